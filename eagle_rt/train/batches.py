"""Which rows each training step sees: a function of the step alone, so that a resumed run sees the same text."""

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from eagle_rt.train.prepare import Row

# Rows of similar length go together; so many batches are drawn at random and then sorted.
NUM_SORTED_BATCHES = 16


@dataclass(frozen=True)
class Text:
    """A row as one run of tokens; the answer begins at `answer_start`."""

    tokens: list[int]
    answer_start: int

    @property
    def num_counted(self) -> int:
        """Tokens that the head is asked to foresee."""
        return len(self.tokens) - self.answer_start


def row_texts(rows: list[Row], max_length: int) -> list[Text]:
    """Rows cut to `max_length` tokens; those whose answer lies past it are left out."""
    texts = [Text((row.prompt + row.answer)[:max_length], len(row.prompt)) for row in rows]
    return [text for text in texts if text.num_counted > 0]


def held_out_split(texts: list[Text], fraction: float, seed: int) -> tuple[list[Text], list[Text]]:
    """(training, held out): a seeded random split, with at least one text held out."""
    order = torch.randperm(len(texts), generator=torch.Generator().manual_seed(seed)).tolist()
    num_held_out = max(1, round(len(texts) * fraction))
    return [texts[index] for index in order[num_held_out:]], [texts[index] for index in order[:num_held_out]]


class BatchOrder:
    """Batches of `batch_size` texts, shuffled anew each epoch."""

    def __init__(self, texts: list[Text], batch_size: int, seed: int) -> None:
        if len(texts) < batch_size:
            raise ValueError(f"{len(texts)} training rows are fewer than a batch of {batch_size}: prepare more, or use less a step")
        self._texts, self._batch_size, self._seed = texts, batch_size, seed
        self.batches_per_epoch = len(texts) // batch_size
        self._epoch = lru_cache(maxsize=1)(self._make_epoch)

    def at(self, step: int) -> list[Text]:
        epoch, index = divmod(step, self.batches_per_epoch)
        return [self._texts[place] for place in self._epoch(epoch)[index]]

    def _make_epoch(self, epoch: int) -> list[list[int]]:
        generator = torch.Generator().manual_seed(self._seed + epoch)
        order = torch.randperm(len(self._texts), generator=generator).tolist()
        batches = []
        pool_size = self._batch_size * NUM_SORTED_BATCHES
        for start in range(0, len(order), pool_size):
            pool = sorted(order[start : start + pool_size], key=lambda place: len(self._texts[place].tokens))
            batches += [pool[first : first + self._batch_size] for first in range(0, len(pool), self._batch_size)]
        batches = [batch for batch in batches if len(batch) == self._batch_size]
        return [batches[place] for place in torch.randperm(len(batches), generator=generator).tolist()]


def padded(rows: list[Tensor], length: int) -> Tensor:
    """[B, length, ...] from B tensors [L, ...], filled up with zeros."""
    result = rows[0].new_zeros(len(rows), length, *rows[0].shape[1:])
    for index, row in enumerate(rows):
        result[index, : len(row)] = row
    return result


def counted_positions(texts: list[Text], length: int, device: torch.device) -> Tensor:
    """[B, length] bool: the positions after which the answer's tokens come."""
    positions = torch.arange(length, device=device)
    starts = torch.tensor([text.answer_start for text in texts], device=device)[:, None]
    ends = torch.tensor([len(text.tokens) for text in texts], device=device)[:, None]
    return (positions >= starts - 1) & (positions < ends - 1)
