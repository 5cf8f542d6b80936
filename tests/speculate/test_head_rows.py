"""Features that wait for the head."""

import random

import torch

from eagle_rt.speculate.head_rows import MOST_UNSORTED, HeadRowsBook


def test_steps_are_sorted_as_if_at_once() -> None:
    """Against features that are added to each sequence by itself, while sequences come, go, come back under the same name and are
    read."""
    rng, book, twin, value = random.Random(0), HeadRowsBook(), HeadRowsBook(), 0.0
    there: list[str] = []
    num_read = 0
    for _ in range(400):
        name, action = rng.choice("abcde"), rng.random()
        if name not in there:
            for own in (book, twin):
                own.begin(name, 0, 0, may_draft=name != "e")
            there.append(name)
        elif action < 0.2:
            for own in (book, twin):
                own.forget(name)
            there.remove(name)
        elif action < 0.3 and book[name].num_waiting:
            assert torch.equal(book.take([name]), twin.take([name]))
            num_read += 1
        if there:
            counts = [rng.randint(1, 3) for _ in there]
            features = value + torch.arange(float(sum(counts)))[:, None]
            value += len(features)
            book.add_step(list(there), counts, features)
            for sequence_id, rows in zip(there, features.split(counts), strict=True):
                twin.add(sequence_id, rows)
        if action > 0.8:
            assert book.num_waiting == twin.num_waiting
            assert [book[own].num_made for own in there] == [twin[own].num_made for own in there]
    assert num_read > 5


def test_it_is_due_after_some_steps_and_not_once_it_is_sorted() -> None:
    book = HeadRowsBook()
    book.begin("a", 0, 0)
    for count in range(MOST_UNSORTED):
        assert not book.is_due
        assert not count or len(book._unsorted) == count
        book.add_step(["a"], [1], torch.zeros(1, 2))
    assert book.is_due
    book.sort()
    assert not book.is_due
    assert book.num_waiting == MOST_UNSORTED


def test_what_has_ended_is_not_sorted_and_nothing_is_where_texts_begin_and_end() -> None:
    book = HeadRowsBook()
    book.begin("a", 0, 0)
    book.begin("b", 0, 0)
    book.add_step(["a", "b"], [1, 2], torch.arange(3.0)[:, None])
    ended = book["a"]
    book.forget("a")
    assert book.num_waiting == 2
    book.begin("a", 0, 0)
    book.add_step(["a", "b"], [1, 1], 3.0 + torch.arange(2.0)[:, None])
    assert len(book._unsorted) == 2
    assert book.take(["a", "b"]).flatten().tolist() == [3.0, 1.0, 2.0, 4.0]
    assert not ended.sorted
