"""Train a draft head for a target: `python -m eagle_rt.train prepare | fit | export --help`."""

import argparse
import json
import os
import sys
from dataclasses import replace
from pathlib import Path

import torch

from eagle_rt.config import add_flags, config_from_args
from eagle_rt.engine.assemble import make_core
from eagle_rt.engine.load import ModelInfo, load_models, model_info
from eagle_rt.engine.params import SamplingParams
from eagle_rt.leave import run
from eagle_rt.resolve import DTYPES, resolve_device
from eagle_rt.train.batches import row_texts
from eagle_rt.train.dialogues import read_dialogues
from eagle_rt.train.export import export_head
from eagle_rt.train.fit import FitConfig, HeadTrainer
from eagle_rt.train.prepare import keep_answers, read_rows, regenerate


def add_prepare(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser("prepare", help="write rows to train on: prompts with the target's own answers")
    parser.add_argument("--prompts", type=Path, nargs="+", required=True, help="JSON lines: dialogues, or what users ask")
    parser.add_argument("--output", type=Path, required=True, help="rows, as JSON lines; the same file resumes")
    parser.add_argument("--keep-answers", action="store_true", help="train on the answers that the dialogues bring")
    parser.add_argument("--max-new-tokens", type=int, default=512, help="per answer")
    parser.add_argument("--temperature", type=float, default=0.0, help="of the answers; 0 is greedy")
    parser.add_argument("--num-prompts", type=int, help="at most")
    add_flags(parser)
    parser.set_defaults(run=prepare)


def prepare(args: argparse.Namespace) -> None:
    config = resolve_device(config_from_args(args))
    info = model_info(config)
    dialogues = list(read_dialogues(args.prompts))[: args.num_prompts]
    if args.keep_answers:
        keep_answers(dialogues, info.tokenizer, info.eos_token_ids, args.output)
        return
    core, notes = make_core(load_models(config, info), replace(config, disable_radix_cache=True))
    print("\n".join(notes), file=sys.stderr)
    sampling = SamplingParams(temperature=args.temperature, max_new_tokens=args.max_new_tokens)
    regenerate(dialogues, core, info.tokenizer, sampling, args.output)


def add_fit(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser("fit", help="train a head on prepared rows; under torchrun on several devices")
    parser.add_argument("--rows", type=Path, nargs="+", required=True, help="what `prepare` wrote")
    parser.add_argument("--run-dir", type=Path, required=True, help="checkpoints and CSV logs; the same folder resumes")
    parser.add_argument("--kind", choices=["EAGLE3", "PEAGLE", "DFLASH", "EAGLE"], default="EAGLE3", help="of head")
    parser.add_argument("--num-layers", type=int, help="of the head (default: PEAGLE 4, DFLASH 5, others 1)")
    parser.add_argument(
        "--mask-token-id", type=int, help="what a PEAGLE or DFLASH head is fed beyond the text (default: the padding token)"
    )
    parser.add_argument(
        "--markov-rank", type=int, default=0, help="of what a token says of the next one, in a DFLASH head (DSpark)"
    )
    parser.add_argument("--start-from", type=Path, metavar="HEAD", help="folder of a head that `export` wrote, to train further")
    parser.add_argument("--num-steps", type=int, default=10000, help="optimizer steps")
    parser.add_argument("--batch-size", type=int, default=16, help="rows a step, over all devices")
    parser.add_argument("--micro-batch-size", type=int, default=2, help="rows a device reads at once; the rest is accumulated")
    parser.add_argument("--num-unrolled", type=int, help="levels that it learns to guess (default: 7, EAGLE 1)")
    parser.add_argument(
        "--draft-vocab-size",
        type=int,
        default=32000,
        help="of an EAGLE3 head: the answers' most frequent tokens; more than a --start-from has are added to it",
    )
    parser.add_argument("--max-length", type=int, default=2048, help="tokens of a row; the rest is cut off")
    parser.add_argument("--learning-rate", type=float, default=1e-4, help="at its peak; Muon's for matrices is ten times that")
    parser.add_argument("--optimizer", choices=["adamw", "muon"], default="adamw")
    parser.add_argument("--precision", choices=list(DTYPES), default="bfloat16", help="of the head's products; weights are float32")
    parser.add_argument("--checkpoint-every", type=int, default=250, help="steps")
    add_flags(parser)
    parser.set_defaults(run=fit)


def fit(args: argparse.Namespace) -> None:
    config = resolve_device(config_from_args(args))
    local_rank = start_processes(config.device)
    info = model_info(config)
    models = load_models(replace(config, speculative_algorithm=None), info)
    texts = row_texts([row for file in args.rows for row in read_rows(file)], args.max_length)
    fit_config = FitConfig(
        kind=args.kind,
        num_steps=args.num_steps,
        batch_size=args.batch_size,
        micro_batch_size=args.micro_batch_size,
        num_unrolled=args.num_unrolled or (1 if args.kind == "EAGLE" else 7),
        draft_vocab_size=args.draft_vocab_size,
        learning_rate=args.learning_rate,
        optimizer=args.optimizer,
        precision=DTYPES[args.precision],
        start_from=args.start_from,
        num_layers=args.num_layers or {"PEAGLE": 4, "DFLASH": 5}.get(args.kind, 1),
        mask_token=padding_token(info) if args.mask_token_id is None else args.mask_token_id,
        markov_rank=args.markov_rank,
        checkpoint_every=args.checkpoint_every,
    )
    trainer = HeadTrainer(models.target, texts, fit_config)
    if local_rank == 0:
        print("\n".join(trainer.memory()), file=sys.stderr)
    trainer.run(args.run_dir)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def padding_token(info: ModelInfo) -> int:
    """One that no text contains, or else one that ends texts."""
    padding = info.tokenizer.pad_token_id
    return padding if isinstance(padding, int) else min(info.eos_token_ids)


def start_processes(device: str) -> int:
    """Join the other processes if torchrun started this one; its number on this machine."""
    if "LOCAL_RANK" not in os.environ:
        return 0
    local_rank = int(os.environ["LOCAL_RANK"])
    if device == "cuda":
        torch.cuda.set_device(local_rank)
    torch.distributed.init_process_group("nccl" if device == "cuda" else "gloo")
    return local_rank


def add_export(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser("export", help="write a trained head in the layout that serving engines load")
    parser.add_argument("--run-dir", type=Path, required=True, help="of `fit`")
    parser.add_argument("--output", type=Path, required=True, help="folder for config.json and model.safetensors")
    parser.add_argument("--dtype", choices=list(DTYPES), default="bfloat16")
    parser.set_defaults(run=export)


def export(args: argparse.Namespace) -> None:
    checkpoint_file = args.run_dir / "checkpoint.pt"
    if not checkpoint_file.exists():
        raise FileNotFoundError(f"{checkpoint_file} does not exist: `fit` has not written a checkpoint to {args.run_dir} yet")
    weights = torch.load(checkpoint_file, weights_only=True, map_location="cpu")["module"]
    export_head(json.loads((args.run_dir / "config.json").read_text()), weights, args.output, DTYPES[args.dtype])


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m eagle_rt.train", description=__doc__)
    commands = parser.add_subparsers(required=True)
    add_prepare(commands)
    add_fit(commands)
    add_export(commands)
    args = parser.parse_args(arguments)
    try:
        args.run(args)
    except (ValueError, FileNotFoundError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    run(main)
