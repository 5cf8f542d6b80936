"""The three numbers of a draft tree. No torch here."""

from dataclasses import dataclass


@dataclass(frozen=True)
class TreeShape:
    """num_steps levels below the root, top_k children a node, num_draft_tokens nodes with the root: D, K and N."""

    num_steps: int
    top_k: int
    num_draft_tokens: int

    @property
    def max_depth(self) -> int:
        """The longest path that a tree of so many nodes can hold."""
        return min(self.num_steps, self.num_draft_tokens - 1)

    @property
    def num_scratch_rows(self) -> int:
        """Cache rows that a request needs past its text: the tree itself, or the head's beams, whichever is more."""
        return max(self.num_draft_tokens, self.top_k * (self.num_steps - 1))

    def __str__(self) -> str:
        return f"({self.num_steps}, {self.top_k}, {self.num_draft_tokens})"


NO_SPECULATION = TreeShape(num_steps=0, top_k=0, num_draft_tokens=1)


def num_tree_nodes(num_steps: int, top_k: int) -> int:
    """Nodes that a beam of top_k over num_steps levels can supply, the root included."""
    return 1 + top_k + (num_steps - 1) * top_k**2
