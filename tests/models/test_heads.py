"""Every published head layout against a slow implementation: logits along a path, and whole trees, node for node."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import mtp_layouts
import numpy as np
import pytest
import torch
from engines import load_target, make_core, random_prompts
from head_layouts import EAGLE3_LAYOUTS, FINAL, LAYOUTS, Written, write_head
from torch import Tensor

from eagle_rt.attention.reference import ReferenceAttention
from eagle_rt.batch import Batch, HostRows
from eagle_rt.cache.pool import KVPool
from eagle_rt.engine.params import SamplingParams
from eagle_rt.engine.prepare import decode_sequences, host_sequences, sampling_batch
from eagle_rt.models.decoder import FINAL_NORM
from eagle_rt.models.heads.base import Head
from eagle_rt.models.heads.load import load_head, load_mtp_head
from eagle_rt.speculate.forest import pack
from eagle_rt.speculate.policy import FixedPolicy
from models.slow_head import SlowHead
from models.slow_trees import slow_tree, true_features

TREES = [(1, 3, 4), (3, 1, 4), (4, 3, 12), (5, 4, 16), (3, 8, 40)]
TEXT = random_prompts(1, seed=5, longest=40)[0] + [7, 8, 9]


@pytest.fixture(scope="session")
def glm(tmp_path_factory: pytest.TempPathFactory) -> Written:
    return mtp_layouts.write_nextn(tmp_path_factory.mktemp("glm"))


@pytest.fixture(scope="session")
def latents(tmp_path_factory: pytest.TempPathFactory) -> list[Written]:
    return [mtp_layouts.write_nextn(tmp_path_factory.mktemp(name), name) for name in ("glm4-moe-lite", "deepseek-v3")]


@pytest.fixture(scope="session")
def qwen3_5(tmp_path_factory: pytest.TempPathFactory) -> Written:
    return mtp_layouts.write_qwen3_5(tmp_path_factory.mktemp("qwen3.5"))


@pytest.fixture(scope="session")
def qwen3_5_experts(tmp_path_factory: pytest.TempPathFactory) -> Written:
    return mtp_layouts.write_qwen3_5(tmp_path_factory.mktemp("qwen3.5"), "qwen3.5-moe")


@pytest.fixture(scope="session")
def mimo(tmp_path_factory: pytest.TempPathFactory) -> Written:
    return mtp_layouts.write_mimo(tmp_path_factory.mktemp("mimo"))


@pytest.fixture(scope="session")
def written(tmp_path_factory: pytest.TempPathFactory, target_dir: Path) -> dict[str, Written]:
    return {name: write_head(name, tmp_path_factory.mktemp("heads") / name, target_dir) for name in LAYOUTS}


def algorithm(name: str) -> str:
    return "EAGLE3" if name in EAGLE3_LAYOUTS else "EAGLE"


def load(head_dir: Path, target_dir: Path, name: str = "EAGLE3") -> Head:
    return load_head(head_dir, load_target(target_dir), name, torch.float32, "cpu")[0]


@torch.inference_mode()
def logits_along(head: Head, text: list[int], features: Tensor, path: tuple[int, ...]) -> list[Tensor]:
    """Our head's logits after a text, and after each draft id of a path below it."""
    length = len(text) - 1
    pool = KVPool(head.rows, length + len(path), torch.float32, "cpu")

    def batch(first: int, tokens: list[int]) -> Batch:
        end = first + len(tokens)
        rows = torch.arange(first, end)
        return Batch(torch.tensor(tokens), rows, rows, (0, len(tokens)), HostRows((end,), (range(end),)), None)

    backend, mask_row = ReferenceAttention(torch.float32), head.mask_row
    rows = batch(0, text[1:])
    state = head.forward(rows.tokens, head.fuse(features), rows, pool, backend)[-1:]
    results = [head.logits(state)[0]]
    for depth, draft_id in enumerate(path):
        row = batch(length + depth, [mask_row.token if mask_row else int(head.token_map.target_ids[draft_id])])
        state = head.forward(row.tokens, mask_row.hidden[None] if mask_row else state, row, pool, backend)
        results.append(head.logits(state)[0])
    return results


def check_logits(head: Head, slow: SlowHead, target_dir: Path, layers: tuple[int, ...]) -> None:
    assert head.feature_layers == tuple(FINAL_NORM if layer == FINAL else layer for layer in layers)
    assert torch.equal(head.token_map.target_ids, slow.target_ids)
    features = true_features(target_dir, TEXT, layers)
    path = (3, 99, 0, 42)
    for depth, logits in enumerate(logits_along(head, TEXT, features, path)):
        expected = slow.logits_after(TEXT, features, path[:depth])
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", LAYOUTS)
def test_logits_at_depths_one_to_five(written: dict[str, Written], target_dir: Path, name: str) -> None:
    head = load(written[name].directory, target_dir, algorithm(name))
    check_logits(head, written[name].slow, target_dir, written[name].feature_layers)


