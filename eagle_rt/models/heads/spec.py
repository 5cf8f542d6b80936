"""What a head's config.json says, whoever wrote it: one description for all published forms."""

from dataclasses import dataclass, replace
from typing import Any

from eagle_rt.models.decoder import FINAL_NORM
from eagle_rt.models.families import HYBRIDS, NEXTN
from eagle_rt.models.layer_kinds import ExpertShape
from eagle_rt.models.layer_shape import LayerShape, layer_shape
from eagle_rt.models.rope import RopeSpec, rope_from_config
from eagle_rt.models.spec import ModelSpec

# What the token is called that a head is fed in place of those not known yet: by Amazon and vLLM, and by speculators.
MASK_TOKENS = ("ptd_token_id", "pard_token", "mask_token_id")


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
    def most_steps(self) -> int:
        """Tokens that blocks of that size tell."""
        return self.size - (not self.is_shifted)

    def num_rows(self, num_steps: int) -> int:
        """Of a block that tells so many tokens."""
        return num_steps + (not self.is_shifted)

    @property
    def first_row(self) -> int:
        """The one that tells the first token after the one that is known."""
        return int(not self.is_shifted)


@dataclass(frozen=True)
class HeadSpec:
    """How to read a head's weights.

    kind: EAGLE3, EAGLE (1 and 2, whose weights are alike), DFLASH, MTP or ASSISTANT. context_length: what `dynamic` angles stretch
    to. feature_layers: target layers whose input the head is fed with, or FINAL_NORM. embedding_first: the token's embedding stands
    before the hidden state where both are put side by side. norm_before_residual: an EAGLE-3 head adds to the normed hidden
    state, not to the one before. norm_output: the state that the next pass takes is normed. zero_first_embedding: the row at
    position 0 has no token. later_norm: the name of the norm before the attention of layers after the first.
    tie_word_embeddings: where there is no output layer, the head's own embeddings are it. experts: those of its layers, if any.
    mask_token: stands for tokens that are not known yet, in an EAGLE-3 head that drafts in parallel. block: of a DFLASH head.
    """

    kind: str
    shape: LayerShape
    num_layers: int
    rope: RopeSpec
    context_length: int
    draft_vocab_size: int
    feature_layers: tuple[int, ...]
    embedding_first: bool = True
    norm_before_residual: bool = False
    norm_output: bool = False
    zero_first_embedding: bool = False
    later_norm: str = "input_layernorm"
    tie_word_embeddings: bool = False
    experts: ExpertShape | None = None
    mask_token: int | None = None
    block: BlockSpec | None = None


