"""Classes that users have written, by the names that options give them."""

import importlib
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any


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
