"""Captured steps. A CPU has no graphs: there the callable that would be captured runs over the same fixed places, and every way in
which it could read a tensor on the host is watched."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import Tree, make_config, random_prompts, run
from kernels.test_triton_compiles import KERNELS
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.interpreter import GridExecutor

from eagle_rt.engine import graphs
from eagle_rt.engine.build import PROMPT_LENGTHS, build_core, warm_up
from eagle_rt.engine.capture import ATTENTION_PARTS_BYTES, capture_steps, graph_batch_sizes, graph_bytes
from eagle_rt.engine.core import EngineCore
from eagle_rt.engine.graphs import GraphResult, StepGraph, StepGraphs, default_batch_sizes
from eagle_rt.engine.load import model_info, require_room
from eagle_rt.engine.params import SamplingParams, SpeculativeParams
from eagle_rt.engine.request import Request
from eagle_rt.engine.runner import Runner
from eagle_rt.kernels import dispatch
from eagle_rt.models import layers
from eagle_rt.models.spec import model_spec, read_config
from eagle_rt.speculate.tree_choice import PayingTree, trees_within
from eagle_rt.tree_shape import NO_SPECULATION, TreeShape

SETTINGS = [
    SamplingParams(temperature=0, max_new_tokens=7, ignore_eos=True),
    SamplingParams(temperature=1.0, seed=1, max_new_tokens=7, ignore_eos=True),
    SamplingParams(temperature=0.7, top_p=0.9, top_k=20, min_p=0.01, seed=2, max_new_tokens=5, ignore_eos=True),
]


@pytest.fixture(autouse=True)
def _time_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels take a thousand times as long in the interpreter."""
    monkeypatch.setattr(graphs, "NUM_TIMED", 1)


def make_captured(
    target_dir: Path,
    head_dir: Path,
    tree: Tree | None,
    batch_sizes: tuple[int, ...],
    speculative_tree: str = "fixed",
    **options: Any,
) -> EngineCore:
    options = {"attention_backend": "triton", "max_total_tokens": 512, "context_length": 64, **options}
    config = make_config(target_dir, head_dir, tree, cuda_graph_bs=batch_sizes, max_running_requests=4, **options)
    core, _ = build_core(config, model_info(config))
    # A CPU's own steps, which the host decides on, need not be measured first.
    notes = capture_steps(core, replace(config, speculative_tree=speculative_tree))
    assert "captured a step" in notes[0]
    return core


@pytest.mark.parametrize("tree", [None, (1, 1, 2), (3, 2, 6)], ids=str)
def test_a_captured_step_writes_the_same_texts(target_dir: Path, head_dir: Path, tree: Tree | None) -> None:
    prompts = random_prompts(3, seed=4, longest=20)
    config = make_config(target_dir, head_dir, None)
    expected = run(build_core(config, model_info(config))[0], prompts, SETTINGS)
    core = make_captured(target_dir, head_dir, tree, (2, 4), page_size=4)
    # Three requests run in the graph for four, then two and one of them in the graph for two.
    assert run(core, prompts, SETTINGS) == expected
    assert "step" in core.runner.clock.seconds


def test_a_batch_larger_than_all_graphs_runs_eagerly(target_dir: Path, head_dir: Path) -> None:
    prompts = random_prompts(3, seed=5, longest=9)
    core = make_captured(target_dir, head_dir, (2, 2, 4), (1,))
    texts = run(core, prompts, SETTINGS)
    assert {"verify", "step"} <= set(core.runner.clock.seconds)
    config = make_config(target_dir, head_dir, None)
    assert texts == run(build_core(config, model_info(config))[0], prompts, SETTINGS)


