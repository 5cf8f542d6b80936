"""The tensors of a grown pair, one by one.

How the function stays the same. The small hidden state sits in the first dimensions of the large one and the rest of the residual
stream is zero, so nothing reads the random weights there and nothing may write to it: rows of output projections past the small
size are zero. A norm over more dimensions divides by a smaller root mean square, which its weight makes up for by
sqrt(small / large), and its epsilon by small / large. Added heads and feed-forward channels have zero columns where they would
write; added layers write nothing at all. A larger head takes rotary pair i of the small one as its pair i * (large / small), which
turns at the same frequency, and its queries are scaled for the softmax; where keys are normed, the rest of them is zero.
Experts all do what the small feed-forward part did, and what they count adds up to one. One dimension past the small size
carries a constant, which only the final norm lets through, and there gives the added rows of the vocabulary a logit that cannot
win. All other new weights are random.
"""

import zlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from eagle_rt.bench.grow.shapes import GrownShape, Sizes, large_layer_shape, layer_places
from eagle_rt.models.layer_shape import layer_shape
from eagle_rt.models.weights import Checkpoint

CONSTANT = 1e-3
CONSTANT_NORM, CONSTANT_LOGIT = 256.0, -16384.0
WEIGHT_SCALE = 0.02
# Layers whose features a head fuses.
NUM_FEATURES = 3


def masked(weight: Tensor, rows: Tensor, scale: float = 1.0) -> Tensor:
    """With these rows, scaled, and zeros in all others."""
    result = torch.zeros_like(weight)
    result[rows] = scale * weight[rows]
    return result


