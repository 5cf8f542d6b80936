"""Where what layers remember of a text is saved at the ends of cached pages, so that texts that begin alike go on from there. No
tensors here."""

from collections import OrderedDict
from typing import Protocol

from eagle_rt.cache.prefix import CachedPage


class Reader(Protocol):
    """What is asked and told of a request: see `engine.request.Request`."""

    num_cached: int
    shared: list[CachedPage]
    marks: dict[int, int]
    memory_source: int | None


class SavedMemories:
    """Rows beside those of running requests, each for one page; the page that was used least recently gives its row up."""

    def __init__(self, rows: range, page_size: int) -> None:
        self.all_rows, self._free, self._page_size = rows, list(rows), page_size
        self._pages: OrderedDict[int, CachedPage] = OrderedDict()

    def begin(self, request: Reader, num_tokens: int, num_alike: int) -> None:
        """A request is let in, which goes on from the end of its shared pages.

        It will save what it remembers at the last end of a page of its num_tokens tokens, and where its text parts from all that is
        cached, after num_alike of them: another text may do so too.
        """
        request.memory_source = None
        if request.shared:
            request.memory_source = request.shared[-1].memory_row
            assert request.memory_source is not None
            self._pages.move_to_end(request.memory_source)
        last = (num_tokens - 1) // self._page_size * self._page_size
        for position in sorted({num_alike, last}):
            if position > request.num_cached and (row := self._take()) is not None:
                request.marks[position] = row

    def settle(self, request: Reader) -> None:
        """Its pages are cached as far as it has read: what it has saved belongs to them, unless they have that already."""
        for position in [own for own in request.marks if own <= request.num_cached]:
            row, number = request.marks.pop(position), position // self._page_size - 1
            page = request.shared[number] if number < len(request.shared) else None
            if page and page.memory_row is None:
                page.memory_row, self._pages[row] = row, page
            else:
                self._free.append(row)

    def end(self, request: Reader) -> None:
        """It saves nothing any more."""
        self._free += request.marks.values()
        request.marks.clear()

    def rows(self) -> list[int]:
        """Those that no request is about to fill, for integrity checks."""
        assert all(page.memory_row == row for row, page in self._pages.items())
        return [*self._free, *self._pages]

    def _take(self) -> int | None:
        if self._free:
            return self._free.pop()
        if not self._pages:
            return None
        row, page = self._pages.popitem(last=False)
        page.memory_row = None
        return row
