import random

import pytest

from eagle_rt.cache import prefix
from eagle_rt.cache.pages import PageAllocator
from eagle_rt.cache.prefix import PrefixCache


def store(cache: PrefixCache, allocator: PageAllocator, tokens: list[int], page_size: int) -> list[int]:
    """What a request does over its life: find, compute the rest, hand over, leave."""
    path = cache.match(tokens)
    cache.acquire(path)
    num_pages = -(-len(tokens) // page_size)
    pages = [node.page for node in path] + allocator.allocate(num_pages - len(path))
    path = cache.insert(tokens, len(tokens) - 1, pages, path, len(tokens))
    cache.forget(path)
    allocator.release(pages[len(path) :])
    return pages


def make(num_pages: int, page_size: int) -> tuple[PageAllocator, PrefixCache]:
    allocator = PageAllocator(num_pages)
    return allocator, PrefixCache(page_size, allocator.release)


def test_a_text_finds_its_pages_again() -> None:
    allocator, cache = make(10, 4)
    pages = store(cache, allocator, list(range(11)), 4)
    assert [node.page for node in cache.match(list(range(11)))] == pages[:2]
    assert [node.page for node in cache.match([*range(8), 99])] == pages[:1], "the look-ahead token of page 2 differs"
    assert cache.match([5, 6, 7]) == []


@pytest.mark.parametrize("page_size", [1, 4])
def test_one_token_is_always_left_to_compute(page_size: int) -> None:
    allocator, cache = make(20, page_size)
    store(cache, allocator, list(range(9)), page_size)
    assert len(cache.match(list(range(8)))) * page_size < 8


def test_used_pages_survive_eviction_and_the_oldest_goes_first() -> None:
    allocator, cache = make(6, 2)
    store(cache, allocator, [1, 2, 3, 4, 5], 2)
    store(cache, allocator, [1, 2, 3, 9, 9], 2)
    held = cache.match([1, 2, 3, 4, 5])
    cache.acquire(held)
    cache.evict(10)
    assert cache.match([1, 2, 3, 4, 5]) == held
    assert len(cache.match([1, 2, 3, 9, 9])) == 1
    cache.forget(held)
    cache.evict(10)
    assert allocator.num_free == 6
    assert cache.num_evictable == 0


def test_nothing_is_evicted_while_there_are_free_pages() -> None:
    allocator, cache = make(10, 2)
    store(cache, allocator, [1, 2, 3, 4, 5], 2)
    for count in (0, -1, -10):
        cache.evict(count)
    assert len(cache.match([1, 2, 3, 4, 5])) == 2


def test_notes_of_leaves_do_not_grow_with_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix, "FEW_LEAVES", 5)
    allocator, cache = make(30, 2)
    texts = [[number, *range(4)] for number in range(10, 16)]
    for text in texts * 20:
        store(cache, allocator, text, 2)
        assert len(cache._leaves) <= 2 * len(texts) + 5
    store(cache, allocator, texts[0], 2)
    for text in texts[1:]:  # the one that was used last stays the longest
        cache.evict(2)
        assert cache.match(text) == []
    assert len(cache.match(texts[0])) == 2
    assert cache.num_evictable == 2


def test_random_use_loses_no_page() -> None:
    rng = random.Random(0)
    allocator, cache = make(30, 2)
    for _ in range(300):
        tokens = [rng.randrange(2) for _ in range(rng.randrange(3, 15))]
        cache.evict(8 - allocator.num_free)
        store(cache, allocator, tokens, 2)
        cached = [node.page for node in cache.nodes()]
        assert sorted(cached + allocator.free_pages()) == list(range(30))
        assert cache.num_evictable == len(cached)
