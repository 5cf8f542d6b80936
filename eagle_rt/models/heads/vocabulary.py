"""Which tokens a head can draft, and what scores them: its own, or the target's."""

from torch import Tensor

from eagle_rt.models.decoder import Decoder
from eagle_rt.models.heads.spec import HeadSpec
from eagle_rt.models.linear import Linear, linear
from eagle_rt.models.weights import Checkpoint
from eagle_rt.token_map.token_map import TokenMap, from_offsets, identity_map


def read_lm_head(checkpoint: Checkpoint, spec: HeadSpec, embedding: Tensor, target: Decoder) -> Linear:
    """The head's own output layer, or its embeddings or the target's layer where it has none.

    Raises:
        ValueError: it has none, and the target's does not fit.
    """
    size = spec.shape.hidden_size
    if "lm_head.weight" in checkpoint:
        return linear(checkpoint, "lm_head", spec.draft_vocab_size, size)
    if "d2t" not in checkpoint and spec.tie_word_embeddings and embedding is not target.embedding:
        return Linear(embedding)
    if "d2t" in checkpoint or size != target.spec.shape.hidden_size:
        raise ValueError(
            f"tensor lm_head.weight is missing from the checkpoint in {checkpoint.model_dir}, and the target's output layer "
            f"cannot take its place: it has {target.spec.vocab_size} rows of {target.spec.shape.hidden_size}"
        )
    return target.lm_head


def read_token_map(checkpoint: Checkpoint, draft_vocab_size: int, target_vocab_size: int) -> TokenMap:
    """The head's `d2t`, or the identity where both vocabularies are one."""
    checkpoint.skip("t2d")  # a mask of the ids that d2t reaches: nothing new in it
    if "d2t" in checkpoint:
        return from_offsets(checkpoint.take_raw("d2t", (draft_vocab_size,)), target_vocab_size)
    if draft_vocab_size != target_vocab_size:
        raise ValueError(
            f"the head has a draft vocabulary of {draft_vocab_size} for a target vocabulary of {target_vocab_size}, "
            f"but no d2t tensor in {checkpoint.model_dir} to map one to the other"
        )
    return identity_map(target_vocab_size)
