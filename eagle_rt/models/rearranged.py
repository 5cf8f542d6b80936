"""Checkpoints that lay out a layer in another way than Llama's: as Phi-3's, which hold projections of one input in one tensor, and
in which only the first numbers of a head may be turned, Qwen3-VL's and Llama 4's, whose experts' gates come before all ups, and
Gemma's, which say by how much weights of norms are more than one; and names of tensors."""

import re

import torch
from torch import Tensor

from eagle_rt.models.experts import expert_name
from eagle_rt.models.families import GEMMA3S, GEMMA4S, GEMMAS, HYBRIDS, IN_TURNS, LLAMA4S
from eagle_rt.models.layer_shape import LatentShape
from eagle_rt.models.layers import GATES_OF_ATTENTION, OUTPUT_NORMS
from eagle_rt.models.spec import ModelSpec
from eagle_rt.models.weights import ChangedCheckpoint, Checkpoint

FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
GATES_FIRST = "Qwen3VLMoeForConditionalGeneration", *LLAMA4S
# Of experts that lie in two tensors each can be taken by itself.
EACH_ALONE = (*HYBRIDS, *GEMMA4S)
# Gemma and GLM-4 norm what is added, too.
GEMMA_NORMS = {
    "post_attention_layernorm": OUTPUT_NORMS[0],
    "pre_feedforward_layernorm": "post_attention_layernorm",
    "post_feedforward_layernorm": OUTPUT_NORMS[1],
}
GLM4_NORMS = {"post_self_attn_layernorm": OUTPUT_NORMS[0], "post_mlp_layernorm": OUTPUT_NORMS[1]}
LLAMA4_PARTS = {"feed_forward": "mlp", "router": "gate", "shared_expert": "shared_experts"}
# Parts of stored names that have others here.
PARTS_OF_NAMES = {
    **dict.fromkeys(GEMMAS, GEMMA_NORMS),
    "Glm4ForCausalLM": GLM4_NORMS,
    "BailingMoeV2ForCausalLM": {
        "word_embeddings": "embed_tokens",
        "attention": "self_attn",
        "query_key_value": "qkv_proj",
        "dense": "o_proj",
        "query_layernorm": "q_norm",
        "key_layernorm": "k_norm",
        "expert_bias": "e_score_correction_bias",
    },
    **dict.fromkeys(LLAMA4S, LLAMA4_PARTS),
}
# Norms whose weights are what they multiply by, less one; that within a gated delta net is not, and is taken raw.
LESS_ONE = (*GEMMA3S, *HYBRIDS)
ONE_EXPERT = r"(?P<stem>.*\.experts)\.(?P<number>\d+)\.(?P<part>(gate|up|down)_proj)\.weight"
INTO_DELTA_NET = r"(?P<stem>.*\.linear_attn)\.in_proj_(?P<part>qkv|z|b|a)\.weight"
# With latents, of heads or of what they share, what is turned comes last, the two of a pair side by side.
IN_PAIRS = r"\.(q_proj|q_b_proj|kv_a_proj_with_mqa)\.(weight|bias)$"
TURNED = r"\.([qk]_(proj|norm)|(query|key)_layernorm)\.(weight|bias)$"


