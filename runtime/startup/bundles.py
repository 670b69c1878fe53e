"""Prepares a model's CPU kernels: takes them from a bundle of compiled programs, or builds them.

This module imports no torch: the engine process prepares the kernels while another thread imports
torch.
"""

from __future__ import annotations

import contextlib
import json
import threading
from pathlib import Path
from typing import Any, NamedTuple

from ostinato.conf.engine_config import EngineConfig
from ostinato.conf.environment import cache_dir, expand_user
from ostinato.conf.schema import (
    DeviceConfig,
    DeviceName,
    DType,
    GraphConfig,
    HeadQuantization,
    InstructionSetName,
    ModelImplementation,
    ModelSection,
    Quantization,
)
from ostinato.conf.sections.cache_schema import CacheDType
from ostinato.graphs.bundle import Bundle, trusted_directories
from ostinato.models.gguf.gguf_paths import GGUFError, is_gguf_path
from ostinato.ops.native import build as native
from ostinato.ops.native.instruction_sets import check_runnable, detect_isa
from ostinato.runtime.directories import ensure_cache
from ostinato.runtime.errors import StartupError

__all__ = (
    "add_kernels",
    "bundle_root",
    "compression",
    "core_part",
    "kernel_libraries",
    "planned_isa",
    "prepare_kernels",
)

# Keys of a config.json that models with recurrent layers have.
_RECURRENT_KEYS = {"linear_num_value_heads", "conv_L_cache", "mamba_n_heads", "mamba_num_heads"}
# `general.file_type` of GGUF files whose matrices are floats (enum llama_ftype of llama.cpp).
_GGUF_FLOAT32, _GGUF_FLOAT16, _GGUF_BFLOAT16 = 0, 1, 32
_DEMO_CONFIG = Path(__file__).parents[2] / "models" / "demo" / "config.json"


def bundle_root(graphs: GraphConfig) -> Path:
    """The directory of bundles."""
    return Path(graphs.bundle_dir or cache_dir() / "bundles")


def kernel_libraries(config: EngineConfig) -> tuple[str, ...]:
    """The native libraries (ops/native/build.py) that an engine's model calls on a CPU.

    A model of a hub may also have quantised weights, experts or recurrent layers, and a GGUF file
    recurrent layers. The plan shows it, and their kernels are loaded then.
    """
    model = config.model
    gguf = _guess_gguf(model)
    is_quantized = (
        model.quantization is not Quantization.none
        or model.quantization_head in (HeadQuantization.int8, HeadQuantization.int4)
        or (gguf.is_quantized if gguf is not None else ":" in model.path)  # a GGUF model of a hub
        or _states_quantization(model)
    )
    further = (
        ("quantized", is_quantized),
        ("quantized_moe", is_quantized and _has_experts(model, gguf)),
        ("recurrent", _has_recurrent_layers(model)),
        ("adapters", config.lora.num_slots > 0),
    )
    return ("core", *(name for name, is_called in further if is_called))


def core_part(config: EngineConfig) -> str | None:
    """The part of the library `core` that suffices for a model; None = it needs the whole library.

    This function reads only the configuration and a local config.json, or the first keys of a GGUF
    file. The plan may show later that the part does not suffice.
    """
    model = config.model
    settings, gguf = _read_settings(model), _guess_gguf(model)
    dtype = str(model.dtype)
    if model.dtype is DType.auto:
        stated = settings.get("dtype") or settings.get("torch_dtype")
        dtype = stated if gguf is None else gguf.dtype
    part = f"core-{dtype}"
    is_plain_decoder = (
        (gguf is not None or _architecture(settings).endswith("ForCausalLM"))
        and not _has_experts(model, gguf)
        and model.implementation is not ModelImplementation.transformers
    )
    if dtype == DType.bfloat16 and compression(config) is not False:
        part += "-compressed"
    runs_alone = config.parallel.num_ranks == 1 and not config.speculation.model
    is_wanted = is_plain_decoder and runs_alone and config.cache.dtype is CacheDType.auto
    return part if is_wanted and part in native.PARTS else None


def compression(config: EngineConfig) -> bool | None:
    """Whether packed weights are compressed; None = those that can be.

    With matrix tiles, compressed weights were as fast or faster in steps of any size. With AVX2
    they decode one stream 1.1 to 1.3 times as fast, and larger steps are 0.93 to 0.97 as fast. With
    AVX-512 they gained less (docs/matrix-tiles.md).
    """
    wanted = config.graphs.compress_weights
    if wanted is None and planned_isa(config.device) not in ("amx", "avx2"):
        return False
    return wanted


class _GGUFGuess(NamedTuple):
    """What a model needs according to the first keys of its file.

    A file with matrices of several types can need more. The plan shows it later.
    """

    dtype: str  # of activations: the one that rounds no float matrix
    has_experts: bool
    is_quantized: bool


