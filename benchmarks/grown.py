"""Is a grown pair the small one still? `python benchmarks/grown.py --shapes 0.5b 1b` compares both on real prompts, in float32.

Prints the largest difference of logits, and whether the greedy texts and what was accepted in every step are the same.
"""

import argparse
import json
import sys
from datetime import date
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from eagle_rt.bench.grow.in_memory import grown_models
from eagle_rt.bench.grow.shapes import SHAPES
from eagle_rt.bench.workload import load_workload
from eagle_rt.config import EngineConfig
from eagle_rt.engine.build import prepared_core
from eagle_rt.engine.core import run_to_end
from eagle_rt.engine.load import LoadedModels, load_models, model_info
from eagle_rt.engine.params import SamplingParams
from eagle_rt.models.reading import read_texts
from eagle_rt.resolve import resolve_device

Text = list[int]


@torch.inference_mode()
def logits(models: LoadedModels, prompts: list[Text]) -> torch.Tensor:
    """[T, V] after every token of the prompts."""
    return models.target.logits(read_texts(models.target, prompts, ()).hidden)


def texts_and_acceptance(
    models: LoadedModels, config: EngineConfig, prompts: list[Text], count: int
) -> tuple[list[Text], list[int]]:
    core, _ = prepared_core(models, config)
    texts = run_to_end(core, prompts, [SamplingParams(temperature=0, max_new_tokens=count)] * len(prompts))
    return texts, core.current_metrics().accepted_per_position


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=["0.5b", "1b"])
    parser.add_argument("--dataset", default="builtin")
    parser.add_argument("--dataset-dir", type=Path)
    parser.add_argument("--num-prompts", type=int, default=4)
    parser.add_argument("--max-new-tokens", type=int, default=48)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results")
    args = parser.parse_args()
    config = resolve_device(
        EngineConfig(
            device="cpu",
            dtype="float32",
            speculative_algorithm="EAGLE3",
            speculative_num_steps=5,
            speculative_eagle_topk=4,
            speculative_num_draft_tokens=16,
            max_total_tokens=4096,
        )
    )
    info = model_info(config)
    small = load_models(config, info)
    prompts = load_workload(args.dataset, args.dataset_dir, info.tokenizer, args.num_prompts).prompts
    expected_logits = logits(small, prompts)
    expected = texts_and_acceptance(small, config, prompts, args.max_new_tokens)
    rows: list[dict[str, Any]] = []
    for shape in args.shapes:
        large = grown_models(SHAPES[shape], info, torch.float32, "cpu", small.context_length)
        found = texts_and_acceptance(large, config, prompts, args.max_new_tokens)
        vocab_size = expected_logits.shape[-1]
        rows.append(
            {
                "shape": shape,
                "largest_logit_difference": float((logits(large, prompts)[:, :vocab_size] - expected_logits).abs().max()),
                "same_texts": found[0] == expected[0],
                "same_acceptance": found[1] == expected[1],
                "num_tokens": sum(map(len, found[0])),
                "accepted_per_position": found[1],
            }
        )
        print(json.dumps(rows[-1]), flush=True)
        del large
    file = args.output / f"grown_{date.today().isoformat()}.json"
    file.write_text(json.dumps({"dataset": args.dataset, "num_prompts": len(prompts), "rows": rows}, indent=1) + "\n")
    print(f"wrote {file}")


if __name__ == "__main__":
    main()
