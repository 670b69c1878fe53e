"""The sections `server` (addresses, limits, logs) and `parallel` (engines and their ranks)."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from ostinato.conf.schema import Section, refuse, setting

__all__ = (
    "ExchangeName",
    "ExecutorName",
    "ParallelConfig",
    "ReasoningParserName",
    "RouterName",
    "ServerConfig",
    "ToolParserName",
    "is_api_key",
)


class ToolParserName(StrEnum):
    """The format in which a model writes tool calls."""

    auto = "auto"
    none = "none"
    hermes = "hermes"
    llama3_json = "llama3_json"
    llama4_pythonic = "llama4_pythonic"
    pythonic = "pythonic"
    olmo3 = "olmo3"
    mistral = "mistral"
    mistral_args = "mistral_args"
    granite = "granite"
    granite_20b_fc = "granite_20b_fc"
    phi4_mini_json = "phi4_mini_json"
    internlm2 = "internlm2"
    jamba = "jamba"
    minimax = "minimax"
    minimax_m2 = "minimax_m2"
    deepseek_v3 = "deepseek_v3"
    deepseek_v31 = "deepseek_v31"
    deepseek_v32 = "deepseek_v32"
    deepseek_v4 = "deepseek_v4"
    functiongemma = "functiongemma"
    kimi_k2 = "kimi_k2"
    glm45 = "glm45"
    qwen3_coder = "qwen3_coder"
    seed_oss = "seed_oss"
    step3 = "step3"
    lfm2 = "lfm2"
    longcat = "longcat"
    xlam = "xlam"
    openai = "openai"
    json = "json"


class ReasoningParserName(StrEnum):
    """The markers around a model's reasoning."""

    auto = "auto"
    none = "none"
    think = "think"
    mistral = "mistral"
    granite = "granite"
    seed_oss = "seed_oss"
    ernie45 = "ernie45"
    hunyuan_a13b = "hunyuan_a13b"
    openai_gptoss = "openai_gptoss"


class ExecutorName(StrEnum):
    """Where the ranks of an engine run."""

    auto = "auto"
    inline = "inline"
    processes = "processes"
    ray = "ray"


class ExchangeName(StrEnum):
    """How the ranks of an engine exchange values."""

    auto = "auto"
    gloo = "gloo"


class RouterName(StrEnum):
    """How a router chooses the replica for a request."""

    round_robin = "round_robin"
    least_load = "least_load"
    prefix_aware = "prefix_aware"


