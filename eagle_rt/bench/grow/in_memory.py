"""A grown pair straight into memory, on a GPU at the GPU's speed: no file is written."""

import torch

from eagle_rt.bench.grow.__main__ import large_configs
from eagle_rt.bench.grow.shapes import GrownShape
from eagle_rt.bench.grow.tensors import grown_head, grown_target
from eagle_rt.engine.load import BUILT_IN, LoadedModels, ModelInfo
from eagle_rt.kernels.products import Quantization
from eagle_rt.models.decoder import Decoder
from eagle_rt.models.experts import expert_name
from eagle_rt.models.heads.eagle3 import Eagle3Head
from eagle_rt.models.heads.load import head_name
from eagle_rt.models.heads.spec import flat_config, head_spec
from eagle_rt.models.spec import model_spec, read_config
from eagle_rt.models.weights import Checkpoint, MemoryCheckpoint


def grown_models(
    shape: GrownShape, info: ModelInfo, dtype: torch.dtype, device: str, context_length: int, quantization: Quantization = "none"
) -> LoadedModels:
    """The built-in pair, grown to a shape, ready for engines; `info` is the built-in target's. quantization: of the target."""
    target_dir, head_dir = BUILT_IN / "target", BUILT_IN / "eagle3"
    large_target, large_head = large_configs(target_dir, head_dir, shape, dtype)
    spec = model_spec(large_target)

    small = Checkpoint(target_dir, torch.float32, device, "small target")
    tensors = grown_target(small, flat_config(read_config(target_dir)), shape)
    grown = MemoryCheckpoint(((expert_name(name), tensor) for name, tensor in tensors), dtype, device, "grown target")
    target = Decoder(grown, spec, context_length=context_length, dtype=dtype, device=device, quantization=quantization)
    grown.finish()

    small = Checkpoint(head_dir, torch.float32, device, "small head", head_name)
    tensors = grown_head(small, flat_config(read_config(head_dir)), shape)
    grown = MemoryCheckpoint(((head_name(name), tensor) for name, tensor in tensors), dtype, device, "grown head")
    head = Eagle3Head(grown, head_spec(large_head, spec, "EAGLE3"), target)
    grown.finish()
    return LoadedModels(spec, target, head, info.eos_token_ids, dtype, context_length, quantization, notes=[])
