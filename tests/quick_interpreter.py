"""Triton's interpreter, without what it does over and over again for the same outcome, which takes most of its time."""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import pytest
from triton import language
from triton.runtime import interpreter

from eagle_rt.kernels.triton.common import IS_INTERPRETED

core = language.core


@contextmanager
def quick_interpreter() -> Iterator[None]:
    """Kernels compute what they did. On a GPU, where they are compiled, nothing changes."""
    if not IS_INTERPRETED:
        yield
        return
    patch_language, launch = interpreter._patch_lang, interpreter.GridExecutor.__call__
    patched: set[frozenset[int]] = set()

    @cache
    def languages_seen(function: Callable[..., Any]) -> frozenset[int]:
        return frozenset(map(id, function.__globals__.values())) & {id(language), id(core)}

    def patch_once(function: Callable[..., Any]) -> Any:
        """It puts its own operators in place at every call within a kernel; after the first from a module they are there."""
        seen = languages_seen(function)
        if seen in patched:
            return None  # only a launch, the first to call this, asks for more
        patched.add(seen)
        return patch_language(function)

    def launch_once(self: interpreter.GridExecutor, *args: Any, **kwargs: Any) -> None:
        patched.clear()
        launch(self, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "_patch_lang", patch_once)
        patch.setattr(interpreter.GridExecutor, "__call__", launch_once)
        # It works out whether integers overflow, which nobody looks at without `debug`.
        patch.setattr(interpreter.interpreter_builder, "options", interpreter.InterpreterOptions(sanitize_overflow=False))
        # What is on the host need not be copied there and back.
        patch.setattr(interpreter.GridExecutor, "_init_args_hst", lambda self, args, kwargs: (args, kwargs))
        patch.setattr(interpreter.GridExecutor, "_restore_args_dev", lambda self, *args: None)
        patch.setattr(interpreter, "_patch_builtin", patch_builtin)
        patch.setattr(interpreter, "_get_np_dtype", by_name(interpreter._get_np_dtype))
        patch.setattr(core.block_type, "__init__", block_type_once(core.block_type.__init__))
        patch.setattr(core.tensor, "__init__", make_tensor)
        patch.setattr(core.tuple, "__eq__", are_equal)
        yield


def patch_builtin(package: Any, builder: Any, scope: Any) -> None:
    for name in builtins_of(package):
        member = getattr(package, name)
        if core.is_builtin(member):  # or it is patched already
            interpreter._patch_attr(package, name, member, builder, scope)


@cache
def builtins_of(package: Any) -> list[str]:
    return [name for name, member in inspect.getmembers(package) if core.is_builtin(member)]


def by_name(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """The same function of a type, asked once for each."""
    known: dict[str, Any] = {}

    def ask(dtype: Any) -> Any:
        name = dtype.name
        if name not in known:
            known[name] = function(dtype)
        return known[name]

    return ask


def block_type_once(initialise: Callable[..., None]) -> Callable[..., None]:
    """Types of blocks do not change once they are made."""
    made: dict[Any, dict[str, Any]] = {}

    def make(self: Any, element_ty: Any, shape: Any) -> None:
        key = element_ty.name, *(size.value if isinstance(size, core.constexpr) else size for size in shape)
        if key not in made:
            initialise(self, element_ty, shape)
            made[key] = dict(self.__dict__)
        self.__dict__.update(made[key])

    return make


def make_tensor(self: Any, handle: Any, type: Any) -> None:
    self.handle, self.type, self.dtype = handle, type, type.scalar
    self.shape, self.numel = shape_of(type.shape if type.is_block() else ())


@cache
def shape_of(shape: tuple[int, ...]) -> tuple[Any, Any]:
    """(the shape, the number of elements) as constants of the language."""
    numel = 1
    for size in shape:
        numel *= size
    return core.tuple([core.constexpr(size) for size in shape]), core.constexpr(numel)


def are_equal(own: Any, other: Any) -> Any:
    return core.constexpr([plain(value) for value in own] == [plain(value) for value in other])


def plain(value: Any) -> Any:
    return value.value if isinstance(value, core.constexpr) else value
