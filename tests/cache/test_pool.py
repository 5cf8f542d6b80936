import torch
from hypothesis import given
from hypothesis import strategies as st

from eagle_rt.cache.pool import KVPool, RowShape


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=10, unique_by=lambda move: move[1]))
def test_moves_that_overlap_read_before_they_write(moves: list[tuple[int, int]]) -> None:
    pool = KVPool([RowShape(1, 2)] * 2, 10, torch.float32, "cpu")
    pool.storage.copy_(torch.randn(pool.storage.shape))
    before = pool.storage.clone()
    sources, destinations = (torch.tensor(column) for column in zip(*moves, strict=True))
    pool.move(sources, destinations)
    expected = before.clone()
    for source, destination in moves:
        expected[:, destination] = before[:, source]
    assert torch.equal(pool.storage, expected)


def test_what_is_written_is_read_by_slice_and_by_index() -> None:
    pool = KVPool([RowShape(3, 4)] * 2, 8, torch.float32, "cpu")
    rows = torch.randn(3, 2, 3, 4)
    pool.write(1, torch.tensor([2, 3, 4]), rows)
    for slots in (slice(2, 5), torch.tensor([2, 3, 4])):
        keys, values = pool.read(1, slots)
        assert torch.equal(keys[0].transpose(0, 1), rows[:, 0])
        assert torch.equal(values[0].transpose(0, 1), rows[:, 1])
    assert not pool.storage[0].any()
