"""Experts: the kernels for CPUs and, in Triton's interpreter on a CPU, for GPUs, against their twin, and that against a loop over
rows."""

from collections.abc import Callable, Iterator
from dataclasses import fields, replace

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from eagle_rt.kernels import dispatch
from eagle_rt.kernels import experts as twin
from eagle_rt.kernels import narrow_experts as narrow_experts_module
from eagle_rt.kernels.experts import ExpertTensors, Mixing
from eagle_rt.kernels.gate import SWIGLU, Gate
from eagle_rt.kernels.narrow_experts import narrow_experts
from eagle_rt.kernels.products import Quantization, experts_with, has_own_kernels
from eagle_rt.kernels.triton.mix_experts import GROUP_BLOCK, block_in, mix_experts
from eagle_rt.kernels.triton.route import route

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 4e-2, torch.float16: 4e-3}
COUNTS = st.sampled_from([(1, 1), (2, 2), (8, 2), (12, 5), (60, 4)])
SEEDS = st.integers(0, 2**31)
# So near that most are held to it.
CLAMPED = Gate(1.702, 0.6, 1.0)
GATES = st.sampled_from([SWIGLU, CLAMPED])


@pytest.fixture(autouse=True, scope="module")
def twins() -> Iterator[None]:
    """On a GPU too the twins are those in torch."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dispatch, "prefers_triton", lambda x: False)
        yield


def made(seed: int, *shape: int, dtype: torch.dtype) -> Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) / shape[-1] ** 0.5).to(DEVICE, dtype)


def made_weights(
    seed: int, count: int, size: int, hidden_size: int, dtype: torch.dtype, *, has_biases: bool = False
) -> ExpertTensors:
    weights = ExpertTensors(
        made(seed, count, hidden_size, dtype=dtype) * 2,
        made(seed + 1, count, 2 * size, hidden_size, dtype=dtype) * 2,
        made(seed + 2, count, hidden_size, size, dtype=dtype) * 4,
    )
    if not has_biases:
        return weights
    sizes = {"router_bias": (count,), "gate_and_up_bias": (count, 2 * size), "down_bias": (count, hidden_size)}
    biases = {name: made(seed + 3, *shape, dtype=dtype) * shape[-1] ** 0.5 for name, shape in sizes.items()}
    return replace(weights, **biases)


def on_cpu(weights: ExpertTensors) -> ExpertTensors:
    own = {field.name: getattr(weights, field.name) for field in fields(weights)}
    return ExpertTensors(**{name: None if value is None else value.cpu() for name, value in own.items()})


def taken(seed: int, num_rows: int, count: int, top_k: int) -> tuple[Tensor, Tensor]:
    """Shares, and experts of which a few have most rows."""
    generator = torch.Generator().manual_seed(seed)
    popularity = torch.rand(count, generator=generator) ** 4 + 1e-4
    experts = torch.multinomial(popularity.expand(num_rows, -1), top_k, generator=generator)
    return torch.rand(num_rows, top_k, generator=generator).to(DEVICE), experts.to(DEVICE, torch.int32)


def by_rows(x: Tensor, shares: Tensor, experts: Tensor, weights: ExpertTensors, mixing: Mixing) -> Tensor:
    """The obvious way, in float64."""
    gate = mixing.gate
    x, shares, gate_and_up, down = (values.double() for values in (x, shares, weights.gate_and_up, weights.down))
    output = torch.zeros_like(x)
    for row in range(len(x)):
        for share, expert in zip(shares[row], experts[row].tolist(), strict=True):
            of_input, of_output = (share, 1) if mixing.weighs_inputs else (1, share)
            halves = gate_and_up[expert] @ (of_input * x[row])
            halves += 0 if weights.gate_and_up_bias is None else weights.gate_and_up_bias[expert]
            gates, ups = halves.chunk(2)
            gates, ups = gates.minimum(torch.tensor(gate.limit)), ups.clamp(-gate.limit, gate.limit)
            added = down[expert] @ (gates * torch.sigmoid(gate.alpha * gates) * (ups + gate.shift))
            output[row] += of_output * (added if weights.down_bias is None else added + weights.down_bias[expert])
    return output


@settings(max_examples=25, deadline=None)
@given(
    num_rows=st.integers(1, 9),
    counts=COUNTS,
    gate=GATES,
    has_biases=st.booleans(),
    weighs_inputs=st.booleans(),
    seed=SEEDS,
)
def test_the_twin_is_a_loop_over_rows(
    num_rows: int, counts: tuple[int, int], gate: Gate, has_biases: bool, weighs_inputs: bool, seed: int
) -> None:
    mixing = Mixing(counts[1], True, gate, weighs_inputs=weighs_inputs)
    weights = made_weights(seed, counts[0], 16, 48, torch.float32, has_biases=has_biases)
    x, choice = made(seed, num_rows, 48, dtype=torch.float32) * 7, taken(seed, num_rows, *counts)
    found, expected = (add(x, *choice, weights, mixing).double() for add in (twin.add_experts, by_rows))
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def check_route(find: Callable[..., tuple[Tensor, Tensor]], logits: Tensor, mixing: Mixing, bias: Tensor | None = None) -> None:
    """Of sigmoids, in float32, so that the order is that of what was rounded as in `find`."""
    shares, experts = find(logits, mixing, bias)
    if mixing.gates_shared:
        of_shared, logits = logits[:, -1:].float().sigmoid(), logits[:, :-1]
    else:
        of_shared = torch.ones(1, 1, device=DEVICE)
    likely = logits.float().sigmoid() if mixing.by_sigmoid else logits.double().exp()
    wanted = likely if bias is None else likely + bias
    order = torch.tensor([sorted(range(logits.shape[1]), key=lambda place: (-row[place], place)) for row in wanted.tolist()])
    expected = order[:, : mixing.top_k].to(DEVICE)
    assert torch.equal(experts[:, : mixing.top_k].long(), expected)
    chosen, whole = likely.double().gather(1, expected), torch.ones(1, dtype=torch.float64, device=DEVICE)
    if mixing.normalizes:
        whole = chosen.sum(1, keepdim=True)
    elif not mixing.by_sigmoid:
        whole = likely.double().sum(1, keepdim=True)
    torch.testing.assert_close(shares[:, : mixing.top_k].double(), mixing.scale * chosen / whole, atol=1e-6, rtol=1e-5)
    assert shares.dtype == torch.float32
    torch.testing.assert_close(shares[:, mixing.top_k :], of_shared.expand(-1, mixing.num_shared).expand(len(shares), -1))
    assert (experts[:, mixing.top_k :] == torch.arange(mixing.num_shared, device=DEVICE) + logits.shape[1]).all()


@settings(max_examples=40, deadline=None)
@given(
    num_rows=st.integers(1, 5),
    counts=COUNTS,
    normalizes=st.booleans(),
    rounds=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    num_shared=st.integers(0, 2),
    gates_shared=st.booleans(),
    scale=st.sampled_from([1.0, 2.5]),
    seed=SEEDS,
)
def test_route(
    num_rows: int,
    counts: tuple[int, int],
    normalizes: bool,
    rounds: bool,
    dtype: torch.dtype,
    num_shared: int,
    gates_shared: bool,
    scale: float,
    seed: int,
) -> None:
    """With many equal logits where they are rounded to whole numbers."""
    logits = (made(seed, num_rows, counts[0] + gates_shared, dtype=torch.float32) * 9).to(dtype)
    logits = logits.round() if rounds else logits
    for find in (twin.route, route):
        mixing = Mixing(counts[1], normalizes, num_shared=num_shared, gates_shared=gates_shared, scale=scale)
        check_route(find, logits, mixing)


@settings(max_examples=40, deadline=None)
@given(
    num_rows=st.integers(1, 5),
    counts=COUNTS,
    normalizes=st.booleans(),
    has_bias=st.booleans(),
    num_shared=st.integers(0, 2),
    scale=st.sampled_from([1.0, 2.5]),
    seed=SEEDS,
)
def test_route_by_sigmoids(
    num_rows: int, counts: tuple[int, int], normalizes: bool, has_bias: bool, num_shared: int, scale: float, seed: int
) -> None:
    """So far apart that no rounding makes another order."""
    generator = torch.Generator().manual_seed(seed)
    wanted = 0.05 + 0.9 * torch.stack([torch.randperm(counts[0], generator=generator) for _ in range(num_rows)]) / counts[0]
    bias = 0.4 * torch.randn(counts[0], generator=generator) if has_bias else None
    logits = wanted.logit() if bias is None else (wanted - bias).clamp(0.01, 0.99).logit()
    mixing = Mixing(counts[1], normalizes, by_sigmoid=True, scale=scale, num_shared=num_shared)
    for find in (twin.route, route):
        check_route(find, logits.to(DEVICE), mixing, None if bias is None else bias.to(DEVICE))


@settings(max_examples=40, deadline=None)
@given(
    num_rows=st.integers(1, 5),
    groups=st.sampled_from([(2, 1, 4), (4, 2, 3), (3, 3, 5), (8, 4, 32)]),
    by_sigmoid=st.booleans(),
    normalizes=st.booleans(),
    seed=SEEDS,
)
def test_route_within_groups(num_rows: int, groups: tuple[int, int, int], by_sigmoid: bool, normalizes: bool, seed: int) -> None:
    """Against a loop over all groups; so far apart that no rounding makes another order."""
    num_groups, top_groups, size = groups
    generator, top_k = torch.Generator().manual_seed(seed), min(3, size)
    likely = torch.stack([torch.randperm(num_groups * size, generator=generator) for _ in range(num_rows)])
    wanted = 0.05 + 0.9 * likely / (num_groups * size)
    bias = 0.1 * torch.randn(num_groups * size, generator=generator) if by_sigmoid else torch.zeros(num_groups * size)
    logits = (wanted - bias).clamp(0.01, 0.99).logit() if by_sigmoid else 8 * wanted
    mixing = Mixing(top_k, normalizes, by_sigmoid=by_sigmoid, num_groups=num_groups, top_groups=top_groups)
    scores = logits.sigmoid() + bias if by_sigmoid else logits
    best_of_groups = scores.unflatten(1, (num_groups, size)).topk(2 if by_sigmoid else 1).values.sum(2).sort(1).values
    assume(best_of_groups.diff(dim=1).min() > 1e-4)
    for find in (twin.route, route):
        _, experts = find(logits.to(DEVICE), mixing, bias.to(DEVICE) if by_sigmoid else None)
        for row, own in enumerate(experts.tolist()):
            parts = [scores[row, group * size : (group + 1) * size].sort(descending=True).values for group in range(num_groups)]
            totals = [float(part[: 2 if by_sigmoid else 1].sum()) for part in parts]
            best = sorted(range(num_groups), key=lambda group: -totals[group])[:top_groups]
            places = [group * size + place for group in best for place in range(size)]
            assert own == sorted(places, key=lambda place: -float(scores[row, place]))[:top_k]


BALANCED = Mixing(3, True, by_sigmoid=True, scale=1.5, num_shared=1)


@pytest.mark.parametrize("mixing", [Mixing(3, False), Mixing(3, True), BALANCED, BALANCED._replace(normalizes=False)])
@pytest.mark.parametrize("find", [twin.route, route])
def test_what_is_no_number_stays_so_and_takes_experts_that_there_are(
    find: Callable[..., tuple[Tensor, Tensor]], mixing: Mixing
) -> None:
    logits = made(1, 3, 6, dtype=torch.float32)
    alone = find(logits[2:].clone(), mixing)
    logits[0, 2], logits[1] = torch.nan, torch.nan
    shares, experts = find(logits, mixing)
    # A sigmoid that is not beside others is its own expert's alone.
    own = shares[:2, :3].isnan()
    assert own.any(1).all() if mixing.by_sigmoid and not mixing.normalizes else own.all()
    assert all(len(set(row)) == 3 and set(row) <= set(range(6)) for row in experts[:, :3].tolist())
    assert torch.equal(shares[2:], alone[0])
    assert torch.equal(experts[2:], alone[1])


def test_sigmoids_that_are_all_nothing_count_nothing() -> None:
    for find in (twin.route, route):
        shares, _ = find(torch.full((2, 6), -60.0, device=DEVICE), BALANCED)
        assert (shares[:, :3] < 1e-5).all()
        assert (shares[:, 3] == 1).all()


@settings(max_examples=20, deadline=None)
@given(
    num_rows=st.sampled_from([1, 2, 7, 33, 70]),
    counts=COUNTS,
    sizes=st.sampled_from([(16, 48), (96, 128), (40 * 16, 256)]),
    dtype=st.sampled_from(list(TOLERANCE)),
    gate=GATES,
    has_biases=st.booleans(),
    weighs_inputs=st.booleans(),
    seed=SEEDS,
)
def test_mix_experts(
    num_rows: int,
    counts: tuple[int, int],
    sizes: tuple[int, int],
    dtype: torch.dtype,
    gate: Gate,
    has_biases: bool,
    weighs_inputs: bool,
    seed: int,
) -> None:
    weights = made_weights(seed, counts[0], *sizes, dtype, has_biases=has_biases)
    mixing = Mixing(counts[1], True, gate, weighs_inputs=weighs_inputs)
    x, choice = made(seed, num_rows, sizes[1], dtype=dtype) * sizes[1] ** 0.5, taken(seed, num_rows, *counts)
    expected = twin.add_experts(x, *choice, weights, mixing).double()
    errors = mix_experts(x, *choice, weights, mixing).double() - expected
    assert errors.abs().max() < TOLERANCE[dtype] * expected.abs().max()


@settings(max_examples=15, deadline=None)
@given(
    num_rows=st.sampled_from([1, 7, 70]),
    counts=COUNTS,
    sizes=st.sampled_from([(16, 48), (96, 128), (5 * 32, 320)]),
    quantization=st.sampled_from(["int8", "int4"]),
    gate=GATES,
    has_biases=st.booleans(),
    seed=SEEDS,
)
def test_mix_experts_of_few_bits(
    num_rows: int, counts: tuple[int, int], sizes: tuple[int, int], quantization: str, gate: Gate, has_biases: bool, seed: int
) -> None:
    weights = made_weights(seed, counts[0], *sizes, torch.bfloat16, has_biases=has_biases)
    mixing = Mixing(counts[1], True, gate)
    own = narrow_experts(weights, mixing, quantization)
    assert own
    rounded = replace(weights, gate_and_up=own.gate_and_up.unpacked(), down=own.down.unpacked())
    for found, given_weights in ((rounded.gate_and_up, weights.gate_and_up), (rounded.down, weights.down)):
        torch.testing.assert_close(found, given_weights, rtol=0, atol=float(given_weights.abs().max()) / 6)
    x = made(seed, num_rows, sizes[1], dtype=torch.bfloat16) * sizes[1] ** 0.5
    choice = taken(seed, num_rows, *counts)
    expected = twin.add_experts(x, *choice, rounded, mixing).double()
    errors = mix_experts(x, *choice, own, mixing).double() - expected
    assert errors.abs().max() < TOLERANCE[torch.bfloat16] * expected.abs().max()
    torch.testing.assert_close(own(x), twin.mix_experts(x, rounded, mixing))


@pytest.mark.parametrize("has_gate", [False, True])
@pytest.mark.parametrize("how", ["twin", "kernel"])
def test_shared_experts_that_are_stored_in_more_bits(how: str, has_gate: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those beside them stay in few, and nothing holds these as they were."""
    weights, x = made_weights(3, 6, 32, 64, torch.bfloat16), made(3, 5, 64, dtype=torch.bfloat16) * 8
    few = narrow_experts(weights, Mixing(2, True), "int4")
    assert few
    stored = replace(weights, gate_and_up=few.gate_and_up.unpacked(), down=few.down.unpacked())
    mixing = Mixing(2, True, by_sigmoid=True, scale=1.5, num_shared=2, gates_shared=has_gate)
    stored = replace(stored, router=stored.router[: 4 + has_gate].float())
    assert narrow_experts(stored, mixing, "stored").gate_and_up.count == 6
    stored.gate_and_up[4:], stored.down[4:] = weights.gate_and_up[4:], weights.down[4:]
    own = narrow_experts(stored, mixing, "stored")
    assert own
    assert (own.gate_and_up.count, own.count) == (4, 4)
    for held, stored_so in zip(own.unpacked(), (stored.gate_and_up, stored.down), strict=True):
        torch.testing.assert_close(held[:4], stored_so[:4], rtol=0, atol=float(stored_so.abs().max()) / 100)
        assert torch.equal(held[4:], stored_so[4:])
    assert all(part.untyped_storage().nbytes() == part.nbytes for part in own._apart)
    if how == "kernel":
        kernels = {"route": route, "mix_experts": mix_experts}
        for module in (twin, narrow_experts_module):
            monkeypatch.setattr(module, "triton_kernel", lambda name, x: kernels[name])
    found = own(x).double()
    monkeypatch.undo()
    expected = twin.mix_experts(x, stored, mixing).double()
    assert (found - expected).abs().max() < TOLERANCE[torch.bfloat16] * expected.abs().max()


