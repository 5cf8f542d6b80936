"""What texts have said before, grafted onto draft trees: fixed shapes, for steps that the host must not look into. Where it may,
`speculate/copies.py` does the same.

Source: prompt lookup decoding (Saxena, 2023).
"""

import torch
from torch import Tensor

from eagle_rt.tree.draft_tree import DraftTree

# How many of a text's last tokens are looked for, and how far back.
MOST_MATCHED, MOST_SEARCHED = 32, 16384


def copied_tokens(texts: Tensor, places: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """(the `count` tokens [B, count] that may follow, whether there are any [B]) of texts [B, T] whose last tokens stand at
    `places` [B]: what followed the latest of the longest runs of tokens that a text ends with and that stand in it before. What
    comes to the end of the text goes on with what it has copied.

    >>> copied_tokens(torch.tensor([[7, 1, 2, 3, 7, 1, 0]]), torch.tensor([5]), 5)
    (tensor([[2, 3, 7, 1, 2]]), tensor([True]))
    """
    places, following = places[:, None], torch.arange(texts.shape[1], device=texts.device)[None]
    still_matches = (following <= places) & (following > places - MOST_SEARCHED)
    lengths = torch.zeros_like(texts, dtype=torch.int64)
    for back in range(MOST_MATCHED):
        before, last = following - 1 - back, places - back
        tokens = texts.gather(1, before.clamp(min=0).expand_as(texts))
        still_matches = still_matches & (before >= 0) & (tokens == texts.gather(1, last.clamp(min=0)))
        lengths += still_matches
    start = (lengths * texts.shape[1] + following).argmax(dim=1, keepdim=True)
    numbers = torch.arange(count, device=texts.device) % (places + 1 - start).clamp(min=1)
    return texts.gather(1, (start + numbers).clamp(max=texts.shape[1] - 1)).long(), lengths.amax(dim=1) > 0


def graft(tree: DraftTree, copied: Tensor, is_found: Tensor, num_copied: int) -> DraftTree:
    """The trees [B, N] with num_copied further nodes of the tokens `copied` [B, M + num_copied], where `is_found` [B].

    What the head has drafted too, of the first M tokens, is taken as it is, and the new nodes go on below it, as likely as what
    they are below. Nodes that stand for none have a score of -inf.
    """
    num_nodes, most_merged = tree.num_nodes, copied.shape[1] - num_copied
    at, merged, still_merges = (torch.zeros_like(tree.tokens[:, :1]) for _ in range(3))
    still_merges = still_merges.bool() | is_found[:, None]
    for step in range(most_merged):
        is_child = (tree.parents == at) & (tree.tokens == copied[:, step : step + 1]) & (tree.scores > -torch.inf)
        still_merges = still_merges & is_child.any(dim=1, keepdim=True)
        at = torch.where(still_merges, is_child.int().argmax(dim=1, keepdim=True), at)
        merged = merged + still_merges
    numbers = torch.arange(num_copied, device=at.device).expand(len(at), -1)
    tokens, parents = copied.gather(1, merged + numbers), torch.where(numbers > 0, num_nodes - 1 + numbers, at)
    scores, is_real = tree.scores.gather(1, at).expand_as(tokens), is_found[:, None]
    return DraftTree(
        tokens=torch.cat((tree.tokens, torch.where(is_real, tokens, tree.tokens[:, :1])), dim=1),
        parents=torch.cat((tree.parents, torch.where(is_real, parents, 0)), dim=1),
        depths=torch.cat((tree.depths, torch.where(is_real, merged + 1 + numbers, 1)), dim=1),
        scores=torch.cat((tree.scores, scores.masked_fill(~is_real, -torch.inf)), dim=1),
    )
