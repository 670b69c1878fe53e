"""The served model's facts and the engine's counters, as sent to the API process."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from itertools import zip_longest
from typing import Any

import msgspec

from ostinato.graphs.compile_monitor import LateCompile
from ostinato.runtime.types.params import PoolingKind

__all__ = ("ITERATION_TOKENS", "EngineStats", "ServedModel", "ServedTask", "sum_stats")

ITERATION_TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)


class ServedTask(StrEnum):
    """The tasks of models."""

    generate = "generate"
    embed = "embed"
    classify = "classify"


class ServedModel(msgspec.Struct, frozen=True, kw_only=True):
    """Facts about the model that an engine serves."""

    name: str
    max_model_len: int  # tokens, prompt plus output
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    tokenizer: str  # directory with the tokenizer's files; empty = none, token ids only
    default_sampling: dict[str, int | float] = {}  # from generation_config.json
    created: int = 0  # unix seconds
    startup_seconds: dict[str, float] = {}  # phase -> seconds, in order
    isa: str = ""  # instruction set of the CPU kernels; empty = none are used
    tasks: tuple[ServedTask, ...] = (ServedTask.generate,)
    embedding_size: int = 0  # numbers of a vector
    pooling: PoolingKind = PoolingKind.last  # of requests that name none
    normalize: bool = True  # of requests that do not say
    num_labels: int = 0  # labels of the classification head; 0 = no head
    has_kv_cache: bool = True  # False = no keys and values are kept between steps
    num_segments: int = 0  # token types of an encoder; 0 = not an encoder


class EngineStats(msgspec.Struct, array_like=True, gc=False):
    """A snapshot of the engine for metrics and health; counters grow from zero at engine start."""

    num_running: int = 0
    num_waiting: int = 0
    num_blocks: int = 0  # usable blocks, the null block excluded
    num_free_blocks: int = 0  # cached but unused blocks count as free
    num_steps: int = 0
    steps_by_kind: dict[str, int] = {}  # captured | compiled | eager
    num_prompt_tokens: int = 0  # computed, cache hits excluded
    num_output_tokens: int = 0
    prefix_queries: int = 0  # prompt tokens looked up in the prefix cache
    prefix_hits: int = 0  # of these, tokens that were found
    num_preemptions: int = 0
    late_compiles: list[LateCompile] = []  # compilations after the start; should be empty
    step_seconds: float = 0.0  # summed over steps
    model_seconds: float = 0.0  # the part of it in the model's graph and the sampler
    # Seconds of finished steps by kind, on the device's clock if it has one.
    device_seconds_by_kind: dict[str, float] = {}
    max_num_seqs: int = 0  # as set, or as chosen from measured step costs
    max_num_batched_tokens: int = 0  # as set, or as chosen from measured step costs
    predicted_step_seconds: float = 0.0  # of a decode of all running sequences; 0 = not known
    predicted_ttft_seconds: float = 0.0  # of a request of mean length that is added now
    num_evictions: int = 0  # cached blocks that were reused for other contents
    num_admitted: int = 0  # sequences that left the queue for the first time
    queue_seconds: float = 0.0  # time that these waited in the queue, summed
    num_waiting_for_grammar: int = 0  # the part of `num_waiting` that waits for a grammar
    grammar_seconds: float = 0.0  # spent on masks of grammars, within steps
    grammar_build_seconds: float = 0.0  # spent on building grammars, beside the steps
    num_padding_tokens: int = 0  # computed to fill captured buckets
    host_gap_seconds: float = 0.0  # time with work, but not in the model or waiting for it
    num_scheduled_tokens: int = 0  # tokens of all steps, without padding
    # Histogram of tokens per step: a count per bound of ITERATION_TOKENS, and one above the last.
    iteration_tokens: list[int] = []
    # Layers by how they run in a small step: captured | fx | inductor | eager.
    layers_by_program: dict[str, int] = {}

    @property
    def device_seconds(self) -> float:
        """Device seconds of all finished steps."""
        return sum(self.device_seconds_by_kind.values())


# Over replicas these are not summed: a request goes to the replica with the smallest value.
_LEAST = ("predicted_step_seconds", "predicted_ttft_seconds")


def sum_stats(stats: Sequence[EngineStats]) -> EngineStats:
    """The counters of several replicas as those of one engine.

    Args:
        stats: at least one.
    """
    if len(stats) == 1:
        return stats[0]
    merged: dict[str, Any] = {}
    for name in EngineStats.__struct_fields__:
        values: list[Any] = [getattr(one, name) for one in stats]
        if name in _LEAST:
            merged[name] = min(values)
        elif name == "late_compiles":
            merged[name] = [compile_ for value in values for compile_ in value]
        elif isinstance(values[0], dict):
            keys = {key for value in values for key in value}
            merged[name] = {key: sum(value.get(key, 0) for value in values) for key in sorted(keys)}
        elif isinstance(values[0], list):
            merged[name] = [sum(column) for column in zip_longest(*values, fillvalue=0)]
        else:
            merged[name] = sum(values)
    return EngineStats(**merged)
