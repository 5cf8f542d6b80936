"""Gated delta nets against transformers', and kernels against their twin."""

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet, Qwen3_5TextConfig

from eagle_rt.kernels import dispatch
from eagle_rt.kernels.delta_net import DeltaNetShape, DeltaNetWeights, Lineage, Memory, delta_net

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NUM_TEXTS = 5


@dataclass
class Case:
    inputs: torch.Tensor
    rates: torch.Tensor
    weights: DeltaNetWeights
    memory: Memory
    lineage: Lineage

    def run(self) -> tuple[torch.Tensor, Memory]:
        """What is read, and a copy of the memory, changed."""
        own = self.memory
        memory = Memory(own.channels.clone(), own.matrices.clone(), own.rows, own.is_new)
        return delta_net(self.inputs, self.rates, self.weights, memory, self.lineage), memory


def random_case(
    shape: DeltaNetShape, lengths: list[int], *, is_text: bool, dtype: torch.dtype = torch.float32, seed: int = 0, num_new: int = 1
) -> Case:
    """Texts or trees of random rows, the first few of which are new."""
    random = torch.Generator().manual_seed(seed)

    def normal(*sizes: int) -> torch.Tensor:
        return torch.randn(*sizes, generator=random).to(DEVICE)

    weights = DeltaNetWeights(
        shape,
        kernel=normal(shape.num_channels, shape.taps) / 2,
        decay=normal(shape.num_heads).exp(),
        time_bias=normal(shape.num_heads),
        norm=normal(shape.value_dim),
        eps=1e-6,
    )
    starts = torch.tensor([0, *lengths]).cumsum(0)
    parents = torch.arange(-1, sum(lengths) - 1)
    visible = torch.zeros(sum(lengths), max(lengths), dtype=torch.bool)
    for start, length in zip(starts.tolist(), lengths, strict=False):
        parents[start] = -1
        visible[start, 0] = True
        for row in range(1, length):
            if not is_text:
                parents[start + row] = start + int(torch.randint(row, (), generator=random))
            visible[start + row] = visible[parents[start + row]]
            visible[start + row, row] = True
    memory = Memory(
        normal(NUM_TEXTS, shape.taps - 1, shape.num_channels).to(dtype),
        normal(NUM_TEXTS, shape.num_heads, shape.key_dim, shape.value_dim),
        torch.randperm(NUM_TEXTS, generator=random)[: len(lengths)].to(DEVICE),
        torch.arange(len(lengths), device=DEVICE) < num_new,
    )
    inputs = normal(sum(lengths), shape.num_channels + shape.values_size).to(dtype)
    rates = normal(sum(lengths), 2 * shape.num_heads).to(dtype)
    lineage = (own.to(DEVICE) for own in (starts[:-1], starts[1:], parents))
    return Case(inputs, rates, weights, memory, Lineage(*lineage, None if is_text else visible.to(DEVICE)))


