"""The served model's facts and the engine's counters, as sent to the API process."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from itertools import zip_longest
from typing import Any, Literal

import msgspec

from ostinato.graphs.compile_monitor import LateCompile
from ostinato.models.audio.audio_spec import AudioSpec
from ostinato.models.audio.sound_spec import SoundSpec
from ostinato.models.vision.image_spec import ImageSpec
from ostinato.runtime.types.params import PoolingKind
from ostinato.runtime.types.speculation import SpeculationStats, sum_speculation
from ostinato.runtime.types.tier_stats import TierStats, continued_tiers, sum_tiers

__all__ = (
    "ITERATION_TOKENS",
    "EngineStats",
    "IsaTrial",
    "RankInfo",
    "ReplicaState",
    "ReplicaStatus",
    "ServedModel",
    "ServedTask",
    "continued",
    "sum_stats",
)

ITERATION_TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)


class ServedTask(StrEnum):
    """The tasks of models."""

    generate = "generate"
    embed = "embed"
    classify = "classify"
    transcribe = "transcribe"


class IsaTrial(msgspec.Struct, frozen=True):
    """Which instruction set the CPU kernels use, and the times that decided it."""

    isa: str
    # Time of the matrix products of one layer: instruction set -> rows of the input -> time.
    # Empty = not measured.
    microseconds: dict[str, dict[str, float]]


class RankInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One rank of an engine whose model is divided among several processes."""

    rank: int
    machine: int = 0  # index of its machine among the engine's machines; 0 = the machine of rank 0
    pid: int
    threads: int  # threads that the model's kernels use
    weights_bytes: int
    memory_bytes: int  # planned: weights, activations, buffers of KV tiers and KV cache
    first_layer: int  # index of the first layer of its stage
    num_layers: int


class ServedModel(msgspec.Struct, frozen=True, kw_only=True):
    """Facts about the model that an engine serves."""

    name: str
    max_model_len: int  # tokens, prompt plus output
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    tokenizer: str  # directory or GGUF file of the tokenizer; empty = none, token ids only
    architecture: str = ""  # the class that config.json names
    default_sampling: dict[str, int | float] = {}  # from generation_config.json
    created: int = 0  # unix seconds
    startup_seconds: dict[str, float] = {}  # phase -> seconds, in order
    isa: str = ""  # instruction set of the CPU kernels; empty = none are used
    isa_microseconds: dict[str, dict[str, float]] = {}  # as in `IsaTrial`
    # bitwise = the bits of a token's logits depend on its own context alone, not on the batch
    determinism: Literal["bitwise", "none"] = "none"
    # A digest of what can change the answer to the same request: weights, kernels, settings.
    system_fingerprint: str = ""
    tasks: tuple[ServedTask, ...] = (ServedTask.generate,)
    embedding_size: int = 0  # length of an embedding vector
    pooling: PoolingKind = PoolingKind.last  # the default of requests
    normalize: bool = True  # the default of requests
    num_labels: int = 0  # labels of the classification head; 0 = no head
    has_kv_cache: bool = True  # False = no keys and values are kept between steps
    num_segments: int = 0  # token types of an encoder; 0 = not an encoder
    speculates: bool = False  # a drafter proposes tokens, so `prediction` has an effect
    ranks: tuple[RankInfo, ...] = ()  # empty = the model is not divided
    block_size: int = 0  # tokens of a KV block; 0 = unknown, or no keys and values are kept
    images: ImageSpec | None = None  # how the model takes images; None = it takes none
    media_cache_tokens: int = 0  # the most embeddings of images or sounds that one request can have
    audio: AudioSpec | None = None  # how the model transcribes audio; None = it does not
    sounds: SoundSpec | None = None  # how the model takes sounds; None = it takes none
    audio_windows: int = 0  # windows of audio that are transcribed at once

    @property
    def media_spec(self) -> ImageSpec | SoundSpec | None:
        """How the model takes what stands in a prompt besides text; None = it takes text only."""
        return self.images if self.sounds is None else self.sounds

    def text_to_encode(self, text: str) -> str:
        """A prompt as it is encoded; see `ImageSpec.text_to_encode`."""
        return text if self.images is None else self.images.text_to_encode(text)


