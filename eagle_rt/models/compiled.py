"""A model's pass, compiled for the few numbers of rows that decoding uses."""

from collections.abc import Callable, Iterable
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from eagle_rt.attention.cached import Attend, attending, opaque_attend


class CompiledPass:
    """`layers(tokens, positions, attend, *rest)`: compiled where the number of rows is one of `row_counts`, as it is elsewhere.

    Every row count has a compiled function of its own, which is why none of them checks at each call what it was made for.
    failures: the row counts whose compiling failed, and why; they stay eager.
    """

    def __init__(self, layers: Callable[..., Any], row_counts: Iterable[int]) -> None:
        self.failures: dict[int, str] = {}
        self._eager = layers
        self._compiled: dict[int, Callable[..., Any]] = {}
        self.add(row_counts)

    def add(self, row_counts: Iterable[int]) -> None:
        """Compile for these numbers of rows too."""
        for count in sorted(set(row_counts) - set(self._compiled) - set(self.failures)):
            self._compiled[count] = compiled(self._eager)

    @property
    def row_counts(self) -> list[int]:
        return sorted(self._compiled)

    def __call__(self, tokens: Tensor, positions: Tensor, attention: Attend, *rest: Any) -> Any:
        num_rows = len(tokens)
        function = self._compiled.get(num_rows)
        if function:
            try:
                with attending(attention):
                    return function(tokens, positions, opaque_attend, *rest)
            except Exception as error:
                self.failures[num_rows] = str(error).strip().split("\n")[0]
                del self._compiled[num_rows]
        return self._eager(tokens, positions, attention, *rest)


class CompilableLayers:
    """A model whose `_layers(tokens, positions, attend, *rest)` may run compiled."""

    _layers: Callable[..., Any]
    _compiled: CompiledPass | None = None

    def compile(self, row_counts: Iterable[int]) -> CompiledPass:
        """From now on passes of so many rows run compiled; each is compiled when it first runs."""
        if self._compiled is None:
            self._compiled = CompiledPass(self._layers, ())
        self._compiled.add(row_counts)
        return self._compiled

    def _run(self, tokens: Tensor, positions: Tensor, attention: Attend, *rest: Any) -> Any:
        return (self._compiled or self._layers)(tokens, positions, attention, *rest)


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` for arguments of one shape, compiled when it is first called, and unguarded."""

    def call(*args: Any) -> Any:
        return function(*args)

    # Compiled code is kept by the code object that it came from, so each needs one of its own.
    own = FunctionType(call.__code__.replace(), call.__globals__, call.__name__, call.__defaults__, call.__closure__)
    options: dict[str, Any] = {"guard_filter_fn": torch.compiler.skip_all_guards_unsafe}
    return torch.compile(own, fullgraph=True, dynamic=False, options=options)