def test_more_pairs_than_are_grouped_at_a_time() -> None:
    weights, x = made_weights(3, 12, 16, 48, torch.float32), made(3, 2 * GROUP_BLOCK // 5, 48, dtype=torch.float32)
    choice = taken(3, len(x), 12, 5)
    found, expected = (add(x, *choice, weights, Mixing(5, True)) for add in (mix_experts, twin.add_experts))
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("gate", [SWIGLU, CLAMPED])
def test_rows_do_not_matter_to_each_other(gate: Gate) -> None:
    weights, x = made_weights(5, 12, 32, 64, torch.bfloat16), made(5, 20, 64, dtype=torch.bfloat16) * 8
    shares, experts = taken(5, 20, 12, 3)
    mixing = Mixing(3, True, gate)
    mixed = mix_experts(x, shares, experts, weights, mixing)
    x[3] = torch.nan
    others = torch.arange(20, device=DEVICE) != 3
    again = mix_experts(x, shares, experts, weights, mixing)
    assert again[3].isnan().all()
    assert torch.equal(again[others], mixed[others])


def test_sizes_that_no_matrix_unit_takes_are_refused() -> None:
    assert [block_in(size) for size in (4096, 768, 1408, 48)] == [128, 128, 128, 16]
    with pytest.raises(ValueError, match="experts of 40 inputs have no kernels: their number must be a multiple of 16"):
        block_in(40)


@pytest.mark.skipif(not has_own_kernels(torch.zeros(1)), reason="no kernels of our own on this processor")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("quantization", ["none", "int8", "int4"])
@pytest.mark.parametrize(
    ("count", "mixing", "has_biases"),
    [
        (8, Mixing(2, True), False),
        (60, Mixing(4, False), False),
        (1, Mixing(1, True), False),
        (12, Mixing(4, True, CLAMPED), True),
        (12, BALANCED, False),
        (9, Mixing(4, False, by_sigmoid=True, num_shared=2), False),
        (12, Mixing(4, True, num_shared=2, gates_shared=True), False),
        (9, Mixing(2, False, by_sigmoid=True, num_shared=1, weighs_inputs=True), False),
    ],
)
def test_ours_for_cpus(count: int, mixing: Mixing, has_biases: bool, quantization: Quantization, dtype: torch.dtype) -> None:
    """Near the twin where it takes the same experts, and every row bit by bit as it comes out alone."""
    weights = on_cpu(made_weights(9, count, 32, 64, dtype, has_biases=has_biases))
    weights = replace(weights, router=weights.router[: count - mixing.num_shared + mixing.gates_shared])
    if mixing.by_sigmoid:
        router = weights.router.float()
        weights = replace(weights, router=router, choice_bias=0.3 * made(4, len(router), dtype=torch.float32).cpu())
    ours = experts_with(weights, mixing, quantization)
    assert ours
    x = made(9, 40, 64, dtype=dtype).cpu() * 8
    found = ours(x)
    own = replace(weights, gate_and_up=ours.gate_and_up.unpacked(), down=ours.down.unpacked())
    assert torch.equal(own.down, weights.down) == (quantization == "none")
    exact = twin.mix_experts(x, own, mixing)
    errors = (found - exact).abs().amax(1)
    # Rows are rounded beside weights of few bits: to sixteen, and to eight beside such of four.
    rounding = {"none": 0, "int8": 20 * TOLERANCE[torch.float32], "int4": 0.025}[quantization]
    tolerance = max(TOLERANCE[dtype], rounding) * exact.abs().max()
    assert (errors < tolerance).float().mean() > 0.9
    assert all(torch.equal(ours(x[row : row + 1])[0], found[row]) for row in range(len(x)))
    x[3] = torch.nan
    again = ours(x)
    assert again[3].isnan().all()
    assert torch.equal(again[4:], found[4:])
    weights.router[0, 0] = torch.nan
    assert experts_with(weights, mixing, quantization)(x).isnan().all()  # type: ignore[misc]


def test_sizes_that_fill_no_panels_take_the_twin() -> None:
    weights = on_cpu(made_weights(1, 4, 24, 64, torch.float32))
    assert experts_with(weights, Mixing(2, True)) is None
    with pytest.raises(ValueError, match=r"experts of \[64, 24\] have no kernels of int4: serve them as they are"):
        experts_with(weights, Mixing(2, True), "int4")
