"""eagle_rt serves a language model with EAGLE-3 tree drafting.

Shapes are written in these letters throughout: B sequences, T packed tokens, N tree nodes with the root, D levels below the root,
K branching, Q query rows a sequence, R selected rows, H hidden size, F feature layers, V target vocabulary, W draft vocabulary,
L layers, S cache slots.
"""

from eagle_rt.config import EngineConfig
from eagle_rt.engine.engine import Engine
from eagle_rt.engine.params import SamplingParams

__all__ = ["Engine", "EngineConfig", "SamplingParams"]
