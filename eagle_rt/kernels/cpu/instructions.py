"""Which instructions compiled functions are made of; needs numba."""

from llvmlite.binding import get_host_cpu_features
from numba import config


def has_instructions(name: str) -> bool:
    """Whether they may have these, which LLVM calls so: where the processor does, or else as NUMBA_CPU_FEATURES says."""
    named = config.CPU_FEATURES  # pyright: ignore[reportAttributeAccessIssue]
    return f"+{name}" in named.split(",") if named else bool(get_host_cpu_features().get(name))
