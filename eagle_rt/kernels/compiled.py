"""Compiling what the host works out between passes: a numpy call on a few dozen numbers takes several microseconds right after a
pass of a model, whose weights have filled the caches, and these would be hundreds of calls a step."""

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

F = TypeVar("F", bound=Callable)


def uncompiled(function: F) -> F:
    """Where there is no numba functions run as they are written."""
    return function


if TYPE_CHECKING:
    compiled, is_compiled = uncompiled, True
else:
    try:
        from numba import njit
    except ImportError:
        compiled, is_compiled = uncompiled, False
    else:
        from eagle_rt.kernels.first_start import announce_compiling

        is_compiled = True
        announce_compiling()

        def compiled(function: F) -> F:
            """For good, where there is a place to keep it."""
            try:
                return njit(cache=True)(function)
            except RuntimeError:
                return njit(function)
