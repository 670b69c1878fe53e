"""`run compile` for this machine: builds and saves a model's bundle, which `run serve` loads."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from ostinato.api.cli.terminal import show_phases
from ostinato.runtime.directories import ensure_cache
from ostinato.runtime.errors import StartupError
from ostinato.runtime.replicas.placement import place_replicas
from ostinato.runtime.startup.bundles import prepare_kernels

if TYPE_CHECKING:
    from ostinato.conf.root import RunConfig

__all__ = ("compile_bundle",)

_WIDTH = 80
_USUAL_PHASES = 8  # the length of the progress bar


def compile_bundle(config: RunConfig) -> int:
    """Start an engine like `run serve`, save its compiled programs and step costs, and list them.

    Raises:
        StartupError: the engine cannot start, or the bundle cannot be saved.
    """
    begin = time.perf_counter()
    if ensure_cache() and not config.graphs.bundle_dir:
        raise StartupError(
            "there is no directory to save the bundle in: set OSTINATO_CACHE_DIR or "
            "graphs.bundle_dir to one that can be written"
        )
    console = Console(width=_WIDTH, highlight=False, file=sys.stderr)
    with Progress(
        TextColumn("{task.description:<24}"), BarColumn(), TimeElapsedColumn(), console=console
    ) as progress:
        task = progress.add_task("imports and kernels", total=_USUAL_PHASES)
        show = show_phases(lambda text: progress.update(task, description=text))

        def on_phase(name: str, seconds: float | None) -> None:
            show(name, seconds)
            progress.advance(task, 0 if seconds is None else 1)

        prepare_kernels(config.engine)
        from ostinato.runtime.startup.build_engine import compile_bundle

        # With several replicas, each has a part of the cores and of the memory.
        placement = place_replicas(config.engine, config.parallel.engines_per_node)[0]
        bundle = compile_bundle(placement.config, on_phase)
        progress.update(task, completed=_USUAL_PHASES, description="done")
    if bundle is None:
        raise StartupError(
            f"graphs.bundle={str(config.graphs.bundle).lower()} with graphs.mode="
            f"{config.graphs.mode.value} compiles nothing that could be saved; leave both out"
        )
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("holds", "bytes", "sha256"):
        table.add_column(heading, justify="right" if heading == "bytes" else "left")
    for entry in bundle.entries:
        table.add_row(entry.name, f"{entry.num_bytes:,}", entry.sha256[:16])
    out = Console(width=_WIDTH, highlight=False)
    out.print(table)
    if not bundle.is_saved:
        raise StartupError(f"the bundle could not be saved in {bundle.directory}; the log says why")
    out.print(
        f"{bundle.directory}\nready in {time.perf_counter() - begin:.1f} s; run serve with the "
        "same model and graphs settings loads it",
        soft_wrap=True,
        markup=False,
    )
    return 0
