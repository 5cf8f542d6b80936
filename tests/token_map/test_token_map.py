import pytest
import torch

from eagle_rt.token_map.token_map import TokenMap, from_offsets, identity_map


def test_offsets_add_to_their_own_number() -> None:
    token_map = from_offsets(torch.tensor([0, 0, 3, 3]), target_vocab_size=7)
    assert token_map.to_target(torch.tensor([[0, 2], [3, 1]])).tolist() == [[0, 5], [6, 1]]


def test_back_to_draft_ids() -> None:
    token_map = TokenMap(torch.tensor([7, 2, 11]))
    assert token_map.to_draft(torch.tensor([[2, 11], [3, 99], [0, 7]])).tolist() == [[1, 2], [3, 3], [3, 0]]


def test_identity() -> None:
    assert identity_map(5).target_ids.tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("offsets", "message"), [([0, 6], "target id 7"), ([-1, 0], "target id -1"), ([1, 0], "target id . twice")]
)
def test_a_map_that_cannot_be_is_refused(offsets: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        from_offsets(torch.tensor(offsets), target_vocab_size=7)
