"""Training a head on prepared rows: the target reads them, the head learns to foresee what it says next."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from eagle_rt.engine.load import num_weights
from eagle_rt.models.decoder import Decoder
from eagle_rt.models.heads.spec import default_feature_layers
from eagle_rt.models.reading import read_texts
from eagle_rt.train.batches import BatchOrder, Text, counted_positions, held_out_split, padded
from eagle_rt.train.blocks import DFlashTrainee
from eagle_rt.train.export import exported_weights
from eagle_rt.train.loop import LoopConfig, Metrics, adamw_for, fit, muon_for, rank_and_world_size
from eagle_rt.train.modules import Eagle3Trainee, EagleTrainee, ParallelTrainee, Trainee, most_frequent_tokens

STEP_DECAY = 0.8
# Uniform noise on the features of an EAGLE head stands in for the errors that it makes when it drafts from its own states; +-0.1 at
# 512 tokens (EAGLE's training code).
FEATURE_NOISE = 0.1
SEED = 0
NUM_EVALUATED_TEXTS = 128


@dataclass(frozen=True)
class FitConfig:
    """kind: EAGLE3, PEAGLE, DFLASH or EAGLE; batch_size rows a step, read `micro_batch_size` at a time; num_unrolled levels;
    optimizer: adamw, or muon, which small heads learn faster with; start_from: a head that `export` wrote, whose draft vocabulary
    grows if draft_vocab_size is larger; num_layers: of the head; mask_token: what a PEAGLE or DFLASH head is fed where no token is
    known yet; markov_rank: of what a token says of the one after it, in a DFLASH head."""

    kind: str
    num_steps: int
    batch_size: int
    micro_batch_size: int
    num_unrolled: int
    draft_vocab_size: int
    learning_rate: float
    optimizer: str
    precision: torch.dtype
    start_from: Path | None = None
    num_layers: int = 1
    mask_token: int = 0
    markov_rank: int = 0
    held_out_fraction: float = 0.02
    checkpoint_every: int = 250


def head_config(target: Decoder, fit: FitConfig, draft_vocab_size: int) -> dict[str, Any]:
    """The config.json of a new head: layers of the target's shape."""
    spec, shape = target.spec, target.spec.shape
    num_heads, num_kv_heads, head_dim = shape.num_heads, shape.num_kv_heads, shape.head_dim
    if shape.latent:  # a head has no more than one layer to keep keys and values of
        head_dim = 128 if shape.hidden_size % 128 == 0 else shape.hidden_size // num_heads
        num_heads = num_kv_heads = shape.hidden_size // head_dim
    config = {
        "architectures": ["LlamaForCausalLMEagle" if fit.kind == "EAGLE" else "LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": fit.num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "head_dim": head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": shape.rms_norm_eps,
        "rope_theta": spec.rope.theta,
        "max_position_embeddings": spec.max_position_embeddings,
        "vocab_size": spec.vocab_size,
        "tie_word_embeddings": False,
    }
    if fit.kind == "EAGLE":
        return {**config, "bias": False}
    if fit.kind == "DFLASH":
        layers = [layer - 1 for layer in default_feature_layers(spec.num_layers)]  # whose outputs are meant
        own = {"mask_token_id": fit.mask_token, "target_layer_ids": layers}
        named = {"architectures": ["DFlashDraftModel"], "model_type": "qwen3", "num_target_layers": spec.num_layers}
        pairs = {"markov_rank": fit.markov_rank, "markov_head_type": "vanilla"} if fit.markov_rank else {}
        return {**config, **named, **pairs, "block_size": 1 + fit.num_unrolled, "dflash_config": own}
    return {**config, "draft_vocab_size": draft_vocab_size, **({"ptd_token_id": fit.mask_token} if fit.kind == "PEAGLE" else {})}


def make_trainee(target: Decoder, config: FitConfig, texts: list[Text]) -> Trainee:
    """A head that begins as a copy of what the target does without it, and alike in every process and run.

    Raises:
        ValueError: there is no such head, or the one to start from is another.
    """
    if config.kind != "DFLASH" and config.markov_rank:
        raise ValueError(f"--markov-rank {config.markov_rank} is for heads of kind DFLASH")
    if config.kind == "EAGLE" and config.num_layers > 1:
        raise ValueError(f"--num-layers {config.num_layers} is for heads of other kinds: an EAGLE head has 1")
    lm_head, vocab_size = target.lm_head.weight, target.spec.vocab_size
    if not 0 <= config.mask_token < vocab_size:
        raise ValueError(f"--mask-token-id {config.mask_token} is no token: the target has {vocab_size}")
    torch.manual_seed(SEED)
    given = exported_weights(config.start_from) if config.start_from else {}
    mask_embedding = target.embedding[config.mask_token].float()
    if config.kind in ("EAGLE3", "PEAGLE"):
        draft_vocab_size = min(config.draft_vocab_size, vocab_size)
        answers = torch.tensor([token for text in texts for token in text.tokens[text.answer_start :]])
        draft_tokens = most_frequent_tokens(answers, vocab_size, draft_vocab_size)
        if "draft_tokens" in given and "lm_head.weight" in given:
            given = widened(given, draft_tokens, lm_head)
            draft_tokens = given["draft_tokens"]
        own_config = head_config(target, config, len(draft_tokens))
        if config.kind == "PEAGLE":
            trainee = ParallelTrainee(own_config, draft_tokens, mask_embedding)
        else:
            trainee = Eagle3Trainee(own_config, draft_tokens)
    else:
        # Under autocast the target's own weights will do; float32 products need them in float32.
        frozen = lm_head.float() if config.precision == torch.float32 else lm_head
        own_config = head_config(target, config, vocab_size)
        is_dflash = config.kind == "DFLASH"
        trainee = DFlashTrainee(own_config, frozen, mask_embedding) if is_dflash else EagleTrainee(own_config, frozen)
    trainee = trainee.to(target.embedding.device)
    trainee.start_from(lm_head, target.final_norm.weight)
    if given:
        # What an EAGLE-3 head lacks to draft in parallel it may learn, or a DFlash head what tokens say of the next.
        learned = {"PEAGLE": ("mask_hidden", "layers."), "DFLASH": ("markov_head.",)}.get(config.kind, ())
        new = {name: own for name, own in trainee.state_dict().items() if name.startswith(learned)}
        try:
            trainee.load_state_dict({**new, **given})
        except RuntimeError as error:
            raise ValueError(f"{config.start_from} is no {config.kind} head for this target: {error}") from None
    return trainee


def widened(given: dict[str, Tensor], draft_tokens: Tensor, lm_head: Tensor) -> dict[str, Tensor]:
    """The weights of a head whose draft vocabulary is its own and, if there are more of them, the `draft_tokens` too.

    draft_tokens: ascending ids [W]; lm_head: [V, H] of the target, whose rows those of the new tokens begin as.
    """
    own = given["draft_tokens"]
    if len(draft_tokens) <= len(own):
        return given
    tokens = torch.cat((own, draft_tokens)).unique()
    rows = lm_head[tokens].to(given["lm_head.weight"])
    rows[torch.isin(tokens, own)] = given["lm_head.weight"]
    return {**given, "draft_tokens": tokens, "lm_head.weight": rows}


def memory_lines(target: Decoder, trainee: Trainee, config: FitConfig, longest: int) -> list[str]:
    """What training takes, by its largest parts, computed from the shapes."""
    spec = target.spec
    num_target = num_weights(spec, of_all_experts=True) + spec.vocab_size * spec.shape.hidden_size
    num_head = sum(parameter.numel() for parameter in trainee.parameters())
    num_tokens = config.micro_batch_size * longest
    draft_vocab_size = trainee.config.get("draft_vocab_size", spec.vocab_size)
    return [
        f"target: {num_target / 1e6:.1f} M weights, {num_target * target.embedding.dtype.itemsize / 1e9:.2f} GB",
        f"head: {num_head / 1e6:.1f} M weights, {num_head * 16 / 1e9:.2f} GB with gradients and optimizer",
        f"logits of {num_tokens} tokens a pass: target {num_tokens * spec.vocab_size * 4 / 1e9:.2f} GB, "
        f"head {num_tokens * draft_vocab_size * 8 * config.num_unrolled / 1e9:.2f} GB over {config.num_unrolled} unrolled steps",
    ]


class HeadTrainer:
    """The target, the head, and the rows that both read."""

    def __init__(self, target: Decoder, texts: list[Text], config: FitConfig) -> None:
        self._target, self._config = target, config
        self._device = target.embedding.device
        training, self.held_out = held_out_split(texts, config.held_out_fraction, SEED)
        self._order = BatchOrder(training, config.batch_size, SEED)
        self.trainee = make_trainee(target, config, training)
        self._feature_layers = () if config.kind == "EAGLE" else default_feature_layers(target.spec.num_layers)
        self._longest = max(len(text.tokens) for text in texts)

    def run(self, run_dir: Path) -> None:
        """Train, or go on training: everything that `export` needs is in `run_dir`."""
        config = self._config
        run_dir.mkdir(parents=True, exist_ok=True)
        (run_dir / "config.json").write_text(json.dumps(self.trainee.config, indent=2) + "\n")
        if config.optimizer == "muon":
            optimizers = muon_for(self.trainee, matrix_lr=10 * config.learning_rate, other_lr=config.learning_rate)
        else:
            optimizers = adamw_for(self.trainee, config.learning_rate)
        loop = LoopConfig(config.num_steps, self._num_parts, clip_norm=0.5, checkpoint_every=config.checkpoint_every)
        fit(self.trainee, optimizers, self.loss_at, loop, run_dir, self.evaluate)

    def memory(self) -> list[str]:
        return memory_lines(self._target, self.trainee, self._config, self._longest)

    def loss_at(self, step: int, part: int) -> tuple[Tensor, Metrics]:
        """This process's share of a step: its part of the batch's loss, per counted token of the whole batch."""
        rank, world_size = rank_and_world_size()
        batch = self._order.at(step)
        num_counted = sum(text.num_counted for text in batch)
        num_shares = self._num_parts * world_size
        share = part * world_size + rank
        generator = torch.Generator(self._device).manual_seed(step * num_shares + share)
        losses, agreements = self._losses(batch[share::num_shares], generator)
        total = torch.stack([loss * STEP_DECAY**j for j, loss in enumerate(losses)]).sum() / num_counted
        return total, {f"accept_{j}": float(count) / num_counted for j, count in enumerate(agreements)}

    @torch.no_grad()
    def evaluate(self) -> Metrics:
        """How often the head's favourite is the target's on held-out rows, by depth."""
        texts = sorted(self.held_out[:NUM_EVALUATED_TEXTS], key=lambda text: len(text.tokens))
        totals = torch.zeros(self._config.num_unrolled)
        size = self._config.micro_batch_size
        for first in range(0, len(texts), size):
            _, agreements = self._losses(texts[first : first + size], None)
            totals += torch.stack(agreements).cpu()
        num_counted = sum(text.num_counted for text in texts)
        return {f"held_out_accept_{j}": count / num_counted for j, count in enumerate(totals.tolist())}

    @property
    def _num_parts(self) -> int:
        """Passes that each process makes a step."""
        rows_at_once = self._config.micro_batch_size * rank_and_world_size()[1]
        return -(-self._config.batch_size // rows_at_once)

    def _losses(self, texts: list[Text], noise: torch.Generator | None) -> tuple[list[Tensor], list[Tensor]]:
        """Sums over the texts' counted tokens, per unroll step. With a generator the features of an EAGLE head get noise."""
        target, num_unrolled = self._target, self._config.num_unrolled
        lengths = [len(text.tokens) for text in texts]
        length = max(lengths) + num_unrolled  # so that every token is a slot at every unroll step
        with torch.no_grad():
            output = read_texts(target, [text.tokens for text in texts], self._feature_layers)
            final = padded(list(output.hidden.float().split(lengths)), length)
            features = final
            if output.features is not None:
                features = padded(list(output.features.float().split(lengths)), length)
            elif noise is not None:
                features = final + self._noise(final.shape, noise)
            tokens = padded([torch.tensor(text.tokens, device=self._device) for text in texts], length)
            embeddings = functional.embedding(tokens, target.embedding).float()
            counts = counted_positions(texts, length, self._device)
            logits = target.logits(final[counts].to(target.embedding.dtype))
        precision = self._config.precision
        with torch.autocast(self._device.type, precision, enabled=precision != torch.float32):
            return self.trainee.unrolled_losses(tokens, embeddings, features, final, logits, counts, num_unrolled)

    def _noise(self, shape: torch.Size, generator: torch.Generator) -> Tensor:
        scale = FEATURE_NOISE * 512 / shape[1]
        return (torch.rand(shape, generator=generator, device=self._device) * 2 - 1) * scale