def default_feature_layers(num_layers: int) -> tuple[int, ...]:
    """Inputs of a low, a middle and a high layer: 2, N // 2, N - 3 (EAGLE-3 reference implementation)."""
    return (2, num_layers // 2, num_layers - 3)


def check_feature_layers(layers: tuple[int, ...], num_layers: int) -> None:
    """Raises ValueError for a layer that the target does not have."""
    outside = [layer for layer in layers if layer != FINAL_NORM and not 0 <= layer <= num_layers]
    if outside:
        raise ValueError(f"the head wants features of layer {outside[0]}, but the target has {num_layers} layers")


def flat_config(config: dict[str, Any]) -> dict[str, Any]:
    """One level of fields out of the forms that nest them.

    speculators puts the layer's fields under `transformer_layer_config` and norms before the residual unless it says otherwise;
    heads converted for vLLM have theirs under `model`; nvidia and SpecForge put some into `eagle_config`.
    """
    flat = {**config, **(config.get("model") or {}), **(config.get("eagle_config") or {})}
    if "transformer_layer_config" in config:
        flat = {"norm_before_residual": True, **config["transformer_layer_config"], **flat}
        # The list of a speculators config is read as vLLM reads it, whatever it begins with.
        flat["layer_ids_are_inputs"] = True
    return flat


def head_spec(config: dict[str, Any], target: ModelSpec, kind: str) -> HeadSpec:
    """Raises ValueError where the config lacks something or contradicts the target's."""
    is_nested, config = "transformer_layer_config" in config, flat_config(config)
    try:
        shape = layer_shape(config)
        vocab_size = config["vocab_size"]
    except KeyError as error:
        raise ValueError(f"the head's config.json has no {error.args[0]}") from None
    activation = config.get("hidden_act", "silu")
    if activation != "silu":
        raise ValueError(f"activation {activation!r} of the head is not supported; heads are expected to use silu")
    if vocab_size != target.vocab_size:
        raise ValueError(
            f"the head's vocab_size is {vocab_size} and the target's {target.vocab_size}: this head was made for another target"
        )
    takes_any_size = kind in ("EAGLE3", "DFLASH")
    wanted_size = config.get("target_hidden_size") or (target.shape.hidden_size if takes_any_size else shape.hidden_size)
    if wanted_size != target.shape.hidden_size:
        raise ValueError(
            f"the head was made for a target of hidden_size {wanted_size}, and the target's is {target.shape.hidden_size}: "
            "this head was made for another target"
        )
    rope = rope_from_config(config, shape.head_dim)
    if rope.rotary_dim != rope.head_dim:
        raise ValueError(f"partial_rotary_factor {rope.parameters['partial_rotary_factor']} of the head is not supported, 1 is")
    spec = HeadSpec(
        kind=kind,
        shape=shape,
        num_layers=config.get("num_hidden_layers") or 1,
        rope=rope,
        context_length=rope.max_position_embeddings,
        draft_vocab_size=vocab_size,
        feature_layers=(FINAL_NORM,),
    )
    if kind == "EAGLE":
        return spec
    spec = replace(spec, draft_vocab_size=config.get("draft_vocab_size") or vocab_size)
    if kind == "DFLASH":
        own = {**config, **(config.get("dflash_config") or {})}
        layers = block_feature_layers(own, target.num_layers, are_inputs=is_nested)
        return replace(spec, feature_layers=layers, block=block_spec(own, target.vocab_size))
    return replace(
        spec,
        feature_layers=feature_layers(config, target.num_layers),
        norm_before_residual=bool(config.get("norm_before_residual")),
        norm_output=bool(config.get("norm_output")),
        tie_word_embeddings=bool(config.get("tie_word_embeddings")),
        later_norm="input_layernorm" if config.get("layer_ids_are_inputs") else "hidden_norm",
        mask_token=next((config[name] for name in MASK_TOKENS if config.get(name) is not None), None),
    )


def feature_layers(config: dict[str, Any], num_layers: int) -> tuple[int, ...]:
    """The layers whose input an EAGLE-3 head is fed with."""
    if config.get("use_aux_hidden_state") is False:
        return (FINAL_NORM,)
    given = config.get("eagle_aux_hidden_state_layer_ids")
    if not given:
        layers = default_feature_layers(num_layers)
    else:
        # Two conventions are in use. Lists that begin with 1 name layers whose output is meant; others, layers whose input is.
        offset = 1 if given[0] == 1 and not config.get("layer_ids_are_inputs") else 0
        layers = tuple(layer + offset for layer in given)
    num_wanted = config.get("num_aux_hidden_states")
    if num_wanted and num_wanted != len(layers):
        raise ValueError(
            f"the head's config.json asks for {num_wanted} layers' features, but names the {len(layers)} layers {layers}"
        )
    check_feature_layers(layers, num_layers)
    return layers


def block_feature_layers(config: dict[str, Any], num_layers: int, *, are_inputs: bool) -> tuple[int, ...]:
    """The layers whose input a DFlash head is fed with. Its own format names those whose output that is; speculators', under
    another name, those whose input it is.

    Raises:
        ValueError: the config names none, or one that the target does not have.
    """
    given = config.get("aux_hidden_state_layer_ids") if are_inputs else config.get("target_layer_ids")
    if not given:
        name = "aux_hidden_state_layer_ids" if are_inputs else "dflash_config.target_layer_ids"
        raise ValueError(f"the head's config.json has no {name}: set it to the layers that it was trained with")
    layers = tuple(given) if are_inputs else tuple(layer + 1 for layer in given)
    check_feature_layers(layers, num_layers)
    return layers


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
    is_dspark = config.get("speculators_model_type") == "dspark" or "DSpark" in (config.get("architectures") or [""])[0]
    types = config.get("layer_types") or ["full_attention"] * config["num_hidden_layers"]
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


def mtp_spec(target: ModelSpec) -> HeadSpec:
    """The multi-token-prediction layer in a target's own checkpoint, as MiMo, GLM, DeepSeek and Qwen3.5 have one: a decoder layer
    of the target's last one's shape."""
    is_mimo = target.architecture not in (*NEXTN, *HYBRIDS)
    return HeadSpec(
        kind="MTP",
        shape=target.shape,
        num_layers=1,
        rope=target.rope,
        context_length=target.max_position_embeddings,
        draft_vocab_size=target.vocab_size,
        feature_layers=(FINAL_NORM,),
        embedding_first=not is_mimo,
        norm_output=True,
        zero_first_embedding=is_mimo,
        experts=target.experts[-1],
    )