@pytest.mark.parametrize("batch_sizes", [(1, 4), (1, 2)], ids=str)
@pytest.mark.parametrize("tree", [None, (3, 2, 6)], ids=str)
def test_penalties_in_captured_steps(target_dir: Path, head_dir: Path, tree: Tree | None, batch_sizes: tuple[int, ...]) -> None:
    """Of some requests, which run beside others, end before them, and come after them; three are too many for a graph of two."""
    penalties = {"frequency_penalty": 0.7, "presence_penalty": 0.4, "repetition_penalty": 1.3}
    settings = [
        replace(SETTINGS[0], max_new_tokens=12),
        replace(SETTINGS[1], max_new_tokens=4, **penalties),
        replace(SETTINGS[0], max_new_tokens=9, **penalties),
        replace(SETTINGS[0], max_new_tokens=9, logit_bias=((65, 3.0), (66, -100.0)), frequency_penalty=1.5),
    ]
    prompts = random_prompts(4, seed=7, longest=9)
    config = make_config(target_dir, head_dir, None)
    expected = run(build_core(config, model_info(config))[0], prompts, settings)
    core = make_captured(target_dir, head_dir, tree, batch_sizes)
    assert run(core, prompts, settings) == expected
    assert "step" in core.runner.clock.seconds
    assert ("verify" in core.runner.clock.seconds) == (batch_sizes == (1, 2)), "all are captured that fit"
    # Nothing of them is left for those who come next.
    assert run(core, prompts[:1], SETTINGS[:1]) == run(build_core(config, model_info(config))[0], prompts[:1], SETTINGS[:1])


def test_captured_drafts_are_ranked_after_penalties(target_dir: Path, head_dir: Path) -> None:
    core = make_captured(target_dir, head_dir, (3, 1, 4), (1,))
    setting = replace(SETTINGS[1], max_new_tokens=8, logit_bias=((65, 100.0),))
    assert run(core, random_prompts(1, longest=9), [setting]) == [[65] * 8]
    assert core.current_metrics().mean_accepted_tokens > 3


def test_padding_harms_no_one(target_dir: Path, head_dir: Path) -> None:
    core = make_captured(target_dir, head_dir, (2, 2, 4), (4,))
    for index, prompt in enumerate(random_prompts(2, seed=6, longest=12)):
        core.submit(f"r{index}", prompt, SETTINGS[0])
    while core.scheduler.waiting or any(request.is_prefilling for request in core.scheduler.running):
        core.step()
    core.scheduler.plan()
    requests = tuple(core.scheduler.running)
    own = [page for request in requests for page in request.pages]
    pool, page_size = core.runner.stepper.pool, core.scheduler.limits.page_size
    num_pages = core.scheduler.limits.num_pages
    others = [page for page in range(num_pages) if page not in own]
    slots = (torch.tensor(others)[:, None] * page_size + torch.arange(page_size)).flatten()
    before = pool.storage[:, slots].clone()
    graph = core.runner.graphs.find(2, core.runner.tree_shape)
    with torch.inference_mode():
        first = graph.launch(requests, follows=False)().rows
        assert graph.launch(requests, follows=False)().rows == first
    assert len(first) == 2
    assert torch.equal(pool.storage[:, slots], before)
    assert pool.storage[:, num_pages * page_size :].any(), "padding writes to the page that is no one's"


