"""A picture of how near products, attention and whole steps come to what a GPU's memory and arithmetic allow.

`python benchmarks/roofline.py` draws `docs/roofline.png` from the results of `gpu.py` for Llama-3.1-8B's shape on an H100.
"""

import json
import re
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
# Dense bfloat16 of an H100 SXM, by its data sheet.
PEAK_FLOPS = 989e12
# [outputs, inputs] of the products that were timed.
WEIGHTS = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336), "lm_head": (128256, 4096)}
NUM_HEADS, HEAD_DIM = 32, 128
NUM_WEIGHTS, ITEM_BYTES = 7.5e9, 2


Point = tuple[float, float]


def point(flops: float, num_bytes: float, seconds: float) -> Point:
    """(operations for each byte, operations a second)"""
    return flops / num_bytes, flops / seconds


def products(rows: list[dict[str, Any]]) -> dict[str, list[Point]]:
    """By whose they are, of all shapes and numbers of rows."""
    points: dict[str, list[Point]] = {"cuBLAS": [], "own wide products": []}
    for row in rows:
        num_outputs, num_inputs = WEIGHTS[row["shape"]]
        flops = 2 * num_outputs * num_inputs * row["rows"]
        num_bytes = ITEM_BYTES * (num_outputs * num_inputs + row["rows"] * (num_inputs + num_outputs))
        points["cuBLAS"].append(point(flops, num_bytes, row["cublas"] / 1e6))
        if row["shape"] in ("gate_up", "lm_head"):
            points["own wide products"].append(point(flops, num_bytes, row["128x128s128"] / 1e6))
    return points


def attention(jobs: dict[str, Any]) -> dict[str, list[Point]]:
    points: dict[str, list[Point]] = {"own tree attention": [], "FlashInfer": []}
    for name, job in jobs.items():
        batch_size, context, num_nodes = map(int, re.findall(r"\d+", name))
        row = job["rows"][0]
        flops = 4 * batch_size * num_nodes * (context + num_nodes) * NUM_HEADS * HEAD_DIM
        points["own tree attention"].append(point(flops, row["bytes"], row["triton_us"] / 1e6))
        points["FlashInfer"].append(point(flops, row["bytes"], row["flashinfer_us"] / 1e6))
    return points


def steps(jobs: dict[str, Any], rate: float) -> dict[str, list[Point]]:
    """Whole steps, the head's passes counted as bytes only."""
    points = []
    for name, job in jobs.items():
        row, num_nodes = job["rows"][0], int(re.findall(r"\d+", name)[2])
        points.append(point(2 * NUM_WEIGHTS * num_nodes, row["floor_ms"] / 1000 * rate, row["step_ms"] / 1000))
    return {"steps: plain, and trees of 4, 32, 60": points}


def main() -> None:
    gpu = json.loads((RESULTS / "gpu_h100_2026-11-26.json").read_text())
    tried = json.loads((RESULTS / "gpu_products_h100_2026-11-26.json").read_text())
    rate = gpu["machine"]["machine"]["rows"][0]["copy_bytes_per_second"]
    figure, axes = plt.subplots(figsize=(8, 5.5))
    intensities = [0.5, PEAK_FLOPS / rate, 2000]
    axes.plot(intensities, [min(rate * own, PEAK_FLOPS) / 1e12 for own in intensities], color="black", linewidth=1)
    axes.annotate(f"copy rate, {rate / 1e12:.2f} TB/s", (1.2, 1.7 * rate / 1e12), rotation=43)
    axes.annotate("data sheet, 989 TFLOP/s", (30, 1.05 * PEAK_FLOPS / 1e12))
    series = products(tried["products"]) | attention(gpu["attention"]) | steps(gpu["contexts"], rate)
    for (name, points), marker in zip(series.items(), "o^s*D", strict=True):
        axes.scatter([x for x, _ in points], [y / 1e12 for _, y in points], label=name, marker=marker, s=28, alpha=0.75)
    axes.set(xscale="log", yscale="log", xlabel="operations for each byte that must be read", ylabel="TFLOP/s", ylim=(0.5, 1500))
    axes.legend(loc="lower right")
    axes.grid(which="both", alpha=0.2)
    figure.tight_layout()
    figure.savefig(ROOT / "docs" / "roofline.png", dpi=110)


if __name__ == "__main__":
    main()
