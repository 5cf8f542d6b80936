"""The page allocator of the KV cache: which pages are free. No tensors here."""

import heapq


class PageAllocator:
    """Hands out page numbers 0 .. num_pages - 1, lowest first, so that a request's rows tend to lie side by side."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._free = list(range(num_pages))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self, count: int) -> list[int]:
        assert count <= self.num_free
        return [heapq.heappop(self._free) for _ in range(count)]

    def release(self, pages: list[int]) -> None:
        for page in pages:
            heapq.heappush(self._free, page)

    def free_pages(self) -> list[int]:
        """A copy, for integrity checks."""
        return list(self._free)
