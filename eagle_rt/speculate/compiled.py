"""What is asked for at every level of a draft, compiled."""

import numpy as np

from eagle_rt.kernels.compiled import compiled
from eagle_rt.speculate.compiled_costs import compile_costs
from eagle_rt.speculate.forest import Bools, Floats, Ints

# Prices of a node, in units of its parent's chance, for which the gain from children is remembered.
CHILD_PRICES = np.linspace(0.0, 1.0, 33)
# Prices of a node that are tried for a tree with children that are not drafted yet.
NODE_PRICES = np.concatenate((np.zeros(1), np.geomspace(0.005, 0.9, 20)))
# How many more nodes than there are so far a tree with another level may have.
MORE_NODES = 64
# How fast it is forgotten what children have gained, for each parent.
CHILD_RATE = 0.03
# Beyond these, more confidence of the head says nothing more.
LEAST_LOG_PROB, MOST_LOG_PROB, MIN_SCORE = -12.0, -6e-6, -20.0


@compiled
def descending(values: Floats) -> Ints:
    """Their places, the largest first, the earlier first where values are the same."""
    return np.argsort(-values, kind="mergesort")


@compiled
def chances_of_level(
    log_probs: Floats, scores: Floats, owners: Ints, lines: Floats, path: float, bias: float, parent_chances: Floats
) -> Floats:
    """[M] that nodes of one depth will be accepted: what the logistic function of the acceptance estimator says, times what it has
    said for their parents. log_probs, scores, owners: of the nodes; lines: [2, B] slopes and offsets of their owners, which more
    may follow."""
    chances = np.empty(len(log_probs))
    for node in range(len(log_probs)):
        own = min(max(log_probs[node], LEAST_LOG_PROB), MOST_LOG_PROB)
        above = max(scores[node] - log_probs[node], MIN_SCORE)
        slope, offset = lines[0, owners[node]], lines[1, owners[node]]
        logit = slope * (own - np.log(-np.expm1(own))) + offset + path * above + bias
        chance = 0.5 + 0.5 * np.tanh(0.5 * logit)
        chances[node] = parent_chances[node] * chance
    return chances


@compiled
def learn_children(
    children: Floats, num_seen: Floats, chances: Floats, owners: Ints, parents: Ints, depths: Ints, kinds: Ints
) -> None:
    """Move `children` [D, 2, P], what is gained below a node of depth d whose owner is of a kind, see `gain_below`, towards what M
    candidates say, those of a parent together; each parent counts as much as it is likely.

    num_seen: [D, 2] how often each was moved, counted here; parents: numbers of candidates, -1 for roots; kinds: [B] of the owners.
    """
    gains, sums = np.zeros(children.shape), np.zeros(num_seen.shape)
    for node in range(len(chances)):
        depth, kind, parent = depths[node] - 1, kinds[owners[node]], parents[node]
        weight = chances[parent] if parent >= 0 else 1.0
        if node == 0 or parent != parents[node - 1] or owners[node] != owners[node - 1]:
            sums[depth, kind] += weight
        for place, price in enumerate(CHILD_PRICES):
            gains[depth, kind, place] += max(0.0, chances[node] - weight * price)
    for depth in range(len(children)):
        for kind in range(2):
            total = sums[depth, kind]
            if total > 0.0:
                num_seen[depth, kind] += 1.0
                rate = max(1.0 - (1.0 - CHILD_RATE) ** total, 1.0 / (2.0 + num_seen[depth, kind]))
                children[depth, kind] += rate * (gains[depth, kind] / total - children[depth, kind])


@compiled
def gain_below(chance: float, node_price: float, gains: Floats) -> float:
    """Expected tokens of the children of a node of this chance, beyond the price of those that are worth it. gains: [P] expected at
    CHILD_PRICES, in units of the chance."""
    if node_price >= chance:
        return 0.0
    place = node_price / chance * (len(gains) - 1)
    left = int(place)
    return chance * (gains[left] + (place - left) * (gains[left + 1] - gains[left]))


@compiled
def best_places(order: Ints, owners: Ints, limits: Ints) -> Ints:
    """Those of `order`, best first, of which there are at most limits[owner] of each owner; ascending."""
    counts, is_chosen = np.zeros(len(limits), dtype=np.int64), np.zeros(len(owners), dtype=np.bool_)
    for place in order:
        owner = owners[place]
        is_chosen[place] = counts[owner] < limits[owner]
        counts[owner] += 1
    return is_chosen.nonzero()[0]


