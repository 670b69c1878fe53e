"""Configuration sections of the engine, and `setting`, which declares a field of a section.

A section is a frozen dataclass that checks its values when it is made. A field's default, meaning
and range are written once, in `setting`. `run <command> --help`, the checks and their messages
read them from there. Derived numbers (blocks that fit, bytes of a block) are not configuration.
Only the standard library is imported here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from enum import StrEnum
from typing import Any, ClassVar, TypeVar, cast

__all__ = (
    "AttentionBackendName",
    "DType",
    "Determinism",
    "DeviceConfig",
    "DeviceName",
    "ExpertKernels",
    "GraphConfig",
    "GraphForm",
    "GraphMode",
    "HeadQuantization",
    "InstructionSetName",
    "LoadFormat",
    "ModelImplementation",
    "ModelSection",
    "PoolingChoice",
    "Quantization",
    "RuntimeSection",
    "SamplingSection",
    "SchedulerConfig",
    "SchedulingPolicy",
    "Section",
    "allowed_range",
    "refuse",
    "setting",
)

T = TypeVar("T")


class DType(StrEnum):
    auto = "auto"
    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


class LoadFormat(StrEnum):
    auto = "auto"
    dummy = "dummy"


class ModelImplementation(StrEnum):
    """The implementation that runs a model."""

    auto = "auto"
    native = "native"
    transformers = "transformers"


class Quantization(StrEnum):
    """How weights are quantised while they are loaded."""

    none = "none"
    int8 = "int8"
    int4 = "int4"


class HeadQuantization(StrEnum):
    """How the token embeddings and the output head are quantised while they are loaded."""

    auto = "auto"
    none = "none"
    int8 = "int8"
    int4 = "int4"


class PoolingChoice(StrEnum):
    """Which hidden states make an embedding: the mean of all tokens, the last, or the first."""

    auto = "auto"
    mean = "mean"
    last = "last"
    cls = "cls"


class DeviceName(StrEnum):
    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


class InstructionSetName(StrEnum):
    """The CPU kernels' instruction set, named as ISA_LEVELS in ops/native/instruction_sets.py."""

    auto = "auto"
    amx = "amx"
    avx512bf16 = "avx512bf16"
    avx512 = "avx512"
    avx2 = "avx2"
    portable = "portable"


class AttentionBackendName(StrEnum):
    auto = "auto"
    reference = "reference"
    cpu = "cpu"
    triton = "triton"
    flashinfer = "flashinfer"


class ExpertKernels(StrEnum):
    auto = "auto"
    flashinfer = "flashinfer"


class Determinism(StrEnum):
    """Whether an engine may start if its answers depend on the batch."""

    auto = "auto"
    bitwise = "bitwise"


class SchedulingPolicy(StrEnum):
    fcfs = "fcfs"
    priority = "priority"


class GraphMode(StrEnum):
    """How a step runs. A step that fits no captured bucket runs the compiled program."""

    eager = "eager"
    compiled = "compiled"
    captured = "captured"


class GraphForm(StrEnum):
    """The compiled unit: the whole model as one graph, or one layer, called at each depth."""

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
        default: the value when none is chosen; lists and dicts are copied for every instance.
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


