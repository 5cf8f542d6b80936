import torch
from hypothesis import given
from hypothesis import strategies as st

from eagle_rt.cache.pool import KVPool, RowShape


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=10, unique_by=lambda move: move[1]))
def test_moves_that_overlap_read_before_they_write(moves: list[tuple[int, int]]) -> None:
    pool = KVPool([RowShape(1, 2), RowShape(2, 3), RowShape(1, 2)], 10, torch.float32, "cpu")
    for layer in pool.layers:
        layer.normal_()
    before = [layer.clone() for layer in pool.layers]
    sources, destinations = (torch.tensor(column) for column in zip(*moves, strict=True))
    pool.move(sources, destinations)
    for layer, own in zip(pool.layers, before, strict=True):
        expected = own.clone()
        for source, destination in moves:
            expected[destination] = own[source]
        assert torch.equal(layer, expected)


def test_what_is_written_is_read_by_slice_and_by_index() -> None:
    pool = KVPool([RowShape(3, 4)] * 2, 8, torch.float32, "cpu")
    rows = torch.randn(3, 2, 3, 4)
    pool.write(1, torch.tensor([2, 3, 4]), rows)
    for slots in (slice(2, 5), torch.tensor([2, 3, 4])):
        keys, values = pool.read(1, slots)
        assert torch.equal(keys[0].transpose(0, 1), rows[:, 0])
        assert torch.equal(values[0].transpose(0, 1), rows[:, 1])
    assert not pool.storage[0].any()


def test_layers_of_two_kinds_are_viewed_in_their_order() -> None:
    kinds = RowShape(1, 2), RowShape(2, 3)
    pool = KVPool([kinds[0], kinds[1], kinds[0]], 10, torch.float32, "cpu")
    for number, layer in enumerate(pool.layers):
        layer.fill_(number)
    assert [storage.shape for storage in pool.storages.values()] == [(2, 10, 2, 1, 2), (1, 10, 2, 2, 3)]
    for number, (keys, values) in enumerate(pool.views(slice(2, 6))):
        expected = pool.read(number, slice(2, 6))
        assert torch.equal(keys, expected[0])
        assert torch.equal(values, expected[1])
        assert (keys == number).all()
    memory = torch.empty(4 * kinds[1].num_numbers)
    assert torch.equal(pool.read(1, torch.tensor([1, 2]), 2, memory)[0], pool.read(1, torch.tensor([1, 2]), 2)[0])
