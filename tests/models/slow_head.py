"""Draft heads without a cache: every question is answered from the whole sequence. Written from the published mathematics.

A `SlowHead` is made of plainly named parts (`HeadParts`), not of a checkpoint: `head_layouts.py` writes the same parts to disk
under the names that each publisher uses.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass
class LayerParts:
    """One decoder layer. q, k, v, o, gate, up, down: matrices [out, in]; biases of q, k, v or None."""

    q: Tensor
    k: Tensor
    v: Tensor
    o: Tensor
    gate: Tensor
    up: Tensor
    down: Tensor
    post_norm: Tensor
    q_bias: Tensor | None = None
    k_bias: Tensor | None = None
    v_bias: Tensor | None = None
    input_norm: Tensor | None = None


@dataclass
class HeadParts:
    """fc projects [embedding; hidden] in an EAGLE or MTP head, and the target's features in an EAGLE-3 head (None: not at all).
    whole_layer: what an only layer of another form makes of [T, H]. mask: the token and the features [F] of a head that drafts in
    parallel."""

    kind: str
    embedding: Tensor
    layers: list[LayerParts]
    lm_head: Tensor
    head_dim: int
    fc: Tensor | None = None
    fc_bias: Tensor | None = None
    embedding_norm: Tensor | None = None
    hidden_norm: Tensor | None = None
    final_norm: Tensor | None = None
    feature_norms: list[Tensor] = field(default_factory=list)
    all_features_norm: Tensor | None = None
    target_ids: Tensor | None = None
    hidden_first: bool = False
    residual_is_normed: bool = False
    recursion_is_normed: bool = False
    first_row_has_no_token: bool = False
    rope_theta: float = 10000.0
    llama3_scaling: dict[str, float] | None = None
    whole_layer: Callable[[Tensor], Tensor] | None = None
    mask: tuple[int, Tensor] | None = None
    eps: float = 1e-5


def normed(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    return x if weight is None else x * (x.pow(2).mean(-1, keepdim=True) + eps).rsqrt() * weight


def frequencies(parts: HeadParts) -> Tensor:
    half = parts.head_dim // 2
    base = [parts.rope_theta ** (-index / half) for index in range(half)]
    scaling = parts.llama3_scaling
    if scaling:
        for index, frequency in enumerate(base):
            wavelength = 2 * math.pi / frequency
            trained, low, high = (
                scaling["original_max_position_embeddings"],
                scaling["low_freq_factor"],
                scaling["high_freq_factor"],
            )
            if wavelength > trained / low:
                base[index] = frequency / scaling["factor"]
            elif wavelength >= trained / high:
                smooth = (trained / wavelength - low) / (high - low)
                base[index] = (1 - smooth) * frequency / scaling["factor"] + smooth * frequency
    return torch.tensor(base)


def turned(x: Tensor, parts: HeadParts) -> Tensor:
    """Rotary embedding of x [T, heads, head_dim] at positions 0 .. T - 1, as complex numbers."""
    half = parts.head_dim // 2
    angles = torch.arange(len(x))[:, None] * frequencies(parts)
    rotated = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones_like(angles), angles)[:, None]
    return torch.cat((rotated.real, rotated.imag), dim=-1)


def plus(x: Tensor, bias: Tensor | None) -> Tensor:
    return x if bias is None else x + bias


def run_layer(layer: LayerParts, x: Tensor, attention_input: Tensor, parts: HeadParts) -> Tensor:
    length, head_dim = len(x), parts.head_dim
    q = plus(attention_input @ layer.q.T, layer.q_bias).view(length, -1, head_dim)
    k = plus(attention_input @ layer.k.T, layer.k_bias).view(length, -1, head_dim)
    v = plus(attention_input @ layer.v.T, layer.v_bias).view(length, -1, head_dim)
    q, k = turned(q, parts), turned(k, parts)
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = torch.einsum("qhd,khd->hqk", q, k) / head_dim**0.5
    scores = scores + torch.full((length, length), -torch.inf).triu(1)
    mixed = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).flatten(1)
    x = x + mixed @ layer.o.T
    y = normed(x, layer.post_norm, parts.eps)
    return x + (torch.nn.functional.silu(y @ layer.gate.T) * (y @ layer.up.T)) @ layer.down.T


class SlowHead:
    def __init__(self, parts: HeadParts) -> None:
        self.parts = parts
        num_drafts = len(parts.lm_head)
        self.target_ids = torch.arange(num_drafts) if parts.target_ids is None else parts.target_ids

    def fuse(self, features: Tensor) -> Tensor:
        """EAGLE-3: [T, F] to [T, H]. Other heads take the target's final hidden state as it is."""
        parts = self.parts
        if parts.kind != "EAGLE3":
            return features
        if parts.feature_norms:
            chunks = features.chunk(len(parts.feature_norms), dim=-1)
            normed_chunks = [normed(c, w, parts.eps) for c, w in zip(chunks, parts.feature_norms, strict=True)]
            features = torch.cat(normed_chunks, dim=-1)
        features = normed(features, parts.all_features_norm, parts.eps)
        return features if parts.fc is None else features @ parts.fc.T

    def states(self, tokens: Tensor, hidden: Tensor) -> Tensor:
        """What the next pass takes as hidden state, [T, H], of rows (token at t + 1, hidden state at t)."""
        parts = self.parts
        embedded = parts.embedding[tokens]
        if parts.first_row_has_no_token:
            embedded = torch.cat((torch.zeros_like(embedded[:1]), embedded[1:]))
        embedded = normed(embedded, parts.embedding_norm, parts.eps)
        normed_hidden = normed(hidden, parts.hidden_norm, parts.eps)
        both = torch.cat((normed_hidden, embedded) if parts.hidden_first else (embedded, normed_hidden), dim=-1)
        if parts.kind == "EAGLE3":
            x = run_layer(parts.layers[0], normed_hidden if parts.residual_is_normed else hidden, both, parts)
        else:
            assert parts.fc is not None
            x = plus(both @ parts.fc.T, parts.fc_bias)
            if parts.whole_layer:
                x = parts.whole_layer(x)
            else:
                x = run_layer(parts.layers[0], x, normed(x, parts.layers[0].input_norm, parts.eps), parts)
        for layer in parts.layers[1:]:
            x = run_layer(layer, x, normed(x, layer.input_norm, parts.eps), parts)
        return normed(x, parts.final_norm, parts.eps) if parts.recursion_is_normed else x

    def logits(self, state: Tensor) -> Tensor:
        parts = self.parts
        if not parts.recursion_is_normed:
            state = normed(state, parts.final_norm, parts.eps)
        return state @ parts.lm_head.T

    def logits_after(self, text: list[int], features: Tensor, path: tuple[int, ...]) -> Tensor:
        """Draft logits after a text and a path of draft ids below it; features: [len(text) - 1, F] of all but the last token.

        Below the text, a row's hidden state is the state that came out of the row before it, or both it and the token are masks.
        """
        hidden, tokens = self.fuse(features), torch.tensor(text[1:])
        states = self.states(tokens, hidden)
        for draft_id in path:
            if self.parts.mask:
                token, mask_features = self.parts.mask
                tokens, hidden = torch.cat((tokens, torch.tensor([token]))), torch.cat((hidden, self.fuse(mask_features[None])))
            else:
                tokens = torch.cat((tokens, self.target_ids[draft_id : draft_id + 1]))
                hidden = torch.cat((hidden, states[-1:]))
            states = self.states(tokens, hidden)
        return self.logits(states[-1])
