"""The engine plan: model, device, memory, attention backend and buckets, before weights are read.

Every rank plans its own part from the same configuration. Nothing is allocated.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Literal

from ostinato.conf.engine_config import EngineConfig, draft_config
from ostinato.conf.schema import Determinism, ExpertKernels, GraphMode
from ostinato.conf.sections.speculation_schema import NO_DRAFTS
from ostinato.graphs.buckets import BucketTable
from ostinato.models.base import AuxStates
from ostinato.models.config.head_spec import NO_INPUTS, HeadInputs
from ostinato.models.kv_cache import KVCache, KVCacheSpec
from ostinato.models.sharding import WHOLE, Shard
from ostinato.models.step_tensors import StepSizes
from ostinato.ops.attention import AttentionSpec, backends_of, load_backend, select_backend
from ostinato.ops.fused.fused_linear import warm_up_tokens
from ostinato.ops.moe.flashinfer_experts import why_unsupported
from ostinato.ops.moe.moe_linear import tile_tokens
from ostinato.ops.quantized import GPU_TILE_TOKENS
from ostinato.runtime.costs.step_limits import StepLimits
from ostinato.runtime.errors import StartupError
from ostinato.runtime.memory.footprint import CUDA_GRAPH_BYTES
from ostinato.runtime.memory.memory_plan import GIB, MemoryPlan
from ostinato.runtime.startup.plan.model_source import ModelSource, model_skeleton, open_model
from ostinato.runtime.startup.plan.planning import bucket_table, count_graphs, plan_engine
from ostinato.runtime.startup.plan.refusals import check_tiers
from ostinato.runtime.startup.plan.warm_up import cpu_steps, gpu_steps
from ostinato.runtime.tiers.block_file import place_stride
from ostinato.runtime.types.engine_info import IsaTrial

__all__ = ("EnginePlan", "check_determinism", "finish_plan", "make_plan")


@dataclass(frozen=True, slots=True, kw_only=True)
class EnginePlan:
    """Everything that is decided about an engine before it is built."""

    config: EngineConfig
    source: ModelSource
    memory: MemoryPlan
    backend: str  # attention backend; empty for a model without a KV cache
    experts: ExpertKernels  # `auto` for a model without experts
    buckets: BucketTable  # the buckets to capture; step costs can remove some
    overlap: bool  # whether a step is launched before the previous step is read
    threads: int  # threads of the model on a CPU
    isa_trial: IsaTrial | None = None  # how the instruction set was chosen; None = not by a trial
    # The plan of the draft model or the head. Its KV cache has the same number of blocks.
    draft: EnginePlan | None = None

    @property
    def is_cpu(self) -> bool:
        """Whether the model runs on a CPU."""
        return self.source.device.type == "cpu"

    @property
    def limits(self) -> StepLimits:
        """The largest step, with only as many sequences as have a slot for their states."""
        limits = self.source.limits
        return limits._replace(max_num_seqs=self.memory.running_seqs(limits.max_num_seqs))

    @property
    def draft_model_len(self) -> int:
        """The longest sequence, in tokens, that the draft model or the head can compute."""
        assert self.draft is not None, "there is a draft model"
        return min(self.memory.max_model_len, self.draft.source.config.max_model_len)

    @property
    def warm_up_steps(self) -> tuple[StepSizes, ...]:
        """The uncaptured steps of a start. They run every kernel once."""
        limits = self.source.limits
        most_tokens, most_seqs = limits.max_num_batched_tokens, limits.max_num_seqs
        if self.is_cpu:
            return cpu_steps(most_tokens)
        moe = self.source.config.moe
        tokens = {*warm_up_tokens(self.source.dtype), *GPU_TILE_TOKENS}
        if moe is not None:
            tokens |= set(tile_tokens(moe.route.num_experts, moe.route.top_k))
        seqs = load_backend(self.backend).warm_up_seqs if self.backend else ()
        return gpu_steps(tokens, {*seqs, *GPU_TILE_TOKENS}, most_tokens, most_seqs)

    @property
    def attention_spec(self) -> AttentionSpec:
        """The requirements of the model on its attention backend."""
        return self.source.attention_spec(self.config.cache.block_size)

    @property
    def kv_cache_spec(self) -> KVCacheSpec:
        """Shapes of the KV cache."""
        return self.source.kv_cache_spec(self.config.cache.block_size)

    def allocate_cache(self) -> KVCache:
        """The KV cache and the states of this rank, as large as planned."""
        memory = self.memory
        return self.kv_cache_spec.allocate(memory.num_blocks, self.source.device, memory.num_states)

    @property
    def num_host_places(self) -> int:
        """Copies of KV blocks that `cache.host_gib` has room for."""
        return int(self.config.cache.host_gib * GIB) // (self._rank_block_bytes * self._num_ranks)

    @property
    def num_disk_places(self) -> int:
        """Copies of KV blocks that `cache.disk_gib` has room for."""
        stride = place_stride(self._rank_block_bytes)
        return int(self.config.cache.disk_gib * GIB) // (stride * self._num_ranks)

    @property
    def _num_ranks(self) -> int:
        return self.source.shard.num_ranks

    @property
    def _rank_block_bytes(self) -> int:
        """Bytes of a block on the rank with the most layers; every rank computes the same."""
        spec = self.kv_cache_spec
        num_layers = -(-self.source.config.num_layers // self.source.shard.stage.count)
        return spec.bytes_per_token // spec.num_layers * num_layers * spec.block_size

    def make_aux_states(self) -> AuxStates | None:
        """Buffers for the hidden states that the draft head reads.

        None if there is no head, or if this rank keeps none of the states.
        """
        inputs, shard = self.source.head_inputs, self.source.shard
        if inputs.has_final:  # all ranks of the last stage compute them together
            return AuxStates((), has_final=True) if shard.stage.is_last else None
        if shard.rank != 0:  # all ranks of a group have the same hidden states
            return None
        first, count, _ = shard.layers(self.source.config.num_layers)
        own = [layer - first for layer in inputs.layers if first <= layer < first + count]
        num_earlier = sum(layer < first for layer in inputs.layers)
        return AuxStates(own, num_earlier=num_earlier) if own or num_earlier else None

    @property
    def determinism(self) -> Literal["bitwise", "none"]:
        """`bitwise` if the bits of a token's logits depend on its own context alone."""
        return "none" if self.why_batch_dependent else "bitwise"

    @property
    def why_batch_dependent(self) -> str | None:
        """Why the bits of a token's logits can depend on the batch, and the remedy on a CPU.

        None if the bits do not depend on the batch.
        """
        graphs, dtype = self.config.graphs, str(self.source.dtype).removeprefix("torch.")
        if not self.is_cpu:
            return f"kernels on {self.source.device.type} choose their order of sums by the batch"
        reasons: list[str] = []
        if not self.source.weights.is_batch_invariant:
            reasons.append(
                f"torch multiplies {dtype} weights; set model.dtype=bfloat16 or float32"
                if graphs.pack_weights
                else "torch multiplies unpacked weights; set graphs.pack_weights=true"
            )
        if self.backend and not load_backend(self.backend).is_batch_invariant:
            reasons.append(f"attention runs on {self.backend}; set graphs.attention=cpu")
        return "; ".join(reasons) or None


