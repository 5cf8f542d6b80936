"""Weights of few bits as a GPU's kernels read them (`triton.narrow_sums`), and how a weight becomes one."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from eagle_rt.kernels.eight_bits import EightBits, rounded_to_eight_bits, stored_eight_bits
from eagle_rt.kernels.four_bits import E2M1, GROUP, FourBits, not_zero, rounded_to_four_bits, rows_at_once, stored_four_bits

# What the bits of a number stand for: 0 to 15 less what is nothing in its group, or less 8; E2M1 in halves; -128 to 127; E4M3
# (OCP Microscaling Formats 1.0 and 8-bit Floating Point 1.0, 2023).
Kind = Literal["offset4", "int4", "e2m1", "int8", "e4m3"]
BITS: dict[Kind, int] = {"offset4": 4, "int4": 4, "e2m1": 4, "int8": 8, "e4m3": 8}
# A tile is of so many outputs, a block of so many words of each of them: STEPS * 32 inputs.
TILE, WORDS, WORD_BITS = 128, 16, 32
STEP_INPUTS = 2 * WORDS
# Numbers from here on are exact in bfloat16, of eight bits of which the lowest four are free.
MIDDLE = 128
# What the largest number of a group in E4M3 may be, but for powers of two, and by which part of itself a number may be off: it and
# the largest may have been rounded to bfloat16 since.
E4M3_SIZES, E4M3_ROUNDING = (448.0, 416.0, 384.0, 352.0, 320.0, 288.0, 256.0, 240.0), 1.02 * 2**-7


def num_steps(kind: Kind) -> int:
    """In how many steps, of two numbers of a word each, a block is multiplied."""
    return WORD_BITS // BITS[kind] // 2


def block_inputs(kind: Kind) -> int:
    return num_steps(kind) * STEP_INPUTS


@dataclass(frozen=True)
class NarrowWeight:
    """W [out, in]: scales * ratios * what the bits of each number stand for.

    words: [tiles, blocks, TILE, WORDS] int32. In a word at step k there are the inputs 2 * (k * WORDS + place) and the next of its
    block, BITS wide: the first from bit k * BITS on, the second 16 bits above.
    ratios: [tiles, blocks, parts, TILE] float16, of each 1 / parts of a block; parts are 0 where `scales` are all that there is.
    offsets: as ratios, bfloat16, MIDDLE more than what is nothing, of kind "offset4" only. scales: [tiles * TILE] float32.
    """

    kind: Kind
    out_size: int
    in_size: int
    words: Tensor
    ratios: Tensor
    offsets: Tensor
    scales: Tensor

    @property
    def parts(self) -> int:
        return self.ratios.shape[2]

    def widened(self) -> Tensor:
        """[out, in] float32."""
        bits, steps = BITS[self.kind], num_steps(self.kind)
        words = self.words.transpose(1, 2).flatten(0, 1)  # [outputs, blocks, WORDS]
        shifts = bits * torch.arange(steps)[:, None, None] + torch.tensor([0, 16])
        # [outputs, blocks, steps, WORDS, 2]
        codes = words[:, :, None, :, None] >> shifts.to(words.device) & (1 << bits) - 1
        groups = self._values(codes).flatten(3)
        if self.parts:
            groups = groups.unflatten(2, (self.parts, -1))
            if self.kind == "offset4":
                groups = groups - (self._by_output(self.offsets) - MIDDLE)
            groups = groups * self._by_output(self.ratios)
        return (groups.flatten(1) * self.scales[:, None])[: self.out_size, : self.in_size]

    def _values(self, codes: Tensor) -> Tensor:
        """float32: what codes stand for, but for offsets."""
        if self.kind == "offset4":
            return codes.float()
        if self.kind == "int4":
            return codes.float() - 8
        if self.kind == "e2m1":
            return (torch.tensor(E2M1, device=codes.device)[codes.long()] - E2M1[0]).float()
        return codes.to(torch.uint8).view(torch.int8 if self.kind == "int8" else torch.float8_e4m3fn).float()

    def _by_output(self, values: Tensor) -> Tensor:
        """[outputs, blocks, parts, 1, 1] float32."""
        return values.permute(0, 3, 1, 2).flatten(0, 1)[..., None, None].float()


def narrowed(weight: Tensor, quantization: str) -> NarrowWeight | None:
    """A weight [out, in] in few bits; quantization: see `products.product_with`. None where nothing is to be rounded and it was not
    stored in any that are known here."""
    if quantization == "int8":
        return of_eight_bits(rounded_to_eight_bits(weight))
    for group in (block_inputs("int4"), GROUP):
        if found := stored_four_bits(weight, group):
            return of_four_bits(found, weight.shape[1])
    if quantization == "int4":
        return of_four_bits(rounded_to_four_bits(weight), weight.shape[1])
    eight_bits = stored_eight_bits(weight)
    return of_eight_bits(eight_bits) if eight_bits else stored_e4m3(weight)


def of_four_bits(weight: FourBits, in_size: int) -> NarrowWeight:
    codes, nothings, kind = weight.codes, weight.nothings, "e2m1"
    if weight.levels != E2M1:
        kind, numbers = "offset4", codes.short() - nothings[..., None]
        if numbers.min() >= -8 and numbers.max() <= 7:
            kind, codes = "int4", (numbers + 8).to(torch.uint8)
    # Blocks are filled up with groups whose steps are nothing.
    groups_in_block = max(1, block_inputs(kind) // codes.shape[2])
    codes, ratios, nothings = (filled_up(own, groups_in_block) for own in (codes, weight.ratios, nothings))
    offsets = nothings.to(torch.bfloat16) + MIDDLE if kind == "offset4" else None
    ratios, offsets = (own if own is None else own.unflatten(1, (-1, groups_in_block)) for own in (ratios, offsets))
    return laid_out(kind, codes.flatten(1), weight.scales, in_size, ratios, offsets)


def of_eight_bits(weight: EightBits) -> NarrowWeight:
    return laid_out("int8", weight.numbers.view(torch.uint8), weight.scales, weight.numbers.shape[1])


def stored_e4m3(weight: Tensor) -> NarrowWeight | None:
    """Of a weight whose numbers are in E4M3, but for scales of each output or of blocks of inputs, at most rounded to bfloat16
    since; None of any other. Powers of two in a scale show nowhere: any will do that puts no number beyond the largest."""
    for group in (weight.shape[1], block_inputs("e4m3")):
        if weight.shape[1] % group:
            return None
        # Where most weights part, the first output already does.
        if e4m3_steps(weight[:1], group) is not None and (steps := e4m3_steps(weight, group)) is not None:
            scales = steps.amax(1)
            if group == weight.shape[1]:
                return laid_out("e4m3", e4m3_codes(weight, steps), scales, weight.shape[1])
            ratios = (steps / not_zero(scales)[:, None]).half()
            codes = e4m3_codes(weight, ratios.float() * scales[:, None])
            return laid_out("e4m3", codes, scales, weight.shape[1], ratios[..., None])
    return None


def e4m3_steps(weight: Tensor, group: int) -> Tensor | None:
    """[out, groups] what each number of a weight is to be divided by to be in E4M3, by least squares; None where there are groups
    of so many inputs of which that cannot be said."""
    found = []
    for rows in weight.split(rows_at_once(weight)):
        groups = rows.float().unflatten(1, (-1, group))
        largest = groups.abs().amax(2, keepdim=True)
        steps, is_found = torch.zeros_like(largest[..., 0]), largest[..., 0] == 0
        for size in E4M3_SIZES:
            numbers = groups * (size / largest)
            nearest = numbers.to(torch.float8_e4m3fn).float()
            lies = ((numbers - nearest).abs() <= E4M3_ROUNDING * numbers.abs()).all(2) & ~is_found
            own_steps = (nearest * groups).sum(2) / (nearest * nearest).sum(2)
            steps = torch.where(lies, own_steps, steps)
            is_found |= lies
        if not is_found.all():
            return None
        found.append(steps)
    return torch.cat(found)


def e4m3_codes(weight: Tensor, steps: Tensor) -> Tensor:
    """uint8 as weight, of groups [out, groups] of such steps."""
    codes = torch.empty(weight.shape, dtype=torch.uint8, device=weight.device)
    size = rows_at_once(weight)
    for own, rows, own_steps in zip(*(whole.split(size) for whole in (codes, weight, not_zero(steps))), strict=True):
        numbers = rows.float().unflatten(1, (steps.shape[1], -1)) / own_steps[..., None]
        own.copy_(numbers.flatten(1).to(torch.float8_e4m3fn).view(torch.uint8))
    return codes


def laid_out(
    kind: Kind, codes: Tensor, scales: Tensor, in_size: int, ratios: Tensor | None = None, offsets: Tensor | None = None
) -> NarrowWeight:
    """codes: [out, inputs] uint8; ratios and offsets: [out, blocks, parts], of no parts if not given."""
    bits, steps = BITS[kind], num_steps(kind)
    by_step = filled_up(codes, block_inputs(kind)).unflatten(1, (-1, steps, WORDS, 2))
    words = by_step.new_zeros(len(codes), by_step.shape[1], WORDS, dtype=torch.int32)
    for step in range(steps):
        for half in range(2):
            words |= by_step[:, :, step, :, half].int() << (bits * step + 16 * half)
    none = scales.new_empty(len(codes), words.shape[1], 0)
    ratios = none.half() if ratios is None else ratios
    offsets = none.bfloat16() if offsets is None else offsets
    words = in_tiles(words).transpose(1, 2).contiguous()
    ratios, offsets = (in_tiles(own).permute(0, 2, 3, 1).contiguous() for own in (ratios, offsets))
    return NarrowWeight(kind, len(codes), in_size, words, ratios, offsets, in_tiles(scales).flatten())


def filled_up(values: Tensor, size: int) -> Tensor:
    """[out, whole multiples of this size, ..], with nothing."""
    return functional.pad(values, (0, 0) * (values.dim() - 2) + (0, -values.shape[1] % size))


def in_tiles(values: Tensor) -> Tensor:
    """[tiles, TILE, ..] from one of each output, filled up with nothing."""
    return functional.pad(values, (0, 0) * (values.dim() - 1) + (0, -len(values) % TILE)).unflatten(0, (-1, TILE))
