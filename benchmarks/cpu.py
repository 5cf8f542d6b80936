"""The CPU benchmark: transformers' generate, OpenVINO GenAI, no speculation and several trees, on the same prompts and weights.

`python benchmarks/cpu.py --dataset gsm8k --dataset-dir PROMPTS` prints a table and writes JSON to benchmarks/results/. All of them
run in turns, several times, in one run; a ratio is the median of the ratios within a turn. With `--openvino-python` and
`--openvino-models` (a folder with an exported `target` and `head`) OpenVINO GenAI takes its turns too. Any option of the engine may
be given as well; with `--enable-torch-compile` everything runs eagerly in the same turns too, and the texts are compared.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm
from transformers import AutoModelForCausalLM, PreTrainedModel

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench_speculative import environment
from eagle_rt.bench.lossless import gaps_where_parted
from eagle_rt.bench.report import print_table
from eagle_rt.bench.sweep import Measurement, Setting, core_for, measure_once, rows
from eagle_rt.bench.workload import Workload, load_workload
from eagle_rt.config import EngineConfig, add_flags, config_from_args
from eagle_rt.engine.core import run_to_end
from eagle_rt.engine.load import LoadedModels, load_models, model_info
from eagle_rt.engine.params import SamplingParams
from eagle_rt.resolve import DTYPES, resolve_device
from eagle_rt.tree_shape import NO_SPECULATION, TreeShape

TREES = ["1,1,2", "2,1,3", "3,1,4", "4,1,5", "5,1,6", "2,2,4", "3,2,6", "3,2,8", "4,2,8", "5,4,16", "8,10,60"]
OPENVINO_MODES = ["plain", "chain:3", "tree:2:3:8"]

Prompts = list[list[int]]


@torch.inference_mode()
def transformers_rate(model: PreTrainedModel, prompts: Prompts, max_new_tokens: int) -> float:
    """Tokens per second of eager greedy generation, one prompt at a time."""
    num_tokens = 0
    start = time.perf_counter()
    for prompt in prompts:
        text = model.generate(torch.tensor([prompt]), max_new_tokens=max_new_tokens, do_sample=False)
        num_tokens += text.shape[1] - len(prompt)
    return num_tokens / (time.perf_counter() - start)


class OpenVino:
    """The peer in its own interpreter."""

    def __init__(self, python: str, models: Path, precision: str, end_token: int) -> None:
        worker = Path(__file__).with_name("openvino_worker.py")
        command = [python, str(worker), "--target", str(models / "target"), "--head", str(models / "head")]
        command += ["--precision", precision, "--end-token", str(end_token)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def rate(self, mode: str, prompts: Prompts, max_new_tokens: int) -> float:
        """Tokens per second of one turn."""
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.write(json.dumps({"mode": mode, "prompts": prompts, "max_new_tokens": max_new_tokens}) + "\n")
        self._process.stdin.flush()
        turn = json.loads(self._process.stdout.readline())
        return sum(map(len, turn["texts"])) / turn["seconds"]


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dataset", default="builtin")
    parser.add_argument("--dataset-dir", type=Path)
    parser.add_argument("--num-prompts", type=int, default=10)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--trees", nargs="+", default=TREES, metavar="STEPS,TOPK,TOKENS")
    parser.add_argument("--openvino-python", help="an interpreter that has openvino-genai")
    parser.add_argument("--openvino-models", type=Path, help="folder with the exported target and head")
    parser.add_argument(
        "--openvino-modes", nargs="+", default=OPENVINO_MODES, help="plain, chain:TOKENS, tree:BRANCHES:DEPTH:TOKENS"
    )
    parser.add_argument("--name", default="cpu", help="what the results file begins with")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results")
    add_flags(parser)
    parser.set_defaults(device="cpu", speculative_algorithm="EAGLE3", speculative_fit_check="off")
    return parser


def peer_row(engine: str, rates: list[float], baseline: list[float]) -> dict[str, Any]:
    """Its speed, and how many times as fast it is as our own decoding without speculation."""
    over = statistics.median(rate / base for rate, base in zip(rates, baseline, strict=True))
    return {"engine": engine, "tokens_per_second": round(statistics.median(rates), 1), "over_no_speculation": round(over, 3)}


Engines = tuple[LoadedModels, EngineConfig, list[Measurement]]


def compared_with_eager(compiled: Engines, eager: Engines, workload: Workload, sampling: SamplingParams) -> dict[str, Any]:
    """The eager rows, and for every tree how much faster compiling made it and where its texts part from the eager ones."""
    eager_table = rows(eager[2])
    print("eager:")
    print_table(eager_table)
    found = []
    for ours, base in zip(compiled[2], eager[2], strict=True):
        texts, eager_texts = (
            run_to_end(core_for(models, config, ours.setting), workload.prompts, [sampling] * len(workload.prompts))
            for models, config, _ in (compiled, eager)
        )
        ratio = statistics.median(rate / base_rate for rate, base_rate in zip(ours.rates, base.rates, strict=True))
        gaps = gaps_where_parted(eager[0], workload.prompts, eager_texts, texts)
        found.append({"tree": str(ours.setting.tree), "ratio": round(ratio, 3), "gaps_where_different": gaps})
        print(f"tree {ours.setting.tree}: compiled {ratio:.2f} times as fast as eager; gaps where texts differ: {gaps}")
    return {"eager_rows": eager_table, "compiled_over_eager": found}


def main() -> None:
    args = make_parser().parse_args()
    config = resolve_device(config_from_args(args))
    info = model_info(config)
    models = load_models(config, info)
    dtype = models.target.embedding.dtype
    workload = load_workload(args.dataset, args.dataset_dir, info.tokenizer, args.num_prompts)
    sampling = SamplingParams(temperature=0, max_new_tokens=args.max_new_tokens)

    peer = AutoModelForCausalLM.from_pretrained(info.directory, dtype=dtype).eval()
    peers = {"transformers": lambda prompts, count: transformers_rate(peer, prompts, count)}
    if args.openvino_python:
        precision = "float32" if dtype == torch.float32 else "default"
        end_token = info.tokenizer.eos_token_id
        openvino = OpenVino(args.openvino_python, args.openvino_models, precision, end_token)
        for mode in args.openvino_modes:
            peers[f"openvino {mode}"] = lambda prompts, count, mode=mode: openvino.rate(mode, prompts, count)
    trees = [TreeShape(*map(int, tree.split(","))) for tree in args.trees]
    settings = [Setting(1, tree) for tree in (NO_SPECULATION, *trees)]
    measurements, eager_measurements = [[Measurement(setting) for setting in settings] for _ in range(2)]
    eager_config = replace(config, enable_torch_compile=False)
    eager_models = load_models(eager_config, info) if config.enable_torch_compile else None

    rates: dict[str, list[float]] = {name: [] for name in peers}
    for rate in peers.values():
        rate(workload.prompts[:2], 16)
    for _ in tqdm(range(args.repeats), unit="turn"):
        for name, rate in peers.items():
            rates[name].append(rate(workload.prompts, args.max_new_tokens))
        for measurement in measurements:
            measure_once(models, config, measurement, workload, sampling)
        if eager_models:
            for measurement in eager_measurements:
                measure_once(eager_models, eager_config, measurement, workload, sampling)

    table = rows(measurements)
    comparison = {}
    if eager_models:
        comparison = compared_with_eager(
            (models, config, measurements), (eager_models, eager_config, eager_measurements), workload, sampling
        )
        print("compiled:")
    peer_rows = [peer_row(name, its_rates, measurements[0].rates) for name, its_rates in rates.items()]
    print_table(table)
    for row in peer_rows:
        print(f"{row['engine']}: {row['tokens_per_second']} tokens/s, {row['over_no_speculation']} times no speculation")
    dtype_name = next(name for name, value in DTYPES.items() if value == dtype)
    document = {
        "environment": {
            **environment(config),
            "dtype": dtype_name,
            "compiled": config.enable_torch_compile,
            "token_map": config.speculative_token_map,
            "dataset": workload.name,
            "num_prompts": len(workload.prompts),
        },
        "peers": peer_rows,
        **comparison,
        "rows": table,
    }
    args.output.mkdir(exist_ok=True)
    file = args.output / f"{args.name}_{workload.name}_{document['environment']['date']}.json"
    file.write_text(json.dumps(document, indent=1) + "\n")
    print(f"wrote {file}")


if __name__ == "__main__":
    main()