def make_plan(
    config: EngineConfig,
    threads: int,
    *,
    max_drafts: int | None = None,
    shard: Shard = WHOLE,
    head_inputs: HeadInputs = NO_INPUTS,
) -> EnginePlan:
    """Find the model and decide how it will run.

    Args:
        config: the engine's configuration.
        threads: threads of the model on a CPU.
        max_drafts: draft tokens of one sequence in one step, at most; 0 = no drafter, None = as
            configured.
        shard: the part of the model that this rank holds.
        head_inputs: as for `open_model`.

    Raises:
        StartupError: there is no such model, it does not fit, or it does not support a setting.
    """
    source = open_model(config, max_drafts=max_drafts, shard=shard, head_inputs=head_inputs)
    has_method = config.speculation.method is not None
    config = dataclasses.replace(config, speculation=source.speculation)
    try:
        memory = plan_engine(config, source)
    except StartupError:  # drafts take memory for rows of logits: plan without default drafts
        if has_method or max_drafts is not None or not source.speculation.max_drafts:
            raise
        config = dataclasses.replace(config, speculation=NO_DRAFTS)
        return make_plan(config, threads, shard=shard)
    return finish_plan(config, source, memory, threads)


def finish_plan(
    config: EngineConfig,
    source: ModelSource,
    memory: MemoryPlan,
    threads: int,
    *,
    is_here: bool = True,
) -> EnginePlan:
    """Choose kernels and buckets for a model whose memory is planned.

    Args:
        config: the engine's configuration, with `source.speculation`.
        source: from `open_model`.
        memory: from `plan_engine`.
        threads: threads of the model on a CPU.
        is_here: whether the device is in this machine. If not, the version of a GPU and the
            libraries for it are not checked.

    Raises:
        StartupError: the model or the device does not support a setting.
    """
    backend = _select_backend(config, source, is_here=is_here)
    _check_graphs(config, source, backend)
    # On a CPU the step runs on the scheduler's thread, so there is nothing to overlap.
    overlap = config.scheduler.overlap
    plan = EnginePlan(
        config=config,
        source=source,
        memory=memory,
        backend=backend,
        experts=_select_experts(config, source, is_here=is_here),
        buckets=bucket_table(config, source),
        overlap=source.device.type != "cpu" if overlap is None else overlap,
        threads=threads,
    )
    check_determinism(plan)
    check_tiers(config, source.config, source.device, is_here=is_here)
    _check_places(plan)
    if source.draft is None:
        return plan
    return dataclasses.replace(plan, draft=_draft_plan(plan, is_here=is_here))