@torch.inference_mode()
def test_the_twin_is_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over a text that comes in two parts."""
    monkeypatch.setattr(dispatch, "HAS_NUMBA", False)
    shape = DeltaNetShape(num_key_heads=2, num_heads=6, key_dim=8, value_dim=12, taps=4)
    sizes = dict(zip(("key_heads", "value_heads"), (2, 6), strict=True))
    config = Qwen3_5TextConfig(
        hidden_size=shape.num_channels,
        **{f"linear_num_{name}": count for name, count in sizes.items()},
        linear_key_head_dim=8,
        linear_value_head_dim=12,
        num_hidden_layers=4,
    )
    torch.manual_seed(3)
    theirs = Qwen3_5GatedDeltaNet(config, 0)
    theirs.dt_bias.normal_()
    theirs.norm.weight.normal_()
    x = torch.randn(1, 90, shape.num_channels)
    weights = DeltaNetWeights(
        shape, theirs.conv1d.weight[:, 0], theirs.A_log.exp(), theirs.dt_bias, theirs.norm.weight, config.rms_norm_eps
    )
    inputs = torch.cat((theirs.in_proj_qkv(x), theirs.in_proj_z(x)), dim=2)[0]
    rates = torch.cat((theirs.in_proj_b(x), theirs.in_proj_a(x)), dim=2)[0]
    memory = Memory(torch.rand(1, 3, shape.num_channels), torch.rand(1, 6, 8, 12), torch.tensor([0]), torch.tensor([True]))
    read = []
    for start, stop in ((0, 2), (2, 90)):
        one = torch.tensor([0]), torch.tensor([stop - start]), torch.arange(-1, stop - start - 1)
        read.append(delta_net(inputs[start:stop], rates[start:stop], weights, memory, Lineage(*one)))
        memory.is_new[0] = False
    torch.testing.assert_close(theirs.out_proj(torch.cat(read)), theirs(x)[0], atol=1e-5, rtol=1e-4)


@settings(max_examples=30, deadline=None)
@given(
    num_key_heads=st.integers(1, 3),
    num_shared=st.integers(1, 3),
    key_dim=st.sampled_from([16, 32, 64]),
    value_dim=st.sampled_from([16, 32]),
    taps=st.integers(1, 4),
    lengths=st.lists(st.integers(1, 20), min_size=1, max_size=4),
    is_text=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    on_gpu=st.booleans(),
    seed=st.integers(0, 999),
)
def test_the_kernel_is_the_twin(
    num_key_heads: int,
    num_shared: int,
    key_dim: int,
    value_dim: int,
    taps: int,
    lengths: list[int],
    is_text: bool,
    dtype: torch.dtype,
    on_gpu: bool,
    seed: int,
) -> None:
    shape = DeltaNetShape(num_key_heads, num_key_heads * num_shared, key_dim, value_dim, taps)
    case = random_case(shape, lengths, is_text=is_text, dtype=dtype, seed=seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dispatch, "prefers_triton", lambda x: on_gpu)
        read, memory = case.run()
        patch.setattr(dispatch, "prefers_triton", lambda x: False)
        patch.setattr(dispatch, "HAS_NUMBA", False)
        expected, expected_memory = case.run()
    tolerance = {"atol": 1e-4, "rtol": 1e-4} if dtype == torch.float32 else {"atol": 0.02, "rtol": 0.02}
    torch.testing.assert_close(read, expected, **tolerance)
    if is_text:
        torch.testing.assert_close(memory.matrices, expected_memory.matrices, atol=1e-4, rtol=1e-4)
        assert torch.equal(memory.channels, expected_memory.channels)


@pytest.mark.skipif(DEVICE == "cuda", reason="of a GPU's sums the order depends on the tree")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_of_a_tree_is_that_of_its_text(dtype: torch.dtype) -> None:
    """Bit for bit, and so is what is remembered of it, wherever the text is cut."""
    shape = DeltaNetShape(num_key_heads=2, num_heads=4, key_dim=16, value_dim=32, taps=4)
    tree = random_case(shape, [12], is_text=False, dtype=dtype, num_new=0)
    read, memory = tree.run()
    assert torch.equal(memory.matrices, tree.memory.matrices)
    assert torch.equal(memory.channels, tree.memory.channels)
    for row in range(12):
        path = [row]
        while (parent := int(tree.lineage.parents[path[0]])) >= 0:
            path.insert(0, parent)
        for cut in range(len(path) + 1):
            memory = Memory(tree.memory.channels.clone(), tree.memory.matrices.clone(), tree.memory.rows, tree.memory.is_new)
            parts = []
            for part in filter(None, (path[:cut], path[cut:])):
                one = torch.tensor([0]), torch.tensor([len(part)]), torch.arange(-1, len(part) - 1)
                parts.append(delta_net(tree.inputs[part], tree.rates[part], tree.weights, memory, Lineage(*one)))
            assert torch.equal(torch.cat(parts), read[path])