class RearrangedCheckpoint(ChangedCheckpoint):
    """A target's tensors by Llama's names, and the numbers of queries and keys in the order that `Rope` wants: the two of a pair
    half a head apart, those that are not turned behind them in both halves. Gates and ups of experts that lie in one tensor come in
    turns. Norms have the weights that they multiply by."""

    def __init__(self, tensors: Checkpoint, spec: ModelSpec) -> None:
        super().__init__(tensors)
        self._spec = spec
        self._read_last: dict[str, tuple[str, Tensor]] = {}
        shape = spec.shape
        queries, keys = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        self._sizes = {"qkv_proj": (queries, keys, keys), "gate_up_proj": (shape.intermediate_size,) * 2}

    def __contains__(self, name: str) -> bool:
        name = self._stored_as(name)
        if self._spec.architecture in EACH_ALONE and name.endswith(".experts.gate_up_proj"):
            return False
        return any(own in self._tensors for own in (name, fused_name(name) or name))

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        if self._spec.shape.gates_attention and name.endswith((".q_proj.weight", GATES_OF_ATTENTION)):
            tensor = self._queries_or_gates(name, shape)
        else:
            stored = self._stored_as(name)
            tensor = self._tensors.take(stored, shape) if stored in self._tensors else self._part(stored, shape)
        if self._spec.architecture in GATES_FIRST and name.endswith(".experts.gate_up_proj"):
            return tensor.unflatten(2, (2, -1)).transpose(2, 3).flatten(2)
        if self._spec.architecture in LESS_ONE and name.endswith("norm.weight"):
            # In float32, as half precision would cut off what is added to one.
            tensor = (tensor.float() + 1) * (self._spec.query_scale if name.endswith("q_norm.weight") else 1)
        if (latent := self._spec.shape.latent) and (own := re.search(IN_PAIRS, name)):
            return self._in_halves(tensor, latent.rank if own[1] == "kv_a_proj_with_mqa" else latent.nope_dim, latent)
        return self._in_order(tensor) if re.search(TURNED, name) else tensor

    def _stored_as(self, name: str) -> str:
        """What makes keys is stored once where it makes values, too."""
        return name.replace(".v_proj.", ".k_proj.") if ".v_proj." in name and self._spec.shape_of(name).values_as_keys else name

    def _part(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """A view of the fused tensor, which is held until another one of its kind is wanted."""
        if own := re.fullmatch(ONE_EXPERT, name):
            return self._part_of_expert(own["stem"], int(own["number"]), own["part"], shape)
        if own := re.fullmatch(INTO_DELTA_NET, name):
            return self._part_of_delta_net(own["stem"], own["part"], shape[1])
        whole_name = fused_name(name)
        if whole_name not in self._tensors:
            return self._tensors.take(name, shape)  # which says that it is missing
        part, fused = name.split(".")[-2], whole_name.split(".")[-2]
        sizes = self._sizes[fused]
        return self._held(whole_name, (sum(sizes), *shape[1:])).split(sizes)[FUSED[fused].index(part)]

    def _part_of_expert(self, stem: str, number: int, part: str, shape: tuple[int, ...]) -> Tensor:
        """Qwen3.5's and Gemma 4's experts lie in two tensors, gates before ups."""
        experts = next(own for own in self._spec.experts if own)
        if part == "down_proj":
            return self._held(f"{stem}.down_proj", (experts.count, *shape))[number]
        halves = self._held(f"{stem}.gate_up_proj", (experts.count, 2 * shape[0], shape[1])).unflatten(1, (2, -1))
        return halves[number, FUSED["gate_up_proj"].index(part)]

    def _part_of_delta_net(self, stem: str, part: str, in_size: int) -> Tensor:
        """Qwen3-Next's queries, keys, values and gates lie side by side for each head of keys, and so do the two rates."""
        own, fused = self._spec.delta_net, "qkvz" if part in "qkvz" else "ba"
        assert own
        num_shared = own.num_heads // own.num_key_heads
        of_values = num_shared * own.value_dim
        sizes = (own.key_dim, own.key_dim, of_values, of_values) if fused == "qkvz" else (num_shared,) * 2
        stored = self._held(f"{stem}.in_proj_{fused}.weight", (own.num_key_heads * sum(sizes), in_size))
        parts = dict(zip(fused, stored.unflatten(0, (own.num_key_heads, -1)).split(sizes, dim=1), strict=True))
        return torch.cat([parts[letter].flatten(0, 1) for letter in part])

    def _held(self, name: str, shape: tuple[int, ...]) -> Tensor:
        kind = name.rpartition(".")[2]
        if self._read_last.get(kind, ("",))[0] != name:
            self._read_last[kind] = name, self._tensors.take(name, shape)
        return self._read_last[kind][1]

    def _queries_or_gates(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Of each head the queries are stored before the gates."""
        both = self._tensors.take(name.replace(GATES_OF_ATTENTION, ".q_proj.weight"), (2 * shape[0], shape[1]))
        heads = both.unflatten(0, (-1, 2, self._spec.shape.head_dim))
        return heads[:, int(name.endswith(GATES_OF_ATTENTION))].flatten(0, 1)

    def _in_halves(self, tensor: Tensor, num_still: int, latent: LatentShape) -> Tensor:
        """Outputs of heads, or of latents, whose first are not turned."""
        if not latent.in_pairs:
            return tensor
        still, turned = tensor.unflatten(0, (-1, num_still + latent.rope_dim)).tensor_split((num_still,), dim=1)
        return torch.cat((still, turned[:, ::2], turned[:, 1::2]), dim=1).flatten(0, 1)

    def _in_order(self, tensor: Tensor) -> Tensor:
        rope = self._spec.window_rope or self._spec.rope
        head_dim, num_turned = rope.head_dim, rope.rotary_dim
        in_turns = self._spec.architecture in IN_TURNS
        if num_turned == head_dim and not in_turns:
            return tensor
        turned = torch.arange(num_turned)
        first, second = (turned[::2], turned[1::2]) if in_turns else turned.chunk(2)
        first_still, second_still = torch.arange(num_turned, head_dim).chunk(2)
        order = torch.cat((first, first_still, second, second_still)).to(tensor.device)
        return tensor.unflatten(0, (-1, head_dim))[:, order].flatten(0, 1)


def own_name(stored: str, spec: ModelSpec) -> str:
    """A stored name of a target's tensor as it is taken by."""
    name, parts = expert_name(name_of_text(stored)), PARTS_OF_NAMES.get(spec.architecture, {})
    return ".".join(parts.get(part, part) for part in name.split("."))


def name_of_text(stored: str) -> str:
    """What a tensor would be called if its model only read: those that see, too, have the other under a name of its own."""
    name = re.sub(r"^(model\.)?language_model\.(model\.)?", "model.", stored)
    return name.removeprefix("model.") if name == "model.lm_head.weight" else name


def fused_name(name: str) -> str:
    """Of the tensor that would hold this one; nothing if none would."""
    *layer, part, kind = name.rsplit(".", 2)
    fused = next((fused for fused, parts in FUSED.items() if part in parts), None)
    return ".".join((*layer, fused, kind)) if fused else ""
