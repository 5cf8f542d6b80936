"""Grow a small trained pair to a published shape without changing what it computes.

`python -m eagle_rt.bench.grow --shape llama-3.1-8b --output DIR` writes a target and a head with the cost of an 8B pair
and the logits, and so the acceptance, of the small one: speculation can be measured at a real size without a download.
"""

import argparse
import json
import shutil
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from tqdm import tqdm

from eagle_rt.bench.grow.shapes import SHAPES, GrownShape, large_layer_shape
from eagle_rt.bench.grow.tensors import grown_head, grown_target
from eagle_rt.engine.load import BUILT_IN
from eagle_rt.models.heads.load import head_name
from eagle_rt.models.heads.spec import default_feature_layers, flat_config
from eagle_rt.models.spec import read_config
from eagle_rt.models.weights import Checkpoint
from eagle_rt.resolve import DTYPES

MAX_SHARD_BYTES = 4 * 10**9


def large_config(config: dict[str, Any], shape: GrownShape, dtype: torch.dtype) -> dict[str, Any]:
    """config.json of the large model: rotary base, context and special tokens stay the small one's."""
    large = large_layer_shape(shape, config)
    return {
        **{name: value for name, value in config.items() if name != "dtype"},
        "hidden_size": large.hidden_size,
        "intermediate_size": large.intermediate_size,
        "num_attention_heads": large.num_heads,
        "num_key_value_heads": large.num_kv_heads,
        "head_dim": large.head_dim,
        "rms_norm_eps": large.rms_norm_eps,
        "vocab_size": shape.vocab_size,
        "torch_dtype": str(dtype).removeprefix("torch."),
    }


def large_configs(target_dir: Path, head_dir: Path, shape: GrownShape, dtype: torch.dtype) -> tuple[dict[str, Any], dict[str, Any]]:
    """config.json of the large target and of the large head."""
    target = large_config(flat_config(read_config(target_dir)), shape, dtype)
    head = large_config(flat_config(read_config(head_dir)), shape.of_head(), dtype)
    if shape.experts:
        count, top_k = shape.experts
        target |= {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "sliding_window": None}
        target |= {"num_local_experts": count, "num_experts_per_tok": top_k}
    target |= {"num_hidden_layers": shape.num_layers}
    if own := head.get("dflash_config"):
        layers = [layer - 1 for layer in default_feature_layers(shape.num_layers)]
        return target, {**head, "dflash_config": {**own, "target_layer_ids": layers}, "num_target_layers": shape.num_layers}
    return target, {**head, "draft_vocab_size": shape.draft_vocab_size}


def write_checkpoint(tensors: Iterator[tuple[str, Tensor]], directory: Path, dtype: torch.dtype) -> None:
    """Shards of a few GB and their index; one shard is in memory at a time."""
    weight_map: dict[str, str] = {}
    shard: dict[str, Tensor] = {}
    num_bytes = num_shards = 0

    def flush() -> None:
        nonlocal shard, num_bytes, num_shards
        num_shards += 1
        file = f"model-{num_shards:05}.safetensors"
        save_file(shard, directory / file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(shard, file))
        shard, num_bytes = {}, 0

    for name, tensor in tqdm(tensors, desc=f"writing {directory.name}", unit="tensor", disable=None):
        shard[name] = (tensor.to(dtype) if tensor.is_floating_point() else tensor).contiguous()
        num_bytes += shard[name].nbytes
        if num_bytes > MAX_SHARD_BYTES:
            flush()
    if shard:
        flush()
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def grow(target_dir: Path, head_dir: Path, shape: GrownShape, output: Path, dtype: torch.dtype) -> None:
    """Write `output`/target and `output`/eagle3, or dflash.

    Raises:
        ValueError: the small pair does not fit into the shape, or has parts that cannot be grown.
    """
    large_target, large_head = large_configs(target_dir, head_dir, shape, dtype)
    head_folder = "dflash" if "dflash_config" in large_head else "eagle3"
    for name, source, rename, tensors_of, large in (
        ("target", target_dir, str, grown_target, large_target),
        (head_folder, head_dir, head_name, grown_head, large_head),
    ):
        config = flat_config(read_config(source))
        small = Checkpoint(source, torch.float32, "cpu", name, rename)
        directory = output / name
        directory.mkdir(parents=True, exist_ok=True)
        write_checkpoint(tensors_of(small, config, shape), directory, dtype)
        left = small.finish()
        if left:
            raise ValueError(f"{source} holds tensors that cannot be grown: {', '.join(left[:5])}")
        (directory / "config.json").write_text(json.dumps(large, indent=2) + "\n")
    for file in target_dir.iterdir():
        if file.name.startswith(("tokenizer", "chat_template", "generation_config", "special_tokens")):
            shutil.copy(file, output / "target" / file.name)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m eagle_rt.bench.grow", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model-path", type=Path, default=BUILT_IN / "target", help="small Llama target (default: the built-in one)"
    )
    parser.add_argument("--draft", type=Path, default=BUILT_IN / "eagle3", help="its EAGLE-3, P-EAGLE or DFlash head")
    parser.add_argument("--shape", choices=list(SHAPES), required=True)
    parser.add_argument("--num-layers", type=int, help="of the target, where a machine cannot hold all that the shape has")
    parser.add_argument("--dtype", choices=list(DTYPES), default="bfloat16")
    parser.add_argument("--output", type=Path, required=True, help="folder for target/ and eagle3/ (or dflash/)")
    args = parser.parse_args(arguments)
    try:
        shape = SHAPES[args.shape]
        shape = replace(shape, num_layers=args.num_layers or shape.num_layers)
        grow(args.model_path, args.draft, shape, args.output, DTYPES[args.dtype])
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"wrote a pair to {args.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