def test_logits_of_a_targets_own_layer(mimo: Written) -> None:
    head, unused = load_mtp_head(mimo.directory, load_target(mimo.directory), torch.float32, "cpu")
    assert unused == []
    check_logits(head, mimo.slow, mimo.directory, mimo.feature_layers)


def test_logits_of_a_layer_with_experts(glm: Written) -> None:
    head, unused = load_mtp_head(glm.directory, load_target(glm.directory), torch.float32, "cpu")
    assert unused == []
    check_logits(head, glm.slow, glm.directory, glm.feature_layers)


def test_logits_of_a_layer_with_latents(latents: list[Written]) -> None:
    for own in latents:
        head, unused = load_mtp_head(own.directory, load_target(own.directory), torch.float32, "cpu")
        assert unused == []
        check_logits(head, own.slow, own.directory, own.feature_layers)


def test_logits_of_a_layer_with_gates(qwen3_5: Written, qwen3_5_experts: Written) -> None:
    for own in (qwen3_5, qwen3_5_experts):
        head, unused = load_mtp_head(own.directory, load_target(own.directory), torch.float32, "cpu")
        assert unused == []
        check_logits(head, own.slow, own.directory, own.feature_layers)


@torch.inference_mode()
def check_trees(written: Written, target_dir: Path, tree_shape: tuple[int, int, int], count: int, **options: Any) -> None:
    """By both drafters, the one with fixed shapes and the one that the host decides for; some contexts straight after the prompt,
    some after steps whose rows were drafted and then replaced."""
    options = {"page_size": 4, "chunked_prefill_size": 16, "speculative_score_sharpness": 1.0, **options}
    core = make_core(target_dir, written.directory, tree_shape, **options)
    for index, prompt in enumerate(random_prompts(count, seed=sum(tree_shape), longest=40)):
        core.submit(f"r{index}", prompt, SamplingParams(temperature=0, max_new_tokens=100, ignore_eos=True))
    for _ in range(2 * count + 2):
        core.step()
    requests = tuple(request for request in core.scheduler.running if not request.is_prefilling)
    assert len(requests) == count
    core.scheduler.plan()
    num_scratch = core.scheduler.limits.num_scratch
    drafter, host_stepper = core.runner.stepper.drafter, core.runner.host_stepper
    assert drafter
    assert host_stepper
    sequences = host_sequences(requests, num_scratch, 4)
    plan = FixedPolicy(None).begin(sequences, [0] * count)
    draft = host_stepper.drafter.draft(sequences, sampling_batch(list(requests), "cpu"), plan, 0.0, lambda part: None)
    kept = plan.keep(draft.candidates)
    packed = pack(np.array([request.tokens[-1] for request in requests]), draft.candidates[kept], kept)
    drafter._states[[request.state_row for request in requests]] = host_stepper.drafter.catch_up(sequences)
    tree = drafter.propose(decode_sequences(requests, num_scratch, 4, "cpu"))

    for row, request in enumerate(requests):
        expected = slow_tree(written, target_dir, request.tokens, tree_shape)
        found: list[tuple[int, ...]] = [()]
        for node in range(1, tree.num_nodes):
            found.append((*found[int(tree.parents[row, node])], int(tree.tokens[row, node])))
        assert set(found[1:]) == expected.keys()
        ragged: dict[int, tuple[int, ...]] = {packed.starts[row]: ()}
        for node in range(packed.starts[row] + 1, packed.starts[row + 1]):
            ragged[node] = (*ragged[int(packed.parents[node])], int(packed.tokens[node]))
        assert set(ragged.values()) - {()} == expected.keys()
        for node in range(1, tree.num_nodes):
            assert float(tree.scores[row, node]) == pytest.approx(expected[found[node]], abs=1e-3)


@pytest.mark.parametrize("tree_shape", TREES, ids=str)
def test_trees_of_every_shape(written: dict[str, Written], target_dir: Path, tree_shape: tuple[int, int, int]) -> None:
    check_trees(written["eagle3-yuhuili"], target_dir, tree_shape, 10)


@pytest.mark.parametrize("name", LAYOUTS)
def test_trees_of_every_layout(written: dict[str, Written], target_dir: Path, name: str) -> None:
    check_trees(written[name], target_dir, (5, 4, 16), 3, speculative_algorithm=algorithm(name))


def test_trees_of_a_targets_own_layer(mimo: Written, glm: Written, latents: list[Written], qwen3_5: Written) -> None:
    own = {"speculative_algorithm": "NEXTN", "speculative_draft_model_path": None}
    for written in (mimo, glm, *latents, qwen3_5):
        check_trees(written, written.directory, (5, 4, 16), 3, **own)


