"""Training-time test against the slow head: what is trained is what is served."""

from pathlib import Path

import checkpoints
import family_configs
import pytest
import torch
from engines import load_target
from head_layouts import served_as
from models.slow_blocks import SlowBlocks
from models.slow_head import HeadParts, LayerParts, SlowHead
from torch import Tensor
from torch.nn import functional

from eagle_rt.models.heads.load import load_head
from eagle_rt.train.blocks import DFlashTrainee
from eagle_rt.train.export import export_head
from eagle_rt.train.modules import Eagle3Trainee, EagleTrainee, ParallelTrainee, Trainee, most_frequent_tokens

CONFIG = {**checkpoints.EAGLE3_CONFIG, "head_dim": 16}
LENGTH, NUM_UNROLLED = 9, 4
GENERATOR = torch.Generator().manual_seed(3)
EMBEDDING = torch.randn(family_configs.VOCAB_SIZE, 64, generator=GENERATOR)
LM_HEAD = torch.randn(family_configs.VOCAB_SIZE, 64, generator=GENERATOR) * 0.3
MASK_TOKEN = 11
DRAFT_TOKENS = torch.randperm(family_configs.VOCAB_SIZE, generator=GENERATOR)[:160].sort().values


def layer_parts(weights: dict[str, Tensor], prefix: str) -> LayerParts:
    names = {part: f"self_attn.{part}_proj" for part in "qkvo"} | {part: f"mlp.{part}_proj" for part in ("gate", "up", "down")}
    matrices = {part: weights[f"{prefix}{name}.weight"] for part, name in names.items()}
    norms = {"post_norm": "post_attention_layernorm", "input_norm": "input_layernorm"}
    return LayerParts(**matrices, **{part: weights.get(f"{prefix}{name}.weight") for part, name in norms.items()})


def twin(trainee: Trainee) -> SlowHead | SlowBlocks:
    if isinstance(trainee, DFlashTrainee):
        return twin_of_blocks(trainee)
    weights, is_parallel = trainee.state_dict(), isinstance(trainee, ParallelTrainee)
    common = {"embedding": EMBEDDING, "head_dim": 16, "fc": weights["fc.weight"]}
    if isinstance(trainee, EagleTrainee):
        return SlowHead(HeadParts(kind="EAGLE", layers=[layer_parts(weights, "layers.0.")], lm_head=LM_HEAD, **common))
    return SlowHead(
        HeadParts(
            kind="EAGLE3",
            layers=[layer_parts(weights, "midlayer."), *([layer_parts(weights, "layers.1.")] if is_parallel else [])],
            mask=(MASK_TOKEN, weights["mask_hidden"].flatten()) if is_parallel else None,
            lm_head=weights["lm_head.weight"],
            embedding_norm=weights["midlayer.input_layernorm.weight"],
            hidden_norm=weights["midlayer.hidden_norm.weight"],
            final_norm=weights["norm.weight"],
            target_ids=weights["draft_tokens"],
            **common,
        )
    )


def twin_of_blocks(trainee: DFlashTrainee) -> SlowBlocks:
    weights, num_layers = trainee.state_dict(), len(trainee.layers)
    parts = HeadParts(
        kind="DFLASH",
        embedding=EMBEDDING,
        layers=[layer_parts(weights, f"layers.{index}.") for index in range(num_layers)],
        lm_head=LM_HEAD,
        head_dim=16,
        fc=weights["fc.weight"],
        hidden_norm=weights["hidden_norm.weight"],
        final_norm=weights["norm.weight"],
    )
    norms = [tuple(weights[f"layers.{index}.self_attn.{part}_norm.weight"] for part in "qk") for index in range(num_layers)]
    pairs = tuple(weights[f"markov_head.markov_w{part}.weight"] for part in (1, 2)) if trainee.markov_head else None
    return SlowBlocks(parts, MASK_TOKEN, [None] * num_layers, [False] * num_layers, norms, num_levels=NUM_UNROLLED, pairs=pairs)


def make_trainee(kind: str) -> Trainee:
    markov_rank, kind = (8, "DFLASH") if kind == "DSPARK" else (0, kind)
    if kind == "DFLASH":
        own = {"mask_token_id": MASK_TOKEN, "target_layer_ids": [1, 3, 5]}
        sizes = {"num_hidden_layers": 2, "block_size": 1 + NUM_UNROLLED, "draft_vocab_size": None, "markov_rank": markov_rank}
        config = {**CONFIG, **sizes, "dflash_config": own}
        trainee = DFlashTrainee(config, LM_HEAD, EMBEDDING[MASK_TOKEN])
    elif kind == "PEAGLE":
        config = {**CONFIG, "num_hidden_layers": 2, "ptd_token_id": MASK_TOKEN}
        trainee = ParallelTrainee(config, DRAFT_TOKENS, EMBEDDING[MASK_TOKEN])
    else:
        trainee = Eagle3Trainee(CONFIG, DRAFT_TOKENS) if kind == "EAGLE3" else EagleTrainee(CONFIG, LM_HEAD)
    generator = torch.Generator().manual_seed(4)
    for parameter in trainee.parameters():
        parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
    return trainee


