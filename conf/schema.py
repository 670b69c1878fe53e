"""What can be chosen, and its legal range: one frozen dataclass per section, checked when made.

Only the standard library is imported here. A field's default, meaning and range are written once,
in `setting`; `run <command> --help`, the checks and their messages all read them from there.
Derived facts (how many blocks fit, bytes per block) are never configuration: their owners compute
them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from enum import StrEnum
from typing import Any, ClassVar, TypeVar, cast

__all__ = (
    "AttentionBackendName",
    "BatchSection",
    "CacheConfig",
    "CacheDType",
    "ChatSection",
    "DType",
    "DeviceConfig",
    "DeviceName",
    "GenerateSection",
    "GraphConfig",
    "GraphForm",
    "GraphMode",
    "HeadQuantization",
    "LoadFormat",
    "ModelSection",
    "PlanSection",
    "PoolingChoice",
    "Quantization",
    "ReasoningParserName",
    "SamplingSection",
    "SchedulerConfig",
    "SchedulingPolicy",
    "Section",
    "ServerConfig",
    "ToolParserName",
    "allowed_range",
    "is_api_key",
    "setting",
)

T = TypeVar("T")


class DType(StrEnum):
    auto = "auto"
    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


class CacheDType(StrEnum):
    auto = "auto"
    fp8_e4m3 = "fp8_e4m3"


class LoadFormat(StrEnum):
    auto = "auto"
    dummy = "dummy"


class Quantization(StrEnum):
    """Of weights, while they are loaded."""

    none = "none"
    int8 = "int8"
    int4 = "int4"


class HeadQuantization(StrEnum):
    """Of the token embeddings and the output head."""

    auto = "auto"
    none = "none"
    int8 = "int8"
    int4 = "int4"


class PoolingChoice(StrEnum):
    """What a text's embedding is made of: all of its tokens' states, the last's, or the first's."""

    auto = "auto"
    mean = "mean"
    last = "last"
    cls = "cls"


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


class ToolParserName(StrEnum):
    """The form in which a model writes tool calls."""

    auto = "auto"
    none = "none"
    hermes = "hermes"
    llama3_json = "llama3_json"
    mistral = "mistral"
    json = "json"


class ReasoningParserName(StrEnum):
    """The markers between which a model reasons."""

    auto = "auto"
    none = "none"
    think = "think"
    mistral = "mistral"


class GraphMode(StrEnum):
    """How far a step's program is prepared; a dispatch miss falls back to the next lesser one."""

    eager = "eager"
    compiled = "compiled"
    captured = "captured"


class GraphForm(StrEnum):
    """Two forms of the same program: the whole model as one graph, or one layer for every depth."""

    model = "model"
    layer = "layer"


def setting(
    default: T,
    meaning: str,
    *,
    at_least: float | None = None,
    at_most: float | None = None,
    above: float | None = None,
    one_of: tuple[object, ...] = (),
) -> T:
    """A field of a section with its default, its meaning and its range.

    Args:
        default: the value when nobody chooses; lists and dicts are copied for every instance.
        meaning: one line for `--help`: unit, and what null or empty stands for.
        at_least: inclusive lower bound; of each element for a list.
        at_most: inclusive upper bound.
        above: exclusive lower bound.
        one_of: the only legal values.
    """
    metadata = {
        "meaning": meaning,
        "at_least": at_least,
        "at_most": at_most,
        "above": above,
        "one_of": one_of,
    }
    if isinstance(default, list | dict):
        return cast(T, field(default_factory=default.copy, metadata=metadata))
    return cast(T, field(default=default, metadata=metadata))


def allowed_range(metadata: Mapping[str, Any]) -> str:
    """The range of a `setting` in words ("in [1, 4096]", "above 0"), or "" when it has none."""
    if one_of := metadata.get("one_of"):
        return f"one of {', '.join(str(value) for value in one_of)}"
    low, high, above = (metadata.get(bound) for bound in ("at_least", "at_most", "above"))
    if above is not None:
        return f"above {above}" if high is None else f"in ({above}, {high}]"
    if low is not None and high is not None:
        return f"in [{low}, {high}]"
    if low is not None:
        return f"at least {low}"
    return "" if high is None else f"at most {high}"


def _in_range(value: Any, metadata: Mapping[str, Any]) -> bool:
    if isinstance(value, list):
        return all(_in_range(element, metadata) for element in cast(list[Any], value))
    if isinstance(value, float) and not math.isfinite(value):
        return not allowed_range(metadata)
    low, high, above = metadata["at_least"], metadata["at_most"], metadata["above"]
    return (
        (not metadata["one_of"] or value in metadata["one_of"])
        and (low is None or value >= low)
        and (high is None or value <= high)
        and (above is None or value > above)
    )


