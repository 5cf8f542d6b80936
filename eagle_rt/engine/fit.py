"""Does a head fit its target?

A head that is read by the wrong convention raises no error: it only never guesses right. So the target writes a few hundred tokens
of its own, the head is led along them, and its favourite next token is compared with the target's, for the head as it is
configured and for the conventions that are easily mistaken for each other.
"""

import math
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from eagle_rt.attention.reference import ReferenceAttention
from eagle_rt.cache.pool import KVPool
from eagle_rt.config import EngineConfig
from eagle_rt.engine.assemble import make_core
from eagle_rt.engine.core import run_to_end
from eagle_rt.engine.load import LoadedModels
from eagle_rt.engine.params import SamplingParams
from eagle_rt.models.decoder import FINAL_NORM
from eagle_rt.models.heads.base import Head
from eagle_rt.models.heads.block_spec import BlockSpec
from eagle_rt.models.heads.spec import default_feature_layers
from eagle_rt.models.reading import read_texts, text_batch, text_pool
from eagle_rt.models.spec import ModelSpec
from eagle_rt.models.tokenizer import question_tokens
from eagle_rt.speculate.guesses import guess_blocks
from eagle_rt.speculate.sequences import HostSequence

PROMPTS = (
    "A shop sells pens for 3 dollars and books for 12 dollars. How much do 4 pens and 2 books cost?",
    "Tell me a short story about a lighthouse keeper.",
    "Write a Python function that returns the largest number in a list.",
    "Explain why the sky is blue in a few sentences.",
    "Give three tips for learning a new language.",
    "A train travels 60 miles in 1.5 hours. What is its average speed?",
    "Write a short letter that thanks a friend for a gift.",
    "What is the difference between a list and a dictionary?",
)
# A convention is better than the configured one if the mean log-probability that the head gives to the target's next token is so
# many standard errors higher. (Counting hits instead needs about ten times the text to see a wrong rotary base.)
SIGNIFICANT = 4.0
# A head that is right less than so many times as often as it is with hidden states from elsewhere was not made for this target.
BLIND_RATIO = 1.5
# Rows of the blocks that show how well a DFLASH head guesses the first of them.
MOST_IN_A_BLOCK = 4
# Logits over a large vocabulary are made for so many rows at a time.
ROWS_AT_ONCE = 256
# Fewer of the target's tokens than this in the draft vocabulary: it was counted on other text, or with another tokenizer.
LOW_COVERAGE = 0.5


@dataclass(frozen=True)
class Convention:
    """Another way to read the head's weights; `changes` are fields of its spec, `remedy` is what a user can do about it."""

    description: str
    changes: dict[str, Any]
    remedy: str


@dataclass(frozen=True)
class Measured:
    """acceptance: how often the head's favourite was the target's next token; z: by how many standard errors the mean
    log-probability of the target's next token is above the configured convention's; blind: as in `FitResult`, of one that is
    clearly better."""

    convention: Convention
    acceptance: float
    z: float = 0.0
    blind: float = 0.0


@dataclass(frozen=True)
class FitResult:
    """acceptance: of the head as configured, at `num_positions` positions; blind: of the same head with hidden states from
    elsewhere in the texts, which leaves it the last token to go by; coverage: the share of the target's tokens that the head can
    draft at all; others: best first."""

    num_positions: int
    acceptance: float
    blind: float
    coverage: float
    others: tuple[Measured, ...]

    @property
    def is_blind(self) -> bool:
        """The head makes nothing of this target's hidden states."""
        return not sees(self.acceptance, self.blind)

    @property
    def better(self) -> Measured | None:
        """A convention that fits clearly better than the configured one."""
        if not self.others:
            return None
        best = self.others[0]
        is_better = best.z > SIGNIFICANT and best.acceptance >= self.acceptance
        return best if is_better and sees(best.acceptance, max(best.blind, self.blind)) else None


