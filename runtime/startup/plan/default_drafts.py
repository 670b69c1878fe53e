"""Decides whether an engine has drafts if `speculation.method` is not set."""

from __future__ import annotations

import dataclasses
import logging

from ostinato.conf.engine_config import EngineConfig
from ostinato.conf.schema import AttentionBackendName
from ostinato.conf.sections.speculation_schema import SpeculationMethod
from ostinato.models.config.model_config import ModelConfig
from ostinato.models.weight_policy import WeightPolicy
from ostinato.runtime.costs.step_limits import upper_limits

__all__ = ("with_default_drafts",)

_LOG = logging.getLogger(__name__)
_INVARIANT_ATTENTION = (AttentionBackendName.auto, AttentionBackendName.cpu)


def with_default_drafts(
    config: EngineConfig, model: ModelConfig, weights: WeightPolicy, *, is_cpu: bool
) -> EngineConfig:
    """The configuration with a `speculation.method`. If it states none, this function chooses one.

    The method is `auto` if the model generates on a CPU, a step has room for a draft, drafts cannot
    change an answer, and measured step costs choose the number of drafts, so that they do not slow
    the engine down. Otherwise it is `none`.

    Args:
        config: the engine's configuration.
        model: the model's configuration.
        weights: how its matrices are stored.
        is_cpu: the model runs on a CPU.
    """
    if config.speculation.method is not None:
        return config
    reason = _why_none(config, model, weights, is_cpu=is_cpu)
    if reason is not None:
        _LOG.debug("no drafts by default: %s", reason)
    method = SpeculationMethod.auto if reason is None else SpeculationMethod.none
    section = dataclasses.replace(config.speculation, method=method)
    return dataclasses.replace(config, speculation=section)


def _why_none(
    config: EngineConfig, model: ModelConfig, weights: WeightPolicy, *, is_cpu: bool
) -> str | None:
    most_tokens = upper_limits(config.scheduler, is_cpu=is_cpu).max_num_batched_tokens
    if not model.kind.generates:
        return "the model does not generate"
    if not is_cpu:
        return "drafts are not measured on GPUs"
    if config.graphs.cost_table_budget_s == 0 or not config.speculation.adaptive:
        return "step costs would not choose the number of drafts"
    if most_tokens < 1 + config.speculation.max_tokens:
        return f"a step of {most_tokens} tokens is shorter than a draft"
    if not weights.is_batch_invariant or config.graphs.attention not in _INVARIANT_ATTENTION:
        return "the logits of a sequence depend on its batch"
    return None
