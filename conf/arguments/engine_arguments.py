"""Maps vLLM's keyword arguments and command-line flags to settings.

`LLM(model, max_model_len=4096)` and `run serve MODEL --max-model-len 4096` are both read with this
table. Some arguments set a setting. The other arguments are accepted only with values that ask for
what this engine does anyway. All other values are refused with the reason. No argument is ignored.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from ostinato.conf.arguments.cache_arguments import (
    HOST_GIB,
    MAMBA_REFUSED,
    NO_OTHER_BACKEND,
    NO_SWAP_SPACE,
    check_one_size,
    transfer_settings,
)
from ostinato.conf.arguments.json_values import json_value
from ostinato.conf.arguments.lora_arguments import (
    ADAPTERS,
    MAX_ADAPTERS,
    REFUSED,
    lora_modules,
    merge_settings,
    num_slots,
    slots_if_enabled,
    without_lora,
)
from ostinato.conf.arguments.media_arguments import MEDIA_REFUSED, MEDIA_SETTINGS
from ostinato.conf.arguments.speculative_config import speculation_settings
from ostinato.conf.describe import describe_keys, nearest
from ostinato.conf.errors import ConfigError
from ostinato.conf.sections.server_schema import ReasoningParserName, ToolParserName

__all__ = (
    "ARGUMENTS",
    "Argument",
    "argument_settings",
    "settings_of_each",
    "unknown_argument",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Argument:
    """One argument: `max_model_len` of `LLM`, `--max-model-len` of `run serve`."""

    setting: str = ""  # the key that it sets; empty = there is no such setting
    # Converts the value; raises ValueError with the reason to refuse it.
    read: Callable[[object], object] = lambda value: value
    # For a value that stands for several settings: returns all of them, `setting` included.
    expand: Callable[[object], Mapping[str, object]] | None = None
    # Values that ask for what the engine does anyway. None (vLLM: not given) is always accepted.
    default: tuple[object, ...] = ()
    reason: str = ""  # why other values are refused, and the remedy
    is_flag: bool = False  # --name and --no-name on the command line
    is_list: bool = False  # one or more values on the command line
    has_pairs: bool = False  # its values are NAME=VALUE, like overrides
    for_server: bool = False  # only `run serve` accepts it


def argument_settings(
    arguments: Mapping[str, object], *, server: bool = False
) -> dict[str, object]:
    """The settings that arguments stand for.

    Args:
        arguments: name -> value; texts of a command line are legal values.
        server: whether arguments of the HTTP server are legal too.

    Returns:
        key -> value, for the argument `values` of `load_config`.

    Raises:
        ConfigError: an argument is unknown, or its value is not supported.
    """
    found: dict[str, object] = {}
    for settings in settings_of_each(arguments, server=server).values():
        merge_settings(found, settings)
    return found


def settings_of_each(
    arguments: Mapping[str, object], *, server: bool = False
) -> dict[str, Mapping[str, object]]:
    """The settings that each argument stands for, by its name; see `argument_settings`.

    An argument that sets nothing is left out.
    """
    each: dict[str, Mapping[str, object]] = {}
    try:
        arguments = without_lora(arguments)
        check_one_size(arguments)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    for name, value in arguments.items():
        argument = ARGUMENTS.get(name)
        if argument is None or (argument.for_server and not server):
            raise unknown_argument(name, f"LLM(..., {name}=...)", server=server)
        if value is None or _text(value) in map(_text, argument.default):
            continue
        if not argument.setting:
            raise ConfigError(f"{name}={value}: {argument.reason}")
        try:
            if argument.expand is None:
                each[name] = {argument.setting: argument.read(value)}
            else:
                each[name] = argument.expand(value)
        except ValueError as error:
            raise ConfigError(f"{name}={value}: {error}") from error
    return each


def unknown_argument(name: str, written: str, *, server: bool) -> ConfigError:
    """The error for an argument that is not in the table. Suggests the nearest argument or setting.

    Args:
        name: with underscores, as in the table.
        written: as the user wrote it.
        server: whether arguments of the HTTP server are legal too.
    """
    if name in ARGUMENTS:
        return ConfigError(f"{written}: this argument belongs to run serve")
    legal = [each for each, one in ARGUMENTS.items() if server or not one.for_server]
    close = nearest(name, legal)
    if close is not None:
        shown = f"--{close.replace('_', '-')}" if server else close
        return ConfigError(f"{written}: there is no such argument; did you mean {shown}?")
    key = nearest(name, describe_keys())
    if key is None:
        return ConfigError(f"{written}: there is no such argument; settings: run serve --help")
    way = f"{key}=..." if server else f'overrides=["{key}=..."]'
    return ConfigError(f"{written}: there is no such argument; did you mean {way}?")


def _text(value: object) -> str:
    return str(value).strip().lower()


def _tokens(value: object) -> object:
    """A count as vLLM reads it: 4096, "4k" = 4000, "4K" = 4096."""
    text = str(value)
    factor = {"k": 1000, "K": 1024, "m": 1000**2, "M": 1024**2, "g": 1000**3, "G": 1024**3}
    if text[-1:] in factor:
        try:
            return round(float(text[:-1]) * factor[text[-1]])
        except ValueError:
            raise ValueError("a number of tokens such as 4096 or 4k is needed") from None
    return value


def _gib(value: object) -> object:
    try:
        return float(str(_tokens(value))) / 2**30
    except ValueError:
        raise ValueError("a number of bytes such as 4000000000 or 4G is needed") from None


def _dtype(value: object) -> object:
    """A dtype by its name in vLLM or here, or as a torch dtype."""
    name = str(value).removeprefix("torch.")
    return {"half": "float16", "float": "float32"}.get(name, name)


def _one_of(values: Mapping[str, object], reason: str) -> Callable[[object], object]:
    """Make a function that converts vLLM's word for a value to this project's value.

    `reason` tells why other words are refused.
    """

    def read(value: object) -> object:
        word = _text(value)
        if word not in values:
            raise ValueError(f"{reason}; supported: {', '.join(values)}")
        return values[word]

    return read


def _name(value: object) -> object:
    """The only name of the model. vLLM takes several names."""
    names = cast(list[object], value) if isinstance(value, list | tuple) else [value]
    if len(names) != 1:
        raise ValueError("a model is served under one name; give one")
    return names[0]


def _list(value: object) -> object:
    """A list of texts, or one text that is a JSON list."""
    items = list(cast(Sequence[object], value)) if isinstance(value, list | tuple) else [value]
    if len(items) == 1 and isinstance(items[0], str) and items[0].startswith("["):
        return json_value(items[0])
    return items


def _flag(value: object) -> bool:
    if _text(value) not in ("true", "false"):
        raise ValueError("it must be true or false")
    return _text(value) == "true"


def _eager(value: object) -> object:
    return "eager" if _flag(value) else "captured"


_NO_EXPERT_PARALLEL = (
    "experts are divided by tensor_parallel_size like all other weights; leave it out"
)
_SPECULATION = "use speculative_config, which has the keys model and num_speculative_tokens"
_NO_OFFLOAD = "weights are not offloaded to host memory; use model.quantization=int8 or int4"
_TASKS = "the task follows from the checkpoint; leave it out"
_BACKENDS = {
    "flashinfer": "flashinfer",
    "triton_attn": "triton",
    "triton": "triton",
    "cpu_attn": "cpu",
    "cpu": "cpu",
}
_QUANTIZATIONS = {"int8": "int8", "int4": "int4"}
_TOOL_PARSERS = {
    **{one.value: one.value for one in ToolParserName if one.value not in ("auto", "none")},
    "ernie45": "hermes",
    "granite4": "hermes",
    "hunyuan_a13b": "jamba",
    "llama4_json": "llama3_json",
    "qwen3_xml": "qwen3_coder",
    "step3p5": "qwen3_coder",
}
_REASONING_PARSERS = {
    **{one.value: one.value for one in ReasoningParserName if one.value not in ("auto", "none")},
    **dict.fromkeys(
        ("deepseek_r1", "deepseek_v3", "glm45", "kimi_k2", "minimax_m2", "olmo3", "qwen3", "step3"),
        "think",
    ),
}

ARGUMENTS: dict[str, Argument] = {
    # The model.
    "model": Argument(setting="model.path"),
    "tokenizer": Argument(setting="model.tokenizer"),
    "revision": Argument(setting="model.revision"),
    "served_model_name": Argument(setting="model.name", read=_name, is_list=True),
    "dtype": Argument(setting="model.dtype", read=_dtype),
    "max_model_len": Argument(setting="model.max_model_len", read=_tokens, default=("auto", -1)),
    "load_format": Argument(
        setting="model.load_format",
        read=_one_of({"dummy": "dummy"}, "a checkpoint's format is recognised; leave it out"),
        default=("auto", "safetensors"),
    ),
    "model_impl": Argument(
        setting="model.implementation",
        read=_one_of(
            {"vllm": "native", "transformers": "transformers"},
            "there is no such implementation; leave it out, and the engine chooses",
        ),
        default=("auto",),
    ),
    "quantization": Argument(
        setting="model.quantization",
        read=_one_of(
            _QUANTIZATIONS,
            "weights cannot be quantised to this while they are loaded; leave it out for a "
            "checkpoint that is quantised",
        ),
        default=("none",),
    ),
    "chat_template": Argument(setting="model.chat_template", read=str),
    "hf_overrides": Argument(setting="model.config", read=json_value, default=("{}",)),
    "generation_config": Argument(
        setting="sampling.use_generation_config",
        read=_one_of(
            {"vllm": False}, "the model's own generation_config.json is read; leave it out"
        ),
        default=("auto",),
    ),
    "tokenizer_revision": Argument(
        reason="the tokenizer is read at the revision of the model; use revision"
    ),
    "tokenizer_mode": Argument(default=("auto",), reason="tokenizer.json is used; leave it out"),
    "skip_tokenizer_init": Argument(
        default=(False,), is_flag=True, reason="the tokenizer is loaded; send prompt_token_ids"
    ),
    "trust_remote_code": Argument(
        default=(False,), is_flag=True, reason="code of a checkpoint is never run; leave it out"
    ),
    "config_format": Argument(default=("auto", "hf"), reason="a config.json is read; leave it out"),
    "task": Argument(default=("auto",), reason=_TASKS),
    "runner": Argument(default=("auto",), reason=_TASKS),
    "convert": Argument(default=("auto",), reason=_TASKS),
    "download_dir": Argument(reason="set the environment variable HF_HOME instead"),
    "hf_token": Argument(reason="set the environment variable HF_TOKEN instead"),
    # Memory and the KV cache.
    "gpu_memory_utilization": Argument(setting="device.memory_fraction"),
    "kv_cache_memory_bytes": Argument(setting="cache.memory_gib", read=_gib),
    "kv_cache_dtype": Argument(
        setting="cache.dtype",
        read=_one_of(
            {"fp8": "fp8_e4m3", "fp8_e4m3": "fp8_e4m3"},
            "leave it out for keys and values of the model's type, or set cache.dtype=int8",
        ),
        default=("auto",),
    ),
    "block_size": Argument(setting="cache.block_size"),
    "enable_prefix_caching": Argument(
        setting="cache.enable_prefix_caching", read=_flag, is_flag=True
    ),
    "disable_hybrid_kv_cache_manager": Argument(
        setting="cache.keep_all_tokens", read=_flag, is_flag=True
    ),
    "kv_offloading_size": Argument(setting=HOST_GIB),
    "kv_offloading_backend": Argument(default=("native",), reason=NO_OTHER_BACKEND),
    "kv_transfer_config": Argument(setting=HOST_GIB, expand=transfer_settings),
    "swap_space": Argument(default=(0, 0.0), reason=NO_SWAP_SPACE),
    "cpu_offload_gb": Argument(default=(0, 0.0), reason=_NO_OFFLOAD),
    "num_gpu_blocks_override": Argument(reason="set the size of the cache: cache.memory_gib=..."),
    # The scheduler.
    "max_num_seqs": Argument(setting="scheduler.max_num_seqs", read=_tokens),
    "max_num_batched_tokens": Argument(setting="scheduler.max_num_batched_tokens", read=_tokens),
    "scheduling_policy": Argument(setting="scheduler.policy"),
    "async_scheduling": Argument(setting="scheduler.overlap", read=_flag, is_flag=True),
    "enable_chunked_prefill": Argument(
        default=(True,),
        is_flag=True,
        reason="long prompts are always computed in parts; leave it out",
    ),
    # Compilation and kernels.
    "enforce_eager": Argument(setting="graphs.mode", read=_eager, default=(False,), is_flag=True),
    "cudagraph_capture_sizes": Argument(setting="graphs.capture_sizes", read=_list, is_list=True),
    "attention_backend": Argument(
        setting="graphs.attention",
        read=_one_of(_BACKENDS, "there is no such attention backend"),
        default=("auto",),
    ),
    "moe_backend": Argument(
        setting="graphs.experts",
        read=_one_of({"flashinfer_cutlass": "flashinfer"}, "there are no such kernels of experts"),
        default=("auto",),
    ),
    "compilation_config": Argument(reason="set graphs.mode, graphs.form or graphs.capture_sizes"),
    "device": Argument(setting="device.name"),
    # Drafts.
    "speculative_config": Argument(setting="speculation.method", expand=speculation_settings),
    "speculative_model": Argument(reason=_SPECULATION),
    "num_speculative_tokens": Argument(default=(0,), reason=_SPECULATION),
    # Parallelism.
    "tensor_parallel_size": Argument(setting="parallel.tensor"),
    "pipeline_parallel_size": Argument(setting="parallel.pipeline"),
    "data_parallel_size": Argument(setting="parallel.data"),
    "enable_expert_parallel": Argument(default=(False,), is_flag=True, reason=_NO_EXPERT_PARALLEL),
    "distributed_executor_backend": Argument(
        setting="parallel.executor",
        read=_one_of(
            {"mp": "processes", "uni": "inline", "ray": "ray"},
            "there is no such executor",
        ),
    ),
    "disable_custom_all_reduce": Argument(
        default=(False,),
        is_flag=True,
        reason="ranks communicate through this project's own collectives; leave it out",
    ),
    # Adapters.
    "enable_lora": Argument(setting=MAX_ADAPTERS, expand=slots_if_enabled, is_flag=True),
    "lora_modules": Argument(setting=ADAPTERS, expand=lora_modules, is_list=True, has_pairs=True),
    "max_loras": Argument(setting=MAX_ADAPTERS, expand=num_slots),
    "max_cpu_loras": Argument(setting=MAX_ADAPTERS, expand=num_slots),
    "max_lora_rank": Argument(setting="lora.max_rank"),
    # Media.
    "allowed_media_domains": Argument(setting="images.domains", read=_list, is_list=True),
    **{
        name: Argument(setting=key, expand=expand, is_flag=is_flag)
        for name, (key, expand, is_flag) in MEDIA_SETTINGS.items()
    },
    # Recurrent layers, adapters and media without a setting.
    **{
        name: Argument(default=default, is_flag=default == (False,), reason=reason)
        for name, (default, reason) in {**MAMBA_REFUSED, **REFUSED, **MEDIA_REFUSED}.items()
    },
    # Logs.
    "disable_log_stats": Argument(
        default=(True,),
        is_flag=True,
        reason="no statistics are logged at intervals; read /metrics, or LLM.stats()",
    ),
    # The HTTP server.
    "host": Argument(setting="server.host", for_server=True),
    "port": Argument(setting="server.port", for_server=True),
    "api_key": Argument(setting="server.api_keys", read=_list, is_list=True, for_server=True),
    "allowed_origins": Argument(setting="server.cors_origins", read=_list, for_server=True),
    "ssl_certfile": Argument(setting="server.tls_certificate", for_server=True),
    "ssl_keyfile": Argument(setting="server.tls_key", for_server=True),
    "uvicorn_log_level": Argument(setting="server.log_level", for_server=True),
    "otlp_traces_endpoint": Argument(setting="server.otlp_endpoint", for_server=True),
    "tool_call_parser": Argument(
        setting="server.tool_parser",
        read=_one_of(_TOOL_PARSERS, "there is no such parser of tool calls"),
        default=("auto",),
        for_server=True,
    ),
    "enable_auto_tool_choice": Argument(
        default=(True,),
        is_flag=True,
        for_server=True,
        reason='tool_choice "auto" is always offered; to refuse tools, set server.tool_parser=none',
    ),
    "reasoning_parser": Argument(
        setting="server.reasoning_parser",
        read=_one_of(_REASONING_PARSERS, "there is no such parser of reasoning"),
        default=("auto",),
        for_server=True,
    ),
    "response_role": Argument(
        default=("assistant",),
        for_server=True,
        reason="replies have the role assistant; leave it out",
    ),
    "enable_log_requests": Argument(
        default=(True,),
        is_flag=True,
        for_server=True,
        reason="every request is one line of the log; set server.log_level=warning",
    ),
    "disable_log_requests": Argument(
        default=(False,),
        is_flag=True,
        for_server=True,
        reason="every request is one line of the log; set server.log_level=warning",
    ),
    "config": Argument(
        for_server=True,
        reason="flags are not read from a file; put an option file into --config-dir DIR, see "
        "run --help",
    ),
    "root_path": Argument(default=("",), for_server=True, reason="routes begin at /; leave it out"),
    "seed": Argument(
        for_server=True,
        reason="a request states its own seed; model.seed is the seed of random weights",
    ),
}
