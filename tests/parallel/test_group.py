"""Commands and their tensors, without processes."""

import pickle

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from eagle_rt.batch import Batch, DeviceRows, HostMask, HostRows, MaskWords
from eagle_rt.models.shard import Shard
from eagle_rt.parallel.group import Group, Pass, Unpickler, packed

PAGES = DeviceRows(torch.tensor([5, 9], dtype=torch.int32), torch.arange(6, dtype=torch.int32).view(2, 3), 16)
SEEN = HostRows((5, 9), (range(5), np.arange(9)))
MASKS = [None, torch.ones(2, 2, 2, dtype=torch.bool).tril(), MaskWords(torch.tensor([[[3], [-1]], [[1], [2]]]), 2)]


@pytest.mark.parametrize("mask", [*MASKS, HostMask(np.eye(4, dtype=np.bool_), (2, 2))])
@pytest.mark.parametrize("rows", [SEEN, PAGES])
def test_a_batch_comes_as_it_was(mask: object, rows: HostRows | DeviceRows, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors of one kind go in one message; what is no tensor goes with the command."""
    sent: list[Tensor] = []

    def broadcast(tensor: Tensor, source: int) -> None:
        assert source == 0
        if is_first:
            sent.append(tensor.clone())
        else:
            tensor.copy_(sent.pop(0))

    monkeypatch.setattr(dist, "broadcast", broadcast)
    batch = Batch(torch.tensor([7, 8, 9, 1]), torch.tensor([4, 4, 8, 8]), torch.arange(4), (0, 2, 4), rows, mask)  # type: ignore[arg-type]
    is_first = True
    data, tensors = packed(Pass(batch, 3, "torch"))
    Group(Shard(0, 2), "cpu").share(tensors)
    assert len(sent) == len({tensor.dtype for tensor in tensors})

    is_first = False
    descriptions, command = pickle.loads(data)
    found = Unpickler(command, Group(Shard(1, 2), "cpu").shared(descriptions)).load()
    assert not sent
    assert (found.pool, found.attention, found.batch.query_starts) == (3, "torch", batch.query_starts)
    _, found_tensors = packed(found)
    for tensor, own in zip(tensors, found_tensors, strict=True):
        assert tensor.dtype == own.dtype
        assert torch.equal(tensor, own)
    assert isinstance(found.batch.rows, type(rows))
    assert isinstance(found.batch.tree_mask, type(mask))
    if isinstance(mask, HostMask):
        assert np.array_equal(found.batch.tree_mask.visible, mask.visible)


def test_nothing_is_sent_where_there_are_no_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "broadcast", lambda *_: pytest.fail("nobody would take it"))
    Group(Shard(0, 2), "cpu").share([])
    assert Group(Shard(1, 2), "cpu").shared([]) == []