@compiled
def worth_of(chances: Floats, prices: Floats) -> tuple[int, float]:
    """How many of some nodes, the likeliest first, are best verified, where 0, 1, ... cost so much, and what that is worth."""
    count, most, total = 0, -prices[0], 0.0
    for number in range(len(chances)):
        total += chances[number]
        if total - prices[number + 1] > most:
            count, most = number + 1, total - prices[number + 1]
    return count, most


@compiled
def worth_expanding(
    chances: Floats,
    owners: Ints,
    kinds: Ints,
    top_ks: Ints,
    children: Floats,
    all_chances: Floats,
    verify_prices: Floats,
    level_prices: Floats,
) -> Ints:
    """The places, ascending, of the nodes of a level under which another level pays; none where it does not.

    chances, owners: [M] of the nodes, chances of 0 where no more may be drafted. kinds, top_ks: [B] of the owners, and how many of
    each are expanded at most; children: [2, P] what is gained below a node of each kind, see `gain_below`; all_chances: of all
    candidates so far; verify_prices, level_prices: of verifying 0, 1, ... nodes and of drafting a level below 0, 1, ... nodes.

    A tree is worth the chances of the nodes that are verified less their price, which is no line: what a node costs depends on how
    many more there are. For n of them that is at most, for any price of a node, n times it and what all nodes are above it, also
    children that are not drafted yet. The least of these bounds is what the likeliest n are worth (Lagrangian duality).
    """
    above = np.zeros(len(NODE_PRICES))
    for number, price in enumerate(NODE_PRICES):
        for chance in all_chances:
            above[number] += max(0.0, chance - price)
        for node in range(len(chances)):
            above[number] += gain_below(chances[node], price, children[kinds[owners[node]]])
    number, most, node_price = len(NODE_PRICES) - 1, 0.0, 0.0
    for count in range(len(verify_prices)):
        while number and above[number - 1] + NODE_PRICES[number - 1] * count <= above[number] + NODE_PRICES[number] * count:
            number -= 1
        worth = above[number] + NODE_PRICES[number] * count - verify_prices[count]
        if count == 0 or worth > most:
            most, node_price = worth, NODE_PRICES[number]
    gains = np.empty(len(chances))
    for node in range(len(chances)):
        gains[node] = gain_below(chances[node], node_price, children[kinds[owners[node]]])
    order = descending(gains)
    # The first of these are expanded, and what the others would have gained is not.
    best, now, left = 0, worth_of(all_chances[descending(all_chances)], verify_prices)[1], gains.sum()
    worth = 0.0
    for count in range(1, len(order) + 1):
        left -= gains[order[count - 1]]
        if most - left - level_prices[count] - now > worth:
            best, worth = count, most - left - level_prices[count] - now
    return best_places(order[:best], owners, top_ks)


@compiled
def grown(
    log_probs: Floats,
    scores: Floats,
    owners: Ints,
    values: Floats,
    so_far: Floats,
    depth: int,
    path_and_biases: Floats,
    members: Floats,
    is_lesson: bool,
    children: Floats,
    prices: Floats,
) -> tuple[Ints, Floats]:
    """A level of M nodes: `chances_of_level`, and under which of them another level pays, see `worth_expanding`; and the chances of
    all candidates, `so_far` before them.

    values: [M] what their parents are worth, overwritten with what they are. path_and_biases: [1 + D] of the estimator; members:
    [5, B], see `Members.numbers`; is_lesson: another level is drafted below the best node of each, whether it pays or not;
    children: [D + 1, 2, P]; prices: [2, N] see `PriceLists`, for MORE_NODES beyond all candidates at least.

    What does not change within a step comes in few arrays: right after a pass of a model each takes a microsecond to look at.
    """
    bias = path_and_biases[min(depth, len(path_and_biases) - 1)]
    values[:] = chances_of_level(log_probs, scores, owners, members, path_and_biases[0], bias, values)
    all_chances = np.concatenate((so_far, values))
    num_steps, top_ks = members[3], members[4].astype(np.int64)
    chances = values.copy()
    for node in range(len(chances)):
        if depth >= num_steps[owners[node]]:
            chances[node] = 0.0
    if not chances.any():
        return np.zeros(0, dtype=np.int64), all_chances
    is_chosen = np.zeros(len(chances), dtype=np.bool_)
    kinds, verify_prices = members[2].astype(np.int64), prices[0, : len(all_chances) + MORE_NODES + 1]
    is_chosen[worth_expanding(chances, owners, kinds, top_ks, children[depth], all_chances, verify_prices, prices[1])] = True
    if is_lesson:
        is_chosen[best_places(descending(chances), owners, np.minimum(top_ks, 1))] = True
    return (is_chosen & (chances > 0.0)).nonzero()[0], all_chances