def test_a_step_is_launched_before_the_one_ahead_is_read(target_dir: Path, head_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []
    original = StepGraph.launch

    def launch(self: StepGraph, requests: Any, *, follows: bool) -> Callable[[], GraphResult]:
        number = sum(entry.startswith("launch") for entry in log)
        log.append(f"launch {number}{' from where the last left off' if follows else ''}")
        read = original(self, requests, follows=follows)

        def logged() -> GraphResult:
            log.append(f"read {number}")
            return read()

        return logged

    core = make_captured(target_dir, head_dir, (2, 2, 4), (1,))
    monkeypatch.setattr(StepGraph, "launch", launch)
    run(core, random_prompts(1, seed=3), SETTINGS[:1])
    ahead = " from where the last left off"
    assert log[:5] == ["launch 0", "launch 1" + ahead, "read 0", "launch 2" + ahead, "read 1"]
    assert sum(entry.startswith("read") for entry in log) == sum(entry.startswith("launch") for entry in log)


def test_leaving_and_arriving_while_a_step_runs(target_dir: Path, head_dir: Path) -> None:
    """Requests that are aborted, end or come while the next step is under way: no page is lost, and no one else's text changes."""
    prompts = random_prompts(5, seed=9, longest=12)
    params = [replace(SETTINGS[index % 3], max_new_tokens=[25, 2, 8, 1, 5][index]) for index in range(5)]
    config = make_config(target_dir, head_dir, None)
    expected = run(build_core(config, model_info(config))[0], prompts, params)

    core = make_captured(target_dir, head_dir, (2, 1, 3), (2, 4), page_size=4)
    texts: dict[str, list[int]] = {str(index): [] for index in range(5)}
    steps: dict[str, int] = {}
    arriving, num_steps = list(range(5)), 0
    while core.has_work or arriving:
        if arriving and num_steps % 3 == 0:
            index = arriving.pop(0)
            core.submit(str(index), prompts[index], params[index])
        if num_steps == 9:
            steps["0"] = core.abort("0").stats.num_steps
        for event in core.step():
            assert not (num_steps >= 9 and event.request_id == "0"), "an aborted request gains nothing"
            texts[event.request_id] += event.tokens
            steps[event.request_id] = event.stats.num_steps
        core.scheduler.check_integrity()
        num_steps += 1
    assert texts["0"] == expected[0][: len(texts["0"])]
    assert len(texts["0"]) < 25
    assert [texts[str(index)] for index in range(1, 5)] == expected[1:]
    metrics = core.current_metrics()
    assert metrics.num_drafts == sum(steps.values()), "a step that a request did not live to see is not counted"
    assert metrics.num_generated_tokens == sum(map(len, texts.values()))
    assert core.scheduler.num_available_pages == core.scheduler.limits.num_pages


@pytest.mark.parametrize(("batch_sizes", "num_beginnings"), [((4,), 1), ((2, 4), 2)])
def test_others_go_on_where_someone_has_left(
    target_dir: Path, head_dir: Path, monkeypatch: pytest.MonkeyPatch, batch_sizes: tuple[int, ...], num_beginnings: int
) -> None:
    """The next step need not wait to be launched until the host knows who has ended: theirs are then rows of no one, of which
    nothing is learned. But where a smaller graph would do for the others, they begin anew in that."""
    prompts, params = random_prompts(3, seed=9, longest=12), [replace(SETTINGS[0], max_new_tokens=count) for count in (14, 3, 14)]
    config = make_config(target_dir, head_dir, None)
    expected = run(build_core(config, model_info(config))[0], prompts, params)
    core = make_captured(target_dir, head_dir, (2, 1, 3), batch_sizes, page_size=4)
    launches: list[tuple[int, bool]] = []
    original, learned = StepGraph.launch, []

    def launch(self: StepGraph, requests: tuple[Request, ...], *, follows: bool) -> Callable[[], GraphResult]:
        launches.append((sum(not request.finish_reason for request in requests), follows))
        return original(self, requests, follows=follows)

    monkeypatch.setattr(StepGraph, "launch", launch)
    monkeypatch.setattr(core.runner.choice, "learn", lambda tree, gains, ms, is_sampled: learned.append(len(gains)))
    assert run(core, prompts, params) == expected
    assert sum(not follows for _, follows in launches) == num_beginnings
    assert {count for count, follows in launches if follows} == {3, 2}
    assert learned == [count for count, _ in launches]
    limits = core.scheduler.limits
    inputs = core.runner.graphs.find(3, core.runner.tree_shape)._inputs
    if num_beginnings == 1:
        assert inputs._integers[2].tolist()[1:4:2] == [limits.max_running] * 2, "states that are no one's"
        assert inputs._integers[1].tolist()[1:4:2] == [0, 0], "which do not grow"
    assert core.scheduler.num_available_pages == limits.num_pages


class HostReadError(Exception):
    pass


class Watch(TorchDispatchMode):
    """Raises HostReadError for every operator that needs a tensor's values on the host, outside of kernels."""

    READING = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "equal", "is_nonzero")
    paused = False

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self.paused and any(name in str(function) for name in self.READING):
            raise HostReadError(str(function))
        return function(*args, **(kwargs or {}))