def _check_places(plan: EnginePlan) -> None:
    """Refuse a tier that is smaller than one KV block."""
    cache = plan.config.cache
    if cache.host_gib and not plan.num_host_places:
        raise _no_room("cache.host_gib", cache.host_gib)
    if cache.disk_dir and not plan.num_disk_places:
        raise _no_room("cache.disk_gib", cache.disk_gib)


def _no_room(key: str, size_gib: float) -> StartupError:
    return StartupError(
        f"{key}={size_gib:g} has no room for one KV block of all ranks; raise it, or leave the "
        "tier out"
    )


def _draft_plan(plan: EnginePlan, *, is_here: bool) -> EnginePlan:
    """The plan of the draft model, which runs steps of decodes and prompts like any model.

    Raises:
        StartupError: the draft model does not support a setting.
    """
    source, config = plan.source.draft, draft_config(plan.config)
    assert source is not None, "there is a draft model"
    has_experts = source.config.has_experts
    spec = source.kv_cache_spec(config.cache.block_size)
    memory = dataclasses.replace(
        plan.memory,
        groups=source.kv_groups,
        max_model_len=min(plan.memory.max_model_len, source.config.max_model_len),
        bytes_per_block=spec.bytes_per_block,
        bytes_per_token=spec.bytes_per_token,
        # The draft model's graphs share the memory pool of the model's graphs.
        graph_bytes=0 if plan.is_cpu else count_graphs(config, source) * CUDA_GRAPH_BYTES,
    )
    return EnginePlan(
        config=config,
        source=source,
        memory=memory,
        backend=_select_backend(config, source, is_here=is_here),
        experts=_select_experts(config, source, is_here=is_here)
        if has_experts
        else ExpertKernels.auto,
        buckets=bucket_table(config, source),
        overlap=False,
        threads=plan.threads,
    )


def _select_backend(config: EngineConfig, source: ModelSource, *, is_here: bool = True) -> str:
    if not source.config.kind.needs_kv_cache:
        return ""  # an encoder's attention is another op, with one kernel
    spec, name = source.attention_spec(config.cache.block_size), config.graphs.attention.value
    names = backends_of(source.device.type)
    if not is_here and name in ("auto", *names):
        return names[0] if name == "auto" else name
    try:
        return select_backend(name, spec)
    except ValueError as error:
        raise StartupError(str(error)) from error


def _select_experts(
    config: EngineConfig, source: ModelSource, *, is_here: bool = True
) -> ExpertKernels:
    """The kernels of a mixture of experts.

    Args:
        config: the engine's configuration.
        source: from `open_model`.
        is_here: whether the device is in this machine. If not, only the model is checked.

    Raises:
        StartupError: the model or the device does not support `graphs.experts`.
    """
    experts, model = config.graphs.experts, source.config
    if experts is ExpertKernels.auto:
        return experts
    reason = why_unsupported(source.device, source.dtype, is_here=is_here)
    if not model.has_experts:
        reason = f"needs a mixture of experts, which {model.architecture} is not"
    elif model.moe is None:
        reason = f"needs a native model, and {model.architecture} runs through transformers"
    if reason is not None:
        raise StartupError(f"graphs.experts={experts} {reason}; leave it at auto")
    try:
        model_skeleton(source, experts)
    except ValueError as error:
        raise StartupError(str(error)) from error
    return experts


def check_determinism(plan: EnginePlan) -> None:
    """Check that the plan keeps what `runtime.determinism` asks for.

    Raises:
        StartupError: the plan does not keep it; the text names the reason and the remedy.
    """
    reason = plan.why_batch_dependent
    if plan.config.runtime.determinism is Determinism.bitwise and reason is not None:
        if not plan.is_cpu:
            reason += "; set device.name=cpu"
        raise StartupError(
            f"runtime.determinism=bitwise, but the bits of an answer would depend on its batch: "
            f"{reason}; or leave runtime.determinism at auto"
        )


def _check_graphs(config: EngineConfig, source: ModelSource, backend: str) -> None:
    """Refuse settings that would fail late on a GPU, or give wrong results without an error."""
    mode, model = config.graphs.mode, source.config
    if source.device.type == "cpu" or mode is GraphMode.eager:
        return
    if backend == "reference" and mode is GraphMode.captured:
        raise StartupError(
            "graphs.attention=reference reads lengths on the host, so its steps cannot be "
            "captured; set graphs.mode=compiled"
        )
    # Compiled GPU kernels compute indices with 32 bits, and no check of the sizes happens later.
    most = ((1 << 31) - 1) // max(model.hidden_size, 2 * model.widest_mlp, model.qkv_size())
    if source.limits.max_num_batched_tokens > most:
        raise StartupError(
            f"scheduler.max_num_batched_tokens={source.limits.max_num_batched_tokens}, but "
            f"compiled kernels of this model take at most {most} tokens a step; lower "
            "scheduler.max_num_batched_tokens"
        )
