"""Every Triton kernel against its torch twin: in Triton's interpreter on a CPU, natively on a GPU."""

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from eagle_rt.cache.pool import KVPool, RowShape
from eagle_rt.kernels import dispatch
from eagle_rt.kernels import noise as noise_twin
from eagle_rt.kernels.gate import GEGLU, SWIGLU, Gate
from eagle_rt.kernels.gate import gated as gated_twin
from eagle_rt.kernels.rms_norm import HeadNorms, RMSNorm
from eagle_rt.kernels.rotary import rotate
from eagle_rt.kernels.triton.add_rms_norm import add_rms_norm
from eagle_rt.kernels.triton.ancestors import ancestors
from eagle_rt.kernels.triton.cos_sin import cos_sin
from eagle_rt.kernels.triton.embed import embed
from eagle_rt.kernels.triton.filter_thresholds import filter_thresholds
from eagle_rt.kernels.triton.gated import gated
from eagle_rt.kernels.triton.gumbel_argmax import gumbel_argmax
from eagle_rt.kernels.triton.norms_side_by_side import norms_side_by_side
from eagle_rt.kernels.triton.penalize import penalize
from eagle_rt.kernels.triton.rerank import rerank
from eagle_rt.kernels.triton.rotate_and_write import rotate_and_write
from eagle_rt.kernels.triton.select_beam import select_beam
from eagle_rt.kernels.triton.top_children import KernelNoise, top_children
from eagle_rt.kernels.triton.tree_attention import mask_words
from eagle_rt.kernels.triton.walk import walk
from eagle_rt.models.rope import Rope, RopeSpec
from eagle_rt.speculate.penalties import Strengths, changed
from eagle_rt.speculate.sampler import SamplingBatch, filter_tokens, perturbed_logits, target_choice
from eagle_rt.speculate.triton_operations import TritonOperations
from eagle_rt.tree.draft_tree import DraftTree, ancestor_mask
from eagle_rt.tree.expand import Beam, Candidates, first_level, next_level
from eagle_rt.tree.rerank import rerank as rerank_twin
from eagle_rt.tree.verify import walk as walk_twin

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
SEEDS = st.integers(0, 2**31)
EPS = st.sampled_from([1e-6, 1e-2])


