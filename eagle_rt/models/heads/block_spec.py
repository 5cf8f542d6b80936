"""What the config.json of a head says that guesses whole blocks: DFlash's and DSpark's, whoever wrote it."""

from dataclasses import dataclass
from typing import Any

from eagle_rt.models.families import architecture_of


@dataclass(frozen=True)
class BlockSpec:
    """How a DFlash or DSpark head guesses.

    mask_token: stands for each token that is to be guessed. size: of the blocks that it was trained with, of which the first
    token is known. is_shifted: a row tells the token after its own place, not the one in it. pair_rank: of what the token
    before a guessed one has to say to that, 0 if it has nothing. windows: per layer, how far back it sees, or None.
    causal_within, causal_without: whether rows of a block see only those before them, in layers with a window and in those
    without one. embedding_scale: what embeddings are multiplied with. logit_scale, logit_cap: what logits are, and the tanh
    that then holds them between -cap and cap.
    """

    mask_token: int
    size: int
    is_shifted: bool
    pair_rank: int
    windows: tuple[int | None, ...]
    causal_within: bool
    causal_without: bool
    embedding_scale: float
    logit_scale: float
    logit_cap: float | None

    @property
    def first_row(self) -> int:
        """The one that tells the first token after the one that is known."""
        return int(not self.is_shifted)

    @property
    def most_steps(self) -> int:
        """Tokens that blocks of that size tell."""
        return self.size - self.first_row

    def num_rows(self, num_steps: int) -> int:
        """Of a block that tells so many tokens."""
        return num_steps + self.first_row


def block_feature_layers(config: dict[str, Any]) -> tuple[int, ...]:
    """The layers whose input a DFlash head is fed with. Its own format names those whose output that is; speculators', under
    another name, those whose input it is. config: as `block_spec`.

    Raises:
        ValueError: the config names none.
    """
    are_inputs = config.get("layer_ids_are_inputs")
    given = config.get("aux_hidden_state_layer_ids") if are_inputs else config.get("target_layer_ids")
    if not given:
        name = "aux_hidden_state_layer_ids" if are_inputs else "dflash_config.target_layer_ids"
        raise ValueError(f"the head's config.json has no {name}: set it to the layers that it was trained with")
    return tuple(given) if are_inputs else tuple(layer + 1 for layer in given)


def block_spec(config: dict[str, Any], vocab_size: int) -> BlockSpec:
    """config: with what stands in `dflash_config` one level up.

    Raises:
        ValueError: it lacks something, or it is of a drafter that has other parts.
    """
    more = [name for name in ("conv_kernel_size", "selector_rank") if config.get(name)]
    if more:
        raise ValueError(
            f"the head's config.json has {more[0]}: drafters of blocks with parts of DFlash 2 are not supported, those of "
            "DFlash and DSpark are, and EAGLE and P-EAGLE heads"
        )
    model_type, pairs = config.get("model_type", "qwen3"), config.get("markov_head_type") or "vanilla"
    if model_type not in ("qwen3", "llama"):
        raise ValueError(f"the head's layers are those of {model_type}, which is not supported in a drafter of blocks: qwen3's are")
    if config.get("markov_rank") and pairs != "vanilla":
        raise ValueError(f"markov_head_type {pairs} in the head's config.json is not supported, vanilla is")
    mask_token, size, window = config.get("mask_token_id"), config.get("block_size", 16), config.get("sliding_window")
    if mask_token is None or not 0 <= mask_token < vocab_size:
        raise ValueError(
            f"the head's config.json names {'no mask token' if mask_token is None else f'the mask token {mask_token}'}: set "
            f"dflash_config.mask_token_id to one of the {vocab_size} tokens that it was trained with"
        )
    if size < 2:
        raise ValueError(f"block_size in the head's config.json is {size}, but a token and a mask are two")
    is_dspark = config.get("speculators_model_type") == "dspark" or "DSpark" in architecture_of(config)
    types = config.get("layer_types") or ["full_attention"] * config["num_hidden_layers"]
    if len(types) != config["num_hidden_layers"]:
        raise ValueError(f"layer_types in the head's config.json names {len(types)} of its {config['num_hidden_layers']} layers")
    if "sliding_attention" in types and not window:
        raise ValueError("the head's config.json has layers of sliding_attention, and no sliding_window")
    is_causal = config.get("is_causal")
    return BlockSpec(
        mask_token,
        size,
        is_shifted=bool(config.get("shift_label", is_dspark)),
        pair_rank=config.get("markov_rank") or 0,
        windows=tuple(window if kind == "sliding_attention" else None for kind in types),
        causal_within=is_causal is not False,
        causal_without=bool(is_causal),
        embedding_scale=config.get("input_embedding_scale") or 1.0,
        logit_scale=config.get("output_multiplier") or 1.0,
        logit_cap=config.get("final_logit_softcapping") or None,
    )
