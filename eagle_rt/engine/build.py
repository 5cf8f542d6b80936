"""From a config to a running engine."""

import time
from contextlib import ExitStack, nullcontext

from eagle_rt.config import EngineConfig
from eagle_rt.engine.assemble import make_core
from eagle_rt.engine.calibrate import measured_costs
from eagle_rt.engine.capture import capture_steps
from eagle_rt.engine.compile import compile_passes
from eagle_rt.engine.core import EngineCore, run_to_end
from eagle_rt.engine.fit import fitted
from eagle_rt.engine.gathering import PassCosts
from eagle_rt.engine.grammars import Grammars
from eagle_rt.engine.load import LoadedModels, ModelInfo, load_models
from eagle_rt.engine.params import SamplingParams
from eagle_rt.engine.profile import find_profile, with_profile
from eagle_rt.engine.second_process import compiling_beside
from eagle_rt.kernels.contenders import compile_now
from eagle_rt.kernels.packed_linear import prepare_products
from eagle_rt.resolve import resolve_device, resolve_tree
from eagle_rt.speculate.acceptance import AcceptanceEstimator
from eagle_rt.speculate.adaptive import AdaptivePolicy
from eagle_rt.speculate.compiled import compile_all
from eagle_rt.speculate.copy_policy import Copying, PayingCopies
from eagle_rt.speculate.costs import StepCosts
from eagle_rt.speculate.own_drafts import OwnStepper
from eagle_rt.speculate.tree_rules import RuledPolicy

# Alone and beside a shorter one: these make up most of the ways in which `tree_attention` cuts the reading of prompts.
PROMPT_LENGTHS = [lengths for length in (7, 70, 140, 280, 500) for lengths in ([length], [length, length // 2])]


def build_core(config: EngineConfig, info: ModelInfo) -> tuple[EngineCore, list[str]]:
    """Load the models, see that head and target fit, and make an engine over them; also what was decided for the user."""
    config = resolve_device(config)
    profile, profile_notes = find_profile(config, info)
    config = with_profile(config, profile)
    resolve_tree(config, config.device)  # a tree that cannot work is refused before anything is loaded
    with ExitStack() as failing:
        with compiling_beside() if config.device == "cpu" else nullcontext():
            models = load_models(config, info)
            failing.callback(models.target.close)
            models = fitted(models, config, info.tokenizer)
        core, notes = prepared_core(models, config, profile.costs if profile else None, profile.weights if profile else None)
        failing.pop_all()
    core.grammars = Grammars(info.tokenizer, models.spec.vocab_size, info.eos_token_ids)
    return core, profile_notes + notes


def prepared_core(
    models: LoadedModels, config: EngineConfig, costs: StepCosts | None = None, weights: list[float] | None = None
) -> tuple[EngineCore, list[str]]:
    """An engine over loaded models, its passes compiled, its steps captured and its trees sized as `config`, with its device
    resolved, says. costs: what steps cost, if that has been measured; weights: where the acceptance estimator begins."""
    core, notes = make_core(models, config)
    if config.device == "cpu":
        compile_now()
    if config.device == "cpu" or config.has_own_drafter or (config.tree_rule and not config.captures_steps):
        # Drafts of drawn tokens are ranked in another number format than those of greedy ones.
        warm_up(core, [[1]], num_tokens=3, temperatures=(0.0, 1.0))
    refuse_what_fails(core, config)
    if config.device != "cpu" and config.attention_backend == "triton":
        start = time.perf_counter()
        warm_up(core, PROMPT_LENGTHS, num_tokens=1, temperatures=(0.0,))
        notes.append(f"compiled the kernels that read prompts in {time.perf_counter() - start:.1f} s")
    if config.enable_torch_compile:
        notes += compile_passes(core, models, config)
    if config.captures_steps:
        notes += capture_steps(core, config)
    if config.sizes_trees and core.runner.host_stepper:
        notes += size_trees(core, config, costs, weights)
    if config.sizes_trees and config.copies_alone and core.runner.headless:
        notes += size_copies(core, config, costs)
    return core, notes


def refuse_what_fails(core: EngineCore, config: EngineConfig) -> None:
    """Raises ValueError if a class of the user's has failed in the steps so far."""
    host, headless = core.runner.host_stepper, core.runner.headless
    if host and isinstance(host.policy, RuledPolicy) and host.policy.failure:
        raise ValueError(f"--speculative-tree {config.tree_rule} fails: {host.policy.failure}")
    if isinstance(headless, OwnStepper) and headless.failure:
        raise ValueError(f"--speculative-algorithm {config.speculative_algorithm} fails: {headless.failure}")


def warm_up(core: EngineCore, prompt_lengths: list[list[int]], *, num_tokens: int, temperatures: tuple[float, ...]) -> None:
    """Answer prompts of such lengths, those together that stand together, with which everything is compiled or read from where that
    was kept, rather than with the first requests."""
    longest = core.scheduler.limits.context_length - num_tokens
    for temperature in temperatures:
        sampling = SamplingParams(temperature=temperature, max_new_tokens=num_tokens, ignore_eos=True)
        for lengths in prompt_lengths:
            run_to_end(core, [[0] * min(length, longest) for length in lengths], [sampling] * len(lengths))
            core.scheduler.forget_prefixes()
    core.forget_metrics()
    core.runner.pass_costs = PassCosts()  # these took what compiling takes


def size_trees(core: EngineCore, config: EngineConfig, costs: StepCosts | None, weights: list[float] | None) -> list[str]:
    """Let the engine draft what pays, by what steps cost here."""
    stepper = core.runner.host_stepper
    assert stepper
    costs, notes = costs_here(core, costs)
    estimator = AcceptanceEstimator(core.runner.tree_shape.num_steps, weights)
    most = config.speculative_disable_by_batch_size
    stepper.policy = AdaptivePolicy(costs, estimator, most)
    stepper.copying = Copying(PayingCopies(costs.of_verifying(), most)) if config.speculative_ngram == "auto" else None
    return notes


def size_copies(core: EngineCore, config: EngineConfig, costs: StepCosts | None) -> list[str]:
    """The same of an engine without a head, which copies what pays."""
    stepper = core.runner.headless
    assert stepper
    costs, notes = costs_here(core, costs)
    stepper.copying = Copying(PayingCopies(costs, config.speculative_disable_by_batch_size))
    return notes


def costs_here(core: EngineCore, known: StepCosts | None) -> tuple[StepCosts, list[str]]:
    """What steps cost, measured if it is not known, and what is said of that."""
    start, notes = time.perf_counter(), []
    prepare_products()
    if known is None:
        known = measured_costs(core)
        notes.append(f"measured what steps cost in {time.perf_counter() - start:.1f} s")
    compile_all()
    return known, notes