# A variant's flag, told wrongly: the layout it belongs to, and the fields of its config.json.
FLIPS: list[tuple[str, dict[str, Any]]] = [
    ("eagle-llama3", {"rope_theta": 10000.0}),
    ("eagle-vicuna", {"rope_theta": 500000.0}),
    ("eagle3-yuhuili", {"rope_theta": 500000.0}),
    ("eagle3-yuhuili", {"rms_norm_eps": 1.0}),
    ("eagle3-yuhuili", {"norm_before_residual": True}),
    ("eagle3-yuhuili", {"eagle_aux_hidden_state_layer_ids": [3, 4, 5]}),
    ("eagle3-yuhuili", {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 4, 5]}}),
    ("eagle3-specforge", {"rope_scaling": None}),
    ("eagle3-specforge", {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 3, 4]}}),
    ("eagle3-nvidia", {"eagle_config": {}}),
    ("eagle3-speculators", {"norm_before_residual": False}),
    ("eagle3-two-layers-vllm", {"norm_before_residual": True}),
    ("eagle3.1", {"norm_output": False}),
    ("eagle3-tied", {"tie_word_embeddings": False}),
    ("p-eagle", {"ptd_token_id": 17}),
    ("p-eagle-speculators", {"mask_token_id": 17}),
]


@pytest.mark.parametrize(("name", "change"), FLIPS, ids=str)
def test_a_flag_told_wrongly_changes_the_draft(target_dir: Path, tmp_path: Path, name: str, change: dict[str, Any]) -> None:
    """So that no flag is read and then forgotten; `norm_output` shows from depth 2 on."""
    right = write_head(name, tmp_path / "head", target_dir)
    file = right.directory / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **change}))
    head = load(right.directory, target_dir, algorithm(name))
    path = (3,)
    layers = tuple(FINAL if layer == FINAL_NORM else layer for layer in head.feature_layers)
    logits = logits_along(head, TEXT, true_features(target_dir, TEXT, layers), path)[-1]
    expected = right.slow.logits_after(TEXT, true_features(target_dir, TEXT, right.feature_layers), path)
    assert (logits - expected).abs().max() > 0.01


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("eagle-vicuna", "fc_bias"),
        ("eagle-qwen2", "q_bias"),
        ("eagle-llama3", "embedding"),
        ("eagle3-nvidia", "all_features_norm"),
        ("eagle3.1", "feature_norms"),
        ("eagle3.1-legacy", "feature_norms"),
        ("eagle3-speculators", "embedding"),
    ],
)
def test_a_part_that_only_some_files_hold_matters(written: dict[str, Written], target_dir: Path, name: str, part: str) -> None:
    """The slow twin without the part disagrees: the layouts' tests can tell."""
    slow = written[name].slow
    features = true_features(target_dir, TEXT, written[name].feature_layers)
    without: Any = {"feature_norms": [], "embedding": torch.zeros_like(slow.parts.embedding)}.get(part)
    if part == "q_bias":
        changed = replace(slow.parts, layers=[replace(slow.parts.layers[0], q_bias=None)])
    else:
        changed = replace(slow.parts, **{part: without})
    difference = SlowHead(changed).logits_after(TEXT, features, ()) - slow.logits_after(TEXT, features, ())
    assert difference.abs().max() > 0.01


@pytest.mark.parametrize(
    "changes", [{"hidden_first": False}, {"recursion_is_normed": False}, {"first_row_has_no_token": False}], ids=str
)
def test_the_conventions_of_mtp_matter(mimo: Written, changes: dict[str, bool]) -> None:
    features = true_features(mimo.directory, TEXT, (FINAL,))
    changed = SlowHead(replace(mimo.slow.parts, **changes)).logits_after(TEXT, features, (3,))
    assert (changed - mimo.slow.logits_after(TEXT, features, (3,))).abs().max() > 0.01


def test_narrowing_keeps_the_logits_of_what_is_left(written: dict[str, Written], target_dir: Path) -> None:
    for name in ("eagle-llama3", "eagle3-yuhuili"):
        head = load(written[name].directory, target_dir, algorithm(name))
        known = head.token_map.target_ids.tolist()
        wanted = torch.tensor([261, *known[50:10:-3], 0, 5])
        narrowed = head.narrowed(wanted)
        kept = [token for token in wanted.tolist() if token in known]
        assert narrowed.token_map.target_ids.tolist() == kept
        states = torch.randn(4, 64)
        places = [known.index(token) for token in kept]
        torch.testing.assert_close(narrowed.logits(states), head.logits(states)[:, places], rtol=1e-5, atol=1e-5)
        unknown = [token for token in range(262) if token not in known]
        if unknown:
            with pytest.raises(ValueError, match=f"none of the {len(unknown)} tokens"):
                head.narrowed(torch.tensor(unknown))
