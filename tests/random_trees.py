"""Made-up draft trees in tests."""

import random

import torch

from eagle_rt.tree.draft_tree import DraftTree


def random_tree(rng: random.Random, batch_size: int, num_nodes: int, vocab_size: int) -> DraftTree:
    """Trees whose siblings hold distinct tokens; where none is left, and now and then, a node stands for none."""
    columns = []
    for _ in range(batch_size):
        nodes, taken = [(rng.randrange(vocab_size), -1, 0, 0.0)], set()
        for node in range(1, num_nodes):
            parent = rng.randrange(node)
            free = [token for token in range(vocab_size) if (parent, token) not in taken]
            is_real = bool(free) and nodes[parent][3] > -float("inf") and rng.random() < 0.9
            token = rng.choice(free) if free else 0
            if is_real:
                taken.add((parent, token))
            score = nodes[parent][3] - rng.random() if is_real else -float("inf")
            nodes.append((token, parent, nodes[parent][2] + 1, score))
        columns.append(list(zip(*nodes, strict=True)))
    tokens, parents, depths, scores = (torch.tensor([own[place] for own in columns]) for place in range(4))
    return DraftTree(tokens, parents, depths, scores.float())
