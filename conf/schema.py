"""What can be chosen, and its legal range: one frozen dataclass per section, checked on construction.

Only the standard library is imported here. Derived facts (how many blocks fit, bytes per block) are never
configuration: they are computed by whoever owns them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

__all__ = (
    "AttentionBackendName",
    "CacheConfig",
    "DType",
    "DeviceConfig",
    "DeviceName",
    "GraphConfig",
    "GraphForm",
    "GraphMode",
    "LoadFormat",
    "ModelSection",
    "SamplingSection",
    "SchedulerConfig",
    "SchedulingPolicy",
    "ServerConfig",
)


class DType(StrEnum):
    auto = "auto"
    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


class LoadFormat(StrEnum):
    auto = "auto"
    dummy = "dummy"


class DeviceName(StrEnum):
    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


class AttentionBackendName(StrEnum):
    auto = "auto"
    reference = "reference"
    cpu = "cpu"
    triton = "triton"
    flashinfer = "flashinfer"


class SchedulingPolicy(StrEnum):
    fcfs = "fcfs"
    priority = "priority"


class GraphMode(StrEnum):
    """How far a step's program is prepared; a dispatch miss always falls back to the next lesser one."""

    eager = "eager"
    compiled = "compiled"
    captured = "captured"


class GraphForm(StrEnum):
    """Two forms of the same program: the whole model as one graph, or one decoder layer for every depth."""

    model = "model"
    layer = "layer"


def _require(ok: bool, key: str, allowed: str, value: object) -> None:
    if not ok:
        raise ValueError(f"{key} must be {allowed}, got {value!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSection:
    """Which model, from where, in which precision."""

    path: str = ""  # a local directory or a hub id; empty = the bundled demo model
    name: str = ""  # the name clients use; empty = last part of the path
    tokenizer: str = ""  # a local directory or a hub id; empty = same as path
    revision: str = ""  # a hub branch, tag or commit; empty = the default branch
    dtype: DType = DType.auto  # auto = the checkpoint's own
    load_format: LoadFormat = LoadFormat.auto  # dummy = random weights, nothing is read but the config
    max_model_len: int | None = None  # tokens of prompt plus output; null = what the model states
    chat_template: str = ""  # a file with a Jinja template; empty = the tokenizer's own
    seed: int = 0  # for dummy weights
    config: dict[str, Any] = field(default_factory=dict)  # keys laid over the model's config.json

    def __post_init__(self) -> None:
        _require(
            self.max_model_len is None or self.max_model_len >= 1,
            "model.max_model_len",
            "null or at least 1 token",
            self.max_model_len,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceConfig:
    """The device and how much of it to use."""

    name: DeviceName = DeviceName.auto  # auto = cuda when there is one, else cpu
    threads: int | None = None  # CPU threads of the model; null = the cores this process may use
    memory_fraction: float = 0.9  # share of the device's free memory that the engine may plan with

    def __post_init__(self) -> None:
        _require(
            self.threads is None or 1 <= self.threads <= 1024,
            "device.threads",
            "null or in [1, 1024]",
            self.threads,
        )
        _require(
            0.0 < self.memory_fraction <= 1.0,
            "device.memory_fraction",
            "in (0, 1]",
            self.memory_fraction,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    """The paged KV cache."""

    block_size: int = 16  # tokens per block
    memory_gib: float | None = None  # bytes for KV blocks; null = what the memory plan leaves
    enable_prefix_caching: bool = True

    def __post_init__(self) -> None:
        _require(
            self.block_size in (8, 16, 32, 64, 128),
            "cache.block_size",
            "one of (8, 16, 32, 64, 128) tokens",
            self.block_size,
        )
        _require(
            self.memory_gib is None or self.memory_gib > 0,
            "cache.memory_gib",
            "null or above 0",
            self.memory_gib,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """One token budget a step; prefill and decode share it."""

    max_num_seqs: int = 64  # sequences that may run at once
    max_num_batched_tokens: int = 2048  # tokens computed in one step
    policy: SchedulingPolicy = SchedulingPolicy.fcfs

    def __post_init__(self) -> None:
        _require(
            1 <= self.max_num_seqs <= 4096,
            "scheduler.max_num_seqs",
            "in [1, 4096] sequences",
            self.max_num_seqs,
        )
        _require(
            self.max_num_seqs <= self.max_num_batched_tokens <= 1 << 20,
            "scheduler.max_num_batched_tokens",
            f"in [scheduler.max_num_seqs={self.max_num_seqs}, 1048576] tokens",
            self.max_num_batched_tokens,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphConfig:
    """How the model's program is compiled and captured, and which attention backend the op runs."""

    mode: GraphMode = GraphMode.captured
    form: GraphForm = GraphForm.layer
    attention: AttentionBackendName = AttentionBackendName.auto
    pack_weights: bool = True  # re-lay weights for the CPU's matrix kernels when loading
    capture_sizes: list[int] = field(default_factory=list)  # empty = chosen from max_num_seqs

    def __post_init__(self) -> None:
        _require(
            all(1 <= size <= 8192 for size in self.capture_sizes),
            "graphs.capture_sizes",
            "a list of sizes in [1, 8192]",
            self.capture_sizes,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingSection:
    """Defaults for what a request leaves out."""

    use_generation_config: bool = True  # take temperature, top_p, ... from generation_config.json
    max_tokens: int | None = None  # null = up to the context's end

    def __post_init__(self) -> None:
        _require(
            self.max_tokens is None or self.max_tokens >= 1,
            "sampling.max_tokens",
            "null or at least 1",
            self.max_tokens,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """The HTTP server."""

    host: str = "127.0.0.1"
    port: int = 8000
    max_body_mib: float = 8.0  # a larger request body is refused with 413
    drain_timeout_s: float = 30.0  # how long SIGTERM waits for running requests
    health_timeout_s: float = 30.0  # /health fails when there is work and no step for this long
    log_level: str = "info"

    def __post_init__(self) -> None:
        _require(0 <= self.port <= 65535, "server.port", "in [0, 65535]", self.port)
        _require(self.max_body_mib > 0, "server.max_body_mib", "above 0", self.max_body_mib)
        _require(self.drain_timeout_s >= 0, "server.drain_timeout_s", ">= 0 s", self.drain_timeout_s)
        _require(self.health_timeout_s > 0, "server.health_timeout_s", "above 0 s", self.health_timeout_s)
        levels = ("debug", "info", "warning", "error")
        _require(self.log_level in levels, "server.log_level", f"one of {levels}", self.log_level)