class Grower:
    """Makes the tensors of a grown model one by one, from those of the small one."""

    def __init__(self, small: Checkpoint, sizes: Sizes, num_experts: int = 0) -> None:
        self._small, self._sizes, self._device, self._num_experts = small, sizes, small.device, num_experts

    def random(self, name: str, *shape: int) -> Tensor:
        """New weights: a function of the tensor's name, and of the kind of device."""
        generator = torch.Generator(self._device).manual_seed(zlib.crc32(name.encode()))
        return torch.randn(*shape, generator=generator, device=self._device) * WEIGHT_SCALE

    def table(self, name: str, num_small: int, num_large: int) -> Tensor:
        """Embeddings: known tokens have the constant and nothing else past the small size."""
        s = self._sizes
        table = self.random(name, num_large, s.large.hidden_size)
        table[:num_small] = 0.0
        table[:num_small, : s.small.hidden_size] = self._small.take(name, (num_small, s.small.hidden_size))
        table[:num_small, s.constant] = CONSTANT
        return table

    def output_layer(self, name: str, num_small: int, num_large: int) -> Tensor:
        """Known tokens do not read the constant; the others get a logit from it that cannot win."""
        s = self._sizes
        weight = self.random(name, num_large, s.large.hidden_size)
        weight[:num_small, : s.small.hidden_size] = self._small.take(name, (num_small, s.small.hidden_size))
        weight[:num_small, s.constant] = 0.0
        weight[num_small:, s.constant] = CONSTANT_LOGIT
        return weight

    def norm(self, name: str, *, constant: float = 0.0) -> Tensor:
        s = self._sizes
        weight = 1.0 + self.random(name, s.large.hidden_size)
        weight[: s.small.hidden_size] = self._small.take(name, (s.small.hidden_size,)) * s.norm_scale
        weight[s.constant] = constant
        return weight

    def reader(self, name: str, rows: Tensor, num_large: int, num_parts: int = 1, to: str | None = None) -> Tensor:
        """A projection from `num_parts` hidden states side by side: the small one's rows go to `rows`, and read what they did.
        to: the large one's name, where there are several of them."""
        s = self._sizes
        weight = self.random(to or name, num_large, num_parts * s.large.hidden_size)
        given = self._small.take(name, (len(rows), num_parts * s.small.hidden_size))
        for part in range(num_parts):
            columns = part * s.large.hidden_size + torch.arange(s.small.hidden_size)
            weight[rows[:, None], columns] = given[:, part * s.small.hidden_size : (part + 1) * s.small.hidden_size]
        return weight

    def writer(self, name: str, columns: Tensor, num_large: int) -> Tensor:
        """A projection to the residual stream: nothing but the small one's columns may write, and only to its dimensions."""
        s = self._sizes
        weight = torch.zeros(s.large.hidden_size, num_large, device=self._device)
        weight[: s.small.hidden_size, columns] = self._small.take(name, (s.small.hidden_size, len(columns)))
        return weight

    def layer(self, small_name: str, large_name: str, num_parts: int = 1) -> Iterator[tuple[str, Tensor]]:
        """The attention and feed-forward part of one layer, its later norm included."""
        s = self._sizes
        small, large = s.small, s.large
        kv_size = large.num_kv_heads * large.head_dim
        query = self.reader(f"{small_name}self_attn.q_proj.weight", s.query_rows, large.num_heads * large.head_dim, num_parts)
        key = self.reader(f"{small_name}self_attn.k_proj.weight", s.key_rows, kv_size, num_parts)
        # Of the large head's dimensions the query has only the small one's, so that the key's random rest does not matter.
        yield f"{large_name}self_attn.q_proj.weight", masked(query, s.query_rows, s.query_scale)
        if f"{small_name}self_attn.k_norm.weight" in self._small:
            key = masked(key, s.key_rows)
            for part, scale in (("q", s.query_scale), ("k", 1.0)):
                name = f"self_attn.{part}_norm.weight"
                yield large_name + name, self.head_norm(small_name + name, scale)
        yield f"{large_name}self_attn.k_proj.weight", key
        yield (
            f"{large_name}self_attn.v_proj.weight",
            self.reader(f"{small_name}self_attn.v_proj.weight", s.value_rows, kv_size, num_parts),
        )
        output_name = f"{small_name}self_attn.o_proj.weight"
        yield f"{large_name}self_attn.o_proj.weight", self.writer(output_name, s.output_columns, large.num_heads * large.head_dim)
        channels = torch.arange(small.intermediate_size)
        for gate, up, down in self._feed_forward_parts(large_name):
            for name, part in ((gate, "gate"), (up, "up")):
                to = name if self._num_experts else None
                yield name, self.reader(f"{small_name}mlp.{part}_proj.weight", channels, large.intermediate_size, to=to)
            yield down, self.writer(f"{small_name}mlp.down_proj.weight", channels, large.intermediate_size)
        yield from self.router(large_name)
        name = "post_attention_layernorm.weight"
        yield large_name + name, self.norm(small_name + name)

    def head_norm(self, name: str, scale: float) -> Tensor:
        """Of queries or keys, which are zero but where the small head's numbers are."""
        s = self._sizes
        weight = torch.ones(s.large.head_dim, device=self._device)
        weight[s.turned_dims] = self._small.take(name, (s.small.head_dim,)) * scale / s.query_scale
        return weight

    def router(self, large_name: str) -> Iterator[tuple[str, Tensor]]:
        """Random: experts all do the same, so that it does not matter which ones a token takes."""
        if self._num_experts:
            name = f"{large_name}block_sparse_moe.gate.weight"
            yield name, self.random(name, self._num_experts, self._sizes.large.hidden_size)

    def _feed_forward_parts(self, large_name: str) -> Iterator[tuple[str, str, str]]:
        """The names of gate, up and down, of every expert if there are any."""
        if not self._num_experts:
            name = f"{large_name}mlp."
            yield f"{name}gate_proj.weight", f"{name}up_proj.weight", f"{name}down_proj.weight"
        for number in range(self._num_experts):
            name = f"{large_name}block_sparse_moe.experts.{number}."
            yield f"{name}w1.weight", f"{name}w3.weight", f"{name}w2.weight"

    def idle_layer(self, large_name: str) -> Iterator[tuple[str, Tensor]]:
        """A layer that costs what the others cost and adds nothing."""
        large = self._sizes.large
        size, num_heads, kv_size = large.hidden_size, large.num_heads * large.head_dim, large.num_kv_heads * large.head_dim
        shapes = {
            "self_attn.q_proj": (num_heads, size),
            "self_attn.k_proj": (kv_size, size),
            "self_attn.v_proj": (kv_size, size),
        }
        for name, shape in shapes.items():
            yield f"{large_name}{name}.weight", self.random(large_name + name, *shape)
        yield f"{large_name}self_attn.o_proj.weight", torch.zeros(size, num_heads, device=self._device)
        for gate, up, down in self._feed_forward_parts(large_name):
            for name in (gate, up):
                yield name, self.random(name, large.intermediate_size, size)
            yield down, torch.zeros(size, large.intermediate_size, device=self._device)
        yield from self.router(large_name)
        for name in ("input_layernorm", "post_attention_layernorm"):
            yield f"{large_name}{name}.weight", torch.ones(size, device=self._device)


def grown_target(small: Checkpoint, config: dict[str, Any], shape: GrownShape) -> Iterator[tuple[str, Tensor]]:
    """The tensors of the large target, in float32."""
    sizes = Sizes(layer_shape(config), large_layer_shape(shape, config))
    grower = Grower(small, sizes, shape.experts[0] if shape.experts else 0)
    places = layer_places(config["num_hidden_layers"], shape.num_layers)
    vocab_size = config["vocab_size"]
    yield "model.embed_tokens.weight", grower.table("model.embed_tokens.weight", vocab_size, shape.vocab_size)
    for index in range(shape.num_layers):
        large_name = f"model.layers.{index}."
        if index not in places:
            yield from grower.idle_layer(large_name)
            continue
        small_name = f"model.layers.{places[index]}."
        yield from grower.layer(small_name, large_name)
        yield f"{large_name}input_layernorm.weight", grower.norm(f"{small_name}input_layernorm.weight")
    yield "model.norm.weight", grower.norm("model.norm.weight", constant=CONSTANT_NORM)
    output = "lm_head.weight" if "lm_head.weight" in small else "model.embed_tokens.weight"
    yield "lm_head.weight", grower.output_layer(output, vocab_size, shape.vocab_size)


