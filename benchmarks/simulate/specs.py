"""Makes the `EngineSpec` of a simulation from a configuration."""

from __future__ import annotations

import dataclasses
from collections import Counter

import torch
from torch import nn

from ostinato.benchmarks.simulate.simulated_drafts import DraftSpec
from ostinato.benchmarks.simulate.simulated_engine import EngineSpec
from ostinato.benchmarks.simulate.step_times.device_roofline import (
    ACCELERATORS,
    LINKS,
    Division,
    ModelShape,
    roofline_table,
)
from ostinato.conf.describe import nearest
from ostinato.conf.environment import expand_user
from ostinato.conf.errors import ConfigError
from ostinato.conf.root import RunConfig
from ostinato.conf.schema import LoadFormat
from ostinato.conf.sections.speculation_schema import NO_DRAFTS
from ostinato.models.layers.expert_linear import ExpertLinear
from ostinato.models.registry import build_model
from ostinato.models.sharding import shard_of_rank
from ostinato.runtime.costs.cost_table import CostTable
from ostinato.runtime.costs.step_limits import seqs_with_states, upper_limits
from ostinato.runtime.errors import StartupError
from ostinato.runtime.startup.build_engine import build_engine
from ostinato.runtime.startup.plan.device import resolve_device
from ostinato.runtime.startup.plan.model_source import ModelSource, open_model, part_of
from ostinato.runtime.startup.plan.planning import plan_engine

__all__ = (
    "engine_spec",
    "measured_spec",
    "model_shape",
    "planned_spec",
    "read_costs",
    "save_costs",
    "without_default_drafts",
    "without_weights",
)

_GIB = 1 << 30
_FREE_SHARE = 0.97  # free share of a device's memory; its driver uses the rest


def engine_spec(config: RunConfig) -> EngineSpec:
    """The engine that the configuration describes, on the device that `simulate` names.

    Raises:
        ConfigError: there is no such device, the table cannot be read, or the drafts cannot be
            simulated.
        StartupError: an engine with this configuration could not start.
    """
    section = config.simulate
    if section.costs:
        return planned_spec(config, read_costs(section.costs), section.device)
    if section.device:
        return planned_spec(config, None, section.device)
    return measured_spec(config)


def measured_spec(config: RunConfig) -> EngineSpec:
    """Start the engine in this process as `run serve` does, and use its step-cost table.

    Raises:
        StartupError: the engine cannot start, or step costs are not measured.
    """
    if config.graphs.cost_table_budget_s == 0:
        raise StartupError(
            "a simulation needs step costs, but graphs.cost_table_budget_s=0; raise it, leave it "
            "null, or set simulate.costs or simulate.device"
        )
    config = without_default_drafts(config)
    # the engine has its drafter, so that verification is measured too
    engine = build_engine(config)
    try:
        costs, stats = engine.cost_table, engine.stats()
        assert costs is not None, "step costs are measured unless that is switched off"
        device, source = resolve_device(config.device.name), open_model(config)
        config = dataclasses.replace(config, speculation=source.speculation)
        num_states = stats.num_state_slots + 1 if stats.num_state_slots else 0
        upper = upper_limits(
            config.scheduler,
            is_cpu=device.type == "cpu",
            max_drafts=config.speculation.max_drafts,
        )
        most = seqs_with_states(upper.max_num_seqs, num_states)
        return EngineSpec(
            scheduler=config.scheduler,
            upper=upper._replace(max_num_seqs=most),
            num_blocks=stats.num_blocks + 1,
            block_size=config.cache.block_size,
            groups=source.kv_groups,
            num_states=num_states,
            max_model_len=engine.model.max_model_len,
            costs=costs,
            prefix_caching=config.cache.enable_prefix_caching,
            num_stages=config.parallel.pipeline,
            overlap=_overlaps(config, device),
            drafts=_drafts(config, engine.draft_costs),
        )
    finally:
        engine.close()


