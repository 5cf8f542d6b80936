"""An EAGLE-3 head without a cache: every question is answered from the whole sequence. Written from the published mathematics."""

from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

HEAD_DIM = 16
EPS = 1e-5


def normed(x: Tensor, weight: Tensor) -> Tensor:
    return x * (x.pow(2).mean(-1, keepdim=True) + EPS).rsqrt() * weight


def turned(x: Tensor, positions: Tensor) -> Tensor:
    """Rotary embedding of x [T, heads, head_dim] as complex numbers, base 10000."""
    half = HEAD_DIM // 2
    angles = positions[:, None] * 10000.0 ** (-torch.arange(half) / half)
    rotated = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones_like(angles), angles)[:, None]
    return torch.cat((rotated.real, rotated.imag), dim=-1)


class SlowHead:
    def __init__(self, head_dir: Path, embedding: Tensor) -> None:
        self.weights = load_file(head_dir / "model.safetensors")
        self.embedding = embedding

    def layer(self, tokens: Tensor, hidden: Tensor) -> Tensor:
        """The states o [T, H] of rows (token at t + 1, hidden state at t), all attending causally."""
        w = {name.removeprefix("midlayer."): weight for name, weight in self.weights.items()}
        length = len(tokens)
        positions = torch.arange(length)
        embedded = normed(self.embedding[tokens], w["input_layernorm.weight"])
        z = torch.cat((embedded, normed(hidden, w["hidden_norm.weight"])), dim=-1)
        q, k, v = ((z @ w[f"self_attn.{part}_proj.weight"].T).view(length, -1, HEAD_DIM) for part in ("q", "k", "v"))
        q, k = turned(q, positions), turned(k, positions)
        group = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        scores = torch.einsum("qhd,khd->hqk", q, k) / HEAD_DIM**0.5
        scores = scores + torch.full((length, length), -torch.inf).triu(1)
        mixed = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).flatten(1)
        r = hidden + mixed @ w["self_attn.o_proj.weight"].T
        x = normed(r, w["post_attention_layernorm.weight"])
        gate = torch.nn.functional.silu(x @ w["mlp.gate_proj.weight"].T)
        return r + (gate * (x @ w["mlp.up_proj.weight"].T)) @ w["mlp.down_proj.weight"].T

    def logits_after(self, text: list[int], features: Tensor, path: tuple[int, ...]) -> Tensor:
        """Draft logits after a text and a path of draft ids below it; features: [len(text) - 1, 3H] of all but the last token.

        Below the text, a row's hidden state is the state that came out of the row before it.
        """
        hidden = features @ self.weights["fc.weight"].T
        target_ids = torch.arange(len(self.weights["d2t"])) + self.weights["d2t"]
        tokens = torch.tensor(text[1:])
        states = self.layer(tokens, hidden)
        for draft_id in path:
            tokens = torch.cat((tokens, target_ids[draft_id : draft_id + 1]))
            hidden = torch.cat((hidden, states[-1:]))
            states = self.layer(tokens, hidden)
        return normed(states[-1], self.weights["norm.weight"]) @ self.weights["lm_head.weight"].T
