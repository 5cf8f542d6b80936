"""Targets whose weights have few bits as on a GPU: kernels are interpreted here."""

from pathlib import Path

import pytest
import torch
from captured import SETTINGS, make_captured
from engine.test_capturable import captured_callable, watching
from engines import make_config, make_core, random_prompts, run, text_logits
from transformers import AutoModelForCausalLM

from eagle_rt.engine import load
from eagle_rt.kernels import dispatch, experts, narrow_experts, narrow_product, products
from eagle_rt.kernels.gate import gated
from eagle_rt.kernels.narrow_product import NarrowProduct
from eagle_rt.kernels.opaque import living
from eagle_rt.kernels.triton import narrow_product as kernels
from eagle_rt.kernels.triton.mix_experts import mix_experts
from eagle_rt.kernels.triton.route import route
from eagle_rt.kernels.triton.widen import widen
from eagle_rt.models import linear
from eagle_rt.models.decoder import Decoder, load_decoder
from eagle_rt.models.experts import Experts
from eagle_rt.models.linear import Linear
from eagle_rt.models.spec import model_spec, read_config
from models.test_quantized_checkpoints import write, write_mxfp4

TEXT = random_prompts(1, seed=5, longest=20)[0]
PROMPTS = random_prompts(2, seed=8, longest=24)


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights are held as there."""
    for module in (load, products):
        monkeypatch.setattr(module, "has_narrow_kernels", lambda weight: True)
        monkeypatch.setattr(module, "has_own_kernels", lambda weight: False)
        monkeypatch.setattr(module, "takes_own_kernel", lambda weight: False)
    monkeypatch.setattr(products, "can_pack", lambda weight: False)


@pytest.fixture
def with_kernels(on_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Products with them are the kernels'."""
    own = {"narrow_product": kernels.narrow_product, "widen": widen, "route": route, "mix_experts": mix_experts}
    for module in (narrow_product, narrow_experts, experts):
        monkeypatch.setattr(module, "triton_kernel", lambda name, x: own[name])


def decoder_of(directory: Path, quantization: str) -> Decoder:
    spec = model_spec(read_config(directory))
    return load_decoder(directory, spec, context_length=512, dtype=torch.float32, device="cpu", quantization=quantization)


@torch.inference_mode()
@pytest.mark.usefixtures("with_kernels")
@pytest.mark.parametrize(
    ("name", "bits"),
    [
        ("gptq", 4),
        ("awq", 4),
        ("compressed-4", 4),
        ("fp8-outputs", 8),
        ("fp8-static", 8),
        ("compressed-int", 8),
        ("compressed-int-zeros", 8),
        ("fp8-blocks", None),
        ("gptq-8-v2", None),
    ],
)
def test_a_checkpoint_in_few_bits_is_held_in_them(tmp_path: Path, name: str, bits: int | None) -> None:
    """Those of scales that kernels have no room for are widened."""
    decoder = decoder_of(write(tmp_path, name), "stored")
    counts = decoder.count_bits()
    assert counts[bits] == counts.total() == 32
    assert_near(decoder, tmp_path / "plain")


@torch.inference_mode()
@pytest.mark.usefixtures("with_kernels")
@pytest.mark.parametrize(
    ("name", "target", "bits"), [("mxfp4", "gpt-oss", 4), ("fp8-outputs", "qwen3-moe", 8), ("compressed-4", "glm4-moe", 4)]
)
def test_experts_in_few_bits(tmp_path: Path, name: str, target: str, bits: int) -> None:
    """Of gpt-oss nothing else has few bits."""
    decoder = decoder_of(write_mxfp4(tmp_path) if name == "mxfp4" else write(tmp_path, name, target), "stored")
    products = [block.feed_forward.products for block in decoder._blocks if isinstance(block.feed_forward, Experts)]
    assert {tuple(own and own.num_bits for own in of_layer) for of_layer in products} == {(None, bits, bits)}
    assert_near(decoder, tmp_path / "plain")


def assert_near(decoder: Decoder, directory: Path) -> None:
    """The sizes of steps within an output have eleven bits."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager")
    expected = model(torch.tensor([TEXT])).logits[0]
    torch.testing.assert_close(text_logits(decoder, TEXT), expected, atol=2e-3 * float(expected.std()), rtol=0)


@pytest.mark.usefixtures("with_kernels")
def test_captured_steps_write_the_same_texts(target_dir: Path, head_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers of four bits, an output layer of eight."""
    core = make_captured(target_dir, head_dir, (2, 2, 4), (2,), quantization="int4")
    texts = run(core, PROMPTS, SETTINGS[1:])
    assert "step" in core.runner.clock.seconds
    monkeypatch.setattr(narrow_product, "triton_kernel", lambda name, x: None)
    plain = make_core(target_dir, quantization="int4")
    assert {product.num_bits for product in living(NarrowProduct)} == {4, 8}
    assert texts == run(plain, PROMPTS, SETTINGS[1:])
    assert texts != run(make_core(target_dir), PROMPTS, SETTINGS[1:]), "nothing was rounded"


@pytest.mark.usefixtures("with_kernels")
def test_what_is_captured_never_reads_a_tensor(target_dir: Path, head_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "HAS_NUMBA", False)  # a CPU's own kernels read their operands on the host
    options = {"quantization": "int4", "speculative_draft_model_quantization": "int8"}
    core = make_captured(target_dir, head_dir, (3, 2, 6), (2,), **options)
    step = captured_callable(core.runner.graphs.find(2, core.runner.tree_shape))
    with watching(monkeypatch):
        step()


@pytest.mark.usefixtures("on_gpu")
def test_a_head_may_have_eight_bits(target_dir: Path, head_dir: Path) -> None:
    """Only where that is asked for."""
    for asked, is_rounded in (("auto", False), ("int8", True)):
        config = make_config(target_dir, head_dir, (3, 2, 8), speculative_draft_model_quantization=asked)
        head = load.load_models(config, load.model_info(config)).head
        assert head
        assert isinstance(head._lm_head.product, NarrowProduct) == is_rounded


@pytest.mark.usefixtures("with_kernels")
def test_none_is_widened_for_a_skinny_product(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "most_skinny_rows", lambda weight: 64)
    asked: list[str] = []
    monkeypatch.setattr(dispatch, "triton_kernel", lambda name, x: asked.append(name))
    own, x = Linear(torch.randn(2 * 24, 64).bfloat16(), None, "int8"), torch.randn(3, 64).bfloat16()
    torch.testing.assert_close(own.gated(x), gated(x @ own.weight.t()), rtol=0.05, atol=0.5)
    assert asked == ["gated"] * 2
