"""Where what is remembered at the ends of pages is saved; `engine/test_scheduler.py` has whole lives of requests."""

from dataclasses import dataclass, field

from eagle_rt.cache.prefix import CachedPage, up_to_a_memory
from eagle_rt.cache.saved import SavedMemories


@dataclass
class MadeUpRequest:
    shared: list[CachedPage] = field(default_factory=list)
    num_cached: int = 0
    marks: dict[int, int] = field(default_factory=dict)
    memory_source: int | None = None


def page() -> CachedPage:
    return CachedPage((1,), 0, None, has_head_rows=True)


def save(saved: SavedMemories, pages: list[CachedPage]) -> None:
    """By a request that reads as many tokens as these pages of one have, and another one."""
    request = MadeUpRequest()
    saved.begin(request, len(pages) + 1, 0)
    request.num_cached, request.shared = len(pages), pages
    saved.settle(request)


def test_what_was_used_least_recently_gives_up_its_row() -> None:
    saved, pages = SavedMemories(range(7, 9), page_size=1), [page() for _ in range(3)]
    save(saved, pages[:1])
    save(saved, pages[1:2])
    first = pages[0].memory_row
    going_on = MadeUpRequest(shared=pages[:1], num_cached=1)
    saved.begin(going_on, 2, 1)
    assert going_on.memory_source == first
    assert not going_on.marks, "its only full page has one"
    save(saved, pages[2:])
    assert [own.memory_row is None for own in pages] == [False, True, False]
    assert sorted(saved.rows()) == [7, 8]


def test_a_text_goes_on_from_the_last_page_that_has_one() -> None:
    pages = [page() for _ in range(4)]
    assert up_to_a_memory(pages) == []
    pages[0].memory_row, pages[2].memory_row = 5, 6
    assert up_to_a_memory(pages) == pages[:3]


def test_where_no_row_is_to_be_had_nothing_is_saved() -> None:
    saved, requests = SavedMemories(range(1), page_size=4), [MadeUpRequest(), MadeUpRequest()]
    for request in requests:
        saved.begin(request, 9, 4)
    assert [list(request.marks) for request in requests] == [[4], []]
    saved.end(requests[0])
    saved.begin(requests[1], 9, 0)
    assert list(requests[1].marks) == [8]
