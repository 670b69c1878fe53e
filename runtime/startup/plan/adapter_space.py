"""The room for low-rank adapters that the configuration asks for."""

from __future__ import annotations

from ostinato.conf.engine_config import EngineConfig
from ostinato.conf.sections.lora_schema import LoraConfig
from ostinato.models.config.model_config import ModelConfig
from ostinato.models.decoder import Decoder
from ostinato.models.layers.adapter_slots import AdapterSpace
from ostinato.models.registry import class_of
from ostinato.runtime.errors import StartupError

__all__ = ("adapter_space",)


def adapter_space(config: EngineConfig, model: ModelConfig) -> AdapterSpace | None:
    """The room for low-rank adapters that the configuration asks for.

    Raises:
        StartupError: the model cannot have adapters.
    """
    lora = config.lora
    if not lora.num_slots:
        return None
    inputs = "images" if model.vision is not None else "audio"
    if model.vision is not None or model.audio is not None or model.sound is not None:
        raise _refusal(lora, model, f"takes {inputs}", "such models have no adapters")
    if model.recurrent is not None:
        raise _refusal(lora, model, "has recurrent layers", "such models have no adapters")
    if not issubclass(class_of(model), Decoder):
        how = "runs through transformers" if model.kind.generates else "is an encoder"
        raise _refusal(lora, model, how, "only native decoders take adapters")
    return AdapterSpace(num_slots=lora.num_slots, max_rank=lora.max_rank)


def _refusal(lora: LoraConfig, model: ModelConfig, how: str, rule: str) -> StartupError:
    asked = f"lora.max_adapters={lora.max_adapters}"
    if lora.max_adapters is None:
        names = ", ".join(f"{name}: {path}" for name, path in lora.adapters.items())
        asked = f"lora.adapters={{{names}}}" if names else "lora.allow_runtime_loading=true"
    return StartupError(
        f"{asked}, but {model.architecture} {how}, and {rule}; merge the adapter into the "
        "checkpoint, and leave the section lora at its defaults"
    )
