"""Checkpoints whose weights are stored in few bits: widened as they are read, from the layouts that are published most.

* fp8, fbgemm_fp8, modelopt (FP8): `X.weight` in float8, and `X.weight_scale` or `X.weight_scale_inv`, a factor of all, of each
  output or of each block; both names multiply.
* compressed-tensors: the same, also in int8, or 4 or 8 bits in the words of `X.weight_packed`, with `X.weight_shape` and a factor
  of each output or group of inputs, which `X.weight_g_idx` names where they are not side by side.
* gptq: `X.qweight` [in, out], inputs side by side in a word, `X.qzeros`, `X.scales` and `X.g_idx`, the group of each input.
* awq (gemm): `X.qweight` [in, out], eight outputs in a word, the even ones first, `X.qzeros` and `X.scales`.
* mxfp4 (gpt-oss): of many weights in one tensor `X` [weights, in, out] `X_blocks` [weights, out, in / 32, 16], two numbers of four
  bits in a byte, the first lower, and `X_scales` [weights, out, in / 32], exponents (OCP Microscaling Formats 1.0, 2023).
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from eagle_rt.models.weights import Checkpoint, Rename

METHODS = ("fp8", "fbgemm_fp8", "modelopt", "compressed-tensors", "gptq", "awq", "mxfp4")
IN_FOUR_BITS = ("gptq", "awq", "mxfp4")
FORMATS = ("float-quantized", "int-quantized", "naive-quantized", "pack-quantized")
EIGHT_BITS = (torch.float8_e4m3fn, torch.float8_e5m2, torch.int8)
WORD_BITS = 32
# A scale may be a power of two, of which its exponent is stored.
EXPONENT_OF_ONE = 127
# Of activations and of the cache, which are not quantized here.
NOT_NEEDED = (".input_scale", ".output_scale", ".q_scale", ".k_scale", ".v_scale")
# What four bits stand for in mxfp4 (E2M1): a sign, and one of eight sizes.
MXFP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
# Which of eight outputs stands at each place of a word of AWQ's.
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


@dataclass(frozen=True)
class Storage:
    """How weights are stored. block: outputs and inputs that share a scale, where a checkpoint has such blocks; bits: of a number;
    zero_offset: what gptq's zero points are short of."""

    method: str
    block: tuple[int, int] | None = None
    bits: int = 8
    zero_offset: int = 0


def storage_of(config: dict[str, Any]) -> Storage | None:
    """What a config.json says of it; None where weights are stored as they are.

    Raises:
        ValueError: they are stored in a way that is not known here.
    """
    given = config.get("quantization_config")
    if not given:
        return None
    method = str(given.get("quant_method", "")).lower()
    problem = f"weights quantized by {method or 'an unknown method'} are not supported" if method not in METHODS else None
    if method == "modelopt" and given.get("quant_algo", "FP8") != "FP8":
        problem = f"modelopt's {given['quant_algo']} is not supported, its FP8 is"
    if method == "compressed-tensors" and given.get("format") not in FORMATS:
        problem = f"compressed-tensors' format {given.get('format')} is not supported; supported are {', '.join(FORMATS)}"
    if method == "awq" and (given.get("bits", 4), given.get("version", "gemm").lower()) != (4, "gemm"):
        problem = (
            f"awq with {given.get('bits')} bits in version {given.get('version')} is not supported; 4 bits in version gemm are"
        )
    if method == "gptq" and given.get("bits") not in (2, 4, 8):
        problem = f"gptq with {given.get('bits')} bits is not supported; 2, 4 and 8 are"
    if problem:
        raise ValueError(f"{problem}: use a checkpoint in bfloat16, float16 or float32")
    weights = [group.get("weights") or {} for group in given.get("config_groups", {}).values()]
    block = given.get("weight_block_size") or next((own["block_structure"] for own in weights if own.get("block_structure")), None)
    is_first_version = method == "gptq" and given.get("checkpoint_format", "gptq") == "gptq"
    given_bits = [given.get("bits"), *(own.get("num_bits") for own in weights)]
    bits = next(filter(None, given_bits), 4 if method in IN_FOUR_BITS else 8)
    return Storage(method, tuple(block) if block else None, bits, int(is_first_version))


def open_checkpoint(
    model_dir: Path, storage: Storage | None, dtype: torch.dtype, device: str, description: str, rename: Rename = str
) -> Checkpoint:
    """The tensors of a checkpoint that stores its weights so."""
    if storage:
        return QuantizedCheckpoint(model_dir, storage, dtype, device, description, rename)
    return Checkpoint(model_dir, dtype, device, description, rename)


