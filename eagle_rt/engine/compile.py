"""`--enable-torch-compile`: compile the passes that decoding makes, and run each once before the first request comes."""

import time
from collections.abc import Iterable

from eagle_rt.config import EngineConfig
from eagle_rt.engine.capture import captured_trees
from eagle_rt.engine.core import EngineCore, run_to_end
from eagle_rt.engine.load import LoadedModels
from eagle_rt.engine.params import SamplingParams
from eagle_rt.models.heads.block_spec import BlockSpec
from eagle_rt.tree_shape import TreeShape

DEFAULT_MAX_BATCH = {"cpu": 1, "cuda": 8}


def compile_passes(core: EngineCore, models: LoadedModels, config: EngineConfig) -> list[str]:
    """Compile target and head for batches of up to --torch-compile-max-bs requests; what was compiled, and in what time.

    Where compiling fails the pass stays eager, unless --strict; so do all of models that no compiler is given.

    Raises:
        ValueError: under --strict, compiling failed.
    """
    if models.spec.delta_net or models.spec.shape.latent:
        problem = f"--enable-torch-compile: {models.spec.architecture} has layers that are not compiled"
        if config.strict:
            raise ValueError(f"{problem}, and --strict was given: leave it out")
        return [f"WARNING: {problem}: steps run eagerly"]
    start = time.perf_counter()
    max_batch = config.torch_compile_max_bs or DEFAULT_MAX_BATCH[config.device]
    max_batch = min(max_batch, config.max_running_requests)
    shape = core.runner.tree_shape
    batches = range(1, max_batch + 1)
    trees = captured_trees(config, shape) if config.captures_steps else [shape]
    target_rows, head_rows = rows_of_passes(trees, batches, models.head.block if models.head else None)
    passes = [models.target.compile(target_rows)]
    if models.head and shape.num_steps:
        passes.append(models.head.compile(head_rows))

    sampling = SamplingParams(temperature=0, max_new_tokens=2 * shape.max_depth + 3, ignore_eos=True)
    for batch in batches:
        run_to_end(core, [[0]] * batch, [sampling] * batch)
    core.forget_metrics()

    failures = {f"{count} rows: {error}" for compiled in passes for count, error in compiled.failures.items()}
    if failures and config.strict:
        raise ValueError(f"--enable-torch-compile failed, and --strict was given: {'; '.join(sorted(failures))}")
    counts = [", ".join(str(count) for count in compiled.row_counts) or "none" for compiled in passes]
    note = f"compiled in {time.perf_counter() - start:.1f} s: passes of the target with {counts[0]} rows"
    notes = [note + (f", of the head with {counts[1]}" if len(counts) > 1 else "")]
    return notes + [f"WARNING: --enable-torch-compile failed, this pass runs eagerly: {failure}" for failure in sorted(failures)]


def rows_of_passes(
    trees: Iterable[TreeShape], batch_sizes: Iterable[int], block: BlockSpec | None = None
) -> tuple[set[int], set[int]]:
    """The rows of every pass of the target, and of the head, that steps with these trees make. block: of a head that guesses so."""
    target_rows, head_rows = set(), set()
    for tree in trees:
        # What the target has confirmed is read by the head, then each level but the last is fed to it.
        own = {tree.max_depth + 1} | ({tree.top_k} if tree.num_steps > 1 else set())
        if block:
            own = {block.num_rows(tree.num_steps)}
        for batch_size in batch_sizes:
            target_rows.add(batch_size * tree.num_nodes)
            head_rows |= {batch_size * rows for rows in own}
    return target_rows, head_rows