def refuse(key: str, allowed: str, value: object) -> None:
    """Raise a ValueError with the dotted `key`, what is `allowed` (in words), and the `value`."""
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
            nullable = str(entry.type).endswith("| None")
            if value is None and nullable:
                continue
            if value is None or not _in_range(value, entry.metadata):
                allowed = allowed_range(entry.metadata) or "set"
                refuse(f"{self.key}.{entry.name}", "null or " * nullable + allowed, value)

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
    """The model, its source and its precision."""

    key = "model"
    path: str = setting(
        "", "a directory, a GGUF file, a hub id or hub-id:GGUF-type; empty = the bundled demo model"
    )
    name: str = setting("", "the name that clients use; empty = the last part of the path")
    tokenizer: str = setting("", "a local directory, a GGUF file or a hub id; empty = same as path")
    revision: str = setting("", "a hub branch, tag or commit; empty = the default branch")
    dtype: DType = setting(DType.auto, "auto = the checkpoint's own")
    load_format: LoadFormat = setting(
        LoadFormat.auto, "dummy = random weights; no file with weights is read"
    )
    implementation: ModelImplementation = setting(
        ModelImplementation.auto,
        "native = our code; transformers = that library; auto = native if it supports the model",
    )
    quantization: Quantization = setting(
        Quantization.none, "quantise weights while they are loaded; none = keep them in dtype"
    )
    quantization_group_size: int | None = setting(
        None,
        "weights that share a scale; null = 128 for int8, 32 for int4",
        one_of=(32, 64, 128, 256),
    )
    quantization_symmetric: bool = setting(True, "false = every group has a zero point too")
    quantization_head: HeadQuantization = setting(
        HeadQuantization.auto,
        "quantise token embeddings and output head while they are loaded; auto = int8 if "
        "model.quantization is set, else none",
    )
    round_activations: bool = setting(
        True, "on CUDA, 8-bit activations if the checkpoint states so; false = model.dtype"
    )
    max_model_len: int | None = setting(
        None, "tokens of prompt plus output; null = what the model states", at_least=1
    )
    chat_template: str = setting("", "a file with a Jinja template; empty = the tokenizer's own")
    pooling: PoolingChoice = setting(
        PoolingChoice.auto,
        "pooling of embeddings; auto = the checkpoint's, else cls for encoders, last for others",
    )
    seed: int = setting(0, "seed of the random weights of load_format=dummy", at_least=0)
    config: dict[str, Any] = setting({}, "keys that replace those of the model's config.json")

    def __post_init__(self) -> None:
        Section.__post_init__(self)
        quantizes_head = self.quantization_head in (HeadQuantization.int8, HeadQuantization.int4)
        if self.quantization is not Quantization.none or quantizes_head:
            return
        for name, unset in (("quantization_group_size", None), ("quantization_symmetric", True)):
            if getattr(self, name) != unset:
                allowed = (
                    "left out unless model.quantization or model.quantization_head is int8 or int4"
                )
                refuse(f"model.{name}", allowed, getattr(self, name))


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
    isa: InstructionSetName = setting(
        InstructionSetName.auto, "instruction set of the CPU kernels; auto = the machine's fastest"
    )
    memory_fraction: float = setting(
        0.9, "share of the device's free memory that the engine may plan with", above=0, at_most=1
    )
    memory_gib: float | None = setting(
        None, "upper limit of the free memory, in GiB; null = all that is free", above=0
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig(Section):
    """Limits of a step, which prefill and decode share, and the order of requests."""

    key = "scheduler"
    max_num_seqs: int | None = setting(
        None,
        "sequences that may run at once; null = derived from measured step costs",
        at_least=1,
        at_most=4096,
    )
    max_num_batched_tokens: int | None = setting(
        None,
        "the most tokens that one step computes, at least scheduler.max_num_seqs; null = derived "
        "from measured step costs",
        at_least=1,
        at_most=1 << 20,
    )
    itl_target_ms: float | None = setting(
        None,
        "target for inter-token latency: limits prompt tokens of decode steps; null = no target",
        above=0,
    )
    max_slowdown: float | None = setting(
        1.5, "one request may make steps this many times as long; null = no limit", at_least=1
    )
    policy: SchedulingPolicy = setting(
        SchedulingPolicy.fcfs, "fcfs = in order of arrival; priority = the request's priority first"
    )
    overlap: bool | None = setting(
        None, "launch a step before the previous step's tokens are read; null = on a GPU only"
    )

    def __post_init__(self) -> None:
        Section.__post_init__(self)
        seqs, tokens = self.max_num_seqs, self.max_num_batched_tokens
        if seqs is not None and tokens is not None and tokens < seqs:
            refuse(
                "scheduler.max_num_batched_tokens",
                f"null or in [scheduler.max_num_seqs={seqs}, {1 << 20}]",
                tokens,
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphConfig(Section):
    """How the model's program is compiled and captured, and which kernels its ops run."""

    key = "graphs"
    mode: GraphMode = setting(
        GraphMode.captured,
        "eager = torch modules; compiled = torch.compile; captured = compiled, then replayed",
    )
    form: GraphForm = setting(
        GraphForm.layer, "compile the model as one graph, or one layer for all depths"
    )
    attention: AttentionBackendName = setting(
        AttentionBackendName.auto, "auto = the first that fits the device and the model"
    )
    experts: ExpertKernels = setting(
        ExpertKernels.auto, "kernels of a mixture of experts; auto = this project's own"
    )
    pack_weights: bool = setting(True, "rearrange weights for the CPU's matrix kernels")
    compress_weights: bool | None = setting(
        None, "packed bfloat16 weights take 12 bits, without loss; null = with AMX and with AVX2"
    )
    bundle: bool = setting(True, "load what an earlier start compiled, and store the rest")
    bundle_dir: str = setting("", "where bundles are; empty = in the cache directory")
    capture_sizes: list[int] = setting(
        [], "decode batches to capture; empty = chosen from max_num_seqs", at_least=1, at_most=8192
    )
    cost_table_budget_s: float | None = setting(
        None,
        "seconds to measure step costs at start; 0 = do not, null = the time of 150 decode steps, "
        "at least 0.5 and at most 4",
        at_least=0,
        at_most=600,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RuntimeSection(Section):
    """Guarantees that are checked before the engine starts."""

    key = "runtime"
    determinism: Determinism = setting(
        Determinism.auto,
        "bitwise = do not start if the bits of an answer can depend on other requests; "
        "auto = start, and log it",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingSection(Section):
    """Defaults for fields that a request leaves out."""

    key = "sampling"
    use_generation_config: bool = setting(
        True, "take temperature, top_p, ... from the model's generation_config.json"
    )
    max_tokens: int | None = setting(
        None, "tokens of an output; null = up to the context's end", at_least=1
    )
