"""EAGLE-3 heads: token and fused features of several target layers enter the attention side by side."""

import torch
from torch import Tensor

from eagle_rt.kernels.rms_norm import norms_side_by_side
from eagle_rt.models.decoder import FINAL_NORM, Decoder
from eagle_rt.models.heads.base import EagleLayers, MaskRow
from eagle_rt.models.heads.spec import HeadSpec
from eagle_rt.models.heads.vocabulary import read_lm_head, read_token_map
from eagle_rt.models.layers import norm, optional_norm
from eagle_rt.models.linear import linear
from eagle_rt.models.weights import Checkpoint


class Eagle3Head(EagleLayers):
    """g = fc(features); z = [norm(embedding); norm(g)]; r = g + attention(z); o = r + feed_forward(norm(r)).

    (Li et al., "EAGLE-3", 2025, section 3.1.) o is the state that the next pass takes in place of g; its norm goes to the output
    layer. Norms before `fc`, over each layer's features or over all of them, are applied where the checkpoint holds them.
    """

    def __init__(self, checkpoint: Checkpoint, spec: HeadSpec, target: Decoder) -> None:
        size, eps = spec.shape.hidden_size, spec.shape.rms_norm_eps
        super().__init__(checkpoint, spec, target, 2 * size)
        self._embedding_norm = norm(checkpoint, "layers.0.input_layernorm", size, eps)
        self._hidden_norm = norm(checkpoint, "layers.0.hidden_norm", size, eps)
        self._final_norm = self._final_norm or norm(checkpoint, "norm", size, eps)  # which says that it is missing
        self._read_fusion(checkpoint, target)
        self.mask_row = self._read_mask_row(checkpoint, target)
        token_map = read_token_map(checkpoint, spec.draft_vocab_size, target.spec.vocab_size)
        self.token_map = token_map.to(target.embedding.device)
        self._lm_head = read_lm_head(checkpoint, spec, self._embedding, target)

    def fuse(self, features: Tensor) -> Tensor:
        if self._layer_norms:
            parts = features.chunk(len(self._layer_norms), dim=-1)
            features = torch.cat([part_norm(part) for part_norm, part in zip(self._layer_norms, parts, strict=True)], dim=-1)
        if self._features_norm:
            features = self._features_norm(features)
        return self._fuse(features) if self._fuse else features

    def _enter(self, embedded: Tensor, hidden: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        parts = (embedded, self._embedding_norm), (hidden, self._hidden_norm)
        first, second = parts if self.spec.embedding_first else parts[::-1]
        z = norms_side_by_side(*first, *second)
        if self.spec.norm_before_residual:
            size = hidden.shape[1]
            hidden = z[:, -size:] if self.spec.embedding_first else z[:, :size]
        return hidden, z

    def _read_fusion(self, checkpoint: Checkpoint, target: Decoder) -> None:
        size, eps, num_parts = target.spec.shape.hidden_size, self.spec.shape.rms_norm_eps, len(self.spec.feature_layers)
        names = [f"fc_norm.{part}" for part in range(num_parts)] if "fc_norm.0.weight" in checkpoint else []
        self._layer_norms = [norm(checkpoint, name, size, eps) for name in names]
        self._features_norm = optional_norm(checkpoint, "input_norm", num_parts * size, eps)
        # A head that is fed with final hidden states has nothing to fuse.
        is_fused = self.spec.feature_layers != (FINAL_NORM,) or "fc.weight" in checkpoint
        self._fuse = linear(checkpoint, "fc", self.spec.shape.hidden_size, num_parts * size) if is_fused else None

    def _read_mask_row(self, checkpoint: Checkpoint, target: Decoder) -> MaskRow | None:
        """That of a head that drafts in parallel: features of no token."""
        if "mask_hidden" not in checkpoint:
            return None
        token, vocab_size = self.spec.mask_token, target.spec.vocab_size
        if token is None or not 0 <= token < vocab_size:
            raise ValueError(
                f"{checkpoint.model_dir} holds a head that drafts in parallel (it has a tensor mask_hidden), but its config.json "
                f"names {'no mask token' if token is None else f'the mask token {token}'}: set ptd_token_id to one of the "
                f"{vocab_size} tokens that it was trained with"
            )
        size = len(self.spec.feature_layers) * target.spec.shape.hidden_size
        features = checkpoint.take_vector("mask_hidden", size)
        return MaskRow(token, self.fuse(features[None])[0])