def sees(acceptance: float, blind: float) -> bool:
    """Whether a head that is right so often makes something of the hidden states, without which it is `blind`."""
    return acceptance >= max(0.1, BLIND_RATIO * blind)


def layer_conventions(head: Head, num_layers: int) -> Iterator[Convention]:
    """The same layers counted from 0 or from 1, and the reference implementation's."""
    given = head.feature_layers
    if FINAL_NORM in given:
        return
    shifted = [tuple(layer + offset for layer in given) for offset in (-1, 1)]
    for layers in dict.fromkeys([*shifted, default_feature_layers(num_layers)]):
        if layers != given and len(layers) == len(given) and all(0 <= layer <= num_layers for layer in layers):
            numbers = " ".join(map(str, layers))
            yield Convention(f"features of layers {numbers}", {"feature_layers": layers}, f"set {aux_layers_flag(layers)}")


def aux_layers_flag(layers: tuple[int, ...]) -> str:
    return f"--speculative-aux-layers {' '.join(map(str, layers))}"


def other_conventions(head: Head, target: ModelSpec) -> Iterator[Convention]:
    """Everything else that published heads disagree about and that the weights do not show."""
    spec = head.spec
    if spec.kind == "ASSISTANT":
        return
    if spec.kind != "DFLASH":
        order = "hidden state before the embedding" if spec.embedding_first else "embedding before the hidden state"
        swap = "its fc (or attention) weights have the hidden state before the embedding: swap their halves"
        yield Convention(order, {"embedding_first": not spec.embedding_first}, swap)
    for theta in dict.fromkeys((target.rope.theta, 10000.0, 500000.0, 1000000.0)):
        if theta != spec.rope.theta:
            remedy = f"set rope_theta to {theta:g} in the head's config.json"
            yield Convention(f"rope_theta {theta:g}", {"rope": replace(spec.rope, theta=theta)}, remedy)
    if spec.kind == "EAGLE3":
        flipped = not spec.norm_before_residual
        value = str(flipped).lower()
        remedy = f"set norm_before_residual to {value} in the head's config.json"
        yield Convention(f"norm_before_residual {value}", {"norm_before_residual": flipped}, remedy)


