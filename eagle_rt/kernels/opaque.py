"""Operations whose weights a compiler cannot hold."""

import itertools
from abc import ABC, abstractmethod
from typing import TypeVar
from weakref import WeakValueDictionary

import torch
from torch import Tensor


class Opaque(ABC):
    """Rows [R, in] to rows [R, out_size] in one operator, of which a compiler holds only a number."""

    out_size: int

    def __init__(self) -> None:
        self._number = next(_numbers)
        _operations[self._number] = self

    def __call__(self, x: Tensor) -> Tensor:
        if torch.compiler.is_compiling():
            return torch.ops.eagle_rt.opaque(x, self._number, self.out_size)
        return self.apply(x)

    @abstractmethod
    def apply(self, x: Tensor) -> Tensor: ...


Kind = TypeVar("Kind", bound=Opaque)


def living(kind: type[Kind]) -> list[Kind]:
    """All of a kind that anyone holds."""
    return [operation for operation in _operations.values() if isinstance(operation, kind)]


_numbers = itertools.count()
_operations: WeakValueDictionary[int, Opaque] = WeakValueDictionary()


@torch.library.custom_op("eagle_rt::opaque", mutates_args=())
def opaque(x: Tensor, number: int, out_size: int) -> Tensor:
    return _operations[number](x)


@opaque.register_fake
def _(x: Tensor, number: int, out_size: int) -> Tensor:
    return x.new_empty(x.shape[0], out_size)
