"""What kind of CPU this is, on which it depends which products are fast."""

import platform
from functools import cache
from pathlib import Path

import torch

CPU_INFO = Path("/proc/cpuinfo")


@cache
def cpu_info(field: str) -> str | None:
    """What the system says of the first processor, if it does."""
    lines = CPU_INFO.read_text().splitlines() if CPU_INFO.exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(field)), None)


def processor_name() -> str:
    """As its maker calls it, where the system says so."""
    return cpu_info("model name") or platform.processor() or platform.machine()


def is_intel() -> bool:
    """Whose processors do some things at another speed than others'."""
    return cpu_info("vendor_id") == "GenuineIntel"


def has_amx() -> bool:
    """Whether it multiplies whole tiles of half-precision numbers."""
    return torch.cpu._is_amx_tile_supported()


def has_bfloat16_products() -> bool:
    """Whether it multiplies bfloat16 without widening it first."""
    return has_amx() or torch.cpu._is_avx512_bf16_supported()
