"""Refuses settings that a model or another setting does not support. Each error is one line."""

from __future__ import annotations

import torch

from ostinato.conf.engine_config import EngineConfig
from ostinato.conf.schema import GraphForm, GraphMode
from ostinato.conf.server_schema import ExchangeName
from ostinato.conf.speculation.speculation_schema import SpeculationMethod
from ostinato.models.config.model_config import ModelConfig
from ostinato.models.sharding import Shard
from ostinato.runtime.costs.step_limits import StepLimits
from ostinato.runtime.errors import StartupError

__all__ = ("check_division", "check_speculation")


def check_speculation(config: EngineConfig, model: ModelConfig, limits: StepLimits) -> None:
    """Refuse drafts if the model does not support them or a step is too small.

    Raises:
        StartupError: the model does not generate, or a step has fewer tokens than a draft.
    """
    method, max_tokens = config.speculation.drafter, config.speculation.max_tokens
    if method is SpeculationMethod.none:
        return
    if not model.kind.generates:
        raise StartupError(
            f"speculation.method={method} is for models that generate, and {model.architecture} "
            "does not; set speculation.method=none"
        )
    if (most := limits.max_num_batched_tokens) < 1 + max_tokens:
        raise StartupError(
            f"speculation.max_tokens={max_tokens} needs steps of {1 + max_tokens} tokens, and "
            f"scheduler.max_num_batched_tokens={most}; lower the first or raise the second"
        )


def check_division(config: EngineConfig, device: torch.device, shard: Shard) -> None:
    """Refuse ranks and stages together with a device or a setting that does not support them.

    Raises:
        StartupError: the device or a setting does not support ranks or stages.
    """
    parallel = config.parallel
    if parallel.exchange is ExchangeName.gloo and device.type != "cpu":
        raise StartupError(
            f"parallel.exchange=gloo is for CPUs, and the model runs on {device.type}; set "
            "parallel.exchange=auto, which is NCCL on GPUs"
        )
    if shard.stage.count == 1:
        return
    key = f"parallel.pipeline={shard.stage.count}"
    if config.graphs.form is not GraphForm.layer and config.graphs.mode is not GraphMode.eager:
        raise StartupError(
            f"graphs.form={config.graphs.form} compiles the model as a whole, and {key} divides "
            "its layers among stages; set graphs.form=layer or parallel.pipeline=1"
        )
