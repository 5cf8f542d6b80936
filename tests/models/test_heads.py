"""The EAGLE-3 head, and the trees that are drafted with it, against a slow implementation."""

import json
import shutil
from pathlib import Path

import checkpoints
import pytest
import torch
from engines import load_target, make_core, random_prompts
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from tree import brute_force

from eagle_rt.engine.prepare import decode_sequences
from eagle_rt.engine.request import SamplingParams
from eagle_rt.models.heads import load_eagle3_head
from models.slow_head import SlowHead

TREES = [(1, 3, 4), (3, 1, 4), (4, 3, 12), (5, 4, 16), (3, 8, 40)]


@torch.inference_mode()
@pytest.mark.parametrize("tree_shape", TREES, ids=str)
def test_trees_equal_the_slow_head_node_for_node(target_dir: Path, head_dir: Path, tree_shape: tuple[int, int, int]) -> None:
    """Ten contexts a shape: some straight after the prompt, some after steps whose rows were drafted and then replaced."""
    model = AutoModelForCausalLM.from_pretrained(target_dir, attn_implementation="eager")
    slow = SlowHead(head_dir, model.get_input_embeddings().weight)
    num_steps, top_k, num_nodes = tree_shape
    core = make_core(target_dir, head_dir, tree_shape, page_size=4, chunked_prefill_size=16)
    for index, prompt in enumerate(random_prompts(10, seed=sum(tree_shape), longest=40)):
        core.submit(f"r{index}", prompt, SamplingParams(temperature=0, max_new_tokens=100, ignore_eos=True))
    for _ in range(22):
        core.step()
    requests = tuple(request for request in core.scheduler.running if not request.is_prefilling)
    assert len(requests) == 10
    core.scheduler.plan()
    num_scratch = core.scheduler.limits.num_scratch
    tree = core.runner._drafter.propose(decode_sequences(requests, num_scratch, 4, "cpu"))

    for row, request in enumerate(requests):
        states = model(torch.tensor([request.tokens[:-1]]), output_hidden_states=True).hidden_states
        features = torch.cat([states[layer][0] for layer in (2, 4, 5)], dim=-1)
        cache: dict[brute_force.Path, list[float]] = {}

        def logits_after(path: brute_force.Path, request=request, features=features, cache=cache) -> list[float]:
            if path not in cache:
                cache[path] = slow.logits_after(request.tokens, features, path).tolist()
            return cache[path]

        scores = brute_force.expand(num_steps, top_k, logits_after)
        paths = list(scores)
        chosen = brute_force.best_subtree(list(scores.values()), num_nodes - 1)
        target_ids = (torch.arange(160) + slow.weights["d2t"]).tolist()
        expected = {tuple(target_ids[draft] for draft in paths[node]): scores[paths[node]] for node in chosen}

        found: list[tuple[int, ...]] = [()]
        for node in range(1, num_nodes):
            found.append((*found[int(tree.parents[row, node])], int(tree.tokens[row, node])))
        assert set(found[1:]) == expected.keys()
        for node in range(1, num_nodes):
            assert float(tree.scores[row, node]) == pytest.approx(expected[found[node]], abs=1e-3)


def load(head: Path, target: Path) -> object:
    return load_eagle3_head(head, load_target(target), torch.float32, "cpu")


def test_feature_layers_follow_the_config(target_dir: Path, tmp_path: Path) -> None:
    for given, expected in ((None, (2, 4, 5)), ([1, 3, 5], (2, 4, 6)), ([2, 4, 6], (2, 4, 6))):
        head_dir = checkpoints.write_eagle3_head(tmp_path / str(given), eagle_config={"eagle_aux_hidden_state_layer_ids": given})
        head, _ = load_eagle3_head(head_dir, load_target(target_dir), torch.float32, "cpu")
        assert head.feature_layers == expected


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": 128}, "hidden_size is 128 and the target's 64"),
        ({"vocab_size": 999}, "vocab_size is 999 and the target's 262"),
        ({"draft_vocab_size": 100}, r"lm_head\.weight .* has shape \[160, 64\]"),
        ({"intermediate_size": 97}, r"midlayer\.mlp\.gate_proj\.weight .* has shape \[96, 64\]"),
        ({"eagle_aux_hidden_state_layer_ids": [2, 4, 90]}, "features of layer 90"),
    ],
)
def test_a_head_that_does_not_fit_says_where(target_dir: Path, tmp_path: Path, change: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load(checkpoints.write_eagle3_head(tmp_path / "head", **change), target_dir)


def test_a_map_out_of_the_vocabulary_is_refused(target_dir: Path, head_dir: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(head_dir, tmp_path / "copy"))
    tensors = load_file(copy / "model.safetensors")
    tensors["d2t"][-1] += 500
    save_file(tensors, copy / "model.safetensors")
    with pytest.raises(ValueError, match="the target has only ids below 262"):
        load(copy, target_dir)
    del tensors["d2t"]
    save_file(tensors, copy / "model.safetensors")
    with pytest.raises(ValueError, match="no d2t tensor"):
        load(copy, target_dir)


def test_unused_tensors_are_reported(target_dir: Path, head_dir: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(head_dir, tmp_path / "copy"))
    tensors = load_file(copy / "model.safetensors")
    save_file({**tensors, "surprise.weight": torch.zeros(1)}, copy / "model.safetensors")
    _, unused = load_eagle3_head(copy, load_target(target_dir), torch.float32, "cpu")
    assert unused == ["surprise.weight"]
    config = json.loads((copy / "config.json").read_text())
    assert "rope_theta" not in config, "the layout that this suite imitates has none"
