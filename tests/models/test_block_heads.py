"""DFlash and DSpark heads of every published layout against a slow implementation: whole trees, node for node."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from block_layouts import BLOCK_SIZE, DFLASH_LAYOUTS, LAYERS, MASK_TOKEN, write_block_head
from engines import load_target, make_config, make_core, random_prompts, run
from head_layouts import Written, write_head

from eagle_rt.engine.fit import MOST_IN_A_BLOCK, FitProbe, other_conventions
from eagle_rt.engine.load import load_models, model_info
from eagle_rt.engine.params import SamplingParams
from eagle_rt.models.heads.load import load_head
from eagle_rt.tree_shape import TreeShape
from models.slow_trees import true_features
from models.test_heads import check_trees

DFLASH = {"speculative_algorithm": "DFLASH"}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory, target_dir: Path) -> dict[str, Written]:
    folder = tmp_path_factory.mktemp("blocks")
    return {name: write_block_head(name, folder / name, target_dir) for name in DFLASH_LAYOUTS}


def with_levels(written: Written, num_levels: int) -> Written:
    return replace(written, slow=replace(written.slow, num_levels=num_levels))


@pytest.mark.parametrize("name", DFLASH_LAYOUTS)
def test_trees_of_every_layout(written: dict[str, Written], target_dir: Path, name: str) -> None:
    check_trees(with_levels(written[name], 5), target_dir, (5, 4, 16), 3, **DFLASH)


@pytest.mark.parametrize("tree_shape", [(1, 3, 4), (3, 1, 4), (7, 4, 12)], ids=str)
@pytest.mark.parametrize("name", ["dflash-windows", "dspark"])
def test_trees_of_every_shape(written: dict[str, Written], target_dir: Path, tree_shape: tuple[int, int, int], name: str) -> None:
    check_trees(with_levels(written[name], tree_shape[0]), target_dir, tree_shape, 4, **DFLASH)


@pytest.mark.parametrize("name", DFLASH_LAYOUTS)
def test_all_tensors_are_used(written: dict[str, Written], target_dir: Path, name: str) -> None:
    assert load_head(written[name].directory, load_target(target_dir), "DFLASH", torch.float32, "cpu")[1] == []


@pytest.mark.parametrize("name", DFLASH_LAYOUTS)
def test_none_changes_the_text(written: dict[str, Written], target_dir: Path, name: str) -> None:
    prompts = random_prompts(4, seed=11)
    settings = [SamplingParams(temperature=float(index % 2), seed=index, max_new_tokens=20) for index in range(4)]
    expected = run(make_core(target_dir), prompts, settings)
    for tree, options in (
        ((1, 1, 2), {}),
        ((4, 3, 12), {"page_size": 4, "chunked_prefill_size": 16}),
        ((4, 3, 12), {"speculative_draft_model_quantization": "int8", "speculative_tree": "adaptive"}),
    ):
        assert run(make_core(target_dir, written[name].directory, tree, **DFLASH, **options), prompts, settings) == expected


FLIPS: list[tuple[str, dict[str, Any]]] = [
    ("dflash", {"rope_theta": 10000.0}),
    ("dflash", {"is_causal": True}),
    ("dflash", {"rms_norm_eps": 1.0}),
    ("dflash", {"dflash_config": {"mask_token_id": 17, "target_layer_ids": [1, 3, 5]}}),
    ("dflash", {"dflash_config": {"mask_token_id": MASK_TOKEN, "target_layer_ids": [2, 3, 5]}}),
    ("dflash-windows", {"is_causal": False}),
    ("dflash-windows", {"sliding_window": 7}),
    ("dflash-windows", {"layer_types": None}),
    ("dflash-scaled", {"is_causal": None}),
    ("dflash-speculators", {"aux_hidden_state_layer_ids": [1, 3, 5]}),
    ("dflash-speculators", {"mask_token_id": 17}),
    ("dspark", {"architectures": ["DFlashDraftModel"]}),
    ("dspark", {"markov_rank": 0}),
    ("dspark-speculators", {"speculators_model_type": "dflash", "architectures": ["DFlashDraftModel"]}),
    ("dflash-pairs", {"markov_rank": None}),
    ("dflash-pairs", {"dflash_config": {"mask_token_id": MASK_TOKEN, "target_layer_ids": [1, 3, 5], "shift_label": True}}),
]


@pytest.mark.parametrize(("name", "change"), FLIPS, ids=str)
def test_a_flag_told_wrongly_changes_the_draft(target_dir: Path, tmp_path: Path, name: str, change: dict[str, Any]) -> None:
    """So that no flag is read and then forgotten."""
    wrong = with_levels(write_block_head(name, tmp_path, target_dir), 4)
    changed(tmp_path, change)
    with pytest.raises(AssertionError):
        check_trees(wrong, target_dir, (4, 3, 12), 3, **DFLASH)


@torch.inference_mode()
@pytest.mark.parametrize("name", ["dflash-windows", "dspark"])
def test_how_often_it_foresees_a_token(written: dict[str, Written], target_dir: Path, name: str) -> None:
    """By the slow twin: what it makes of a block after each of the target's own tokens."""
    config = make_config(target_dir, written[name].directory, (3, 2, 6), speculative_draft_model_quantization="none", **DFLASH)
    info = model_info(config)
    models = load_models(config, info)
    probe = FitProbe(models, config, info.tokenizer, num_new_tokens=6)
    assert models.head
    hits, log_probs = probe.guesses(models.head)
    assert models.head.block
    slow, row = with_levels(written[name], MOST_IN_A_BLOCK - models.head.block.first_row).slow, 0
    for text, prompt_length in zip(probe._texts, probe.prompt_lengths, strict=True):
        features = true_features(target_dir, [*text, 0], LAYERS)
        for length in range(prompt_length, len(text) + 1):
            expected = slow.logits_after(text[:length], features[: length - 1], ()).log_softmax(-1)
            assert int(expected.argmax()) == probe.labels[row] or not hits[row]
            torch.testing.assert_close(log_probs[row], expected[probe.labels[row]], rtol=1e-3, atol=1e-3)
            row += 1
    assert row == len(hits) > 20
    names = [convention.description for convention in other_conventions(models.head, models.spec)]
    assert any("rope_theta" in name for name in names)
    assert not any("embedding" in name for name in names)


