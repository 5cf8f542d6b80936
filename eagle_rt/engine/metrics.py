"""What an engine has done so far, as plain numbers."""

from dataclasses import dataclass, field

from eagle_rt.speculate.acceptance import Calibration


@dataclass
class EngineMetrics:
    """Totals since start, and the current load.

    A step may read prompts, decode, or both; num_decode_steps counts the last two kinds, and num_drafts the requests in them.
    num_drafts counts the requests of decode steps, num_undrafted those of them for which nothing was drafted.
    accepted_per_position[d]: how often the draft at depth d + 1 was kept. seconds: time by part of the step.
    is_simulated: what was accepted is made up. calibration: how good the estimates of acceptance were, where trees are sized by
    them.
    """

    num_steps: int = 0
    num_decode_steps: int = 0
    num_drafts: int = 0
    num_undrafted: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    accepted_per_position: list[int] = field(default_factory=list)
    num_broken_drafts: int = 0
    num_prompt_tokens: int = 0
    num_cached_prompt_tokens: int = 0
    num_generated_tokens: int = 0
    num_finished: int = 0
    num_aborted: int = 0
    num_preemptions: int = 0
    num_running: int = 0
    num_waiting: int = 0
    cache_use: float = 0.0
    is_simulated: bool = False
    calibration: Calibration | None = None
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def mean_accepted_tokens(self) -> float:
        """Tokens per request and decode step, the bonus token included: the papers' tau."""
        return 1 + self.num_accepted_tokens / self.num_drafts if self.num_drafts else 0.0

    def count_decode(self, num_accepted: int, num_drafted: int, is_broken: bool) -> None:
        """One request's share of one decode step."""
        self.num_drafts += 1
        self.num_undrafted += num_drafted == 0
        self.num_draft_tokens += num_drafted
        self.num_accepted_tokens += num_accepted
        self.num_broken_drafts += is_broken
        positions = self.accepted_per_position
        positions += [0] * (num_accepted - len(positions))
        for depth in range(num_accepted):
            positions[depth] += 1