def is_api_key(text: str) -> bool:
    """Whether a text can be sent as a bearer token: visible ASCII, not empty."""
    return bool(text) and all("!" <= character <= "~" for character in text)


def _refuse(key: str, allowed: str, value: object) -> None:
    raise ValueError(f"{key} must be {allowed}, got {value!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """Checks every field against its range; the message names the key, the range and the value."""

    key: ClassVar[str]  # the section's name in the configuration

    def __post_init__(self) -> None:
        for entry in fields(self):
            if "meaning" not in entry.metadata:
                continue
            value = getattr(self, entry.name)
            nullable = entry.default is None
            if value is None and nullable:
                continue
            if value is None or not _in_range(value, entry.metadata):
                allowed = allowed_range(entry.metadata) or "set"
                _refuse(f"{self.key}.{entry.name}", "null or " * nullable + allowed, value)

    @classmethod
    def settings(cls) -> dict[str, tuple[object, Mapping[str, Any]]]:
        """name -> (default, metadata of `setting`), in the order of declaration."""
        return {
            entry.name: (
                entry.default if entry.default is not MISSING else entry.default_factory(),  # pyright: ignore[reportCallIssue]
                entry.metadata,
            )
            for entry in fields(cls)
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSection(Section):
    """Which model, from where, in which precision."""

    key = "model"
    path: str = setting("", "a local directory or a hub id; empty = the bundled demo model")
    name: str = setting("", "the name that clients use; empty = the last part of the path")
    tokenizer: str = setting("", "a local directory or a hub id; empty = same as path")
    revision: str = setting("", "a hub branch, tag or commit; empty = the default branch")
    dtype: DType = setting(DType.auto, "auto = the checkpoint's own")
    load_format: LoadFormat = setting(
        LoadFormat.auto, "dummy = random weights; nothing is read but the model's config"
    )
    quantization: Quantization = setting(
        Quantization.none, "of weights while they are loaded, on a CPU; none = as dtype says"
    )
    quantization_group_size: int | None = setting(
        None,
        "weights that share a scale; null = 128 for int8, 32 for int4",
        one_of=(32, 64, 128, 256),
    )
    quantization_symmetric: bool = setting(True, "false = every group has a zero point too")
    quantization_head: HeadQuantization = setting(
        HeadQuantization.auto, "of the token embeddings and the output head; auto = int8"
    )
    max_model_len: int | None = setting(
        None, "tokens of prompt plus output; null = what the model states", at_least=1
    )
    chat_template: str = setting("", "a file with a Jinja template; empty = the tokenizer's own")
    pooling: PoolingChoice = setting(
        PoolingChoice.auto,
        "of embeddings; auto = what the checkpoint says, else cls for encoders and last for others",
    )
    seed: int = setting(0, "of the random weights of load_format=dummy", at_least=0)
    config: dict[str, Any] = setting({}, "keys laid over the model's config.json")

    def __post_init__(self) -> None:
        Section.__post_init__(self)
        if self.quantization is not Quantization.none:
            return
        for name, unset in (
            ("quantization_group_size", None),
            ("quantization_symmetric", True),
            ("quantization_head", HeadQuantization.auto),
        ):
            if getattr(self, name) != unset:
                allowed = "left out unless model.quantization is int8 or int4"
                _refuse(f"model.{name}", allowed, getattr(self, name))


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceConfig(Section):
    """The device and how much of it to use."""

    key = "device"
    name: DeviceName = setting(DeviceName.auto, "auto = cuda when there is one, else cpu")
    threads: int | None = setting(
        None,
        "CPU threads of the model; null = the cores this process may use",
        at_least=1,
        at_most=1024,
    )
    memory_fraction: float = setting(
        0.9, "share of the device's free memory that the engine may plan with", above=0, at_most=1
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig(Section):
    """The paged KV cache."""

    key = "cache"
    block_size: int = setting(16, "tokens per block", one_of=(8, 16, 32, 64, 128))
    dtype: CacheDType = setting(
        CacheDType.auto, "of keys and values; auto = the model's own, fp8_e4m3 = half the memory"
    )
    memory_gib: float | None = setting(
        None, "GiB for KV blocks; null = what the memory plan leaves", above=0
    )
    enable_prefix_caching: bool = setting(True, "reuse the blocks of a common prompt beginning")


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig(Section):
    """One token budget a step; prefill and decode share it."""

    key = "scheduler"
    max_num_seqs: int | None = setting(
        None,
        "sequences that may run at once; null = decided from measured step costs",
        at_least=1,
        at_most=4096,
    )
    max_num_batched_tokens: int | None = setting(
        None,
        "tokens computed in one step, at least scheduler.max_num_seqs; null = decided from "
        "measured step costs",
        at_least=1,
        at_most=1 << 20,
    )
    itl_target_ms: float | None = setting(
        None,
        "parts of prompts are cut so that a step with decodes takes at most this long, as measured "
        "at start; null = no such bound",
        above=0,
    )
    policy: SchedulingPolicy = setting(
        SchedulingPolicy.fcfs, "fcfs = in order of arrival; priority = the request's priority first"
    )
    overlap: bool | None = setting(
        None, "launch a step before the last one's tokens are read; null = on a GPU"
    )

    def __post_init__(self) -> None:
        Section.__post_init__(self)
        seqs, tokens = self.max_num_seqs, self.max_num_batched_tokens
        if seqs is not None and tokens is not None and tokens < seqs:
            _refuse(
                "scheduler.max_num_batched_tokens",
                f"null or in [scheduler.max_num_seqs={seqs}, {1 << 20}]",
                tokens,
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphConfig(Section):
    """How the model's program is compiled and captured, and which attention backend the op runs."""

    key = "graphs"
    mode: GraphMode = setting(GraphMode.captured, "how far a step's program is prepared at start")
    form: GraphForm = setting(GraphForm.layer, "one graph for the model, or one for every layer")
    attention: AttentionBackendName = setting(
        AttentionBackendName.auto, "auto = the first that fits the device and the model"
    )
    pack_weights: bool = setting(True, "re-lay weights for the CPU's matrix kernels when loading")
    bundle: bool = setting(True, "load what an earlier start compiled, keep what this one compiles")
    bundle_dir: str = setting("", "where bundles are; empty = in the cache directory")
    capture_sizes: list[int] = setting(
        [], "token counts to capture; empty = chosen from max_num_seqs", at_least=1, at_most=8192
    )
    cost_table_budget_s: float | None = setting(
        None,
        "seconds to measure step costs in at start; 0 = do not, null = 0.5, or more when one "
        "step takes long",
        at_least=0,
        at_most=600,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingSection(Section):
    """Defaults for what a request leaves out."""

    key = "sampling"
    use_generation_config: bool = setting(
        True, "take temperature, top_p, ... from the model's generation_config.json"
    )
    max_tokens: int | None = setting(None, "null = up to the context's end", at_least=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig(Section):
    """The HTTP server."""

    key = "server"
    host: str = setting("127.0.0.1", "address to listen on; 0.0.0.0 = every interface")
    port: int = setting(8000, "TCP port; 0 = any free one", at_least=0, at_most=65535)
    api_keys: list[str] = setting(
        [], "who may ask; visible in the process list, so prefer api_key_file; empty = everybody"
    )
    api_key_file: str = setting("", "a file with one API key a line, # begins a comment")
    cors_origins: list[str] = setting(
        [], "origins whose pages may call this server from a browser; * = any"
    )
    tls_certificate: str = setting("", "a PEM file with the certificate chain; empty = plain HTTP")
    tls_key: str = setting("", "a PEM file with the certificate's private key")
    max_body_mib: float = setting(8.0, "a larger request body is refused with 413", above=0)
    max_prompt_tokens: int | None = setting(
        None, "a longer prompt is refused with 400; null = what the context holds", at_least=1
    )
    max_requests_per_key: int | None = setting(
        None, "at once; more are refused with 429; null = no limit", at_least=1
    )
    max_queued_requests: int | None = setting(
        None,
        "completions that wait for their first token; more are refused with 429; null = no limit",
        at_least=1,
    )
    max_queued_tokens: int | None = setting(
        None,
        "of the prompts that wait for their first token; more are refused with 429; null = no "
        "limit",
        at_least=1,
    )
    drain_timeout_s: float = setting(
        30.0, "how long SIGTERM waits for running requests", at_least=0
    )
    health_timeout_s: float = setting(
        30.0,
        "/live and /health fail when there is work and no step for this long, beyond what a step "
        "should take",
        above=0,
    )
    hang_timeout_s: float | None = setting(
        60.0,
        "an engine that is silent for this long, beyond what a step should take, is killed and "
        "started again; null = never",
        above=0,
    )
    tool_parser: ToolParserName = setting(
        ToolParserName.auto,
        "the form of the model's tool calls; auto = recognised from the chat template",
    )
    reasoning_parser: ReasoningParserName = setting(
        ReasoningParserName.auto,
        "the marks around the model's reasoning; auto = recognised from the chat template",
    )
    max_restarts: int = setting(
        5, "of a dead engine within server.restart_window_s; 0 = never", at_least=0, at_most=1000
    )
    restart_window_s: float = setting(600.0, "after which a restart is forgotten", above=0)
    restart_backoff_s: float = setting(
        0.5,
        "wait before the second restart within the window, doubled for each further; the first "
        "comes at once",
        at_least=0,
        at_most=30,
    )
    response_store_mib: float = setting(
        64.0,
        "memory for stored replies of /v1/responses; the oldest go first, 0 = none are stored",
        at_least=0,
        at_most=65536,
    )
    profile_dir: str = setting(
        "", "where /start_profile and /stop_profile write traces; empty = they are refused"
    )
    log_level: str = setting(
        "info", "of the log on stderr", one_of=("debug", "info", "warning", "error")
    )
    record_trace: str = setting(
        "",
        "JSON-lines file that arrival, lengths and shared prefixes of every request are appended "
        "to, never text; empty = none",
    )
    log_format: str = setting(
        "text", "of the log: text, or json = one object per line", one_of=("text", "json")
    )
    log_prompts: bool = setting(False, "put prompts' token ids into the log lines of requests")
    flight_recorder_steps: int = setting(
        256, "last steps that are kept for after a crash; 0 = none", at_least=0, at_most=65536
    )
    flight_recorder_dir: str = setting(
        "", "where they are written after a crash; empty = flight/ in the cache directory"
    )
    page: bool = setting(True, "serve the page at / and what it reads at /debug")
    vllm_metrics: bool = setting(True, "/metrics has its figures under vLLM's names too")
    otlp_endpoint: str = setting(
        "", "where OpenTelemetry traces go, such as http://host:4318/v1/traces; empty = nowhere"
    )

    def __post_init__(self) -> None:
        Section.__post_init__(self)
        if not all(is_api_key(key) for key in self.api_keys):
            raise ValueError(
                "server.api_keys must be texts without spaces, one has spaces, is empty or not "
                "ASCII (which one is not shown)"
            )
        if bool(self.tls_certificate) != bool(self.tls_key):
            _refuse(
                "server.tls_key",
                "set exactly when server.tls_certificate is",
                self.tls_key,
            )
        if self.max_requests_per_key is not None and not (self.api_keys or self.api_key_file):
            _refuse(
                "server.max_requests_per_key",
                "null without server.api_keys or server.api_key_file",
                self.max_requests_per_key,
            )
        for origin in self.cors_origins:
            scheme, mark, host = origin.partition("://")
            if origin != "*" and not (
                scheme in ("http", "https") and mark and host.strip("/") == host
            ):
                _refuse("server.cors_origins", "* or origins like https://example.org", origin)


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateSection(Section):
    """What `run generate` asks of the model."""

    key = "generate"
    max_tokens: int = setting(128, "tokens to generate at most", at_least=1)
    temperature: float | None = setting(
        None, "0 = the likeliest token; null = the model's default", at_least=0, at_most=2
    )
    top_p: float | None = setting(
        None, "nucleus; 1 = off, null = the model's default", above=0, at_most=1
    )
    top_k: int | None = setting(
        None, "the k likeliest; 0 = off, null = the model's default", at_least=0
    )
    seed: int | None = setting(None, "same seed, same tokens; null = a new one", at_least=0)
    stop: list[str] = setting([], "strings that end the text")
    chat: bool = setting(False, "send the prompt as a user's message through the chat template")


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSection(Section):
    """How `run batch` works through a file."""

    key = "batch"
    concurrency: int | None = setting(
        None, "requests at once; null = twice the sequences that may run", at_least=1
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatSection(Section):
    """What `run chat` asks of the model."""

    key = "chat"
    system: str = setting("", "system message at the head of the conversation; empty = none")
    max_tokens: int | None = setting(
        None, "tokens of one answer at most; null = up to the context's end", at_least=1
    )
    temperature: float | None = setting(
        None, "0 = the likeliest token; null = the model's default", at_least=0, at_most=2
    )
    top_p: float | None = setting(
        None, "nucleus; 1 = off, null = the model's default", above=0, at_most=1
    )
    top_k: int | None = setting(
        None, "the k likeliest; 0 = off, null = the model's default", at_least=0
    )
    seed: int | None = setting(None, "same seed, same tokens; null = a new one", at_least=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanSection(Section):
    """What `run plan` prints and for which machine."""

    key = "plan"
    json: bool = setting(False, "print the ledger as JSON instead of a table")
    free_gib: float | None = setting(
        None, "plan for a device with this much free memory; null = this machine's", above=0
    )
