"""eagle_rt serves a language model with EAGLE-3 tree drafting.

Shapes are written in these letters throughout: B sequences, T packed tokens, N tree nodes with the root, D levels below the root,
K branching, Q query rows a sequence, R selected rows, H hidden size, F feature layers, V target vocabulary, W draft vocabulary,
L layers, S cache slots.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from eagle_rt.config import EngineConfig
    from eagle_rt.engine.engine import Engine
    from eagle_rt.engine.params import SamplingParams

__all__ = ["Engine", "EngineConfig", "SamplingParams"]
HOMES = {"Engine": "engine.engine", "EngineConfig": "config", "SamplingParams": "engine.params"}


def __getattr__(name: str) -> Any:
    """Imported when it is asked for: torch and transformers take seconds, which whoever reads flags need not wait for."""
    if name not in HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{HOMES[name]}"), name)