@compiled
def worth_verifying(
    chances: Floats, owners: Ints, limits: Ints, prices: Floats, is_halved: bool
) -> tuple[Ints, int, float, float, float]:
    """The places, ascending, of the nodes that are worth verifying, of which 0, 1, ... cost so much; how many they are without the
    limits of their owners; the chance of the last one that is worth it: of the last of them, but no less than the best one of
    the others has, nor than what more of those would cost; and how many of the places will be accepted, and the variance of that.

    is_halved: only half of what is worth it, and one at least.
    """
    order = descending(chances)
    ordered = chances[order]
    count = worth_of(ordered, prices)[0]
    least, most = ordered[count] if count < len(ordered) else 0.0, ordered[count - 1] if count else 1.0
    next_price = 1.0
    for number in range(count + 1, len(prices)):
        next_price = min(next_price, (prices[number] - prices[count]) / (number - count))
    places = best_places(order[: (count + 1) // 2 if is_halved else count], owners, limits)
    said = variance = 0.0
    for place in places:
        chance = float(chances[place])
        said += chance
        variance += chance * (1.0 - chance)
    return places, count, min(most, max(least, next_price)), said, variance


@compiled
def worth_of_drafts(
    promises: Floats,
    node: float,
    node_paid: float,
    level_row: float,
    level_sequence: float,
    any_node: float,
    beyond: float,
    least_levels: int,
) -> Floats:
    """[N] of the drafts of sequences, which go as deep as pays: `Price.utility` of promises [N, D, R] at these prices of a node
    that has to be worth it, of one that is, of a row and of a sequence of each level past the first, and of anything at all; and
    what drafts that are worth anything have gained beyond that. Levels that have to be drafted may take more than they gain."""
    utilities = np.zeros(len(promises))
    for draft in range(len(promises)):
        most, total = -np.inf, 0.0
        for level in range(promises.shape[1]):
            for rank in range(promises.shape[2]):
                gain = promises[draft, level, rank] - node - (level_row if level else 0.0)
                if gain > 0.0:
                    total += gain + (node - node_paid)
            total -= level_sequence if level else 0.0
            if level + 1 >= least_levels:
                most = max(most, total)
        if most > any_node:
            utilities[draft] = max(0.0, most - any_node + beyond)
        else:
            utilities[draft] = min(0.0, most)
    return utilities


@compiled
def best_of_levels(owners: Ints, depths: Ints, chances: Floats, batch_size: int, num_levels: int, num_ranks: int) -> Floats:
    """[B, D, R] the R best chances of each owner's nodes at depths 1 to D, best first; what is deeper counts as at the last."""
    best = np.zeros((batch_size, num_levels, num_ranks))
    for node in range(len(owners)):
        ranked = best[owners[node], min(depths[node], num_levels) - 1]
        chance = chances[node]
        for rank in range(num_ranks):
            if chance > ranked[rank]:
                ranked[rank], chance = chance, ranked[rank]
    return best


@compiled
def surprises_of(
    chances: Floats, owners: Ints, parents: Ints, numbers: Ints, labels: Floats, batch_size: int
) -> tuple[Bools, Floats]:
    """[M] whether the parents of verified nodes were accepted, so that the target chose among siblings; and [B] the sums, for each
    owner, of what was chosen less its chance then. numbers: of the nodes, ascending; parents: by such numbers, -1 for roots."""
    is_asked, surprises = np.zeros(len(chances), dtype=np.bool_), np.zeros(batch_size)
    for node in range(len(chances)):
        chance = chances[node]
        is_asked[node] = parents[node] < 0
        if parents[node] >= 0:
            parent = np.searchsorted(numbers, parents[node])
            is_asked[node] = labels[parent] > 0
            chance /= max(chances[parent], 1e-9)
        if is_asked[node]:
            surprises[owners[node]] += labels[node] - chance
    return is_asked, surprises


def compile_all() -> None:
    """Now, rather than in the first steps: which takes some seconds where nothing is kept of an earlier time."""
    two, nobody, nothing = np.array([0.5, 0.5]), np.zeros(2, dtype=np.int64), np.zeros(2)
    chances, children = two.copy(), np.ones((2, 2, len(CHILD_PRICES)))
    grown(-two, -two, nobody, chances, nothing, 1, two, np.ones((5, 2)), True, children, np.zeros((2, MORE_NODES + 5)))
    learn_children(children, np.zeros((2, 2)), chances, nobody, nobody - 1, nobody + 1, nobody)
    worth_verifying(chances, nobody, nobody, np.zeros(3), False)
    worth_of_drafts(best_of_levels(nobody, nobody + 1, chances, 1, 2, 2), 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1)
    surprises_of(chances, nobody, nobody - 1, nobody, nothing, 1)
    compile_costs()
