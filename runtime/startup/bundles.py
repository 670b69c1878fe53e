"""Prepares a model's CPU kernels: takes them from a bundle of compiled programs, or builds them.

This module imports no torch: the engine process prepares the kernels while another thread imports
torch.
"""

from __future__ import annotations

import contextlib
import threading
from pathlib import Path

from ostinato.conf.environment import cache_dir, expand_user
from ostinato.conf.schema import (
    DeviceConfig,
    DeviceName,
    GraphConfig,
    InstructionSetName,
    ModelSection,
    Quantization,
)
from ostinato.graphs.bundle import Bundle, trusted_directories
from ostinato.models.gguf.gguf_file import is_gguf_path
from ostinato.ops.native import build as native
from ostinato.ops.native.instruction_sets import check_runnable, detect_isa
from ostinato.runtime.directories import ensure_cache
from ostinato.runtime.errors import StartupError

__all__ = ("add_kernels", "bundle_root", "kernel_libraries", "planned_isa", "prepare_kernels")


def bundle_root(graphs: GraphConfig) -> Path:
    """The directory of bundles."""
    return Path(graphs.bundle_dir or cache_dir() / "bundles")


def kernel_libraries(model: ModelSection) -> tuple[str, ...]:
    """The native libraries (ops/native/build.py) that a model calls on a CPU."""
    is_gguf = is_gguf_path(model.path) or ":" in model.path  # a GGUF model of a hub
    is_quantized = model.quantization is not Quantization.none or is_gguf
    is_quantized = is_quantized or _states_quantization(model)
    return ("core", "quantized") if is_quantized else ("core",)


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


def prepare_kernels(model: ModelSection, device: DeviceConfig, graphs: GraphConfig) -> None:
    """Take the CPU kernels from a bundle, or start to compile them on threads.

    The first start spends most of its time in the C++ compiler, so the build starts early.
    `ops/native/library.py` waits for the build when it loads the kernels, and reports its errors.

    Raises:
        StartupError: neither the cache nor a temporary directory can be written, or the
            configuration names an instruction set that this machine does not run.
    """
    ensure_cache()
    on_gpu = device.name is not DeviceName.cpu and Path("/dev/nvidiactl").exists()
    if on_gpu or not graphs.pack_weights:
        return
    isa = planned_isa(device)
    root = bundle_root(graphs) if graphs.bundle else None
    for library in kernel_libraries(model):
        if native.intact_libraries(library, isa) or _adopt(library, isa, root):
            continue
        threading.Thread(
            target=_build, args=(library, isa), name=f"build-{library}", daemon=True
        ).start()


def add_kernels(bundle: Bundle, model: ModelSection, isa: str) -> None:
    """Put a model's CPU kernels for one instruction set into the model's bundle."""
    for library in kernel_libraries(model):
        for path in native.intact_libraries(library, isa):
            bundle.put(f"{_kernels_name(library, isa)}.so", path.read_bytes())


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
