"""What a head's config.json says, whoever wrote it: one description for all published forms."""

from dataclasses import dataclass, replace
from typing import Any

from eagle_rt.models.decoder import FINAL_NORM
from eagle_rt.models.families import HYBRIDS, NEXTN
from eagle_rt.models.heads.block_spec import BlockSpec, block_feature_layers, block_spec
from eagle_rt.models.layer_kinds import ExpertShape
from eagle_rt.models.layer_shape import LayerShape, layer_shape
from eagle_rt.models.rope import RopeSpec, rope_from_config
from eagle_rt.models.spec import ModelSpec

# What the token is called that a head is fed in place of those not known yet: by Amazon and vLLM, and by speculators.
MASK_TOKENS = ("ptd_token_id", "pard_token", "mask_token_id")


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
    config = flat_config(config)
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
        layers = block_feature_layers(own)
        check_feature_layers(layers, target.num_layers)
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
