"""A radix tree of cached pages: prompts that begin alike share them. No tensors here."""

import heapq
from collections.abc import Callable, Iterator

# So many notes of leaves are kept though they may no longer hold, and as many more as there are leaves.
FEW_LEAVES = 1024


class CachedPage:
    """A page of the cache, under the page that comes before it in the text. has_head_rows: the draft head's rows are in it too.
    memory_row: where what is remembered at its end is saved, see `SavedMemories`."""

    def __init__(self, key: tuple[int, ...], page: int, parent: "CachedPage | None", has_head_rows: bool) -> None:
        self.key = key
        self.page = page
        self.has_head_rows = has_head_rows
        self.memory_row: int | None = None
        self.parent = parent
        self.children: dict[tuple[int, ...], CachedPage] = {}
        self.num_users = 0
        self.last_used = 0


class PrefixCache:
    """Finds, keeps and evicts cached pages.

    A page's key is its own tokens and the one after them: the draft head's row at position i is made from the token at
    i + 1, so a page is only reusable where the next token is the same too. A node is protected while it, or anything under
    it, is in use; the least recently used leaf goes first.
    """

    def __init__(self, page_size: int, release: Callable[[list[int]], None], *, enabled: bool = True) -> None:
        self.page_size = page_size
        self.num_evictable = 0
        self._enabled = enabled
        self._release = release
        self._root = CachedPage((), -1, None, has_head_rows=True)
        self._clock = 0
        self._leaves: list[tuple[int, int, CachedPage]] = []  # of which some have been used since
        self._most_leaves = FEW_LEAVES

    def match(self, tokens: list[int], *, with_head_rows: bool = False) -> list[CachedPage]:
        """The cached pages that `tokens` begins with, in order, or only those that the draft head can go on from. At least one
        token is always left over."""
        node, path = self._root, []
        for key in self._keys(tokens, len(tokens)):
            child = node.children.get(key)
            if child is None or (with_head_rows and not child.has_head_rows):
                break
            path.append(child)
            node = child
        return path

    def acquire(self, path: list[CachedPage]) -> None:
        """Protect the pages of `path` until they are released by `forget`."""
        self._clock += 1
        for node in path:
            if node.num_users == 0:
                self.num_evictable -= 1
            node.num_users += 1
            node.last_used = self._clock

    def forget(self, path: list[CachedPage]) -> None:
        """Undo one `acquire`."""
        for node in path:
            assert node.num_users > 0
            node.num_users -= 1
            if node.num_users == 0:
                self.num_evictable += 1
                self._note_leaf(node)

    def insert(
        self, tokens: list[int], num_cached: int, pages: list[int], path: list[CachedPage], num_head_rows: int
    ) -> list[CachedPage]:
        """Hand over the full pages of a text whose first `num_cached` tokens are cached, num_head_rows of them by the head too.

        pages: the text's pages from its start; path: the acquired nodes that its first pages already are. Pages that the
        cache takes are acquired for the caller; a page that was cached meanwhile by another is released, and `pages` is
        changed in place to name the cached one. Where the other's lacks the head's rows and ours has them, ours takes its place,
        or, while the other is in use, the handing over ends. Returns the longer path.
        """
        if not self._enabled:
            return path
        path = list(path)
        node = path[-1] if path else self._root
        for index, key in enumerate(self._keys(tokens, num_cached)):
            has_head_rows = (index + 1) * self.page_size <= num_head_rows
            if index < len(path):
                path[index].has_head_rows |= has_head_rows
                continue
            child = node.children.get(key)
            if child is None:
                child = CachedPage(key, pages[index], node if node is not self._root else None, has_head_rows)
                node.children[key] = child
                self.num_evictable += 1
            elif has_head_rows and not child.has_head_rows:
                if child.num_users:
                    break
                self._release([child.page])
                child.page, child.has_head_rows = pages[index], True
            elif child.page != pages[index]:
                self._release([pages[index]])
                pages[index] = child.page
            self.acquire([child])
            path.append(child)
            node = child
        return path

    def evict(self, count: int) -> None:
        """Release up to `count` unprotected pages, least recently used first; none if that is less than one."""
        while count > 0 and self._leaves:
            stamp, _, node = heapq.heappop(self._leaves)
            if not self._still_holds(stamp, node):
                continue
            siblings = node.parent.children if node.parent else self._root.children
            del siblings[node.key]
            self.num_evictable -= 1
            self._release([node.page])
            if node.parent:
                self._note_leaf(node.parent)
            count -= 1

    def nodes(self) -> Iterator[CachedPage]:
        """Every cached page, for integrity checks."""
        stack = list(self._root.children.values())
        while stack:
            node = stack.pop()
            yield node
            stack += node.children.values()

    def _keys(self, tokens: list[int], num_cached: int) -> Iterator[tuple[int, ...]]:
        size = self.page_size
        for start in range(0, min(num_cached, len(tokens) - 1) - size + 1, size):
            yield tuple(tokens[start : start + size + 1])

    def _is_evictable_leaf(self, node: CachedPage) -> bool:
        siblings = node.parent.children if node.parent else self._root.children
        return node.num_users == 0 and not node.children and siblings.get(node.key) is node

    def _still_holds(self, stamp: int, node: CachedPage) -> bool:
        """Whether what was noted of a leaf still holds."""
        return stamp == node.last_used and self._is_evictable_leaf(node)

    def _note_leaf(self, node: CachedPage) -> None:
        if not self._is_evictable_leaf(node):
            return
        heapq.heappush(self._leaves, (node.last_used, id(node), node))
        if len(self._leaves) > self._most_leaves:
            self._leaves = [*{own[1]: own for own in self._leaves if self._still_holds(own[0], own[2])}.values()]
            heapq.heapify(self._leaves)
            self._most_leaves = 2 * len(self._leaves) + FEW_LEAVES


def up_to_a_memory(path: list[CachedPage]) -> list[CachedPage]:
    """The first of these pages, up to the last at whose end what is remembered is saved."""
    return path[: next((number for number in range(len(path), 0, -1) if path[number - 1].memory_row is not None), 0)]