class EngineStats(msgspec.Struct, array_like=True, gc=False):
    """A snapshot of the engine for metrics and health. Counters are 0 when the engine starts."""

    num_running: int = 0
    num_waiting: int = 0
    num_blocks: int = 0  # usable blocks, the null block excluded
    num_free_blocks: int = 0  # cached but unused blocks count as free
    num_steps: int = 0
    steps_by_kind: dict[str, int] = {}  # captured | compiled | eager
    num_prompt_tokens: int = 0  # computed prompt tokens, without cache hits
    num_output_tokens: int = 0
    prefix_queries: int = 0  # prompt tokens looked up in the prefix cache
    prefix_hits: int = 0  # prompt tokens that were found in the prefix cache
    num_preemptions: int = 0
    late_compiles: list[LateCompile] = []  # compilations after the start; should be empty
    step_seconds: float = 0.0  # summed over steps
    model_seconds: float = 0.0  # the part of `step_seconds` in the model's graph and the sampler
    # Seconds of finished steps by kind, on the device's clock if it has one.
    device_seconds_by_kind: dict[str, float] = {}
    max_num_seqs: int = 0  # as set, or as chosen from measured step costs
    max_num_batched_tokens: int = 0  # as set, or as chosen from measured step costs
    predicted_step_seconds: float = 0.0  # for one decode of all running sequences; 0 = unknown
    predicted_ttft_seconds: float = 0.0  # for a request of mean length that is added now
    num_evictions: int = 0  # cached blocks that were reused for other contents
    num_admitted: int = 0  # sequences that left the queue for the first time
    queue_seconds: float = 0.0  # the sum of the queue times of the admitted sequences
    num_waiting_for_grammar: int = 0  # sequences of `num_waiting` that wait for a grammar
    grammar_seconds: float = 0.0  # time for grammar masks, within steps
    grammar_build_seconds: float = 0.0  # time of building grammars, in parallel with steps
    num_padding_tokens: int = 0  # tokens computed only to fill captured buckets
    # Time in which the engine had work, but neither ran the model nor waited for it.
    host_gap_seconds: float = 0.0
    num_scheduled_tokens: int = 0  # tokens of all steps, without padding
    # Histogram of tokens per step: one count for each bound of ITERATION_TOKENS, and one count for
    # larger steps.
    iteration_tokens: list[int] = []
    # Number of layers by the way they run in a step of few tokens, such as a decode step: captured,
    # fx, inductor or eager (`LayerProgram`).
    layers_by_program: dict[str, int] = {}
    speculation: SpeculationStats | None = None  # None = the engine has no drafter
    tiers: dict[str, TierStats] = {}  # slower tiers of the KV cache by name: host, disk
    num_tier_loads: int = 0  # loads of blocks from slower tiers
    num_refused_tier_loads: int = 0  # computing the blocks was predicted to be faster
    tier_load_seconds: float = 0.0  # the sum of the seconds of the loads
    num_waiting_for_encodings: int = 0  # sequences of `num_waiting` whose images or audio wait
    num_inputs_encoded: int = 0  # images and windows of audio that were encoded
    num_encoding_hits: int = 0  # images and audio of requests that were encoded before
    encode_seconds: float = 0.0  # time for encoding, between steps
    num_state_slots: int = 0  # usable slots for states of recurrent layers; 0 = there are none
    num_free_state_slots: int = 0  # slots of checkpoints that no sequence reads count as free

    @property
    def device_seconds(self) -> float:
        """Device seconds of all finished steps."""
        return sum(self.device_seconds_by_kind.values())


class ReplicaState(StrEnum):
    """The states of a replica."""

    starting = "starting"
    serving = "serving"
    drained = "drained"  # it finishes its requests and gets no new ones
    restarting = "restarting"
    dead = "dead"  # its engine is not started again


class ReplicaStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One replica, for health checks and the web page."""

    engine: int  # the replica's number, from 0
    state: ReplicaState
    reason: str | None = None  # why it does not serve
    num_unfinished: int  # requests that have not ended
    num_restarts: int
    pid: int | None  # the engine process; None = there is none
    node: str | None = None  # the other machine that the engine runs on; None = this machine
    ranks: tuple[RankInfo, ...] = ()  # empty = the model is not divided, or the engine does not run

    @property
    def local_pid(self) -> int | None:
        """Process id of the engine if it runs on this machine."""
        return self.pid if self.node is None else None

    @property
    def local_rank_pids(self) -> list[int]:
        """Process ids of the ranks after the first that run on this machine."""
        if self.node is not None:
            return []
        return [rank.pid for rank in self.ranks[1:] if rank.machine == 0]


# Figures that describe the present. All other figures are counters, which only grow.
_GAUGES = (
    *("num_running", "num_waiting", "num_waiting_for_grammar", "num_waiting_for_encodings"),
    *("num_blocks", "num_free_blocks", "num_state_slots", "num_free_state_slots"),
    *("max_num_seqs", "max_num_batched_tokens", "layers_by_program"),
    *("predicted_step_seconds", "predicted_ttft_seconds"),
)
# For several replicas, the smallest figure is taken: a request can go to the replica that has it.
_LEAST = ("predicted_step_seconds", "predicted_ttft_seconds")


def sum_stats(stats: Sequence[EngineStats]) -> EngineStats:
    """Combine the counters of several replicas, as if the replicas were one engine.

    Args:
        stats: the counters of each replica, at least one.
    """
    if len(stats) == 1:
        return stats[0]
    merged: dict[str, Any] = {}
    for name in EngineStats.__struct_fields__:
        values: list[Any] = [getattr(one, name) for one in stats]
        if name in _LEAST:
            merged[name] = min(values)
        elif name == "speculation":
            merged[name] = sum_speculation([value for value in values if value is not None])
        elif name == "tiers":
            merged[name] = sum_tiers(values)
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


def continued(before: EngineStats | None, now: EngineStats) -> EngineStats:
    """Add the counters of the old engine to those of the new engine after a restart.

    Args:
        before: the last figures of the old engine; None = there was none.
        now: the figures of the new engine.
    """
    if before is None:
        return now
    gauges = {name: getattr(now, name) for name in _GAUGES}
    tiers = continued_tiers(before.tiers, now.tiers)
    return msgspec.structs.replace(sum_stats([before, now]), tiers=tiers, **gauges)
