"""From a config to a running engine."""

from eagle_rt.config import EngineConfig, resolve_device, resolve_tree
from eagle_rt.engine.assemble import make_core
from eagle_rt.engine.capture import capture_steps, captures_steps
from eagle_rt.engine.compile import compile_passes
from eagle_rt.engine.core import EngineCore
from eagle_rt.engine.fit import fitted
from eagle_rt.engine.load import LoadedModels, ModelInfo, load_models


def build_core(config: EngineConfig, info: ModelInfo) -> tuple[EngineCore, list[str]]:
    """Load the models, see that head and target fit, and make an engine over them; also what was decided for the user."""
    config = resolve_device(config)
    resolve_tree(config, config.device)  # a tree that cannot work is refused before anything is loaded
    models = fitted(load_models(config, info), config, info.tokenizer)
    return prepared_core(models, config)


def prepared_core(models: LoadedModels, config: EngineConfig) -> tuple[EngineCore, list[str]]:
    """An engine over loaded models, its passes compiled and its steps captured as `config`, with its device resolved, says."""
    core, notes = make_core(models, config)
    if config.enable_torch_compile:
        notes += compile_passes(core, models, config)
    if captures_steps(config):
        notes += capture_steps(core, config)
    return core, notes