@pytest.fixture(autouse=True, scope="module")
def twins() -> Iterator[None]:
    """On a GPU too the twins are those in torch."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dispatch, "prefers_triton", lambda x: False)
        yield


def randn(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def randint(seed: int, low: int, high: int, *shape: int) -> Tensor:
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def close(found: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    torch.testing.assert_close(found, expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@settings(max_examples=20, deadline=None)
@given(rows=st.integers(0, 5), size=st.sampled_from([16, 80, 896]), adds=st.booleans(), dtype=st.sampled_from(DTYPES), seed=SEEDS)
def test_add_rms_norm(rows: int, size: int, adds: bool, dtype: torch.dtype, seed: int) -> None:
    x, delta, weight = (
        randn(seed, rows, size, dtype=dtype),
        randn(seed + 1, rows, size, dtype=dtype),
        randn(seed + 2, size, dtype=dtype),
    )
    total, normed = add_rms_norm(x, delta if adds else None, weight, 1e-5)
    expected = x + delta if adds else x
    assert torch.equal(total, expected)
    close(normed, RMSNorm(weight, 1e-5)(total), dtype)


@settings(max_examples=20, deadline=None)
@given(
    rows=st.integers(0, 5),
    size=st.sampled_from([3, 64, 1100]),
    gate=st.sampled_from([SWIGLU, GEGLU, Gate(1.702, 0.5, 1.0)]),
    dtype=st.sampled_from(DTYPES),
    seed=SEEDS,
)
def test_gated(rows: int, size: int, gate: Gate, dtype: torch.dtype, seed: int) -> None:
    x = randn(seed, rows, 2 * size, dtype=dtype)
    close(gated(x, gate), gated_twin(x, gate), dtype)


@settings(max_examples=10, deadline=None)
@given(rows=st.integers(0, 5), size=st.sampled_from([3, 64, 1100]), dtype=st.sampled_from(DTYPES), seed=SEEDS)
def test_embed(rows: int, size: int, dtype: torch.dtype, seed: int) -> None:
    embedding, tokens = randn(seed, 9, size, dtype=dtype), randint(seed, 0, 9, rows)
    assert torch.equal(embed(tokens, embedding), embedding[tokens])


@pytest.mark.parametrize("scale", [1.0, 1.25])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [80, 128])
def test_cos_sin(head_dim: int, dtype: torch.dtype, scale: float) -> None:
    """Angles are large, where an approximation would be far off."""
    kind, parameters = "yarn" if scale > 1 else "default", {"factor": 4.0, "attention_factor": scale}
    spec = RopeSpec(head_dim, head_dim - 16, 10000.0, kind, parameters, 2048)
    rope = Rope(spec, 2048, dtype, DEVICE)
    positions = torch.tensor([0, 1, 77, 2047, 131071], device=DEVICE)
    found = cos_sin(positions, rope._frequencies, rope._scales, dtype)
    for own, expected in zip(found, rope.cos_sin(positions), strict=True):
        close(own, expected, dtype)


@settings(max_examples=10, deadline=None)
@given(rows=st.integers(0, 4), sizes=st.sampled_from([(16, 16), (80, 896)]), dtype=st.sampled_from(DTYPES), eps=EPS, seed=SEEDS)
def test_norms_side_by_side(rows: int, sizes: tuple[int, int], dtype: torch.dtype, eps: float, seed: int) -> None:
    x, y = (randn(seed + index, rows, size, dtype=dtype) for index, size in enumerate(sizes))
    norms = [RMSNorm(randn(seed + 2, size, dtype=dtype), own_eps) for size, own_eps in zip(sizes, (eps, 1e-5), strict=True)]
    found = norms_side_by_side(x, norms[0].weight, norms[0].eps, y, norms[1].weight, norms[1].eps)
    close(found, torch.cat((norms[0](x), norms[1](y)), dim=1), dtype)


@settings(max_examples=30, deadline=None)
@given(
    tokens=st.integers(0, 5),
    kv_heads=st.integers(0, 3),
    group=st.sampled_from([1, 2, 7]),
    head_dim=st.sampled_from([16, 64, 80, 96, 128]),
    follows=st.sampled_from([None, False, True]),
    norms_values=st.booleans(),
    dtype=st.sampled_from(DTYPES),
    seed=SEEDS,
)
def test_rotate_and_write(
    tokens: int, kv_heads: int, group: int, head_dim: int, follows: bool | None, norms_values: bool, dtype: torch.dtype, seed: int
) -> None:
    """kv_heads: none where another layer keeps them; follows: whether norms follow turning; None for no norms."""
    heads = max(1, kv_heads) * group
    qkv = randn(seed, tokens, heads + 2 * kv_heads, head_dim, dtype=dtype)
    angles = randn(seed + 1, tokens, head_dim // 2).repeat(1, 2)[:, None]
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    sin[..., : head_dim // 2] *= -1
    of_queries, of_keys, of_values = (RMSNorm(randn(seed + index, head_dim, dtype=dtype), 1e-6) for index in (2, 3, 4))
    norms = None if follows is None else HeadNorms(of_queries, of_keys, follows, of_values if norms_values else None)
    pool, expected_pool = (KVPool([RowShape(kv_heads, head_dim)] * 2, 12, dtype, DEVICE) for _ in range(2))
    slots = torch.randperm(12, generator=torch.Generator().manual_seed(seed))[:tokens].to(DEVICE)

    queries = rotate_and_write(qkv, heads, cos, sin, norms, pool.storage[1], slots)

    turned, values = qkv.split((heads + kv_heads, kv_heads), dim=1)
    turned = norms(turned, heads) if norms and not follows else turned
    turned = rotate(turned, cos, sin)
    turned = norms(turned, heads) if norms and follows else turned
    values = norms.values(values) if norms and norms.values else values
    expected_pool.write(1, slots, torch.stack((turned[:, heads:], values), dim=1))
    close(queries, turned[:, :heads], dtype)
    close(pool.storage, expected_pool.storage, dtype)


def sampling_batch(
    temperatures: list[float], top_ks: list[int], top_ps: list[float], min_ps: list[float], seed: int
) -> SamplingBatch:
    return SamplingBatch(
        temperature=torch.tensor(temperatures, device=DEVICE),
        top_k=torch.tensor(top_ks, device=DEVICE),
        top_p=torch.tensor(top_ps, device=DEVICE),
        min_p=torch.tensor(min_ps, device=DEVICE),
        seeds=randint(seed, 0, 2**62, len(temperatures)),
        sampled=torch.tensor([row for row, t in enumerate(temperatures) if t > 0], dtype=torch.int64, device=DEVICE),
        has_filters=True,
    )


def thresholds_for(logits: Tensor, sampling: SamplingBatch) -> Tensor:
    return filter_thresholds(logits, sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p)


SETTINGS = st.tuples(
    st.sampled_from([0.0, 0.3, 1.0, 1.7]),
    st.sampled_from([0, 1, 5, 5000]),
    st.sampled_from([1.0, 0.9, 0.3]),
    st.sampled_from([0.0, 0.1]),
)


@settings(max_examples=15, deadline=None)
@given(chosen=st.lists(SETTINGS, min_size=1, max_size=3), vocab=st.sampled_from([2, 300, 4500]), has_ties=st.booleans(), seed=SEEDS)
def test_filter_thresholds(chosen: list[tuple[float, int, float, float]], vocab: int, has_ties: bool, seed: int) -> None:
    sampling = sampling_batch(*map(list, zip(*chosen, strict=True)), seed)
    logits = randn(seed, len(chosen), 2, vocab) * 3
    if has_ties:
        logits = logits.round()
    thresholds = thresholds_for(logits, sampling)
    for b, (temperature, top_k, top_p, min_p) in enumerate(chosen):
        if temperature == 0 or (top_k == 0 and top_p == 1 and min_p == 0):
            assert torch.isneginf(thresholds[b]).all()
            continue
        scaled = logits[b] / temperature
        setting = (torch.full((2,), value, device=DEVICE) for value in (top_k, top_p, min_p))
        expected = torch.isfinite(filter_tokens(scaled, *setting))
        found = scaled >= thresholds[b][:, None]
        # Where the mass of the kept tokens hits top-p within rounding, either cut is right.
        probabilities = scaled.softmax(-1)
        for row in (expected != found).any(dim=1).nonzero()[:, 0].tolist():
            assert probabilities[row][expected[row] != found[row]].max() < 1e-5 or top_p < 1
            in_top_k = scaled[row] >= scaled[row].topk(min(top_k or vocab, vocab)).values[-1]
            mass = probabilities[row][expected[row] & found[row]].sum() / probabilities[row][in_top_k].sum()
            assert abs(mass - top_p) < 1e-5


@settings(max_examples=15, deadline=None)
@given(chosen=st.lists(SETTINGS, min_size=1, max_size=3), vocab=st.sampled_from([2, 300, 4500]), seed=SEEDS)
def test_gumbel_argmax(chosen: list[tuple[float, int, float, float]], vocab: int, seed: int) -> None:
    sampling = sampling_batch(*map(list, zip(*chosen, strict=True)), seed)
    logits, positions = randn(seed, len(chosen), 3, vocab) * 3, randint(seed, 0, 9999, len(chosen), 3)
    thresholds = thresholds_for(logits, sampling)
    found = gumbel_argmax(logits, sampling.temperature, thresholds, sampling.seeds, positions)
    expected = target_choice(logits, positions, sampling)
    different = found != expected
    if different.any():  # two values within rounding of each other, or of a threshold
        rows = sampling.sampled
        tokens = torch.arange(vocab, device=DEVICE)
        values = logits.clone()
        values[rows] = perturbed_logits(logits, positions, sampling, tokens)
        gap = values.gather(2, expected[..., None]) - values.gather(2, found[..., None])
        assert gap[different].abs().max() < 1e-4


def test_gumbel_argmax_takes_the_lowest_of_equals_and_shows_nan() -> None:
    logits = torch.zeros(1, 3, 2100, device=DEVICE)
    logits[0, 0, [7, 1500, 2099]] = 1.0
    logits[0, 1, 1800] = torch.nan
    nothing = torch.full((1, 3), -torch.inf, device=DEVICE)
    zeros = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    found = gumbel_argmax(logits, zeros.float(), nothing, zeros, torch.zeros(1, 3, dtype=torch.int64, device=DEVICE))
    assert found.tolist() == [[7, 1800, 0]] == logits.argmax(-1).tolist()


def test_noise_is_the_twins_to_the_last_bits() -> None:
    # At temperature 1 over equal logits the argmax is the noise's own.
    seeds, positions = randint(1, 0, 2**62, 6), randint(2, 0, 2**40, 6, 4)
    sampling = SimpleNamespace(temperature=torch.ones(6, device=DEVICE))
    found = gumbel_argmax(
        torch.zeros(6, 4, 3000, device=DEVICE),
        sampling.temperature,
        torch.full((6, 4), -torch.inf, device=DEVICE),
        seeds,
        positions,
    )
    tokens = torch.arange(3000, device=DEVICE)
    expected = noise_twin.gumbel_noise(seeds.repeat_interleave(4), positions.flatten(), tokens).argmax(-1)
    assert torch.equal(found.flatten(), expected)


@settings(max_examples=25, deadline=None)
@given(
    shape=st.tuples(st.integers(1, 3), st.integers(1, 4)),
    width=st.sampled_from([16, 100, 2048, 4500]),
    top_k=st.integers(1, 10),
    kind=st.sampled_from(["plain", "ties", "nan", "noise", "out"]),
    sharpness=st.sampled_from([1.0, 1.5]),
    seed=SEEDS,
)
def test_top_children(shape: tuple[int, int], width: int, top_k: int, kind: str, sharpness: float, seed: int) -> None:
    logits, parent_scores = randn(seed, *shape, width) * 3, -randn(seed + 1, *shape).abs()
    noise, values = None, logits
    if kind == "ties":
        logits = values = logits.round()
    if kind == "nan":
        logits[0, 0, seed % width] = torch.nan
    if kind == "out":
        parent_scores[0, 0] = -torch.inf
    if kind == "noise":
        batch_size = shape[0]
        sampling = sampling_batch(
            [1.0, 0.0, 0.6][:batch_size], [0, 0, 12][:batch_size], [1.0] * batch_size, [0.0] * batch_size, seed
        )
        positions, ids = randint(seed, 0, 999, *shape), randint(seed, 0, 99999, width)
        noise = KernelNoise(sampling.temperature, sampling.seeds, thresholds_for(logits, sampling), positions, ids)
        values = logits.clone()
        perturbed = perturbed_logits(logits, positions, sampling, ids)
        values[sampling.sampled] = perturbed * sampling.temperature[sampling.sampled, None, None]
    tokens, scores = top_children(logits, parent_scores, top_k, sharpness, noise)
    assert all(len(set(row)) == top_k for row in tokens.flatten(0, 1).tolist())
    own = torch.log_softmax(values * sharpness, -1)
    expected = (parent_scores[..., None] + own.topk(top_k).values).nan_to_num(nan=-torch.inf, neginf=-torch.inf)
    torch.testing.assert_close(scores, expected, rtol=1e-4, atol=1e-4)
    reached = (parent_scores[..., None] + own.gather(2, tokens)).nan_to_num(nan=-torch.inf, neginf=-torch.inf)
    torch.testing.assert_close(scores, reached, rtol=1e-4, atol=1e-4)


def random_levels(
    seed: int, batch_size: int, num_steps: int, top_k: int, *, has_ties: bool, has_nan: bool
) -> tuple[Candidates, list[Beam]]:
    """The candidates and beams that the twin makes of random draft logits."""
    width = 40
    logits = [randn(seed, batch_size, width)] + [randn(seed + level, batch_size, top_k, width) for level in range(1, num_steps)]
    if has_ties:
        logits = [level.round() for level in logits]
    if has_nan and num_steps > 1:
        logits[1][0, 0, 3] = torch.nan
    candidates, beam = first_level(logits[0], top_k)
    beams = [beam]
    for level in logits[1:]:
        candidates, beam = next_level(candidates, beam, level)
        beams.append(beam)
    return candidates, beams


TREE_SHAPES = st.tuples(st.integers(1, 4), st.integers(1, 9))


@settings(max_examples=25, deadline=None)
@given(batch_size=st.integers(1, 3), shape=TREE_SHAPES, has_nan=st.booleans(), seed=SEEDS)
def test_select_beam(batch_size: int, shape: tuple[int, int], has_nan: bool, seed: int) -> None:
    num_steps, top_k = shape
    assume(num_steps > 1)
    candidates, beams = random_levels(seed, batch_size, num_steps, top_k, has_ties=False, has_nan=has_nan)
    num_words = -(-top_k * num_steps // 64)
    visible = mask_words(torch.nn.functional.pad(beams[0].visible, (0, num_words * 64 - top_k)))
    for level, beam in enumerate(beams[1:], start=1):
        own, num_before = candidates[level], sum(before.tokens.shape[1] for before in candidates[:level])
        found = Beam(*select_beam(own.scores, own.tokens, visible, top_k, level * top_k, num_before))
        visible = found.visible
        assert torch.equal(found.scores, beam.scores)
        if has_nan:
            return  # several at -inf: which of them is taken is open
        assert torch.equal(found.parent_rows, beam.parent_rows)
        assert torch.equal(found.candidates, beam.candidates)
        assert torch.equal(found.tokens, beam.tokens)
        padding = num_words * 64 - beam.visible.shape[-1]
        assert torch.equal(visible, mask_words(torch.nn.functional.pad(beam.visible, (0, padding))))


@settings(max_examples=30, deadline=None)
@given(batch_size=st.integers(1, 3), shape=TREE_SHAPES, has_ties=st.booleans(), has_nan=st.booleans(), data=st.data(), seed=SEEDS)
def test_rerank_ancestors_and_walk(
    batch_size: int, shape: tuple[int, int], has_ties: bool, has_nan: bool, data: st.DataObject, seed: int
) -> None:
    num_steps, top_k = shape
    candidates, _ = random_levels(seed, batch_size, num_steps, top_k, has_ties=has_ties, has_nan=has_nan)
    supply = sum(level.tokens.shape[1] for level in candidates)
    num_nodes = data.draw(st.integers(2, 1 + supply))
    target_ids, roots, starts = randint(seed, 0, 12, 40), randint(seed, 0, 99, batch_size), randint(seed, 0, 9999, batch_size)
    expected = rerank_twin(candidates, target_ids, roots, num_nodes)

    def joined(name: str) -> Tensor:
        return torch.cat([getattr(level, name) for level in candidates], dim=1)

    tree = DraftTree(*rerank(joined("scores"), joined("tokens"), joined("parents"), target_ids, roots, top_k, num_nodes))
    for name in ("tokens", "parents", "depths", "scores"):
        assert torch.equal(getattr(tree, name), getattr(expected, name)), name

    words, positions = ancestors(tree.parents, tree.depths, starts, num_steps)
    assert torch.equal(words, mask_words(ancestor_mask(tree.parents, num_steps)))
    assert torch.equal(positions, starts[:, None] + tree.depths)

    # A small vocabulary lets the choices meet drafts; siblings hold distinct tokens only where the map is one to one.
    tree = DraftTree(
        tree.tokens + 100 * torch.arange(num_nodes, device=DEVICE) * (seed % 2), tree.parents, tree.depths, tree.scores
    )
    choice = tree.tokens.gather(1, randint(seed, 0, num_nodes, batch_size, num_nodes))
    kept = walk_twin(tree, choice, num_steps)
    path, num_accepted, tokens = walk(tree.tokens, tree.parents, tree.scores, choice, num_steps)
    assert torch.equal(path, kept.path)
    assert torch.equal(num_accepted, kept.num_accepted)
    for b in range(batch_size):
        assert tokens[b, : num_accepted[b] + 1].tolist() == kept.tokens[b, : num_accepted[b] + 1].tolist()


def test_a_tree_of_more_than_two_words() -> None:
    num_nodes = 150
    parents = torch.tensor([[-1, *(max(0, node - 1 - node % 3) for node in range(1, num_nodes))]], device=DEVICE)
    depths = torch.zeros_like(parents)
    for node in range(1, num_nodes):
        depths[0, node] = depths[0, parents[0, node]] + 1
    max_depth = int(depths.max())
    words, _ = ancestors(parents, depths, parents[:, 0], max_depth)
    assert words.shape == (1, num_nodes, 3)
    assert torch.equal(words, mask_words(ancestor_mask(parents, max_depth)))


@settings(max_examples=20, deadline=None)
@given(batch_size=st.integers(1, 3), num_nodes=st.integers(1, 12), dtype=st.sampled_from(DTYPES), data=st.data(), seed=SEEDS)
def test_move_rows(batch_size: int, num_nodes: int, dtype: torch.dtype, data: st.DataObject, seed: int) -> None:
    max_depth = data.draw(st.integers(0, num_nodes - 1))
    paths = []
    for _ in range(batch_size):
        length = data.draw(st.integers(0, max_depth))
        nodes = sorted(data.draw(st.permutations(range(1, num_nodes)))[:length])
        paths.append([0, *nodes] + [-1] * (max_depth - length))
    path = torch.tensor(paths, device=DEVICE)
    rows = [RowShape(2, 8), RowShape(1, 24), RowShape(2, 8)]
    pool, expected = (KVPool(rows, 40, dtype, DEVICE) for _ in range(2))
    for kind, storage in pool.storages.items():
        storage.copy_(randn(seed, *storage.shape))
        expected.storages[kind].copy_(storage)
    slots = (
        torch.randperm(40, generator=torch.Generator().manual_seed(seed))[: batch_size * num_nodes].view(batch_size, -1).to(DEVICE)
    )
    steps = torch.arange(max_depth + 1, device=DEVICE)
    sources = slots.gather(1, torch.where(path >= 0, path, steps))
    expected.move(sources.flatten(), slots[:, : max_depth + 1].flatten())
    TritonOperations(1.0).keep(pool, slots, path)
    assert all(torch.equal(*pair) for pair in zip(pool.layers, expected.layers, strict=True))


@settings(max_examples=20, deadline=None)
@given(
    batch_size=st.integers(1, 3),
    num_rows=st.integers(0, 3),
    vocab_size=st.sampled_from([5, 1024, 1500]),
    is_mapped=st.booleans(),
    dtype=st.sampled_from(DTYPES),
    seed=SEEDS,
)
def test_penalize(batch_size: int, num_rows: int, vocab_size: int, is_mapped: bool, dtype: torch.dtype, seed: int) -> None:
    """Bit by bit: text depends on it. Rows of tables are longer than the vocabulary."""
    token_ids = torch.randperm(vocab_size, generator=torch.Generator().manual_seed(seed))[: 1 + vocab_size // 2].to(DEVICE)
    logits = 5 * randn(seed, batch_size * num_rows, len(token_ids) if is_mapped else vocab_size, dtype=dtype)
    logits[:, ::3], logits[:, 1::7] = 0, -torch.inf
    counts = randint(seed, 0, 3, batch_size, vocab_size + 1).int()
    is_seen, bias = randint(seed + 1, 0, 2, batch_size, vocab_size + 1).bool(), randn(seed + 2, batch_size, vocab_size + 1)
    strengths = Strengths(randn(seed + 3, batch_size), randn(seed + 4, batch_size), randn(seed + 5, batch_size).abs() + 0.1)
    found = penalize(logits, (counts, is_seen, bias), strengths, token_ids if is_mapped else None)
    columns = token_ids if is_mapped else slice(vocab_size)
    tables = (table[:, None, columns] for table in (counts, is_seen, bias))
    rows = logits.float().unflatten(0, (batch_size, num_rows))
    assert torch.equal(found, changed(rows, *tables, strengths.at((..., None, None))).flatten(0, 1))
