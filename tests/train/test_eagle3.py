"""Training-time test against the slow head: what is trained is what is served."""

from pathlib import Path

import checkpoints
import pytest
import torch
from engines import load_target
from models.slow_head import SlowHead
from torch.nn import functional

from eagle_rt.models.heads import load_eagle3_head
from eagle_rt.train.eagle3 import Eagle3Trainee, export_head, most_frequent_tokens

CONFIG = {**checkpoints.EAGLE3_CONFIG, "head_dim": 16}
LENGTH, NUM_UNROLLED = 9, 4


@torch.no_grad()
def test_unrolled_losses_are_those_of_drafting(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(3)
    draft_tokens = torch.randperm(checkpoints.VOCAB_SIZE, generator=generator)[:160].sort().values
    trainee = Eagle3Trainee(CONFIG, draft_tokens)
    for parameter in trainee.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
    export_head(trainee, tmp_path, torch.float32)

    embedding = torch.randn(checkpoints.VOCAB_SIZE, 64, generator=generator)
    draft_ids = torch.randint(160, (LENGTH,), generator=generator)
    text = draft_tokens[draft_ids]
    features = torch.randn(LENGTH, 192, generator=generator)
    target_logits = torch.randn(LENGTH, checkpoints.VOCAB_SIZE, generator=generator) * 2
    counts = torch.ones(1, LENGTH, dtype=torch.bool)
    losses, acceptance = trainee.unrolled_losses(embedding[text][None], features[None], target_logits[None], counts, NUM_UNROLLED)

    slow = SlowHead(tmp_path, embedding)
    num_slots = LENGTH - NUM_UNROLLED
    for step in range(NUM_UNROLLED):
        expected, num_agreeing = [], 0
        for slot in range(num_slots):
            place = slot + 1 + step  # the token that the head is given last, and whose successor it predicts
            path = tuple(draft_ids[slot + 2 : place + 1].tolist())
            logits = slow.logits_after(text[: slot + 2].tolist(), features[: slot + 1], path)
            favourite = int(target_logits[place].argmax())
            if favourite in draft_tokens:
                expected.append(functional.cross_entropy(logits, target_logits[place, draft_tokens].softmax(-1)))
                num_agreeing += int(draft_tokens[logits.argmax()]) == favourite
        torch.testing.assert_close(losses[step], torch.stack(expected).mean(), rtol=1e-4, atol=1e-4)
        assert float(acceptance[step]) == pytest.approx(num_agreeing / num_slots)


def test_an_exported_head_loads(target_dir: Path, tmp_path: Path) -> None:
    draft_tokens = torch.arange(0, 2 * 100, 2)
    export_head(Eagle3Trainee({**CONFIG, "draft_vocab_size": 100}, draft_tokens), tmp_path, torch.bfloat16)
    head, unused = load_eagle3_head(tmp_path, load_target(target_dir), torch.float32, "cpu")
    assert unused == []
    assert torch.equal(head.token_map.target_ids, draft_tokens)


def test_the_draft_vocabulary_is_the_most_frequent_counted_tokens() -> None:
    tokens = torch.tensor([[5, 5, 5, 2, 2, 9, 1, 1, 1, 1]])
    counts = tokens != 1
    assert most_frequent_tokens(tokens, counts, 10, 2).tolist() == [2, 5]
