"""Checkpoints in few bits, written number by number as their layouts are published, against transformers with the same weights."""

import itertools
import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import checkpoints
import pytest
import torch
from engines import load_target, random_prompts, text_logits
from mtp_layouts import write_mimo
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from eagle_rt.attention.reference import ReferenceAttention
from eagle_rt.config import EngineConfig
from eagle_rt.engine.load import load_models, model_info
from eagle_rt.kernels.cpu.int4_product import Int4Weights
from eagle_rt.kernels.cpu.int8_product import Int8Weights
from eagle_rt.kernels.cpu.product import RowWeights
from eagle_rt.kernels.products import has_own_kernels
from eagle_rt.models.decoder import load_decoder
from eagle_rt.models.heads.base import Head
from eagle_rt.models.heads.load import load_head, load_mtp_head
from eagle_rt.models.reading import text_batch, text_pool
from eagle_rt.models.spec import model_spec, read_config

TEXT = random_prompts(1, seed=5, longest=60)[0]
FP8 = torch.float8_e4m3fn
Tensors = dict[str, Tensor]
# What is stored for a weight [out, in], and the weight that it stands for.
Store = Callable[[Tensor, random.Random], tuple[Tensors, Tensor]]


def scale_of(rng: random.Random) -> float:
    return rng.uniform(0.5, 1.5) * 2**-9


