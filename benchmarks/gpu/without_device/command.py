"""`run compile`: for this machine, or with `compile.gpu` for a GPU that can be elsewhere."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console
from rich.table import Table

from ostinato.api.cli.compile_command import compile_bundle as compile_here
from ostinato.benchmarks.machine.described_device import described_device
from ostinato.conf.errors import ConfigError
from ostinato.conf.schema import DeviceName
from ostinato.runtime.directories import ensure_cache

if TYPE_CHECKING:
    from ostinato.conf.root import RunConfig

__all__ = ("compile_bundle",)

_WIDTH = 100


def compile_bundle(config: RunConfig) -> int:
    """Compile for the machine that the configuration names; save the bundle and list it.

    Raises:
        ConfigError: there is no description of that GPU, or the configuration is for a CPU.
        StartupError: the model cannot be compiled, or the bundle cannot be saved.
    """
    if not config.compile.gpu:
        return compile_here(config)
    if config.device.name is DeviceName.cpu:
        raise ConfigError(
            f"compile.gpu={config.compile.gpu} is for a GPU, and device.name=cpu; leave one out"
        )
    try:
        device = described_device(config.compile.gpu)
    except ValueError as error:
        raise ConfigError(f"compile.gpu: {error}") from error
    begin = time.perf_counter()
    ensure_cache()
    from ostinato.benchmarks.gpu.without_device.described_bundle import bundle_for

    found = bundle_for(config.engine, device)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("holds", "bytes", "sha256"):
        table.add_column(heading, justify="right" if heading == "bytes" else "left")
    for entry in found.bundle.entries:
        table.add_row(entry.name, f"{entry.num_bytes:,}", entry.sha256[:16])
    out = Console(width=_WIDTH, highlight=False, file=sys.stdout)
    out.print(table)
    out.print(
        f"{found.bundle.directory}\n{found.num_kernels} kernels compiled for {device.name} (sm_"
        f"{device.arch}) in {time.perf_counter() - begin:.1f} s; nothing has run on it. "
        "The programs that Inductor makes are not in the bundle: a first start lowers them again "
        "and finds their kernels compiled.\nA start on that GPU loads the bundle if it has the "
        "same Python, the same versions of this project, torch and Triton, the same model, cache "
        f"and graphs settings, and room for contexts of {found.max_model_len} tokens.",
        soft_wrap=True,
        markup=False,
    )
    return 0
