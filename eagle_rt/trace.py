"""What one decode step drafted for a request, and what the target made of it, as plain numbers."""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class StepTrace:
    """A verified tree of N nodes, the root first and every parent before its children; without a draft the root alone.

    position: of the root in the text, prompt included. tokens, parents (-1 for the root): [N]. scores: [N] sums of the head's
    log-probabilities along the path, as nodes are ranked by (for those that are copied from the text, how likely that is to be
    right); chances: [N] how likely each was thought to be accepted, where trees are adaptive. path: the nodes that the target
    confirmed, from the root down; choices: its own token after each of them, which is the next one's or, last, the one that ends
    the step. copied: the nodes that the text has said before, and no head has drafted.
    """

    position: int
    tokens: list[int]
    parents: list[int]
    scores: list[float]
    chances: list[float] | None
    path: list[int]
    choices: list[int]
    copied: list[int] = field(default_factory=list)


# By the id of the request.
Traces = dict[str, StepTrace]