class FitProbe:
    """Texts by the target, and what the target makes of each of their tokens.

    Each of the prompts is answered `num_answers` times, first greedily, with `num_new_tokens` at most.
    """

    @torch.inference_mode()
    def __init__(
        self,
        models: LoadedModels,
        config: EngineConfig,
        tokenizer: PreTrainedTokenizerBase,
        *,
        num_answers: int = 1,
        num_new_tokens: int = 48,
    ) -> None:
        self._target = models.target
        num_new_tokens = min(num_new_tokens, models.context_length // 2)
        asked = [question_tokens(tokenizer, prompt)[: models.context_length - num_new_tokens - 1] for prompt in PROMPTS]
        prompts = asked * num_answers
        params = [
            SamplingParams(temperature=float(index >= len(asked)), seed=index, max_new_tokens=num_new_tokens)
            for index in range(len(prompts))
        ]
        answers = write_on(models, config, prompts, params)
        self.prompt_lengths = [len(prompt) for prompt in prompts]
        self._texts = [prompt + answer for prompt, answer in zip(prompts, answers, strict=True)]
        self._batch = text_batch([text[:-1] for text in self._texts], self._target.embedding.device)
        starts = self._batch.query_starts
        # The row at t foresees the token at t + 2; rows count from where that is the target's own.
        rows = [torch.arange(starts[index] + max(len(prompt) - 2, 0), starts[index + 1]) for index, prompt in enumerate(prompts)]
        self._rows = torch.cat(rows).to(self._target.embedding.device)
        self._next_tokens = torch.cat([torch.tensor(text[1:]) for text in self._texts]).to(self._rows.device)
        self._features: dict[int, Tensor] = {}
        self.labels = self._target_choices()

    def _read(self, layers: tuple[int, ...]) -> Tensor:
        """[T, size] per layer, of all tokens of all texts, side by side."""
        features = read_texts(self._target, self._texts, layers).features
        assert features is not None
        return features

    def _target_choices(self) -> Tensor:
        """[R] the target's favourite after the token that each counted row is made from."""
        hidden = self._without_last(self._read((FINAL_NORM,)), shift=1)
        return torch.cat([self._target.logits(hidden[rows]).argmax(dim=-1) for rows in self._rows.split(ROWS_AT_ONCE)])

    @cached_property
    def _read_pool(self) -> KVPool:
        """What the target keeps of the rows' texts."""
        pool = self._target.make_pool(len(self._batch.tokens), self._batch.batch_size)
        self._target.forward(self._batch, pool, ReferenceAttention(self._target.embedding.dtype))
        return pool

    def _without_last(self, per_token: Tensor, shift: int = 0) -> Tensor:
        """Of [T, size] over whole texts, the part for the batch's rows, or for the tokens one later."""
        parts = per_token.split([len(text) for text in self._texts])
        return torch.cat([part[shift : len(part) - 1 + shift] for part in parts])

    def _features_of(self, layers: tuple[int, ...]) -> Tensor:
        missing = tuple(layer for layer in dict.fromkeys(layers) if layer not in self._features)
        if missing:
            parts = self._without_last(self._read(missing)).chunk(len(missing), dim=-1)
            self._features |= dict(zip(missing, parts, strict=True))
        return torch.cat([self._features[layer] for layer in layers], dim=-1)

    @torch.inference_mode()
    def guesses(self, head: Head, *, blind: bool = False) -> tuple[Tensor, Tensor]:
        """([R] bool: the head's favourite is the target's; [R] the log-probability that the head gives to the target's favourite,
        0 where it cannot draft that at all). blind: with the hidden states of other places in the texts."""
        features = self._features_of(head.feature_layers)
        hidden = head.fuse(features.roll(len(features) // 2, dims=0) if blind else features)
        states = self._states_by_blocks(head, hidden, head.block) if head.block else self._states(head, hidden)
        target_ids = head.token_map.target_ids
        hits, log_probs = [], []
        parts = (each.split(ROWS_AT_ONCE) for each in (states, self._next_tokens[self._rows], self.labels))
        for own, roots, labels in zip(*parts, strict=True):
            logits = head.after(roots, head.logits(own)).float()
            hits.append(target_ids[logits.argmax(dim=-1)] == labels)
            is_label = target_ids == labels[:, None]
            log_probs.append(torch.where(is_label, logits.log_softmax(dim=-1), 0.0).sum(dim=-1))
        return torch.cat(hits), torch.cat(log_probs)

    def _states(self, head: Head, hidden: Tensor) -> Tensor:
        """[R, H] after the counted rows."""
        pool = text_pool(self._batch, head.rows, self._target.embedding) if head.rows else self._read_pool
        return head.forward(self._next_tokens, hidden, self._batch, pool, ReferenceAttention(hidden.dtype))[self._rows]

    def _states_by_blocks(self, head: Head, hidden: Tensor, block: BlockSpec) -> Tensor:
        """[R, H] of what stands after the tokens that counted rows are made from, each with a block of its own."""
        size, starts, num_rows = min(MOST_IN_A_BLOCK, block.size), self._batch.query_starts, len(self._batch.tokens)
        pool = KVPool(head.rows, num_rows + size * ROWS_AT_ONCE, self._target.embedding.dtype, str(self._rows.device))
        backend, states = ReferenceAttention(hidden.dtype), []
        head.forward(self._next_tokens, hidden, self._batch, pool, backend)
        for rows in self._rows.split(ROWS_AT_ONCE):
            sequences = []
            for scratch, row in enumerate(rows.tolist()):
                number = bisect_right(starts, row) - 1
                first, place = starts[number], num_rows + size * scratch
                slots = np.array([*range(first, row + 1), *range(place, place + size)])
                sequences.append(HostSequence("", self._texts[number][: row - first + 2], slots, 0.0, None))
            states.append(guess_blocks(head, sequences, size - block.first_row, pool, backend)[:, 0])
        return torch.cat(states)

    def _blind_acceptance(self, head: Head) -> float:
        return float(self.guesses(head, blind=True)[0].float().mean())

    def measure(self, head: Head, conventions: list[Convention]) -> FitResult:
        """The head as it is, and under other conventions."""
        variants = [head.with_spec(**convention.changes) for convention in conventions]
        self._features_of(tuple({layer for variant in (head, *variants) for layer in variant.feature_layers}))  # one pass for all
        hits, log_probs = self.guesses(head)
        others = []
        for convention, variant in zip(conventions, variants, strict=True):
            other_hits, other_log_probs = self.guesses(variant)
            gain = other_log_probs - log_probs
            z = float(gain.mean() / (gain.std() / math.sqrt(len(gain)))) if gain.any() else 0.0
            blind = self._blind_acceptance(variant) if z > SIGNIFICANT else 0.0
            others.append(Measured(convention, float(other_hits.float().mean()), z, blind))
        return FitResult(
            num_positions=len(hits),
            acceptance=float(hits.float().mean()),
            blind=self._blind_acceptance(head),
            coverage=float(torch.isin(self.labels, head.token_map.target_ids).float().mean()),
            others=tuple(sorted(others, key=lambda measured: -measured.z)),
        )


def write_on(models: LoadedModels, config: EngineConfig, prompts: list[list[int]], params: list[SamplingParams]) -> list[list[int]]:
    """The target's own continuation of every prompt."""
    num_rows = sum(len(prompt) + (sampling.max_new_tokens or 0) for prompt, sampling in zip(prompts, params, strict=True))
    plain = replace(
        config,
        max_running_requests=len(prompts),
        max_total_tokens=num_rows + len(prompts) * config.page_size,
        speculative_algorithm=None,
        speculative_num_steps=None,
        speculative_eagle_topk=None,
        speculative_num_draft_tokens=None,
    )
    return run_to_end(make_core(models, plain)[0], prompts, params)


def fitted(models: LoadedModels, config: EngineConfig, tokenizer: PreTrainedTokenizerBase) -> LoadedModels:
    """The models with notes on how well the head fits; under --speculative-fit-check auto, with the layers that fit best."""
    head = models.head
    if head is None or config.speculative_fit_check == "off":
        return models
    result = FitProbe(models, config, tokenizer).measure(head, list(layer_conventions(head, models.spec.num_layers)))
    notes = [
        f"the head foresees the target's next token at {result.acceptance:.0%} of {result.num_positions} positions of its own text "
        f"({result.blind:.0%} without the target's hidden states)"
    ]
    if config.speculative_token_map and result.coverage < LOW_COVERAGE:
        notes.append(
            f"WARNING: --speculative-token-map holds only {result.coverage:.0%} of the tokens that the target writes: it was "
            "counted on other text, or with another tokenizer"
        )
    better = result.better
    if better:
        layers = better.convention.changes["feature_layers"]
        flag = aux_layers_flag(layers)
        given = " ".join(map(str, head.feature_layers))
        words = f"with {flag} it would foresee {better.acceptance:.0%}"
        if config.speculative_fit_check == "auto":
            head = head.with_spec(feature_layers=layers)
            words = f"taking {flag}, with which it foresees {better.acceptance:.0%}"
        notes.append(f"WARNING: the head is fed from layers {given}, but {words}")
    elif result.is_blind:
        notes.append(
            "WARNING: the head makes next to nothing of the target's hidden states, and will slow decoding down: it was made for "
            "another target, or is read by the wrong convention. `python -m eagle_rt.doctor` with the same flags tries more of them"
        )
    return replace(models, head=head, notes=models.notes + notes)
