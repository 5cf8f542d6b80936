"""Classes that users have written, by the names that options give them."""

import importlib
import importlib.util
import logging
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

logger = logging.getLogger(__name__)


class Trust:
    """In an object of a user's class, until it has failed: that is told of, and who asks it goes on without. instead: what happens
    from then on; failure: what was wrong, empty before."""

    def __init__(self, made: Any, instead: str) -> None:
        self.failure, self._name, self._instead = "", type(made).__name__, instead

    @contextmanager
    def asking(self, method: str) -> Iterator[None]:
        """Whatever is wrong with it ends this block and nothing else."""
        try:
            yield
        except Exception as error:
            self.failure = f"{self._name}.{method}: {type(error).__name__}: {error}"
            logger.error("%s: %s", self._instead, self.failure, exc_info=error)


def made_of(flag: str, name: str, methods: Sequence[str]) -> Any:
    """An object of the class that is called FILE.py:CLASS or MODULE:CLASS, made without arguments.

    Raises:
        ValueError: there is no such class, it can't be made, or it lacks one of these methods.
    """
    place, class_name = name.rsplit(":", 1)
    try:
        made = getattr(module_of(place), class_name)()
    except Exception as error:
        raise ValueError(f"{flag} {name} can't be made: {type(error).__name__}: {error}") from error
    if missing := [method for method in methods if not callable(getattr(made, method, None))]:
        raise ValueError(f"{flag} {name} has no method {' and none '.join(missing)}, see docs/extending.md")
    return made


def module_of(place: str) -> ModuleType:
    """A Python file, or a module by its name."""
    if not place.endswith(".py"):
        return importlib.import_module(place)
    spec = importlib.util.spec_from_file_location(f"plug_in_{Path(place).stem}", place)
    assert spec
    assert spec.loader
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
