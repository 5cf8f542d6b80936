"""What a tree would be, worked out without a cache from transformers' hidden states, a slow head and plain dictionaries."""

import json
from pathlib import Path
from typing import Any

import torch
from head_layouts import FINAL, Written
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen2ForCausalLM
from tree import brute_force


@torch.inference_mode()
def true_features(target_dir: Path, text: list[int], layers: tuple[int, ...]) -> Tensor:
    """[len(text) - 1, F] by transformers: the inputs of layers, or the final norm's output."""
    is_mimo = json.loads((target_dir / "config.json").read_text())["model_type"] == "mimo"
    loader: Any = Qwen2ForCausalLM if is_mimo else AutoModelForCausalLM
    model = loader.from_pretrained(target_dir, attn_implementation="eager", dtype=torch.float32)
    states = model(torch.tensor([text[:-1]]), output_hidden_states=True).hidden_states
    # transformers' last hidden state has been through the final norm.
    return torch.cat([states[-1 if layer == FINAL else layer][0] for layer in layers], dim=-1)


@torch.inference_mode()
def slow_tree(head: Written, target_dir: Path, text: list[int], tree_shape: tuple[int, int, int]) -> dict[tuple[int, ...], float]:
    """The scores of the nodes under a text's last token, by their paths of target ids."""
    num_steps, top_k, num_nodes = tree_shape
    features = true_features(target_dir, text, head.feature_layers)
    cache: dict[brute_force.Path, list[float]] = {}

    def logits_after(path: brute_force.Path) -> list[float]:
        if path not in cache:
            cache[path] = head.slow.logits_after(text, features, path).tolist()
        return cache[path]

    scores = brute_force.expand(num_steps, top_k, logits_after)
    paths = list(scores)
    chosen = brute_force.best_subtree(list(scores.values()), num_nodes - 1)
    target_ids = head.slow.target_ids.tolist()
    return {tuple(target_ids[draft] for draft in paths[node]): scores[paths[node]] for node in chosen}