@torch.no_grad()
@pytest.mark.parametrize("kind", ["EAGLE3", "PEAGLE", "DFLASH", "DSPARK", "EAGLE"])
def test_unrolled_losses_are_those_of_drafting(kind: str) -> None:
    trainee = make_trainee(kind)
    slow = twin(trainee)
    draft_ids = torch.randint(160, (LENGTH,), generator=GENERATOR)
    text = slow.target_ids[draft_ids]
    features = torch.randn(LENGTH, 64 if kind == "EAGLE" else 192, generator=GENERATOR)
    target_states = torch.randn(LENGTH, 64, generator=GENERATOR)
    counts = torch.tensor([False, False, True, True, False, True, True, True, True])
    all_logits = torch.randn(LENGTH, family_configs.VOCAB_SIZE, generator=GENERATOR) * 2
    losses, agreements = trainee.unrolled_losses(
        text[None], EMBEDDING[text][None], features[None], target_states[None], all_logits[counts], counts[None], NUM_UNROLLED
    )

    num_slots = LENGTH - NUM_UNROLLED
    for step in range(NUM_UNROLLED):
        expected, num_agreeing = torch.zeros(()), 0
        for slot in range(num_slots):
            place = slot + 1 + step  # the token that the head is given last, and whose successor it predicts
            if not counts[place]:
                continue
            path = tuple(draft_ids[slot + 2 : place + 1].tolist())
            logits = slow.logits_after(text[: slot + 2].tolist(), features[: slot + 1], path)
            favourite = int(all_logits[place].argmax())
            num_agreeing += int(slow.target_ids[logits.argmax()]) == favourite
            labels = all_logits[place, slow.target_ids].softmax(-1)
            if kind != "EAGLE":
                expected += functional.cross_entropy(logits, labels) * (kind in ("DFLASH", "DSPARK") or favourite in DRAFT_TOKENS)
            else:
                rows = torch.tensor([text[index] for index in range(1, place + 1)])
                hidden = features[: slot + 1]
                for _ in range(step):
                    hidden = torch.cat((hidden, slow.states(rows[: len(hidden)], hidden)[-1:]))
                state = slow.states(rows, hidden)[-1]
                expected += functional.smooth_l1_loss(state, target_states[place]) + 0.1 * functional.cross_entropy(logits, labels)
        torch.testing.assert_close(losses[step], expected, rtol=1e-4, atol=1e-4)
        assert int(agreements[step]) == num_agreeing


@pytest.mark.parametrize("kind", ["EAGLE3", "PEAGLE", "DFLASH", "DSPARK", "EAGLE"])
def test_an_exported_head_is_the_one_that_was_trained(target_dir: Path, tmp_path: Path, kind: str) -> None:
    trainee = make_trainee(kind)
    export_head(trainee.config, trainee.state_dict(), tmp_path, torch.float32)
    head, unused = load_head(tmp_path, load_target(target_dir), served_as(kind), torch.float32, "cpu")
    assert unused == []
    assert torch.equal(head.token_map.target_ids, twin(trainee).target_ids)
    assert (head.mask_row and head.mask_row.token) == (MASK_TOKEN if kind == "PEAGLE" else None)
    assert (head.block and (head.block.mask_token, head.block.size)) == ((MASK_TOKEN, 5) if kind in ("DFLASH", "DSPARK") else None)
    states = torch.randn(3, 64)
    if kind in ("EAGLE3", "PEAGLE"):
        torch.testing.assert_close(head.logits(states), trainee.logits(states), rtol=1e-4, atol=1e-4)


def test_a_new_head_starts_as_the_targets_output_layer() -> None:
    final_norm = torch.rand(64) + 0.5
    state = torch.randn(1, 5, 64)
    eagle3 = Eagle3Trainee(CONFIG, DRAFT_TOKENS)
    eagle3.start_from(LM_HEAD, final_norm)
    embeddings = torch.randn(1, 5, 64)
    ((_, states),) = eagle3.unroll(embeddings, torch.cat((torch.randn(1, 5, 128), state), dim=-1), 1)
    torch.testing.assert_close(states, state[:, :4])
    assert torch.equal(eagle3.lm_head.weight, LM_HEAD[DRAFT_TOKENS])
    eagle = EagleTrainee(CONFIG, LM_HEAD)
    eagle.start_from(LM_HEAD, final_norm)
    ((_, states),) = eagle.unroll(embeddings, state, 1)
    torch.testing.assert_close(states, state[:, :4])


def test_the_draft_vocabulary_is_the_most_frequent_tokens() -> None:
    assert most_frequent_tokens(torch.tensor([5, 5, 5, 2, 2, 9]), 10, 2).tolist() == [2, 5]