def eight_bits(kind: torch.dtype, rows: int | None, columns: int | None, name: str = "weight_scale", zeros: bool = False) -> Store:
    """With a scale for so many outputs and inputs, None for all of them."""

    def store(weight: Tensor, rng: random.Random) -> tuple[Tensors, Tensor]:
        out_size, in_size = weight.shape
        high, wide = rows or out_size, columns or in_size
        scales = torch.tensor([[scale_of(rng) for _ in range(0, in_size, wide)] for _ in range(0, out_size, high)])
        offsets = torch.tensor([[rng.randrange(-5, 6)] for _ in range(out_size)], dtype=torch.int8)
        steps = [[row[i // wide] for i in range(in_size)] for row in scales.tolist() for _ in range(high)]
        numbers = [
            [max(-100, min(100, value / step)) for value, step in zip(*own, strict=True)]
            for own in zip(weight.tolist(), steps[:out_size], strict=True)
        ]
        stored = torch.tensor(numbers if kind.is_floating_point else [list(map(round, row)) for row in numbers]).to(kind)
        meant = torch.empty(out_size, in_size)
        for o, row in enumerate(stored.float().tolist()):
            zero = int(offsets[o, 0]) if zeros else 0
            meant[o] = torch.tensor([(number - zero) * step for number, step in zip(row, steps[o], strict=True)])
        if rows is None and columns is None:
            scales = scales.reshape(())
        elif columns is None:
            scales = scales[:, 0] if name == "weight_scale_inv" else scales
        return {"weight": stored, name: scales, **({"weight_zero_point": offsets} if zeros else {})}, meant

    return store


def exponents(weight: Tensor, rng: random.Random) -> tuple[Tensors, Tensor]:
    """Scales that are powers of two."""
    stored = torch.tensor([[rng.randrange(117, 121) for _ in range(0, weight.shape[1], 32)] for _ in range(len(weight))])
    scales = torch.exp2(stored.float() - 127).repeat_interleave(32, 1)[:, : weight.shape[1]]
    few = (weight / scales).to(FP8)
    return {"weight": few, "weight_scale": stored.to(torch.uint8)}, few.float() * scales


def signed(word: int) -> int:
    return word - 2**32 if word >= 2**31 else word


def words_of(numbers: list[int], bits: int) -> list[int]:
    """32 bits at a time, the first number lowest."""
    count = 32 // bits
    groups = [numbers[start : start + count] for start in range(0, len(numbers), count)]
    return [signed(sum(number << (bits * place) for place, number in enumerate(group))) for group in groups]


def packed(bits: int, group: int | None, *, zeros: bool = False, order: str | None = None) -> Store:
    """compressed-tensors' pack-quantized."""

    def store(weight: Tensor, rng: random.Random) -> tuple[Tensors, Tensor]:
        out_size, in_size = weight.shape
        size, middle = group or in_size, 2 ** (bits - 1)
        groups = [i // size for i in range(in_size)]
        if order == "shuffled":
            rng.shuffle(groups)
        scales = torch.tensor([[8 * scale_of(rng) for _ in range(0, in_size, size)] for _ in range(out_size)])
        offsets = [[rng.randrange(-2, 3) if zeros else 0 for _ in range(0, in_size, size)] for _ in range(out_size)]
        rows, meant = [], torch.empty(out_size, in_size)
        for o, (values, steps) in enumerate(zip(weight.tolist(), scales.tolist(), strict=True)):
            row = [max(-middle, min(middle - 1, round(value / steps[g]))) for value, g in zip(values, groups, strict=True)]
            meant[o] = torch.tensor([(number - offsets[o][g]) * steps[g] for number, g in zip(row, groups, strict=True)])
            rows.append(words_of([number + middle for number in row], bits))
        tensors = {
            "weight_packed": torch.tensor(rows, dtype=torch.int32),
            "weight_scale": scales,
            "weight_shape": torch.tensor([out_size, in_size]),
        }
        if zeros:
            columns = [words_of([offset[g] + middle for offset in offsets], bits) for g in range(len(offsets[0]))]
            tensors["weight_zero_point"] = torch.tensor(columns, dtype=torch.int32).t().contiguous()
        if order:
            tensors["weight_g_idx"] = torch.tensor(groups if order == "shuffled" else [-1] * in_size, dtype=torch.int32)
        return tensors, meant

    return store


def gptq(bits: int, group: int, *, is_first_version: bool, in_order: bool) -> Store:
    def store(weight: Tensor, rng: random.Random) -> tuple[Tensors, Tensor]:
        out_size, in_size = weight.shape
        groups = [i // group for i in range(in_size)]
        if not in_order:
            rng.shuffle(groups)
        num_groups, most = max(groups) + 1, 2**bits - 1
        scales = torch.tensor([[16 / most * 8 * scale_of(rng) for _ in range(out_size)] for _ in range(num_groups)])
        zeros = [[rng.randrange(1, most) for _ in range(out_size)] for _ in range(num_groups)]
        meant, columns = torch.empty(out_size, in_size), []
        for o, (values, steps) in enumerate(zip(weight.tolist(), scales.t().tolist(), strict=True)):
            own = [row[o] for row in zeros]
            column = [max(0, min(most, round(value / steps[g]) + own[g])) for value, g in zip(values, groups, strict=True)]
            meant[o] = torch.tensor([(number - own[g]) * steps[g] for number, g in zip(column, groups, strict=True)])
            columns.append(words_of(column, bits))
        tensors = {
            "qweight": torch.tensor(columns, dtype=torch.int32).t().contiguous(),
            "qzeros": torch.tensor([words_of([z - is_first_version for z in row], bits) for row in zeros], dtype=torch.int32),
            "scales": scales,
        }
        return {**tensors, "g_idx": torch.tensor(groups, dtype=torch.int32)}, meant

    return store


def awq(group: int) -> Store:
    def in_words(row: list[int]) -> list[int]:
        """Outputs 0, 2, 4, 6, 1, 3, 5, 7 of eight, the first one lowest."""
        return words_of(
            [number for start in range(0, len(row), 8) for number in row[start : start + 8 : 2] + row[start + 1 : start + 8 : 2]], 4
        )

    def store(weight: Tensor, rng: random.Random) -> tuple[Tensors, Tensor]:
        out_size, in_size = weight.shape
        num_groups = in_size // group
        scales = torch.tensor([[8 * scale_of(rng) for _ in range(out_size)] for _ in range(num_groups)])
        zeros = [[rng.randrange(16) for _ in range(out_size)] for _ in range(num_groups)]
        meant, rows, steps = torch.empty(out_size, in_size), [], scales.tolist()
        for i, values in enumerate(weight.t().tolist()):
            places = list(zip(values, steps[i // group], zeros[i // group], strict=True))
            row = [max(0, min(15, round(value / step) + zero)) for value, step, zero in places]
            meant[:, i] = torch.tensor([(number - zero) * step for number, (_, step, zero) in zip(row, places, strict=True)])
            rows.append(in_words(row))
        tensors = {"qweight": rows, "qzeros": [in_words(row) for row in zeros]}
        return {**{name: torch.tensor(own, dtype=torch.int32) for name, own in tensors.items()}, "scales": scales}, meant

    return store


def compressed(format: str, **weights: Any) -> dict[str, Any]:
    return {"quant_method": "compressed-tensors", "format": format, "config_groups": {"group_0": {"weights": weights}}}


STORAGES: dict[str, tuple[dict[str, Any], Store]] = {
    "fp8-blocks": (
        {"quant_method": "fp8", "weight_block_size": [48, 40]},
        eight_bits(FP8, 48, 40, "weight_scale_inv"),
    ),
    "fp8-static": ({"quant_method": "fp8", "activation_scheme": "static"}, eight_bits(FP8, None, None)),
    "fp8-outputs": ({"quant_method": "fp8"}, eight_bits(FP8, 1, None, "weight_scale_inv")),
    "fbgemm": ({"quant_method": "fbgemm_fp8"}, eight_bits(FP8, 1, None)),
    "modelopt": ({"quant_method": "modelopt", "quant_algo": "FP8"}, eight_bits(FP8, None, None)),
    "compressed-float": (compressed("float-quantized"), eight_bits(FP8, 1, None)),
    "compressed-blocks": (compressed("float-quantized", block_structure=[48, 40]), eight_bits(FP8, 48, 40)),
    "compressed-exponents": (compressed("float-quantized"), exponents),
    "compressed-int": (compressed("int-quantized"), eight_bits(torch.int8, 1, None)),
    "compressed-int-zeros": (compressed("int-quantized"), eight_bits(torch.int8, 1, None, zeros=True)),
    "compressed-4": (compressed("pack-quantized", num_bits=4), packed(4, 32)),
    "compressed-4-zeros": (compressed("pack-quantized", num_bits=4), packed(4, 16, zeros=True)),
    "compressed-4-shuffled": (compressed("pack-quantized", num_bits=4), packed(4, 16, zeros=True, order="shuffled")),
    "compressed-4-in-order": (compressed("pack-quantized", num_bits=4), packed(4, 16, order="unknown")),
    "compressed-8": (compressed("pack-quantized", num_bits=8), packed(8, None)),
    "gptq": ({"quant_method": "gptq", "bits": 4}, gptq(4, 32, is_first_version=True, in_order=True)),
    "gptq-shuffled": ({"quant_method": "gptq", "bits": 4}, gptq(4, 32, is_first_version=True, in_order=False)),
    "gptq-8-v2": (
        {"quant_method": "gptq", "bits": 8, "checkpoint_format": "gptq_v2"},
        gptq(8, 16, is_first_version=False, in_order=True),
    ),
    "awq": ({"quant_method": "awq", "bits": 4, "version": "gemm"}, awq(32)),
}


# All weights but those of norms, embeddings, routers and the output layer.
PRODUCTS = ("_proj.weight", ".w1.weight", ".w2.weight", ".w3.weight")


def write(directory: Path, name: str, family: str = "llama-biased") -> Path:
    """A checkpoint in few bits, and beside it one with the same weights as they are."""
    return quantize(checkpoints.write_target(directory / "plain", family), directory / "quantized", name)


def quantize(plain: Path, quantized: Path, name: str) -> Path:
    """Make a checkpoint in few bits of one as it is, which then has the same weights."""
    config, store = STORAGES[name]
    tensors, few, rng = load_file(plain / "model.safetensors"), {}, random.Random(name)
    for stored, tensor in tensors.items():
        if stored.endswith(PRODUCTS):
            own, tensors[stored] = store(tensor, rng)
            few |= {f"{stored.removesuffix('weight')}{part}": value for part, value in own.items()}
            few[f"{stored.removesuffix('weight')}input_scale"] = torch.ones(())
        else:
            few[stored] = tensor
    save_file(tensors, plain / "model.safetensors", metadata={"format": "pt"})
    quantized.mkdir()
    save_file(few, quantized / "model.safetensors", metadata={"format": "pt"})
    for file in plain.glob("*.json"):
        (quantized / file.name).write_text(file.read_text())
    document = {**json.loads((plain / "config.json").read_text()), "quantization_config": config}
    (quantized / "config.json").write_text(json.dumps(document))
    return quantized


@torch.inference_mode()
@pytest.mark.parametrize(
    ("name", "family"),
    [
        *((name, "llama-biased") for name in STORAGES),
        ("fp8-blocks", "qwen3-moe"),
        ("gptq", "mixtral"),
        ("awq", "qwen3-moe-mixed"),
        ("gptq-shuffled", "phi3"),
        ("compressed-4-zeros", "phi3"),
    ],
)
def test_every_layout(tmp_path: Path, name: str, family: str) -> None:
    quantized = write(tmp_path, name, family)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "plain", dtype=torch.float32, attn_implementation="eager")
    expected = model(torch.tensor([TEXT])).logits[0]
    assert expected.std() > 0.1
    torch.testing.assert_close(text_logits(load_target(quantized), TEXT), expected, atol=2e-4, rtol=0)


def mxfp4(weights: Tensor, rng: random.Random) -> tuple[Tensors, Tensor]:
    """Of weights [count, in, out], which are stored outputs first."""
    values = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    weights = weights.transpose(1, 2)
    *shape, in_size = weights.shape
    blocks, scales = (
        torch.empty(*shape, in_size // 32, 16, dtype=torch.uint8),
        torch.empty(*shape, in_size // 32, dtype=torch.uint8),
    )
    meant = torch.empty(weights.shape)
    for place in itertools.product(*map(range, scales.shape)):
        inputs = slice(32 * place[-1], 32 * (place[-1] + 1))
        scales[place] = rng.randrange(122, 127)
        scale, codes = 2.0 ** (int(scales[place]) - 127), []
        for number in weights[place[:-1]][inputs].tolist():
            size = min(range(8), key=lambda code: abs(abs(number) / scale - values[code]))
            codes.append(size + 8 * (number < 0))
        blocks[place] = torch.tensor([low + 16 * high for low, high in zip(codes[::2], codes[1::2], strict=True)])
        signed = [values[code % 8] * (-1 if code >= 8 else 1) * scale for code in codes]
        meant[place[:-1]][inputs] = torch.tensor(signed)
    return {"blocks": blocks, "scales": scales}, meant.transpose(1, 2).contiguous()


def write_mxfp4(directory: Path) -> Path:
    plain, quantized = checkpoints.write_target(directory / "plain", "gpt-oss", num_hidden_layers=2), directory / "quantized"
    tensors, few, rng = load_file(plain / "model.safetensors"), {}, random.Random(3)
    for name, tensor in tensors.items():
        if name.endswith("_proj"):
            own, tensors[name] = mxfp4(tensor, rng)
            few |= {f"{name}_{part}": value for part, value in own.items()}
        else:
            few[name] = tensor
    shutil.copytree(plain, quantized)
    for folder, own in ((plain, tensors), (quantized, few)):
        save_file(own, folder / "model.safetensors", metadata={"format": "pt"})
    document = {**json.loads((plain / "config.json").read_text()), "quantization_config": {"quant_method": "mxfp4"}}
    (quantized / "config.json").write_text(json.dumps(document))
    return quantized


@torch.inference_mode()
def test_mxfp4(tmp_path: Path) -> None:
    quantized = write_mxfp4(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "plain", dtype=torch.float32, attn_implementation="eager")
    expected = model(torch.tensor([TEXT])).logits[0]
    assert expected.std() > 0.1
    torch.testing.assert_close(text_logits(load_target(quantized), TEXT), expected, atol=2e-4, rtol=0)
    file = quantized / "model.safetensors"
    tensors = load_file(file)
    name = "model.layers.1.mlp.experts.down_proj_scales"
    save_file({**tensors, name: tensors[name][..., :2].contiguous()}, file)
    with pytest.raises(ValueError, match=rf"{name} in .* has shape \[8, 64, 2\], which does not fit \[8, 64, 3, 16\] blocks"):
        load_target(quantized)


def test_biases_of_nothing_are_none(tmp_path: Path) -> None:
    """Which some quantizers write for every product."""
    quantized = write(tmp_path, "gptq", "llama")
    exact = text_logits(load_target(quantized), TEXT)
    tensors = load_file(quantized / "model.safetensors")
    biases = {
        f"{name.removesuffix('qweight')}bias": torch.zeros(own.shape[1]) for name, own in tensors.items() if "qweight" in name
    }
    save_file({**tensors, **biases}, quantized / "model.safetensors")
    target = load_target(quantized)
    assert torch.equal(text_logits(target, TEXT), exact)
    assert target._blocks[0].attention.qkv.bias is None


@torch.inference_mode()
@pytest.mark.parametrize("name", ["fp8-blocks", "gptq-shuffled", "compressed-4-zeros"])
def test_a_targets_own_layer(tmp_path: Path, name: str) -> None:
    plain = write_mimo(tmp_path / "plain").directory
    quantized = quantize(plain, tmp_path / "quantized", name)
    logits = []
    for directory in (plain, quantized):
        head, unused = load_mtp_head(directory, load_target(directory), torch.float32, "cpu")
        assert unused == []
        logits.append(head.logits(states_after(head, TEXT)))
    torch.testing.assert_close(logits[0], logits[1], atol=1e-5, rtol=0)


def states_after(head: Head, text: list[int]) -> Tensor:
    batch = text_batch([text], torch.device("cpu"))
    features = torch.randn(len(text), head.shape.hidden_size, generator=torch.Generator().manual_seed(1))
    pool = text_pool(batch, head.rows, features)
    return head.forward(batch.tokens, head.fuse(features), batch, pool, ReferenceAttention(torch.float32))


@pytest.mark.parametrize("quantization", ["none", "int8"])
@pytest.mark.parametrize(
    ("name", "bits", "held_in"), [("fp8-blocks", 8, 0), ("gptq", 4, 4), ("compressed-4", 4, 4), ("compressed-int", 8, 8)]
)
def test_they_are_served_and_that_is_said(tmp_path: Path, name: str, bits: int, held_in: int, quantization: str) -> None:
    quantized = write(tmp_path, name, "llama")
    config = EngineConfig(model_path=str(quantized), device="cpu", dtype="float32", quantization=quantization)
    notes = load_models(config, model_info(config)).notes
    method = STORAGES[name][0]["quant_method"]
    is_held = held_in and quantization == "none" and has_own_kernels(torch.zeros(1))
    how = f": of 32 products of its layers 32 are held in {held_in}" if is_held else "; they are widened to torch.float32"
    assert f"the checkpoint's weights are quantized ({method}, {bits} bits){how}" in notes


@torch.inference_mode()
@pytest.mark.skipif(not has_own_kernels(torch.zeros(1)), reason="no kernels of our own on this processor")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "name", ["compressed-4", "gptq", "awq", "mxfp4", "compressed-int", "compressed-4-zeros", "gptq-shuffled", "gptq-8-v2"]
)
def test_few_bits_are_held_in_few(tmp_path: Path, name: str, dtype: torch.dtype) -> None:
    """Where inputs that are side by side share a scale, or all inputs do that have eight bits; others are widened. It is not much
    less exact than bfloat16."""
    quantized = write_mxfp4(tmp_path) if name == "mxfp4" else write(tmp_path, name)
    spec = model_spec(read_config(quantized))
    decoders = [
        load_decoder(quantized, spec, context_length=512, dtype=own, device="cpu", quantization=quantization)
        for own, quantization in ((dtype, "stored"), (torch.bfloat16, "none"))
    ]
    products = [product for block in decoders[0]._blocks for product in block.parts.products]
    kinds = {type(product.weights) for product in products if product}  # pyright: ignore[reportAttributeAccessIssue]
    counts = decoders[0].count_bits()
    assert counts[4] == {"mxfp4": 4}.get(name, 32 * (Int4Weights in kinds))
    assert counts[8] == 32 * (Int8Weights in kinds)
    assert counts.total() == (10 if name == "mxfp4" else 32)
    assert set(decoders[1].count_bits()) == {None}
    assert kinds == {
        "mxfp4": {RowWeights, Int4Weights}, "compressed-4": {Int4Weights}, "gptq": {Int4Weights}, "awq": {Int4Weights},
        "compressed-int": {Int8Weights},
    }.get(name, {RowWeights})  # fmt: skip
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "plain", dtype=torch.float32, attn_implementation="eager")
    expected = model(torch.tensor([TEXT])).logits[0]
    held, in_bfloat16 = ((text_logits(decoder, TEXT) - expected).abs().mean() for decoder in decoders)
    assert held < (2 if Int4Weights in kinds else 1.01) * in_bfloat16


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"quant_method": "bitsandbytes"}, "weights quantized by bitsandbytes are not supported: use a checkpoint in bfloat16"),
        ({}, None),
        ({"bits": 4}, "by an unknown method"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "modelopt's NVFP4 is not supported, its FP8 is"),
        (compressed("nvfp4-pack-quantized"), "format nvfp4-pack-quantized is not supported; supported are float-quantized"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "awq with 4 bits in version gemv"),
        ({"quant_method": "gptq", "bits": 3}, "gptq with 3 bits is not supported; 2, 4 and 8 are"),
    ],
)
def test_others_are_refused(target_dir: Path, config: dict[str, Any], message: str | None) -> None:
    document = {**json.loads((target_dir / "config.json").read_text()), "quantization_config": config}
    if message is None:
        assert model_spec(document).storage is None
    else:
        with pytest.raises(ValueError, match=message):
            model_spec(document)


def test_what_is_missing_or_does_not_fit_is_named(tmp_path: Path) -> None:
    quantized = write(tmp_path, "fp8-blocks")
    file = quantized / "model.safetensors"
    tensors = load_file(file)
    name = "model.layers.1.mlp.up_proj.weight_scale_inv"
    scales = tensors.pop(name)
    save_file(tensors, file)
    with pytest.raises(ValueError, match=rf"tensor {name} is missing from the checkpoint in"):
        load_target(quantized)
    save_file({**tensors, name: scales[:, :1].repeat(1, 9).contiguous()}, file)
    with pytest.raises(ValueError, match=rf"{name} in .* has shape \[2, 9\], which does not fit a weight of"):
        load_target(quantized)


def test_eight_bits_without_a_word_in_the_config(tmp_path: Path, target_dir: Path) -> None:
    """They are no numbers by themselves; neither in a target nor in a head."""
    quantized = write(tmp_path, "fp8-static")
    (quantized / "config.json").write_text((tmp_path / "plain" / "config.json").read_text())
    with pytest.raises(ValueError, match=r"q_proj.weight in .* is stored as torch.float8_e4m3fn, and config.json does not say"):
        load_target(quantized)
    head = checkpoints.write_eagle3_head(tmp_path / "head")
    file = head / "model.safetensors"
    tensors = load_file(file)
    save_file({**tensors, "fc.weight": tensors["fc.weight"].to(torch.int8)}, file)
    with pytest.raises(ValueError, match=r"fc.weight in .* is stored as torch.int8"):
        load_head(head, load_target(target_dir), "EAGLE3", torch.float32, "cpu")