def _guess_gguf(model: ModelSection) -> _GGUFGuess | None:
    """What the first keys of a local GGUF file say; None if the model is no readable one."""
    if not is_gguf_path(model.path):
        return None
    from ostinato.models.gguf.gguf_file import read_first_keys  # imports NumPy

    try:
        keys = read_first_keys(expand_user(model.path))
    except GGUFError:  # the start reads the file again and reports it
        return None
    kind = keys.get("general.file_type")
    number = kind if isinstance(kind, int) else None
    experts = keys.get(f"{keys.get('general.architecture')}.expert_count")
    return _GGUFGuess(
        dtype="float32" if number in (_GGUF_FLOAT32, _GGUF_FLOAT16) else "bfloat16",
        has_experts=isinstance(experts, int) and experts > 0,
        is_quantized=number not in (_GGUF_FLOAT32, _GGUF_FLOAT16, _GGUF_BFLOAT16),
    )


def _architecture(settings: dict[str, Any]) -> str:
    """The first of the config's `architectures`; "" if they are not a list of names.

    The plan checks the config and reports what is wrong with it.
    """
    names = settings.get("architectures")
    is_list = isinstance(names, list) and all(isinstance(name, str) for name in names)
    return names[0] if is_list and names else ""


def _read_settings(model: ModelSection) -> dict[str, Any]:
    """The config.json of the demo model or of a local directory, with the configured keys.

    For other models the result has only the configured keys.
    """
    path = expand_user(model.path) / "config.json" if model.path else _DEMO_CONFIG
    settings: dict[str, Any] = {}
    with contextlib.suppress(OSError, ValueError):  # the start reads the file again and reports it
        found = json.loads(path.read_bytes())
        settings = found if isinstance(found, dict) else {}
    return {**settings, **model.config}


def _states_quantization(model: ModelSection) -> bool:
    """Whether the files of a local checkpoint mention a quantization. No file is parsed."""
    keys = ("quantization_config", "compression_config")
    if any(key in model.config for key in keys):
        return True
    if not model.path:
        return False
    directory = expand_user(model.path)
    files = ("quantize_config.json", "quant_config.json", "hf_quant_config.json")
    try:
        text = (directory / "config.json").read_text(encoding="utf-8")
        return any(f'"{key}"' in text for key in keys) or any(
            (directory / file).is_file() for file in files
        )
    except (OSError, UnicodeDecodeError):
        return False


def _has_experts(model: ModelSection, gguf: _GGUFGuess | None) -> bool:
    """Whether the first keys of a GGUF file say so, or the settings have a key of experts."""
    if gguf is not None:
        return gguf.has_experts
    return any("expert" in key for key in _read_settings(model))


def _has_recurrent_layers(model: ModelSection) -> bool:
    """Whether the settings have a key of recurrent layers, also those of a text model in them."""
    settings = _read_settings(model)
    text = settings.get("text_config")
    keys = settings.keys() | (text.keys() if isinstance(text, dict) else set())
    return not _RECURRENT_KEYS.isdisjoint(keys)


def planned_isa(device: DeviceConfig) -> str:
    """The configured instruction set of the CPU kernels; `auto` = the highest of this machine.

    Raises:
        StartupError: the configuration names an instruction set that this machine does not run.
    """
    if device.isa is InstructionSetName.auto:
        return detect_isa()
    try:
        check_runnable(device.isa.value)
    except ValueError as error:
        raise StartupError(
            f"device.isa={device.isa}: {error}; choose one of these or auto"
        ) from error
    return device.isa.value


def prepare_kernels(config: EngineConfig) -> None:
    """Take the CPU kernels from a bundle, or start to compile them on threads.

    The first start spends most of its time in the C++ compiler, so the build starts early.
    `ops/native/library.py` waits for the build when it loads the kernels, and reports its errors.

    Raises:
        StartupError: neither the cache nor a temporary directory can be written, or the
            configuration names an instruction set that this machine does not run.
    """
    ensure_cache()
    device, graphs = config.device, config.graphs
    on_gpu = device.name is not DeviceName.cpu and Path("/dev/nvidiactl").exists()
    if on_gpu or not graphs.pack_weights:
        return
    isa = planned_isa(device)
    root = bundle_root(graphs) if graphs.bundle else None
    for library in kernel_libraries(config):
        names = [library]
        if library == "core" and (part := core_part(config)) is not None:
            names.append(part)
        if any(native.intact_libraries(name, isa) or _adopt(name, isa, root) for name in names):
            continue
        name = names[-1]
        threading.Thread(target=_build, args=(name, isa), name=f"build-{name}", daemon=True).start()


def add_kernels(bundle: Bundle, config: EngineConfig, isa: str) -> None:
    """Put an engine's CPU kernels for one instruction set into the model's bundle.

    Of a library that is not compiled as a whole, the bundle gets the compiled parts.
    """
    for library in kernel_libraries(config):
        parts = [name for name, part in native.PARTS.items() if part.library == library]
        whole = native.intact_libraries(library, isa)
        for name in [library] if whole else parts:
            for path in native.intact_libraries(name, isa):
                bundle.put(f"{_kernels_name(name, isa)}.so", path.read_bytes())


def _adopt(library: str, isa: str, root: Path | None) -> bool:
    """Copy a library from any bundle below `root`; False if no bundle has the library."""
    for directory in () if root is None else trusted_directories(root):
        for path in directory.glob(f"{_kernels_name(library, isa)}*"):
            native.adopt(library, isa, path.read_bytes())
            return True
    return False


def _build(library: str, isa: str) -> None:
    with contextlib.suppress(native.NativeBuildError):
        native.build(library, isa)


def _kernels_name(library: str, isa: str) -> str:
    return f"kernels-{native.content_key(library, isa)}"
