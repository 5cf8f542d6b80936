"""The numbers of a draft tree. No torch here."""

from dataclasses import dataclass


@dataclass(frozen=True)
class TreeShape:
    """num_steps levels below the root, top_k children a node, num_draft_tokens nodes with the root: D, K and N. num_copied further
    nodes are a chain of what the text has said before, which no head drafts."""

    num_steps: int
    top_k: int
    num_draft_tokens: int
    num_copied: int = 0

    @property
    def num_nodes(self) -> int:
        """All that the target verifies."""
        return self.num_draft_tokens + self.num_copied

    @property
    def most_drafted(self) -> int:
        """The longest path that a head's tree of so many nodes can hold."""
        return min(self.num_steps, self.num_draft_tokens - 1)

    @property
    def max_depth(self) -> int:
        """The longest path, copies included."""
        return self.most_drafted + self.num_copied

    @property
    def num_scratch_rows(self) -> int:
        """Cache rows that a request needs past its text: the tree itself, or what the head is fed to guess it, its beams or the
        root and a mask for each level, whichever is the most."""
        return max(self.num_nodes, self.num_steps + 1, self.top_k * (self.num_steps - 1))

    @property
    def numbers(self) -> dict[str, int]:
        """The three of the head's tree, by their names."""
        return {"num_steps": self.num_steps, "top_k": self.top_k, "num_draft_tokens": self.num_draft_tokens}

    @property
    def of_a_request(self) -> "TreeShape":
        """What a request may want less of: the head's tree, or without one the chain that is copied."""
        if self.num_steps or not self.num_copied:
            return TreeShape(**self.numbers)
        return TreeShape(self.num_copied, 1, self.num_nodes)

    def __str__(self) -> str:
        own = f"({self.num_steps}, {self.top_k}, {self.num_draft_tokens})"
        if not self.num_copied:
            return own
        return f"{own} and {self.num_copied} copied" if self.num_steps else f"{self.num_copied} copied"


NO_SPECULATION = TreeShape(num_steps=0, top_k=0, num_draft_tokens=1)


def num_tree_nodes(num_steps: int, top_k: int) -> int:
    """Nodes that a beam of top_k over num_steps levels can supply, the root included."""
    return 1 + top_k + (num_steps - 1) * top_k**2
