"""The target's own token after every node of a tree: greedy and sampled, filtered and not, in one function."""

from dataclasses import dataclass

import torch
from torch import Tensor

from eagle_rt.kernels.contenders import RowSettings, can_leave_out, drawn_tokens, perturbed_contenders
from eagle_rt.kernels.dispatch import compiled_kernel
from eagle_rt.kernels.noise import gumbel_noise
from eagle_rt.speculate.grammar_masks import GrammarMasks
from eagle_rt.speculate.penalties import Penalties
from eagle_rt.speculate.penalty_tables import PenaltyTables
from eagle_rt.token_map.token_map import TokenMap

# Guesses that are so far below the best are never made, in the logits' own unit.
DRAFT_MARGIN = 8.0


@dataclass(frozen=True)
class SamplingBatch:
    """Sampling settings of B sequences, each [B]: float32, and int64 for top_k (0: off) and seeds.

    sampled: int64 numbers of the sequences with temperature > 0; has_filters: whether any of those filters its tokens. penalties,
    grammars: None where no sequence has any; logits are given to the functions of this file as they are `judged`.
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    seeds: Tensor
    sampled: Tensor
    has_filters: bool
    penalties: Penalties | PenaltyTables | None = None
    grammars: GrammarMasks | None = None

    @property
    def changes_logits(self) -> bool:
        """Whether `judged` does."""
        return self.penalties is not None or self.grammars is not None

    def judged(
        self, logits: Tensor, owners: Tensor | None = None, paths: Tensor | None = None, token_map: TokenMap | None = None
    ) -> Tensor:
        """[T, V] logits after nodes as the choice is made by them: after penalties, and without what grammars rule out.

        owners: [T] whose sequence's each is, None: one of each; paths: [T, D] the tokens below the root on the way to each, itself
        included, from the first to the last, with -1 anywhere between. token_map: of logits over a draft vocabulary.
        """
        for own in (self.penalties, self.grammars):
            if own:
                logits = own.applied_to(logits, owners, paths, token_map)
        return logits

    def rows(self, owners: Tensor) -> "SamplingBatch":
        """The settings of T rows that belong to sequences `owners` [T]."""
        if len(self.sampled) == 0:
            return self  # nothing in it is looked at
        temperature, seeds = self.temperature[owners], self.seeds[owners]
        sampled = torch.nonzero(temperature > 0)[:, 0]
        filters = self.top_k[owners], self.top_p[owners], self.min_p[owners]
        return SamplingBatch(temperature, *filters, seeds, sampled, self.has_filters)


def target_choice(logits: Tensor, positions: Tensor, sampling: SamplingBatch) -> Tensor:
    """[B, N] tokens from logits [B, N, V] at text positions [B, N]; what is sampled is computed in float32.

    Each is argmax(logits / temperature + g) with Gumbel noise g that depends on (seed, position, token) only, which is an
    exact draw from the softmax, and the same draw whatever tree the node is in. At temperature 0 it is the plain argmax.
    """
    rows = sampling.sampled
    if len(rows) == 0:
        return best_token(logits)
    drawn = sampled_choice(logits, positions, sampling)
    return drawn if len(rows) == len(logits) else best_token(logits).index_copy(0, rows, drawn)


def sampled_choice(logits: Tensor, positions: Tensor, sampling: SamplingBatch) -> Tensor:
    """[S, N] of the S sampled sequences."""
    if not can_leave_out(logits):
        tokens = torch.arange(logits.shape[-1], device=logits.device)
        return best_token(perturbed_logits(logits, positions, sampling, tokens))
    rows = sampling.sampled
    own = logits if len(rows) == len(logits) else logits[rows]
    return drawn_tokens(own.flatten(0, 1), row_settings(positions, sampling)).unflatten(0, (-1, logits.shape[1]))


def row_settings(positions: Tensor, sampling: SamplingBatch) -> RowSettings:
    """Of the nodes of the S sampled sequences, one after the other, of all at positions [B, N]."""
    rows, num_nodes = sampling.sampled, positions.shape[1]

    def per_node(values: Tensor) -> Tensor:
        return values[rows].repeat_interleave(num_nodes)

    return RowSettings(
        temperature=per_node(sampling.temperature),
        top_k=per_node(sampling.top_k),
        top_p=per_node(sampling.top_p),
        min_p=per_node(sampling.min_p),
        seeds=per_node(sampling.seeds),
        positions=positions[rows].flatten(),
    )


def best_token(logits: Tensor) -> Tensor:
    """The first of the largest in the last dimension, or the first that is no number; on a CPU by our kernel, if there is one, and
    else not by `argmax`, which takes several times as long."""
    if kernel := compiled_kernel("best_token", logits, logits.dtype):
        return kernel(logits.flatten(0, -2).contiguous()).view(logits.shape[:-1])
    return logits.max(dim=-1).indices


def perturbed_logits(
    logits: Tensor, positions: Tensor, sampling: SamplingBatch, tokens: Tensor, margin: float = torch.inf
) -> Tensor:
    """[S, N, V] filtered logits / temperature + noise of the S sampled sequences of [B, N, V] logits over token ids [V].

    What is more than `margin` below a row's best, in the unit of the logits that are given, may be -inf.
    """
    settings, num_nodes = row_settings(positions, sampling), logits.shape[1]
    own = logits[sampling.sampled].flatten(0, 1)
    if margin < torch.inf and can_leave_out(logits):
        return perturbed_contenders(own, settings, tokens, margin / settings.temperature).unflatten(0, (-1, num_nodes))
    scaled = own.float() / settings.temperature[:, None]
    if sampling.has_filters:
        scaled = filter_tokens(scaled, settings.top_k, settings.top_p, settings.min_p)
    return (scaled + gumbel_noise(settings.seeds, settings.positions, tokens)).unflatten(0, (-1, num_nodes))


def coupled_logits(logits: Tensor, positions: Tensor, sampling: SamplingBatch, tokens: Tensor) -> Tensor:
    """Draft logits [B, N, W] over target ids [W], as the target will look at its own after nodes at positions [B, N].

    The target's choice is the argmax of its perturbed logits, and the noise is known before the target has run. A head that ranks
    its guesses by its own logits under the same temperature, filters and noise guesses that choice, not the most likely token. What
    is drafted never changes what is chosen, so the output stays the same.

    They are logits + temperature * noise, in the head's own unit, in which it errs as much at any temperature: so a score is worth
    about the same for greedy and sampled sequences (docs/findings.md).
    """
    rows = sampling.sampled
    if len(rows) == 0:
        return logits
    perturbed = perturbed_logits(logits, positions, sampling, tokens, DRAFT_MARGIN)
    return logits.float().index_copy(0, rows, perturbed * sampling.temperature[rows, None, None])


def filter_tokens(logits: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """Logits [R, V] with -inf at the tokens that top-k, then top-p, then min-p rule out; settings are [R].

    top_k 0, top_p 1 and min_p 0 rule out nothing. top-p keeps a token while those above it hold less than top_p together;
    min-p keeps the tokens at least min_p times as likely as the best one. Tokens that tie with a kept one are kept.
    """
    ordered = logits.sort(dim=-1, descending=True).values
    vocab_size = logits.shape[-1]
    last_kept = torch.where(top_k > 0, top_k, vocab_size).clamp(max=vocab_size) - 1
    in_top_k = ordered >= ordered.gather(1, last_kept[:, None])
    probabilities = ordered.masked_fill(~in_top_k, -torch.inf).softmax(dim=-1)
    mass_above = probabilities.cumsum(dim=-1) - probabilities
    # Rounding may bring the mass above the last tokens to 1, which must not rule them out where top-p is off.
    in_top_p = (mass_above < top_p[:, None]) | (top_p[:, None] >= 1)
    in_min_p = ordered >= ordered[:, :1] + min_p.log()[:, None]
    threshold = ordered.masked_fill(~(in_top_k & in_top_p & in_min_p), torch.inf).amin(dim=-1, keepdim=True)
    return logits.masked_fill(logits < threshold, -torch.inf)
