"""Prompts to measure with."""

import json
from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from eagle_rt.models.tokenizer import question_tokens

BUILT_IN = Path(__file__).with_name("prompts.jsonl")


@dataclass(frozen=True)
class Workload:
    """Tokenized prompts, and where they are from."""

    name: str
    prompts: list[list[int]]


def find_dataset(dataset: str, dataset_dir: Path | None) -> Path:
    """The file of `builtin`, of a path, or of a name such as mt_bench in the dataset folder.

    Raises:
        FileNotFoundError: there is none.
    """
    if dataset == "builtin":
        return BUILT_IN
    candidates = [Path(dataset)]
    if dataset_dir is not None:
        candidates.append(dataset_dir / f"{dataset}.jsonl")
    for candidate in candidates:
        if candidate.is_file():
            return candidate
    raise FileNotFoundError(
        f"no prompts found for --dataset {dataset} (looked for {', '.join(map(str, candidates))}): give a .jsonl file whose "
        "lines have `turns` or `prompt`, or --dataset-dir, the folder that holds it"
    )


def load_workload(dataset: str, dataset_dir: Path | None, tokenizer: PreTrainedTokenizerBase, num_prompts: int | None) -> Workload:
    """The first turn of each question, in the model's chat template where it has one.

    Raises:
        FileNotFoundError, ValueError: no such file, or a line in it holds neither `turns` nor `prompt`.
    """
    file = find_dataset(dataset, dataset_dir)
    prompts = []
    for number, line in enumerate(file.read_text().splitlines(), start=1):
        record = json.loads(line)
        turns = record.get("turns") or [record.get("prompt")]
        if not isinstance(turns[0], str):
            raise ValueError(f"line {number} of {file} has neither `turns` nor `prompt`")
        prompts.append(question_tokens(tokenizer, turns[0]))
    return Workload(file.stem if dataset != "builtin" else "builtin", prompts[:num_prompts])