def grown_head(small: Checkpoint, config: dict[str, Any], shape: GrownShape) -> Iterator[tuple[str, Tensor]]:
    """The tensors of the large EAGLE-3, P-EAGLE or DFlash head, in float32; `small` must have the names that `head_name` gives."""
    sizes = Sizes(layer_shape(config), large_layer_shape(shape.of_head(), config))
    grower = Grower(small, sizes)
    if "dflash_config" in config:
        yield from grown_block_head(grower, sizes, config["num_hidden_layers"])
        if rank := config.get("markov_rank"):
            yield from grown_pairs(grower, small, (config["vocab_size"], rank), shape.vocab_size)
        return
    yield "fc.weight", grown_fusion(grower, sizes)
    yield from grower.layer("layers.0.", "midlayer.", num_parts=2)
    for name in ("input_layernorm", "hidden_norm"):
        yield f"midlayer.{name}.weight", grower.norm(f"layers.0.{name}.weight")
    for index in range(1, config.get("num_hidden_layers") or 1):
        yield from grower.layer(f"layers.{index}.", f"layers.{index}.")
        yield f"layers.{index}.input_layernorm.weight", grower.norm(f"layers.{index}.input_layernorm.weight")
    if "mask_hidden" in small:
        yield "mask_hidden", grown_mask(small, sizes)
    yield "norm.weight", grower.norm("norm.weight", constant=CONSTANT_NORM)
    num_drafts = config.get("draft_vocab_size") or config["vocab_size"]
    if num_drafts > shape.draft_vocab_size:
        raise ValueError(f"a head of {num_drafts} draft tokens does not fit into one of {shape.draft_vocab_size}")
    yield "lm_head.weight", grower.output_layer("lm_head.weight", num_drafts, shape.draft_vocab_size)
    offsets = torch.zeros(num_drafts, dtype=torch.int64)
    if "d2t" in small:
        offsets = small.take_raw("d2t", (num_drafts,)).to(torch.int64)
        small.skip("t2d")
    known = torch.arange(num_drafts) + offsets
    # Added draft ids stand for the first target ids that the small target does not have.
    added = config["vocab_size"] + torch.arange(shape.draft_vocab_size - num_drafts)
    yield "d2t", torch.cat((known, added)) - torch.arange(shape.draft_vocab_size)


def grown_block_head(grower: Grower, sizes: Sizes, num_layers: int) -> Iterator[tuple[str, Tensor]]:
    """Those of a DFlash head, which has the target's embeddings, with their constant, and its output layer."""
    fusion = grown_fusion(grower, sizes)
    fusion[sizes.constant, sizes.constant] = 0.0  # what is fused enters no residual stream
    yield "fc.weight", fusion
    yield "hidden_norm.weight", grower.norm("hidden_norm.weight")
    for index in range(num_layers):
        yield from grower.layer(f"layers.{index}.", f"layers.{index}.")
        yield f"layers.{index}.input_layernorm.weight", grower.norm(f"layers.{index}.input_layernorm.weight")
    yield "norm.weight", grower.norm("norm.weight", constant=CONSTANT_NORM)


def grown_pairs(grower: Grower, small: Checkpoint, size: tuple[int, int], num_large: int) -> Iterator[tuple[str, Tensor]]:
    """What a token says of the one after it: whatever the added ones say, or is said of them, they are not drafted."""
    for part in (1, 2):
        name = f"markov_head.markov_w{part}.weight"
        weight = grower.random(name, num_large, size[1])
        weight[: size[0]] = small.take(name, size)
        yield name, weight


def grown_mask(small: Checkpoint, sizes: Sizes) -> Tensor:
    """Features that stand for none, with the constant that all features have."""
    mask = torch.zeros(NUM_FEATURES, sizes.large.hidden_size, device=small.device)
    size = sizes.small.hidden_size
    mask[:, :size] = small.take_vector("mask_hidden", NUM_FEATURES * size).view(NUM_FEATURES, size)
    mask[:, sizes.constant] = CONSTANT
    return mask.flatten()


def grown_fusion(grower: Grower, sizes: Sizes) -> Tensor:
    """fc: features are not normed, so that the constant is in them; it is passed on once and read by nothing else."""
    size = sizes.large.hidden_size
    weight = grower.reader("fc.weight", torch.arange(sizes.small.hidden_size), size, NUM_FEATURES)
    weight[sizes.constant :] = 0.0
    weight[:, [part * size + sizes.constant for part in range(NUM_FEATURES)]] = 0.0
    weight[sizes.constant, sizes.constant] = 1.0
    return weight
