"""How much memory loading a head takes at its peak: `python benchmarks/head_memory.py --shape 8b 70b`.

Writes an EAGLE-3 head of a published shape full of zeros, loads it in a process of its own, and prints the peak of that process own
(anonymous) memory, which leaves out the pages of the file that the system maps and can drop at any time.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import save_file

from eagle_rt.models.heads.load import load_head
from eagle_rt.models.linear import Linear
from eagle_rt.models.spec import model_spec

# hidden size, feed-forward size, heads, key-value heads, layers of the target, its vocabulary, the draft vocabulary
SHAPES = {
    "1b": (2048, 8192, 32, 8, 16, 128256, 32000),
    "8b": (4096, 14336, 32, 8, 32, 128256, 32000),
    "70b": (8192, 28672, 64, 8, 80, 128256, 32000),
}


def config(shape: str) -> dict[str, Any]:
    hidden_size, intermediate_size, num_heads, num_kv_heads, num_layers, vocab_size, draft_vocab_size = SHAPES[shape]
    return {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": hidden_size,
        "intermediate_size": intermediate_size,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "num_hidden_layers": num_layers,
        "vocab_size": vocab_size,
        "draft_vocab_size": draft_vocab_size,
        "torch_dtype": "bfloat16",
    }


def write_head(shape: str, directory: Path) -> None:
    hidden, ffn, num_heads, num_kv_heads, _, _, draft_vocab_size = SHAPES[shape]
    kv_size = hidden // num_heads * num_kv_heads
    sizes = {
        "fc.weight": (hidden, 3 * hidden),
        "midlayer.self_attn.q_proj.weight": (hidden, 2 * hidden),
        "midlayer.self_attn.k_proj.weight": (kv_size, 2 * hidden),
        "midlayer.self_attn.v_proj.weight": (kv_size, 2 * hidden),
        "midlayer.self_attn.o_proj.weight": (hidden, hidden),
        "midlayer.mlp.gate_proj.weight": (ffn, hidden),
        "midlayer.mlp.up_proj.weight": (ffn, hidden),
        "midlayer.mlp.down_proj.weight": (hidden, ffn),
        "lm_head.weight": (draft_vocab_size, hidden),
        "norm.weight": (hidden,),
        "midlayer.input_layernorm.weight": (hidden,),
        "midlayer.hidden_norm.weight": (hidden,),
        "midlayer.post_attention_layernorm.weight": (hidden,),
    }
    tensors = {name: torch.zeros(size, dtype=torch.bfloat16) for name, size in sizes.items()}
    tensors["d2t"] = torch.zeros(draft_vocab_size, dtype=torch.int64)
    save_file(tensors, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps({**config(shape), "num_hidden_layers": 1}))


def anonymous_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith("RssAnon")).split()[1]) * 1024


def load_and_watch(shape: str, directory: Path) -> dict[str, int]:
    """Load the head beside a target that is nothing but its shape; bytes of the file, held after loading, and at the peak."""
    spec = model_spec(config(shape))
    embedding = torch.empty(spec.vocab_size, spec.shape.hidden_size, dtype=torch.bfloat16)  # never touched, so never in memory
    target: Any = SimpleNamespace(spec=spec, embedding=embedding, lm_head=None)
    Linear(torch.zeros(2, 2, dtype=torch.bfloat16))  # what compiles kernels is in memory before
    before = peak = anonymous_bytes()
    is_done = threading.Event()

    def watch() -> None:
        nonlocal peak
        while not is_done.is_set():
            peak = max(peak, anonymous_bytes())
            time.sleep(0.002)

    watcher = threading.Thread(target=watch)
    watcher.start()
    head, _ = load_head(directory, target, "EAGLE3", torch.bfloat16, "cpu")
    is_done.set()
    watcher.join()
    assert len(head.rows) == 1
    file_bytes = (directory / "model.safetensors").stat().st_size
    return {"file": file_bytes, "held": anonymous_bytes() - before, "peak": peak - before}


def measure(shape: str) -> dict[str, int]:
    with tempfile.TemporaryDirectory() as directory:
        write_head(shape, Path(directory))
        command = [sys.executable, __file__, "--shape", shape, "--load", directory]
        return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", nargs="+", choices=list(SHAPES), default=["8b", "70b"])
    parser.add_argument("--load", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.load:
        print(json.dumps(load_and_watch(args.shape[0], args.load)))
        return
    for shape in args.shape:
        found = measure(shape)
        print(f"{shape}: " + ", ".join(f"{name} {size / 1e9:.2f} GB" for name, size in found.items()))


if __name__ == "__main__":
    main()
