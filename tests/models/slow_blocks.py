"""A DFlash head without a cache: every question is answered from the whole text. Written from the published mathematics."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import silu

from models.slow_head import HeadParts, LayerParts, normed, turned


@dataclass
class SlowBlocks:
    """parts: of kind DFLASH. windows: per layer, how far back it sees, or None; is_causal: per layer, whether rows of a block see
    only those before them; head_norms: per layer, those of queries and of keys. num_levels: that a block tells. is_shifted:
    a row tells the token after its place. pairs: [V, R] and [W, R], what a token says of the one after it."""

    parts: HeadParts
    mask_token: int
    windows: list[int | None]
    is_causal: list[bool]
    head_norms: list[tuple[Tensor, Tensor]]
    embedding_scale: float = 1.0
    logit_scale: float = 1.0
    logit_cap: float | None = None
    num_levels: int = 5
    is_shifted: bool = False
    pairs: tuple[Tensor, Tensor] | None = None

    @property
    def target_ids(self) -> Tensor:
        own = self.parts.target_ids
        return torch.arange(len(self.parts.lm_head)) if own is None else own

    def logits_after(self, text: list[int], features: Tensor, path: tuple[int, ...]) -> Tensor:
        """As `SlowHead.logits_after`: of what is on the path only the last token is looked at, if any is."""
        parts = self.parts
        block = torch.tensor([text[-1], *[self.mask_token] * (self.num_levels - self.is_shifted)])
        x = self.embedding_scale * parts.embedding[block]
        assert parts.fc is not None
        context = normed(features @ parts.fc.T, parts.hidden_norm, parts.eps)
        for index, layer in enumerate(parts.layers):
            x = self._run(index, layer, x, context)
        row = len(path) + (not self.is_shifted)
        logits = self.logit_scale * (normed(x, parts.final_norm, parts.eps)[row] @ parts.lm_head.T)
        if self.logit_cap is not None:
            logits = self.logit_cap * (logits / self.logit_cap).tanh()
        if self.pairs is None:
            return logits
        return logits + self.pairs[1] @ self.pairs[0][int(self.target_ids[path[-1]]) if path else text[-1]]

    def _run(self, index: int, layer: LayerParts, x: Tensor, context: Tensor) -> Tensor:
        parts, (query_norm, key_norm), window = self.parts, self.head_norms[index], self.windows[index]
        length, end = len(context), len(context) + len(x)
        y = normed(x, layer.input_norm, parts.eps)
        seen = torch.cat((context, y))
        q = normed((y @ layer.q.T).unflatten(1, (-1, parts.head_dim)), query_norm, parts.eps)
        k = normed((seen @ layer.k.T).unflatten(1, (-1, parts.head_dim)), key_norm, parts.eps)
        v = (seen @ layer.v.T).unflatten(1, (-1, parts.head_dim))
        q = turned(torch.cat((q.new_zeros(length, *q.shape[1:]), q)), parts)[length:]
        k = turned(k, parts)
        group = q.shape[1] // k.shape[1]
        distance = torch.arange(length, end)[:, None] - torch.arange(end)
        hidden = (distance < 0) if self.is_causal[index] else torch.zeros_like(distance, dtype=torch.bool)
        if window is not None:
            hidden |= distance >= window
        scores = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(group, 1)) / parts.head_dim**0.5
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        x = x + torch.einsum("hqk,khd->qhd", weights, v.repeat_interleave(group, 1)).flatten(1) @ layer.o.T
        y = normed(x, layer.post_norm, parts.eps)
        return x + (silu(y @ layer.gate.T) * (y @ layer.up.T)) @ layer.down.T