@contextmanager
def watching(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Within this, reading a tensor raises HostReadError, except inside a kernel, where the interpreter does nothing else."""
    watch = Watch()
    original = GridExecutor.__call__

    def launch(self: GridExecutor, *args: Any, **kwargs: Any) -> None:
        watch.paused = True
        try:
            original(self, *args, **kwargs)
        finally:
            watch.paused = False

    with monkeypatch.context() as patch:
        patch.setattr(GridExecutor, "__call__", launch)
        for name in ("item", "tolist", "numpy", "__bool__", "__int__", "__float__", "__index__"):
            reading = getattr(Tensor, name)

            def read(self: Tensor, *args: Any, reading: Callable[..., Any] = reading, name: str = name) -> Any:
                if not watch.paused:
                    raise HostReadError(name)
                return reading(self, *args)

            patch.setattr(Tensor, name, read)
        with watch, torch.inference_mode():
            yield


def test_kernels_are_launched_with_the_types_that_they_are_compiled_for(
    target_dir: Path, head_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The interpreter takes any types, a compiler does not: whole numbers among the settings once became tensors of them."""
    launched: dict[str, list[list[str]]] = {}
    original = GridExecutor.__call__

    def launch(self: GridExecutor, *args: Any, **kwargs: Any) -> None:
        kinds = [kind_of(str(arg.dtype).removeprefix("torch.")) for arg in args if isinstance(arg, Tensor)]
        launched.setdefault(self.fn.__name__, []).append(kinds)
        original(self, *args, **kwargs)

    monkeypatch.setattr(dispatch, "prefers_triton", lambda x: True)
    monkeypatch.setattr(dispatch, "HAS_NUMBA", False)
    monkeypatch.setattr(layers, "product_with", lambda weight, bias: None)
    core = make_captured(target_dir, head_dir, (3, 2, 6), (1,))
    monkeypatch.setattr(GridExecutor, "__call__", launch)
    sampling = replace(SETTINGS[0], temperature=1, top_k=3, top_p=1, min_p=0, frequency_penalty=1, max_new_tokens=3)
    run(core, random_prompts(1, longest=9), [sampling])
    compiled: dict[str, list[list[str]]] = {}
    for _, name, types, _ in KERNELS:
        compiled.setdefault(name, []).append([kind_of(own) for own in types.split() if own.startswith("*")])
    assert {"_attend", "_top_of_split", "_penalize", "_best_of_split", "_thresholds", "_move", "_embed"} <= set(launched)
    for name, found in launched.items():
        assert [kinds for kinds in found if kinds not in compiled[name]] == [], f"{name} is compiled for {compiled[name]}"


def kind_of(dtype: str) -> str:
    """Of a pointer, in torch's or Triton's words; which floats depends on the model."""
    words = {"int64": "i64", "int32": "i32", "uint8": "u8"} | dict.fromkeys(("float32", "fp32", "bf16", "fp16"), "float")
    return words.get(dtype.lstrip("*"), dtype.lstrip("*"))


def captured_callable(graph: StepGraph) -> Callable[[], Tensor]:
    return graph._step


@pytest.mark.parametrize("has_penalties", [False, True])
@pytest.mark.parametrize("tree", [None, (3, 2, 6)], ids=str)
def test_what_is_captured_never_reads_a_tensor(
    target_dir: Path, head_dir: Path, tree: Tree | None, has_penalties: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As on a GPU: a CPU's own kernels read their operands on the host.
    monkeypatch.setattr(layers, "product_with", lambda weight, bias: None)
    monkeypatch.setattr(dispatch, "HAS_NUMBA", False)
    core = make_captured(target_dir, head_dir, tree, (2,), speculative_tree="adaptive")
    captured = core.runner.graphs
    assert NO_SPECULATION in captured.trees
    with watching(monkeypatch):
        for shape in captured.trees:
            captured_callable(captured.find(2, shape, has_penalties=has_penalties))()


@pytest.mark.parametrize("read", [Tensor.item, Tensor.tolist, torch.nonzero, bool], ids=["item", "tolist", "nonzero", "bool"])
def test_one_that_did_would_be_caught(
    target_dir: Path, head_dir: Path, read: Callable[[Tensor], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    core = make_captured(target_dir, head_dir, (2, 2, 4), (1,))
    drafter = core.runner.stepper.drafter
    original = drafter.propose

    def reading(sequences: Any) -> Any:
        tree = original(sequences)
        name = getattr(read, "__name__", "")
        value = tree.tokens[0, 0]
        getattr(value, name)() if name in ("item", "tolist") else read(value)
        return tree

    drafter.propose = reading
    with pytest.raises(HostReadError), watching(monkeypatch):
        captured_callable(core.runner.graphs.find(1, core.runner.tree_shape))()


class InTurns:
    """Another tree in every step, and what was learned of them."""

    def __init__(self, trees: list[TreeShape]) -> None:
        self._trees, self.learned = cycle(trees), []

    def best(self, batch_size: int, *, is_sampled: bool) -> TreeShape:
        return next(self._trees)

    def learn(self, tree: TreeShape, gains: Sequence[int], ms: float, *, is_sampled: bool) -> None:
        assert ms > 0
        assert all(1 <= gain <= tree.max_depth + 1 for gain in gains)
        self.learned.append(tree)


@pytest.mark.parametrize("batch_sizes", [(4,), (1,)], ids=str)
def test_trees_may_change_from_step_to_step(target_dir: Path, head_dir: Path, batch_sizes: tuple[int, ...]) -> None:
    """Captured, each before the one ahead of it is read, and in batches that are too large: nothing of the texts changes, and a
    tree after a step without one accepts what it does after others."""
    prompts = random_prompts(3, seed=4, longest=20)
    settings = [replace(setting, max_new_tokens=9) for setting in SETTINGS]
    config = make_config(target_dir, head_dir, None)
    expected = run(build_core(config, model_info(config))[0], prompts, settings)
    core = make_captured(target_dir, head_dir, (2, 2, 5), batch_sizes, speculative_tree="adaptive")
    trees = core.runner.graphs.trees
    assert trees == trees_within(TreeShape(2, 2, 5))[::-1]
    core.runner.choice = InTurns(trees)
    assert run(core, prompts, settings) == expected
    assert core.runner.choice.learned[: len(trees)] == trees
    metrics = core.current_metrics()
    assert 0 < metrics.num_undrafted < metrics.num_drafts


def test_a_head_follows_while_nothing_is_drafted(target_dir: Path, head_dir: Path) -> None:
    """What a tree accepts after rests is what it accepts where there were none."""
    prompts, setting = random_prompts(1, seed=8), [replace(SETTINGS[0], max_new_tokens=16)]
    tree, states = TreeShape(2, 1, 3), []
    core = make_captured(target_dir, head_dir, (2, 1, 3), (1,), speculative_tree="adaptive")
    by_position = states_by_position(core)
    for trees in ([tree], [NO_SPECULATION, NO_SPECULATION, tree]):
        core.runner.choice = InTurns(trees)
        run(core, prompts, setting)
        states.append(dict(by_position))
        by_position.clear()
    always, seldom = states
    shared = set(always) & set(seldom)
    assert len(shared) > 3
    for position in shared:
        torch.testing.assert_close(seldom[position], always[position])


def states_by_position(core: EngineCore) -> dict[int, Tensor]:
    """Of the first state row, filled while the engine runs: the head's state by where the last token stands."""
    drafter, states = core.runner.stepper.drafter, {}
    for tree in core.runner.graphs.trees:
        own = core.runner.graphs.find(1, tree)._stepper.drafter
        assert own._states is drafter._states, "all trees go on from the same states"
        original = own.propose

        def propose(sequences: Any, original: Callable[..., Any] = original) -> Any:
            row = int(sequences.state_rows[0])
            states[int(sequences.positions[0])] = drafter._states[row].clone()
            return original(sequences)

        own.propose = propose
    return states


def test_an_adaptive_engine_is_given_what_steps_take(target_dir: Path, head_dir: Path) -> None:
    core = make_captured(target_dir, head_dir, (2, 1, 3), (1, 2), speculative_tree="adaptive")
    assert isinstance(core.runner.choice, PayingTree)
    assert core.runner.host_stepper is None
    prompts, config = random_prompts(2, seed=5, longest=9), make_config(target_dir, head_dir, None)
    assert run(core, prompts, SETTINGS[1:]) == run(build_core(config, model_info(config))[0], prompts, SETTINGS[1:])


def test_steps_that_are_not_captured_rest_where_that_is_asked_for(target_dir: Path, head_dir: Path) -> None:
    """As they do on a GPU with our kernels and no graphs."""
    options = {"attention_backend": "triton", "max_total_tokens": 512, "speculative_disable_by_batch_size": 1}
    config = make_config(target_dir, head_dir, (2, 1, 3), **options)
    core, _ = build_core(config, model_info(config))
    core.runner._host_stepper = None
    prompts, plain = random_prompts(2, seed=5, longest=9), SpeculativeParams(enabled=False)
    for count, speculative, drafts in ((1, None, True), (2, None, False), (1, plain, False)):
        core.forget_metrics()
        own = SETTINGS[0] if speculative is None else replace(SETTINGS[0], speculative=speculative)
        run(core, prompts[:count], [own] * count)
        metrics = core.current_metrics()
        assert metrics.num_undrafted == (0 if drafts else metrics.num_drafts)
        assert metrics.num_drafts > 0


def test_requests_that_want_no_drafts_get_none(target_dir: Path, head_dir: Path) -> None:
    prompts, plain = random_prompts(2, seed=5, longest=9), SpeculativeParams(enabled=False)
    core = make_captured(target_dir, head_dir, (1, 1, 2), (2,), speculative_tree="adaptive")
    run(core, prompts, [replace(SETTINGS[0], speculative=plain)] * 2)
    assert core.current_metrics().num_undrafted == core.current_metrics().num_drafts > 0


def test_large_batches_draft_nothing_where_that_is_asked_for(target_dir: Path, head_dir: Path) -> None:
    core = make_captured(target_dir, head_dir, (2, 1, 3), (1, 2), speculative_disable_by_batch_size=1)
    prompts = random_prompts(2, seed=5, longest=9)
    run(core, prompts[:1], SETTINGS[:1])
    assert core.current_metrics().num_undrafted == 0
    core.forget_metrics()
    run(core, prompts, [SETTINGS[0]] * 2)
    assert core.current_metrics().num_undrafted >= 2 * 6


def test_capturing_that_fails_is_said_or_refused(target_dir: Path, head_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any) -> None:
        raise RuntimeError("out of graphs\nand much more")

    monkeypatch.setattr(StepGraphs, "__init__", fail)
    config = make_config(target_dir, head_dir, (2, 2, 4), attention_backend="triton", strict=True)
    core, _ = build_core(config, model_info(config))
    with pytest.raises(ValueError, match=r"capturing CUDA graphs failed, and --strict was given: out of graphs$"):
        capture_steps(core, config)
    config = make_config(target_dir, head_dir, (2, 2, 4), attention_backend="triton")
    assert capture_steps(core, config) == ["WARNING: capturing CUDA graphs failed, steps run eagerly: out of graphs"]
    assert core.runner.graphs is None


def test_batch_sizes(target_dir: Path) -> None:
    assert default_batch_sizes(1) == [1]
    assert default_batch_sizes(8) == [1, 2, 4, 8]
    assert default_batch_sizes(6) == [1, 2, 4, 6]
    assert graph_batch_sizes(make_config(target_dir, cuda_graph_bs=(9, 3), max_running_requests=5)) == [3, 5]
    assert graph_batch_sizes(make_config(target_dir, max_running_requests=2)) == [1, 2]
    with pytest.raises(ValueError, match="--cuda-graph-bs is 0"):
        make_config(target_dir, cuda_graph_bs=(0, 2))


def test_the_cache_leaves_room_for_the_graphs(target_dir: Path) -> None:
    spec = model_spec(read_config(target_dir))
    tree = TreeShape(3, 2, 8)
    config = replace(make_config(target_dir, attention_backend="triton", cuda_graph_max_bs=4), device="cuda")
    small = graph_bytes(replace(config, cuda_graph_bs=(1,)), spec, tree, torch.float16)
    assert small > 2 * 8 * spec.vocab_size * 6
    assert graph_bytes(config, spec, tree, torch.float16) - ATTENTION_PARTS_BYTES == 4 * (small - ATTENTION_PARTS_BYTES)
    for without in (
        replace(config, disable_cuda_graph=True),
        replace(config, device="cpu"),
        replace(config, attention_backend="torch"),
    ):
        assert graph_bytes(without, spec, tree, torch.float16) == 0


def test_a_gpu_too_small_for_the_target_is_named(target_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = model_spec(read_config(target_dir))
    needed = sum(file.stat().st_size for file in target_dir.glob("*.safetensors"))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (needed // 2, 2**30))
    with pytest.raises(ValueError, match=r"GiB in float32, and the GPU has 0\.0 of its 1\.0 GiB free"):
        require_room(spec, torch.float32, "cuda")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (2 * needed, 2**30))
    require_room(spec, torch.float32, "cuda")
    require_room(spec, torch.float32, "cpu")


def test_prompts_are_read_while_a_captured_step_runs(target_dir: Path, head_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    launch, prefill = StepGraph.launch, Runner.start_prefill

    def noted_launch(self: StepGraph, *args: Any, **kwargs: Any) -> Callable[[], GraphResult]:
        read = launch(self, *args, **kwargs)
        order.append("launch")

        def noted_read() -> GraphResult:
            order.append("read")
            return read()

        return noted_read

    def noted_prefill(self: Runner, *args: Any) -> Callable[[], list[int]]:
        order.append("prefill")
        return prefill(self, *args)

    core = make_captured(target_dir, head_dir, (2, 2, 4), (2,))
    core.submit("first", [1, 2, 3], SETTINGS[0])
    for _ in range(2):
        core.step()
    monkeypatch.setattr(StepGraph, "launch", noted_launch)
    monkeypatch.setattr(Runner, "start_prefill", noted_prefill)
    core.submit("second", [4, 5, 6, 7], SETTINGS[0])
    while "prefill" not in order:
        core.step()
    assert order[-3:] == ["launch", "prefill", "read"]


def test_warming_up_leaves_nothing_behind(target_dir: Path, head_dir: Path) -> None:
    """With prompts longer than the context, too."""
    config = make_config(target_dir, head_dir, (2, 2, 4), context_length=64, max_total_tokens=512)
    core, _ = build_core(config, model_info(config))
    num_pages = core.scheduler.num_available_pages
    warm_up(core, PROMPT_LENGTHS, num_tokens=1, temperatures=(0.0,))
    assert core.current_metrics().num_prompt_tokens == 0
    assert core.scheduler.num_available_pages == num_pages == core.scheduler.limits.num_pages