def test_what_a_token_says_of_the_next_is_narrowed_too(written: dict[str, Written], target_dir: Path) -> None:
    head = load_head(written["dspark-speculators"].directory, load_target(target_dir), "DFLASH", torch.float32, "cpu")[0]
    known = head.token_map.target_ids.tolist()
    narrowed, states, tokens = head.narrowed(torch.tensor(known[50:10:-3])), torch.randn(4, 64), torch.tensor([5, 6, 200, 0])
    expected = head.after(tokens, head.logits(states))[:, [known.index(token) for token in narrowed.token_map.target_ids.tolist()]]
    torch.testing.assert_close(narrowed.after(tokens, narrowed.logits(states)), expected, rtol=1e-5, atol=1e-5)


def test_trees_that_are_tried_are_no_deeper_than_it_guesses(written: dict[str, Written], target_dir: Path, head_dir: Path) -> None:
    trees = [TreeShape(steps, 2, 12) for steps in (3, BLOCK_SIZE - 1, BLOCK_SIZE)]
    for own, options, expected in ((written["dflash"].directory, DFLASH, trees[:2]), (head_dir, {}, trees)):
        config = make_config(target_dir, own, (3, 2, 6), **options)
        assert load_models(config, model_info(config)).fitting(trees) == expected


def changed(directory: Path, change: dict[str, Any]) -> None:
    file = directory / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **change}))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"dflash_config": {"target_layer_ids": [1]}}, "names no mask token: set dflash_config.mask_token_id to one of the 262"),
        ({"dflash_config": {"mask_token_id": 262, "target_layer_ids": [1]}}, "names the mask token 262"),
        ({"dflash_config": {"mask_token_id": 5}}, "has no dflash_config.target_layer_ids: set it to the layers"),
        ({"dflash_config": {"mask_token_id": 5, "target_layer_ids": [8]}}, "wants features of layer 9, but the target has 8"),
        ({"layer_types": ["full_attention"]}, "layer_types in .* names 1 of its 2 layers"),
        ({"layer_types": ["sliding_attention"] * 2}, "has layers of sliding_attention, and no sliding_window"),
        (
            {"dflash_config": {"mask_token_id": 5, "target_layer_ids": [1], "selector_rank": 4}},
            "has selector_rank: drafters .*DFlash 2",
        ),
        ({"model_type": "gemma4_text"}, "layers are those of gemma4_text, which is not supported"),
        ({"markov_rank": 4, "markov_head_type": "rnn"}, "markov_head_type rnn .* is not supported, vanilla is"),
        ({"block_size": 1}, "block_size in the head's config.json is 1"),
        ({"hidden_size": 48}, "hidden_size is 48 and the target's 64, .* made for another target"),
    ],
    ids=lambda value: "" if isinstance(value, str) else None,
)
def test_what_does_not_fit(target_dir: Path, tmp_path: Path, change: dict[str, Any], words: str) -> None:
    write_block_head("dflash", tmp_path, target_dir)
    changed(tmp_path, change)
    with pytest.raises(ValueError, match=words):
        make_core(target_dir, tmp_path, (3, 2, 6), **DFLASH)


def test_what_is_asked_of_it_wrongly(written: dict[str, Written], target_dir: Path, tmp_path: Path) -> None:
    directory = written["dflash"].directory
    with pytest.raises(ValueError, match=f"num-steps {BLOCK_SIZE} is more than the head guesses: .* use at most {BLOCK_SIZE - 1}"):
        make_core(target_dir, directory, (BLOCK_SIZE, 2, 10), **DFLASH)
    with pytest.raises(ValueError, match=f"num-steps {BLOCK_SIZE} is more than the head guesses: .* use at most {BLOCK_SIZE - 1}"):
        make_core(target_dir, written["dspark"].directory, (BLOCK_SIZE, 2, 10), **DFLASH)
    with pytest.raises(ValueError, match="holds a head of kind DFLASH: use --speculative-algorithm DFLASH, not EAGLE3"):
        make_core(target_dir, directory, (3, 2, 6))
    eagle3 = write_head("eagle3-vicuna", tmp_path, target_dir).directory
    with pytest.raises(ValueError, match="holds a head of kind EAGLE3: use --speculative-algorithm EAGLE3, not DFLASH"):
        make_core(target_dir, eagle3, (3, 2, 6), **DFLASH)
    with pytest.raises(ValueError, match="DFLASH needs --speculative-draft-model-path"):
        make_core(target_dir, None, (3, 2, 6), speculative_draft_model_path=None, **DFLASH)
