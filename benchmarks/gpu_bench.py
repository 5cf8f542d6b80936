"""What the parts of the GPU benchmark measure: models, prompts and engines."""

import argparse
import gc
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from typing import Any

from benchmarks.gpu_kernels import copy_rate
from eagle_rt.bench.grow.in_memory import grown_models
from eagle_rt.bench.grow.shapes import SHAPES
from eagle_rt.bench.sweep import Setting, core_for
from eagle_rt.bench.workload import Workload, load_workload
from eagle_rt.config import EngineConfig
from eagle_rt.engine.core import EngineCore, run_to_end
from eagle_rt.engine.load import LoadedModels, load_models, model_info
from eagle_rt.engine.params import SamplingParams
from eagle_rt.resolve import DTYPES
from eagle_rt.tree_shape import NO_SPECULATION, TreeShape

TREES = [(3, 1, 4), (5, 1, 6), (3, 4, 16), (5, 4, 16), (5, 8, 32), (7, 10, 60)]
GREEDY = SamplingParams(temperature=0, max_new_tokens=128, ignore_eos=True)

Rows = list[dict[str, Any]]
Jobs = dict[str, Callable[[], Rows]]


class Bench:
    """What all parts measure, loaded when the first of them asks for it."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.device, self.is_quick = args, args.device, args.quick
        self.base = EngineConfig(
            device=args.device,
            dtype=args.dtype,
            quantization=args.quantization,
            speculative_algorithm="EAGLE3",
            speculative_ngram="off",
            speculative_fit_check="off",
            attention_backend=args.attention_backend,
            max_total_tokens=args.max_total_tokens,
            enable_torch_compile=args.enable_torch_compile,
        )
        self.info = model_info(self.base)
        self.sampling = replace(GREEDY, max_new_tokens=16 if args.quick else 128)
        self.trees = [TreeShape(*tree) for tree in (TREES[:1] if args.quick else TREES)]

    @cached_property
    def models(self) -> LoadedModels:
        if self.args.shape == "builtin":
            return load_models(self.base, self.info)
        context = 20480
        dtype, quantization = DTYPES[self.args.dtype], self.args.quantization
        return grown_models(SHAPES[self.args.shape], self.info, dtype, self.device, context, quantization)

    @property
    def heads(self) -> tuple[int, int, int]:
        """Of the target: query heads, key heads, and their dimensions."""
        shape = self.models.spec.shape
        return shape.num_heads, shape.num_kv_heads, shape.head_dim

    @cached_property
    def workload(self) -> Workload:
        return load_workload(self.args.dataset, self.args.dataset_dir, self.info.tokenizer, 2 if self.is_quick else 16)

    @cached_property
    def plain_texts(self) -> list[list[int]]:
        """Greedy ones, without speculation."""
        return self.texts(NO_SPECULATION)

    def texts(self, tree: TreeShape, **changes: Any) -> list[list[int]]:
        prompts = self.workload.prompts
        return run_to_end(self.core(tree, 4, **changes), prompts, [self.sampling] * len(prompts))

    def core(self, tree: TreeShape, batch_size: int = 1, *, is_adaptive: bool = False, **changes: Any) -> EngineCore:
        gc.collect()  # the last engine's cache and graphs
        return core_for(self.models, self.config(batch_size, **changes), Setting(batch_size, tree, is_adaptive))

    def config(self, batch_size: int, **changes: Any) -> EngineConfig:
        """With one graph, for just this batch size."""
        return replace(self.base, cuda_graph_bs=(batch_size,), **changes)

    @cached_property
    def copy_rate(self) -> float:
        """Bytes per second of a large copy."""
        return copy_rate(self.device, 2**24 if self.is_quick else 2**32)
