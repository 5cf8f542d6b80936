"""The CPU benchmark: transformers' generate, no speculation and several trees, on the same prompts, threads and weights.

`python benchmarks/cpu.py --dataset gsm8k --dataset-dir PROMPTS` prints a table and writes JSON to benchmarks/results/. All of them
run in turns, several times, in one process; a ratio is the median of the ratios within a turn.
"""

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

import torch
from tqdm import tqdm
from transformers import AutoModelForCausalLM, PreTrainedModel

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench_speculative import environment
from eagle_rt.bench.report import print_table
from eagle_rt.bench.sweep import Measurement, Setting, measure_once, rows
from eagle_rt.bench.workload import load_workload
from eagle_rt.config import NO_SPECULATION, EngineConfig, TreeShape, resolve_device
from eagle_rt.engine.load import load_models, model_info
from eagle_rt.engine.request import SamplingParams

TREES = [(1, 1, 2), (2, 1, 3), (3, 1, 4), (4, 1, 5), (5, 1, 6), (2, 2, 4), (3, 2, 6), (3, 2, 8), (4, 2, 8), (5, 4, 16), (8, 10, 60)]


@torch.inference_mode()
def transformers_rate(model: PreTrainedModel, prompts: list[list[int]], max_new_tokens: int) -> float:
    """Tokens per second of eager greedy generation, one prompt at a time."""
    num_tokens = 0
    start = time.perf_counter()
    for prompt in prompts:
        text = model.generate(torch.tensor([prompt]), max_new_tokens=max_new_tokens, do_sample=False)
        num_tokens += text.shape[1] - len(prompt)
    return num_tokens / (time.perf_counter() - start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dataset", default="builtin")
    parser.add_argument("--dataset-dir", type=Path)
    parser.add_argument("--num-prompts", type=int, default=10)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results")
    args = parser.parse_args()

    config = resolve_device(EngineConfig(speculative_algorithm="EAGLE3", device="cpu", dtype="float32"))
    info = model_info(config)
    models = load_models(config, info)
    peer = AutoModelForCausalLM.from_pretrained(info.directory, dtype=torch.float32).eval()
    workload = load_workload(args.dataset, args.dataset_dir, info.tokenizer, args.num_prompts)
    sampling = SamplingParams(temperature=0, max_new_tokens=args.max_new_tokens)

    measurements = [Measurement(Setting(1, tree)) for tree in (NO_SPECULATION, *(TreeShape(*tree) for tree in TREES))]
    transformers_rate(peer, workload.prompts[:1], 8)
    peer_rates = []
    for _ in tqdm(range(args.repeats), unit="turn"):
        peer_rates.append(transformers_rate(peer, workload.prompts, args.max_new_tokens))
        for measurement in measurements:
            measure_once(models, config, measurement, workload, sampling)

    table = rows(measurements)
    over_peer = statistics.median(rate / base for rate, base in zip(measurements[0].rates, peer_rates, strict=True))
    print_table(table)
    print(f"transformers: {statistics.median(peer_rates):.1f} tokens/s; no speculation is {over_peer:.2f} times as fast")
    document = {
        "environment": {**environment(config), "dataset": workload.name, "num_prompts": len(workload.prompts)},
        "transformers_tokens_per_second": round(statistics.median(peer_rates), 1),
        "no_speculation_over_transformers": round(over_peer, 3),
        "rows": table,
    }
    args.output.mkdir(exist_ok=True)
    file = args.output / f"cpu_{workload.name}_{document['environment']['date']}.json"
    file.write_text(json.dumps(document, indent=1) + "\n")
    print(f"wrote {file}")


if __name__ == "__main__":
    main()
