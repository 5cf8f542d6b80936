"""A model in parts: together they are what it is whole."""

import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import checkpoints
import family_configs
import pytest
import torch
from engines import load_target
from torch import Tensor

from eagle_rt.models.decoder import Decoder, load_decoder
from eagle_rt.models.reading import read_texts
from eagle_rt.models.shard import Shard
from eagle_rt.models.spec import model_spec, read_config

TEXTS = [torch.randint(6, 262, (length,), generator=torch.Generator().manual_seed(length)).tolist() for length in (1, 40, 70)]


class Sum:
    """What threads hold comes to together."""

    def __init__(self, size: int) -> None:
        self._parts: list[Tensor] = [torch.empty(0)] * size
        self._barrier = threading.Barrier(size, timeout=60)
        self.num_made = 0

    def of(self, rank: int, part: Tensor) -> Tensor:
        self._parts[rank] = part
        self._barrier.wait()
        total = torch.stack(self._parts).sum(dim=0)
        self.num_made += rank == 0
        self._barrier.wait()
        return total


@torch.inference_mode()
def read(decoder: Decoder) -> tuple[Tensor, Tensor]:
    """Logits and features of the texts."""
    output = read_texts(decoder, TEXTS, (2, 5))
    assert output.features is not None
    return decoder.logits(output.hidden), output.features


def parts_of(directory: Path, size: int) -> tuple[Tensor, Tensor, list[Decoder]]:
    """Logits and features of the texts by a model in so many parts, each on a thread, and those."""
    spec, total = model_spec(read_config(directory)), Sum(size)
    Shard(0, size).check(spec)

    def part(rank: int) -> tuple[Decoder, Tensor, Tensor]:
        make = partial(Decoder, shard=Shard(rank, size), total=lambda x: total.of(rank, x))
        decoder = load_decoder(directory, spec, context_length=512, dtype=torch.float32, device="cpu", make=make)
        return decoder, *read(decoder)

    with ThreadPoolExecutor(size) as pool:
        decoders, logits, features = zip(*pool.map(part, range(size)), strict=True)
    assert total.num_made == sum(2 + bool(own and own.beside_gate) for own in spec.experts)
    assert all(torch.equal(features[0], own) for own in features)
    return torch.cat(logits, dim=1), features[0], list(decoders)


@pytest.mark.parametrize("name", [name for name in (*checkpoints.FAMILIES, "qwen3-vl-moe") if name not in checkpoints.WHOLE])
def test_every_family(tmp_path: Path, name: str) -> None:
    directory = checkpoints.write_target(tmp_path, name)
    (logits, features, decoders), (expected, expected_features) = parts_of(directory, 2), read(load_target(directory))
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)
    torch.testing.assert_close(features, expected_features, atol=1e-4, rtol=1e-5)
    numbers = [row.num_numbers // min(2, row.num_heads) for row in load_target(directory).rows]  # of one head both hold all
    assert all(decoder.bytes_per_slot == 4 * sum(numbers) for decoder in decoders)


@pytest.mark.parametrize(("num_kv_heads", "held"), [(4, [0, 1, 2, 3]), (2, [0, 0, 1, 1]), (1, [0, 0, 0, 0])])
def test_fewer_heads_of_keys_than_parts(tmp_path: Path, num_kv_heads: int, held: list[int]) -> None:
    """Some parts then hold the same."""
    directory = checkpoints.write_target(tmp_path, num_key_value_heads=num_kv_heads, vocab_size=264)
    logits, _, decoders = parts_of(directory, 4)
    torch.testing.assert_close(logits, read(load_target(directory))[0], atol=1e-4, rtol=0)
    key_weight = load_target(directory)._blocks[0].attention.qkv.weight[64 : 64 + 16 * num_kv_heads].split(16)
    for decoder, head in zip(decoders, held, strict=True):
        assert torch.equal(decoder._blocks[0].attention.qkv.weight[16:32], key_weight[head])


@pytest.mark.parametrize(
    ("size", "overrides", "reason"),
    [
        (3, {}, "--tensor-parallel-size 3 does not divide the model's 4 attention heads"),
        (4, {}, "4 does not divide the model's 262 tokens"),
        (2, {"intermediate_size": 97}, "97 feed-forward channels"),
        (6, {"num_attention_heads": 12, "num_key_value_heads": 4, "hidden_size": 96, "vocab_size": 264}, "4 heads of keys"),
    ],
)
def test_what_cannot_be_cut(tmp_path: Path, size: int, overrides: dict[str, Any], reason: str) -> None:
    config = family_configs.family_config("llama", **overrides)
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=reason):
        Shard(0, size).check(model_spec(read_config(tmp_path)))


def test_channels_of_experts_that_cannot_be_cut(tmp_path: Path) -> None:
    config = family_configs.family_config("qwen3-moe", moe_intermediate_size=33)
    config.architectures = ["Qwen3MoeForCausalLM"]
    config.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="33 channels of an expert"):
        Shard(0, 2).check(model_spec(read_config(tmp_path)))


def test_norms_over_all_heads_cannot_be_cut(tmp_path: Path) -> None:
    config = family_configs.family_config("minimax-m2")
    config.architectures = ["MiniMaxM2ForCausalLM"]
    config.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="MiniMaxM2ForCausalLM cannot be cut into parts yet"):
        Shard(0, 2).check(model_spec(read_config(tmp_path)))


def test_a_tensor_of_another_size_is_refused(tmp_path: Path) -> None:
    """As it is for a whole model: nothing is cut that does not fit."""
    directory = checkpoints.write_target(tmp_path)
    config = read_config(directory)
    config["intermediate_size"] = 48
    spec, make = model_spec(config), partial(Decoder, shard=Shard(1, 2))
    with pytest.raises(ValueError, match=r"has shape \[96, 64\], but config.json implies \[48, 64\]"):
        load_decoder(directory, spec, context_length=64, dtype=torch.float32, device="cpu", make=make)
