"""A sweep's results for people: a table, pictures, and the flags to use."""

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

COLUMNS = {
    "batch_size": "batch",
    "kind": "trees",
    "steps": "steps",
    "topk": "top-k",
    "num_draft_tokens": "tokens",
    "tokens_per_second": "tokens/s",
    "speedup": "speed-up",
    "mean_accepted_tokens": "accepted/step",
    "step_ms": "step ms",
    "draft_ms": "draft ms",
    "verify_ms": "verify ms",
    "other_ms": "other ms",
    "mean_tree_size": "nodes/step",
    "acceptance_by_depth": "acceptance by depth",
}


def print_table(rows: list[dict[str, Any]]) -> None:
    """Only the columns that the rows have."""
    columns = {name: title for name, title in COLUMNS.items() if name in rows[0]}
    table = Table(box=None, header_style="bold")
    for title in columns.values():
        table.add_column(title, justify="right")
    for row in rows:
        table.add_row(*(cell(row[name]) for name in columns))
    Console(width=160).print(table)


def cell(value: Any) -> str:
    return " ".join(f"{share:.2f}" for share in value) if isinstance(value, list) else str(value)


def best_per_batch_size(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    best: dict[int, dict[str, Any]] = {}
    for row in rows:
        current = best.get(row["batch_size"])
        if current is None or row["tokens_per_second"] > current["tokens_per_second"]:
            best[row["batch_size"]] = row
    return list(best.values())


def flags(row: dict[str, Any], algorithm: str) -> str:
    """What to pass to launch_server.py for this row's setting, which was measured with this algorithm."""
    if row["steps"] == 0:
        return "(no --speculative-algorithm: no tree was faster than none)"
    return (
        f"--speculative-algorithm {algorithm} --speculative-tree {row['kind']} --speculative-num-steps "
        f"{row['steps']} --speculative-eagle-topk {row['topk']} --speculative-num-draft-tokens {row['num_draft_tokens']}"
    )


def plot(rows: list[dict[str, Any]], folder: Path) -> list[Path]:
    """Per batch size a heat-map of the speed-up over steps and top-k, tokens per second against accepted tokens, acceptance by
    depth, and of adaptive trees their size over time and how reliable the estimates were; over batch sizes the best of each kind.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    folder.mkdir(parents=True, exist_ok=True)
    files = []
    for batch_size in sorted({row["batch_size"] for row in rows}):
        some = [row for row in rows if row["batch_size"] == batch_size]
        trees = [row for row in some if row["kind"] == "fixed"]
        adaptive = [row for row in some if row["kind"] == "adaptive"]
        others = [row for row in some if row["kind"] not in ("none", "fixed")]
        if trees:
            figure = heat_map(pyplot, trees)
            files.append(save(figure, folder / f"speedup_batch_{batch_size}.png"))
        files.append(save(pareto(pyplot, some), folder / f"pareto_batch_{batch_size}.png"))
        if len(trees) + len(others):
            files.append(save(by_depth(pyplot, trees + others), folder / f"acceptance_batch_{batch_size}.png"))
        for row in adaptive:
            files.append(save(size_over_time(pyplot, row), folder / f"tree_size_batch_{batch_size}.png"))
            files.append(save(reliability(pyplot, row), folder / f"reliability_batch_{batch_size}.png"))
    files.append(save(over_batch_sizes(pyplot, rows), folder / "tokens_per_second.png"))
    return files


def over_batch_sizes(pyplot: Any, rows: list[dict[str, Any]]) -> Any:
    figure, axes = pyplot.subplots(figsize=(7, 5))
    labels = {"none": "no speculation", "fixed": "best fixed tree", "adaptive": "adaptive trees"}
    for kind, label in {**{row["kind"]: row["kind"] for row in rows}, **labels}.items():
        best = best_per_batch_size([row for row in rows if row["kind"] == kind])
        best.sort(key=lambda row: row["batch_size"])
        if best:
            axes.plot([row["batch_size"] for row in best], [row["tokens_per_second"] for row in best], marker="o", label=label)
    axes.set_xscale("log", base=2)
    axes.set_xlabel("requests decoded together")
    axes.set_ylabel("tokens/s")
    axes.legend()
    return figure


def by_depth(pyplot: Any, some: list[dict[str, Any]]) -> Any:
    figure, axes = pyplot.subplots(figsize=(7, 5))
    for row in some:
        shares = row["acceptance_by_depth"]
        label = f"{row['kind']} {row['steps']},{row['topk']},{row['num_draft_tokens']}"
        axes.plot(range(1, len(shares) + 1), shares, marker=".", label=label)
    axes.set_xlabel("depth")
    axes.set_ylabel("share of steps that kept a draft there")
    axes.set_title(f"acceptance by depth, batch {some[0]['batch_size']}")
    axes.legend(fontsize=7)
    return figure


def size_over_time(pyplot: Any, row: dict[str, Any]) -> Any:
    figure, axes = pyplot.subplots(figsize=(7, 4))
    axes.plot(row["tree_sizes"], linewidth=0.8)
    axes.set_xlabel("decode step")
    axes.set_ylabel("nodes verified for a request, the root included")
    axes.set_title(f"adaptive trees, batch {row['batch_size']}")
    return figure


def reliability(pyplot: Any, row: dict[str, Any]) -> Any:
    figure, axes = pyplot.subplots(figsize=(5, 5))
    axes.plot([0, 1], [0, 1], color="grey", linewidth=0.8)
    counts, predicted, accepted = zip(*row["reliability"], strict=True) if row["reliability"] else ((), (), ())
    largest = max(counts, default=1)
    axes.scatter(predicted, accepted, s=[20 + 180 * count / largest for count in counts])
    axes.set_xlabel("estimated acceptance")
    axes.set_ylabel("share accepted")
    axes.set_title(f"batch {row['batch_size']}: Brier score {row['brier_score']}, the head sharpened {row['raw_brier_score']}")
    return figure


def save(figure: Any, file: Path) -> Path:
    figure.savefig(file, dpi=120, bbox_inches="tight")
    return file


def heat_map(pyplot: Any, trees: list[dict[str, Any]]) -> Any:
    all_steps = sorted({row["steps"] for row in trees})
    all_top_ks = sorted({row["topk"] for row in trees})
    figure, axes = pyplot.subplots(figsize=(1.2 + 1.1 * len(all_top_ks), 1.2 + 0.7 * len(all_steps)))
    grid = [[float("nan")] * len(all_top_ks) for _ in all_steps]
    for row in trees:
        y, x = all_steps.index(row["steps"]), all_top_ks.index(row["topk"])
        if not grid[y][x] >= row["speedup"]:
            grid[y][x] = row["speedup"]
    axes.imshow(grid, cmap="YlGn")
    for y, line in enumerate(grid):
        for x, value in enumerate(line):
            axes.text(x, y, f"{value:.2f}", ha="center", va="center")
    axes.set_xticks(range(len(all_top_ks)), [str(top_k) for top_k in all_top_ks])
    axes.set_yticks(range(len(all_steps)), [str(steps) for steps in all_steps])
    axes.set_xlabel("top-k")
    axes.set_ylabel("steps")
    axes.set_title(f"speed-up over no speculation, batch {trees[0]['batch_size']}\n(best number of draft tokens)")
    return figure


def pareto(pyplot: Any, some: list[dict[str, Any]]) -> Any:
    figure, axes = pyplot.subplots(figsize=(7, 5))
    axes.scatter([row["mean_accepted_tokens"] for row in some], [row["tokens_per_second"] for row in some])
    for row in some:
        label = f"{row['steps']},{row['topk']},{row['num_draft_tokens']}" if row["steps"] else "none"
        axes.annotate(
            label, (row["mean_accepted_tokens"], row["tokens_per_second"]), fontsize=8, xytext=(3, 3), textcoords="offset points"
        )
    front, fastest = [], 0.0
    for row in sorted(some, key=lambda row: -row["mean_accepted_tokens"]):
        if row["tokens_per_second"] > fastest:
            fastest = row["tokens_per_second"]
            front.append(row)
    axes.plot([row["mean_accepted_tokens"] for row in front], [row["tokens_per_second"] for row in front], alpha=0.5)
    axes.set_xlabel("mean accepted tokens per step")
    axes.set_ylabel("tokens/s")
    axes.set_title(f"steps, top-k, draft tokens at batch {some[0]['batch_size']}")
    return figure