def planned_spec(
    config: RunConfig,
    costs: CostTable | None,
    device_name: str,
    draft_costs: CostTable | None = None,
) -> EngineSpec:
    """The engine that a configuration describes, from its memory plan alone.

    Args:
        config: the configuration.
        costs: the step-cost table; None = a roofline of the named device.
        device_name: a key of `ACCELERATORS` to plan the memory for; empty = this machine.
        draft_costs: the step-cost table of the draft model, if there is one.

    Raises:
        ConfigError: there is no such device, there are drafts of several stages, or a draft model
            has no step costs.
        StartupError: the model does not exist or does not fit.
    """
    accelerator = None
    if device_name:
        accelerator = ACCELERATORS.get(device_name)
        if accelerator is None:
            close = nearest(device_name, ACCELERATORS)
            raise ConfigError(
                f"simulate.device must be one of {', '.join(ACCELERATORS)}, got {device_name!r}"
                + (f"; did you mean {close}?" if close else "")
            )
    config = without_default_drafts(without_weights(config))
    device = resolve_device(config.device.name) if accelerator is None else torch.device("cuda")
    source = open_model(config, device)
    config = dataclasses.replace(config, speculation=source.speculation)
    free = None if accelerator is None else int(accelerator.memory_gib * _GIB * _FREE_SHARE)
    parallel = config.parallel
    if parallel.pipeline > 1 and config.speculation.max_drafts:
        raise ConfigError(
            f"speculation.method={config.speculation.method} with parallel.pipeline="
            f"{parallel.pipeline}: drafts of several stages need costs that this run measures; "
            "leave simulate.costs and simulate.device out, or set speculation.method=none"
        )
    shards = [
        shard_of_rank(rank, parallel.tensor, parallel.pipeline)
        for rank in range(parallel.num_ranks)
    ]
    plans = [plan_engine(config, part_of(source, shard), free_bytes=free) for shard in shards]
    shares = map(min, zip(*(each.shares for each in plans), strict=True))
    plan = plans[0].limited(*shares)
    if source.draft is not None and draft_costs is None:
        raise ConfigError(
            "simulate.costs and simulate.device give no step costs of a draft model; leave them "
            "out, so that both models are measured, or set speculation.method=none"
        )
    limits = source.limits
    limits = limits._replace(max_num_seqs=plan.running_seqs(limits.max_num_seqs))
    if costs is None:
        assert accelerator is not None, "without a table there is a device"
        shape = model_shape(source)
        division = Division(
            tensor=parallel.tensor,
            pipeline=parallel.pipeline,
            link=LINKS[config.simulate.link],
            stage_link=LINKS[config.simulate.stage_link or config.simulate.link],
        )
        costs = roofline_table(accelerator, shape, limits, plan.max_model_len, division)
    return EngineSpec(
        scheduler=config.scheduler,
        upper=limits,
        num_blocks=plan.num_blocks,
        block_size=config.cache.block_size,
        groups=plan.groups,
        num_states=plan.num_states,
        max_model_len=plan.max_model_len,
        costs=costs,
        prefix_caching=config.cache.enable_prefix_caching,
        num_stages=parallel.pipeline,
        overlap=_overlaps(config, device),
        drafts=_drafts(config, draft_costs),
    )


def _drafts(config: RunConfig, model_costs: CostTable | None) -> DraftSpec | None:
    if not config.speculation.max_drafts:
        return None
    return DraftSpec(
        max_drafts=config.speculation.max_drafts,
        acceptance=config.simulate.acceptance,
        adaptive=config.speculation.adaptive,
        model_costs=model_costs,
    )


def without_weights(config: RunConfig) -> RunConfig:
    """The configuration with dummy weights, so that no weights are downloaded."""
    section = dataclasses.replace(config.model, load_format=LoadFormat.dummy)
    return dataclasses.replace(config, model=section)


def without_default_drafts(config: RunConfig) -> RunConfig:
    """The configuration without drafts, unless it has a `speculation.method`.

    How many drafts are right depends on the text, so drafts are simulated only if that is asked
    for.
    """
    if config.speculation.method is not None:
        return config
    return dataclasses.replace(config, speculation=NO_DRAFTS)


def read_costs(path: str) -> CostTable:
    """Read a step-cost table from a file.

    Raises:
        ConfigError: the file does not exist or is not a table.
    """
    try:
        return CostTable.from_bytes(expand_user(path).read_bytes())
    except OSError as error:
        raise ConfigError(f"simulate.costs={path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(
            f"simulate.costs={path}: {error}; write one with simulate.save_costs"
        ) from error


def save_costs(costs: CostTable, path: str) -> None:
    """Write a table to a file for `simulate.costs`."""
    file = expand_user(path)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(costs.to_bytes())


def _overlaps(config: RunConfig, device: torch.device) -> bool:
    overlap = config.scheduler.overlap
    return device.type != "cpu" if overlap is None else overlap


def model_shape(source: ModelSource) -> ModelShape:
    """The sizes of a model, which is built on the meta device."""
    model = source.config
    skeleton = build_model(
        model, dtype=source.dtype, device=torch.device("meta"), attention_backend="reference"
    )
    total = _count(skeleton)
    table = model.vocab_size * model.hidden_size
    layers = total - table * (1 if model.tie_word_embeddings else 2)
    experts, share = _experts(source, skeleton)
    spec = model.kv_cache_spec(1, source.cache_dtype, activation_dtype=source.dtype)
    return ModelShape(
        num_parameters=layers - round(experts * (1 - share)),
        num_logit_parameters=table,
        weight_bytes=(layers + table) * source.dtype.itemsize,
        expert_bytes=experts * source.dtype.itemsize,
        expert_share=share,
        kv_bytes_per_token=spec.bytes_per_token,
        attention_width=spec.num_layers * model.num_heads * model.head_dim,
        windows=dict(Counter(model.attention_windows)),
        state_bytes=0 if spec.recurrent is None else spec.recurrent.bytes_per_slot,
        state_operations=model.state_operations,
        num_layers=model.num_layers,
        hidden_bytes=model.hidden_size * source.dtype.itemsize,
    )


def _experts(source: ModelSource, skeleton: nn.Module) -> tuple[int, float]:
    """The parameters of routed experts, and the share of these experts that one token uses."""
    # In a layer with a single expert, every token uses it.
    routed = [
        module
        for module in skeleton.modules()
        if isinstance(module, ExpertLinear) and module.experts.size > 1
    ]
    if not routed:
        return 0, 1.0
    moe = source.config.moe
    given = source.checkpoint.hf_config.get("num_experts_per_tok")
    if moe is not None:
        top_k = moe.route.top_k
    else:  # a model through `transformers`; without the key, all experts count
        top_k = given if isinstance(given, int) else routed[0].experts.size
    return sum(map(_count, routed)), min(1.0, top_k / routed[0].experts.size)


def _count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