def is_api_key(text: str) -> bool:
    """Whether a text can be sent as a bearer token: visible ASCII, not empty."""
    return bool(text) and all("!" <= character <= "~" for character in text)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig(Section):
    """The HTTP server."""

    key = "server"
    host: str = setting("127.0.0.1", "address to listen on; 0.0.0.0 = every interface")
    port: int = setting(8000, "TCP port; 0 = any free one", at_least=0, at_most=65535)
    api_keys: list[str] = setting(
        [],
        "keys that clients may send; empty = none is needed. The process list shows them: "
        "prefer api_key_file",
    )
    api_key_file: str = setting("", "a file with one API key a line, # begins a comment")
    cors_origins: list[str] = setting(
        [], "origins whose pages may call this server from a browser; * = any"
    )
    tls_certificate: str = setting("", "a PEM file with the certificate chain; empty = plain HTTP")
    tls_key: str = setting("", "a PEM file with the certificate's private key")
    max_body_mib: float = setting(8.0, "a larger request body is refused with 413", above=0)
    max_header_kib: float = setting(
        64.0, "larger headers, the request line included, are refused with 431", at_least=1
    )
    header_timeout_s: float = setting(
        30.0,
        "a connection whose headers are not complete after this time is refused with 408, or "
        "closed if it sent nothing",
        above=0,
    )
    body_timeout_s: float = setting(
        120.0, "a request whose body is not complete after this time is refused with 408", above=0
    )
    max_prompt_tokens: int | None = setting(
        None, "a longer prompt is refused with 400; null = the context's length", at_least=1
    )
    max_requests_per_key: int | None = setting(
        None,
        "POST requests that one key may have running, background replies included; more are "
        "refused with 429; null = no limit",
        at_least=1,
    )
    max_queued_requests: int | None = setting(
        None,
        "completions that wait for their first token; more are refused with 429; null = no limit",
        at_least=1,
    )
    max_queued_tokens: int | None = setting(
        None,
        "prompt tokens of completions that wait for their first token; more are refused with 429; "
        "null = no limit",
        at_least=1,
    )
    max_media_mib: float | None = setting(
        1024.0,
        "MiB of prepared images, videos and audio of requests in progress; more are refused with "
        "429; null = no limit",
        above=0,
    )
    drain_timeout_s: float = setting(
        30.0, "after SIGTERM, how long running requests may still take", at_least=0
    )
    health_timeout_s: float = setting(
        30.0,
        "/health and /ready fail if the engine is silent for this long beyond the predicted step "
        "time; /live then fails only if there are unfinished requests",
        above=0,
    )
    hang_timeout_s: float | None = setting(
        60.0,
        "an engine process that sends nothing for this long, beyond the predicted step time, is "
        "killed and restarted; null = never",
        above=0,
    )
    tool_parser: ToolParserName = setting(
        ToolParserName.auto,
        "the format of the model's tool calls; auto = recognised from the chat template or the "
        "architecture",
    )
    reasoning_parser: ReasoningParserName = setting(
        ReasoningParserName.auto,
        "the markers around the model's reasoning; auto = recognised from the chat template",
    )
    max_restarts: int = setting(
        5,
        "restarts of the engine within server.restart_window_s; 0 = none",
        at_least=0,
        at_most=1000,
    )
    restart_window_s: float = setting(
        600.0, "seconds after which a restart no longer counts", above=0
    )
    restart_backoff_s: float = setting(
        0.5,
        "pause before the second restart within the window, doubled for each further one; the "
        "first has none",
        at_least=0,
        at_most=30,
    )
    response_store_mib: float = setting(
        64.0,
        "memory for stored replies of /v1/responses; the oldest are dropped, 0 = none are stored",
        at_least=0,
        at_most=65536,
    )
    admin: bool = setting(
        False,
        "serve the endpoints that drain an engine and reload the weights; clients that may send "
        "requests may use them",
    )
    profile_dir: str = setting(
        "", "where /start_profile and /stop_profile write traces; empty = they are refused"
    )
    log_level: str = setting(
        "info", "least level of the log on stderr", one_of=("debug", "info", "warning", "error")
    )
    record_trace: str = setting(
        "",
        "JSON-lines file for arrival, lengths and shared prefixes of every completion, without any "
        "text; empty = none",
    )
    log_format: str = setting(
        "text", "format of the log; json = one object per line", one_of=("text", "json")
    )
    log_prompts: bool = setting(False, "put prompts' token ids into the log lines of requests")
    flight_recorder_steps: int = setting(
        256,
        "last steps that are recorded for a report after a crash; 0 = none",
        at_least=0,
        at_most=65536,
    )
    flight_recorder_dir: str = setting(
        "", "where recorded steps are written after a crash; empty = flight/ in the cache directory"
    )
    page: bool = setting(True, "serve the page at / and what it reads at /debug")
    vllm_metrics: bool = setting(True, "/metrics also has vLLM's metric names")
    otlp_endpoint: str = setting(
        "", "where OpenTelemetry traces go, such as http://host:4318/v1/traces; empty = nowhere"
    )

    def __post_init__(self) -> None:
        Section.__post_init__(self)
        if not all(is_api_key(key) for key in self.api_keys):
            raise ValueError(
                "server.api_keys must be texts of ASCII characters without spaces; one of them is "
                "empty, has a space or is not ASCII (it is not shown)"
            )
        if bool(self.tls_certificate) != bool(self.tls_key):
            refuse(
                "server.tls_key",
                "set exactly when server.tls_certificate is",
                self.tls_key,
            )
        if self.max_requests_per_key is not None and not (self.api_keys or self.api_key_file):
            refuse(
                "server.max_requests_per_key",
                "null without server.api_keys or server.api_key_file",
                self.max_requests_per_key,
            )
        for origin in self.cors_origins:
            scheme, mark, host = origin.partition("://")
            if origin != "*" and not (
                scheme in ("http", "https") and mark and host.strip("/") == host
            ):
                refuse("server.cors_origins", "* or origins like https://example.org", origin)


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelConfig(Section):
    """How many engines (replicas) serve the model, and how many ranks divide each engine's copy."""

    key = "parallel"
    tensor: int = setting(
        1,
        "ranks of a stage: processes that each hold a part of every weight; on a CPU all ranks "
        "share device.threads and device.memory_gib",
        at_least=1,
        at_most=32,
    )
    pipeline: int = setting(
        1,
        "stages of an engine: processes that each hold some of the layers and work on different "
        "steps at the same time",
        at_least=1,
        at_most=32,
    )
    executor: ExecutorName = setting(
        ExecutorName.auto,
        "where ranks run: inline = in the engine's process, which is for one rank; processes = "
        "each rank after the first in a process of its own; ray = like processes, and Ray chooses "
        "the machine of each engine; auto = inline for one rank, else processes",
    )
    exchange: ExchangeName = setting(
        ExchangeName.auto,
        "how ranks exchange values: auto = shared memory between CPUs, NCCL between GPUs; gloo = "
        "Gloo between CPUs, in the code path of NCCL: for tests, slower and not encrypted",
    )
    rank_timeout_s: float = setting(
        1.0,
        "the engine is started again if a rank is stopped, or no rank does anything, for this long "
        "within a step",
        above=0,
        at_most=3600,
    )
    data: int = setting(
        1,
        "replicas; on a CPU they share cores and memory; with GPUs each replica has its own GPUs",
        at_least=1,
        at_most=1024,
    )
    nodes: int = setting(
        1,
        "machines, this one included, each with an equal part of the replicas, or of a replica's "
        "ranks if there are more machines than replicas; other machines join with run rank",
        at_least=1,
        at_most=1024,
    )
    host: str = setting(
        "",
        "address of this machine at which the server listens for other machines; empty = the "
        "address of its default route, 0.0.0.0 = all",
    )
    ray_address: str = setting(
        "",
        "address of the Ray cluster for parallel.executor=ray; empty = RAY_ADDRESS, a cluster of "
        "this machine, or a new one",
    )
    router: RouterName = setting(
        RouterName.prefix_aware,
        "choice of a request's replica: round_robin = in turn; least_load = the fewest requests; "
        "prefix_aware = the longest common prefix, unless that replica is much busier",
    )

    def __post_init__(self) -> None:
        Section.__post_init__(self)
        if self.executor is ExecutorName.inline and self.num_ranks > 1:
            key = "tensor" if self.tensor > 1 else "pipeline"
            refuse(
                "parallel.executor",
                f"auto, processes or ray with parallel.{key}={getattr(self, key)}",
                self.executor.value,
            )
        if self.nodes not in (fitting := self._fitting_nodes()):
            few = f"{' or '.join(map(str, fitting[:8]))}{' or more' if fitting[8:] else ''}"
            divided = f"parallel.data={self.data}"
            divided += f" engines of {self.num_ranks} ranks" if self.num_ranks > 1 else ""
            refuse("parallel.nodes", f"{few} with {divided}", self.nodes)
        if self.executor is ExecutorName.ray and 1 < self.nodes <= self.data:
            more = "1, or more than parallel.data"
            refuse("parallel.nodes", f"{more}, with parallel.executor=ray", self.nodes)
        if self.ray_address and self.executor is not ExecutorName.ray:
            refuse("parallel.ray_address", "empty without parallel.executor=ray", self.ray_address)

    @property
    def num_ranks(self) -> int:
        """Number of processes of one engine that compute the model together."""
        return self.tensor * self.pipeline

    @property
    def engines_per_node(self) -> int:
        """Number of replicas on each machine, if Ray does not place them."""
        return max(1, self.data // self.nodes)

    @property
    def machines_per_engine(self) -> int:
        """Number of machines among which the ranks of one engine are divided."""
        return max(1, self.nodes // self.data)

    @property
    def ranks_per_machine(self) -> int:
        """Number of ranks of one engine on each machine. These ranks have consecutive numbers."""
        return self.num_ranks // self.machines_per_engine

    def _fitting_nodes(self) -> list[int]:
        """The possible numbers of machines.

        Each machine gets the same number of whole engines, or an equal part of one engine.
        """
        whole = [count for count in range(1, self.data + 1) if self.data % count == 0]
        parts = [count for count in range(2, self.num_ranks + 1) if self.num_ranks % count == 0]
        return whole + [self.data * count for count in parts]
