"""Every backend serves the same text."""

from pathlib import Path

import pytest
import torch
from engines import make_core, random_prompts, run

from eagle_rt.attention.select import attention_backend
from eagle_rt.engine.request import SamplingParams


@pytest.mark.parametrize("tree", [None, (3, 2, 6)])
def test_the_kernel_serves_what_torch_serves(target_dir: Path, head_dir: Path, tree: tuple[int, int, int] | None) -> None:
    prompts = random_prompts(3, seed=4, longest=20)
    sampling = SamplingParams(temperature=0, max_new_tokens=6, ignore_eos=True)
    expected = run(make_core(target_dir, head_dir, tree), prompts, sampling)
    assert (
        run(make_core(target_dir, head_dir, tree, attention_backend="triton", chunked_prefill_size=8), prompts, sampling)
        == expected
    )


def test_a_backend_that_cannot_run_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ValueError, match="needs a GPU"):
        attention_backend("triton", "cpu", torch.float32)