class QuantizedCheckpoint(Checkpoint):
    """Every `X.weight` can be taken, however it is stored."""

    def __init__(
        self, model_dir: Path, storage: Storage, dtype: torch.dtype, device: str, description: str, rename: Rename = str
    ) -> None:
        super().__init__(model_dir, dtype, device, description, rename)
        self._storage = storage
        for name in self._file_of:
            if name.endswith(NOT_NEEDED):
                self.skip(name)
        for packed in [name for name in self._file_of if name.endswith((".qweight", ".weight_packed"))]:
            weight = f"{packed.rpartition('.')[0]}.weight"
            self._file_of[weight], self._stored_name[weight] = self._file_of[packed], self._stored_name[packed]
        for blocks in [name for name in self._file_of if name.endswith("_blocks")]:
            weights = blocks.removesuffix("_blocks")
            self._file_of[weights], self._stored_name[weights] = self._file_of[blocks], self._stored_name[blocks]

    def _read(self, name: str) -> Tensor:
        if f"{name}_blocks" in self:
            return self._read_blocks(name)
        stem, _, kind = name.rpartition(".")
        if kind == "weight" and f"{stem}.qweight" in self:
            return self._read_words(stem)
        if kind == "weight" and f"{stem}.weight_packed" in self:
            return self._read_packed(stem)
        tensor = super()._read(name)
        if kind != "weight" or tensor.dtype not in EIGHT_BITS:
            return tensor
        zeros = self._part(f"{stem}.weight_zero_point").float() if f"{stem}.weight_zero_point" in self else None
        return self._scaled(stem, tensor.float(), zeros)

    def _part(self, name: str) -> Tensor:
        """One of those that a weight is made of."""
        if name not in self:
            raise ValueError(f"tensor {name} is missing from the checkpoint in {self.model_dir}")
        self.skip(name)
        return super()._read(name)

    def _read_packed(self, stem: str) -> Tensor:
        """compressed-tensors: whole numbers with a sign, of as many bits as fill the words."""
        out_size, in_size = self._part(f"{stem}.weight_shape").tolist()
        words, zeros = self._part(f"{stem}.weight_packed"), None
        bits = WORD_BITS // -(-in_size // words.shape[1])
        middle = 1 << (bits - 1)
        if f"{stem}.weight_zero_point" in self:
            zeros = unpacked(self._part(f"{stem}.weight_zero_point").t(), bits).t()[:out_size].float() - middle
        return self._scaled(stem, unpacked(words, bits)[:, :in_size].float() - middle, zeros)

    def _scaled(self, stem: str, numbers: Tensor, zeros: Tensor | None) -> Tensor:
        """Numbers [out, in] less their zero points, times their scales."""
        name = "weight_scale" if f"{stem}.weight_scale" in self else "weight_scale_inv"
        scales = self._part(f"{stem}.{name}")
        factors = torch.exp2(scales.float() - EXPONENT_OF_ONE) if scales.dtype == torch.uint8 else scales.float()
        if f"{stem}.weight_g_idx" in self:
            groups = self._part(f"{stem}.weight_g_idx").long()
            if (groups >= 0).all():  # or inputs are in the order of their groups
                factors, zeros = factors[:, groups], None if zeros is None else zeros[:, groups]
        if zeros is not None:
            numbers = numbers - self._spread(zeros, numbers.shape, f"{stem}.weight_zero_point")
        return numbers * self._spread(factors, numbers.shape, f"{stem}.{name}")

    def _spread(self, values: Tensor, shape: torch.Size, name: str) -> Tensor:
        """One value for all of a weight, or for each of its outputs, groups or blocks, to every number of it."""
        if values.numel() == 1:
            return values.reshape(1, 1)
        spread = values = values if values.dim() == 2 else values[:, None]
        block = self._storage.block
        for axis, (size, count) in enumerate(zip(shape, values.shape, strict=True)):
            own = block[axis] if block and count not in (1, size) else size // count
            if own == 0 or -(-size // own) != count:
                raise ValueError(
                    f"{name} in {self.model_dir} has shape {list(values.shape)}, which does not fit a weight of {list(shape)}"
                )
            spread = spread.repeat_interleave(own, axis).narrow(axis, 0, size)
        return spread

    def _read_blocks(self, name: str) -> Tensor:
        """mxfp4: [weights, in, out]; weight by weight, since all in float32 would take eight times what is stored."""
        blocks, scales = self._part(f"{name}_blocks"), self._part(f"{name}_scales")
        if blocks.shape[:-1] != scales.shape:
            raise ValueError(
                f"{name}_scales in {self.model_dir} has shape {list(scales.shape)}, which does not fit {list(blocks.shape)} blocks"
            )
        both = torch.tensor(MXFP4)
        both = torch.stack((both.repeat(16), both.repeat_interleave(16)), dim=1)  # by byte
        weights = torch.empty(*scales.shape[:-1], 2 * blocks[0, 0].numel(), dtype=self._dtype)
        for own, own_blocks, own_scales in zip(weights, blocks, scales, strict=True):
            values = functional.embedding(own_blocks.int(), both).flatten(2)
            own.copy_(values.mul_(torch.exp2(own_scales.float() - EXPONENT_OF_ONE)[..., None]).flatten(1))
        return weights.transpose(1, 2)

    def _read_words(self, stem: str) -> Tensor:
        """gptq and awq: whole numbers [in, out], with zero points and scales [groups, out]."""
        storage = self._storage
        words, zero_words, scales = (self._part(f"{stem}.{name}") for name in ("qweight", "qzeros", "scales"))
        zeros = unpacked(zero_words, storage.bits)
        if storage.method == "awq":
            order = torch.tensor(AWQ_ORDER).argsort()
            numbers, zeros = (own.unflatten(1, (-1, 8))[:, :, order].flatten(1) for own in (unpacked(words, storage.bits), zeros))
        else:
            numbers = unpacked(words.t(), storage.bits).t()
        if f"{stem}.g_idx" in self:
            groups = self._part(f"{stem}.g_idx").long()
        else:
            groups = torch.arange(len(numbers)) // -(-len(numbers) // len(scales))
        return ((numbers - zeros[groups] - storage.zero_offset).float() * scales[groups].float()).t()


def unpacked(words: Tensor, bits: int) -> Tensor:
    """[R, C * 32 / bits] the numbers without signs that int32 words [R, C] hold, the lowest bits first."""
    shifts = torch.arange(0, WORD_BITS, bits, dtype=torch.int32)
    return ((words[:, :, None] >> shifts) & ((1 << bits) - 1)).flatten(1)
