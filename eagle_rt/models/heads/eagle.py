"""EAGLE-1 / EAGLE-2 heads and multi-token-prediction layers: token and hidden state are projected to one hidden size."""

import torch
from torch import Tensor

from eagle_rt.models.decoder import Decoder
from eagle_rt.models.heads.base import EagleLayers
from eagle_rt.models.heads.spec import HeadSpec
from eagle_rt.models.layers import optional_norm
from eagle_rt.models.linear import linear
from eagle_rt.models.weights import Checkpoint


class EagleHead(EagleLayers):
    """x = fc([embedding; hidden]); r = x + attention(x); o = r + feed_forward(norm(r)); the target's output layer reads o.

    (Li et al., "EAGLE", 2024.) o foresees the target's final hidden state, and the next pass takes it as such. Where the
    checkpoint holds norms for the embedding, the hidden state, the layer's input or its output, they are applied: MiMo's and
    GLM's MTP layers have all four, and MiMo's the hidden state first.
    """

    def __init__(self, checkpoint: Checkpoint, spec: HeadSpec, target: Decoder) -> None:
        size, eps = spec.shape.hidden_size, spec.shape.rms_norm_eps
        super().__init__(checkpoint, spec, target, size)
        self._fuse = linear(checkpoint, "fc", size, 2 * size)
        self._embedding_norm = optional_norm(checkpoint, "enorm", size, eps)
        self._hidden_norm = optional_norm(checkpoint, "hnorm", size, eps)
        self._input_norm = optional_norm(checkpoint, "layers.0.input_layernorm", size, eps)
        checkpoint.skip("lm_head.weight")  # some converters add a copy of the target's

    def _enter(self, embedded: Tensor, hidden: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        if self.spec.zero_first_embedding:
            embedded = embedded * (positions > 0)[:, None]
        if self._embedding_norm:
            embedded = self._embedding_norm(embedded)
        if self._hidden_norm:
            hidden = self._hidden_norm(hidden)
        assert self._fuse
        x = self._fuse(torch.cat((embedded, hidden) if self.spec.embedding_first else (hidden, embedded), dim=-1))
        return x, self._input_norm(x) if self._input_norm else x
