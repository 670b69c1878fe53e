"""Which compiled bundle belongs to a configuration, and the CPU's kernels in it.

Imports no torch: the engine process looks for kernels here, and builds them, while it imports
torch.
"""

from __future__ import annotations

import contextlib
import threading
from pathlib import Path

from ostinato.conf.environment import cache_dir
from ostinato.conf.schema import DeviceConfig, DeviceName, GraphConfig
from ostinato.graphs.bundle import Bundle, trusted_directories
from ostinato.ops.native import build as native

__all__ = ("add_kernels", "bundle_root", "prepare_kernels")


def bundle_root(graphs: GraphConfig) -> Path:
    """The directory of bundles."""
    return Path(graphs.bundle_dir or cache_dir() / "bundles")


def prepare_kernels(device: DeviceConfig, graphs: GraphConfig) -> None:
    """Have the CPU's kernels ready soon: from a bundle, or compiled on a thread meanwhile.

    A first start waits for the compiler longer than for anything else. Whoever loads the kernels
    (ops/native/library.py) waits for this build, and reports what went wrong with it.
    """
    on_gpu = device.name is not DeviceName.cpu and Path("/dev/nvidiactl").exists()
    if on_gpu or not graphs.pack_weights:
        return
    isa = native.detect_isa()
    if native.intact_libraries(isa):
        return
    for directory in trusted_directories(bundle_root(graphs)) if graphs.bundle else ():
        for path in directory.glob(f"{_kernels_name(isa)}*"):
            native.adopt(isa, path.read_bytes())
            return

    def build() -> None:
        with contextlib.suppress(native.NativeBuildError):
            native.build(isa)

    threading.Thread(target=build, name="build-kernels", daemon=True).start()


def add_kernels(bundle: Bundle) -> None:
    """Put this machine's CPU kernels into a bundle."""
    isa = native.detect_isa()
    for path in native.intact_libraries(isa):
        bundle.put(f"{_kernels_name(isa)}.so", path.read_bytes())


def _kernels_name(isa: str) -> str:
    return f"kernels-{native.content_key(isa)}"
