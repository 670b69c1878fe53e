"""The room for low-rank adapters that the configuration asks for."""

from __future__ import annotations

from ostinato.conf.engine_config import EngineConfig
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
        raise StartupError(
            f"lora.max_adapters={lora.num_slots}, but {model.architecture} takes {inputs}, and "
            "such models have no adapters; merge the adapter into the checkpoint, and leave the "
            "section lora at its defaults"
        )
    if model.recurrent is not None:
        raise StartupError(
            f"lora.max_adapters={lora.num_slots}, but {model.architecture} has recurrent layers, "
            "and such models have no adapters; merge the adapter into the checkpoint, and leave "
            "the section lora at its defaults"
        )
    if not issubclass(class_of(model), Decoder):
        how = "runs through transformers" if model.kind.generates else "is an encoder"
        raise StartupError(
            f"lora.max_adapters={lora.num_slots}, but {model.architecture} {how}, and only native "
            "decoders take adapters; merge the adapter into the checkpoint, and leave the section "
            "lora at its defaults"
        )
    return AdapterSpace(num_slots=lora.num_slots, max_rank=lora.max_rank)
