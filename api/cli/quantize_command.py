"""`run quantize`: writes a quantised checkpoint of a model."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from ostinato.conf.errors import ConfigError

if TYPE_CHECKING:
    from ostinato.conf.root import RunConfig

__all__ = ("quantize",)

_WIDTH = 80
_MIB = 1 << 20


def quantize(config: RunConfig) -> int:
    """Quantise a model's layers, write the checkpoint and print sizes and perplexities.

    Raises:
        ConfigError: `quantize.output` is not a new or empty directory.
        StartupError: the model, the format or a file is not supported.
    """
    _check_output(config.quantize.output)  # importing torch takes seconds
    from ostinato.runtime.quantize_model import quantize_model

    console = Console(width=_WIDTH, highlight=False, file=sys.stderr)
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
    ) as progress:
        task = progress.add_task("loading", total=None)
        report = quantize_model(
            config.engine,
            config.quantize,
            lambda done, total: progress.update(
                task, completed=done, total=total, description="matrices"
            ),
        )
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("", "before", "after"):
        table.add_column(heading, justify="right" if heading else "left")
    sizes = (f"{size / _MIB:.1f} MiB" for size in (report.bytes_before, report.bytes_after))
    table.add_row("weight files", *sizes)
    if report.perplexity_before is not None:
        table.add_row(
            f"perplexity of {report.evaluation_tokens} tokens",
            f"{report.perplexity_before:.4f}",
            f"{report.perplexity_after:.4f}",
        )
    out = Console(width=_WIDTH, highlight=False)
    out.print(table)
    how = "each weight is rounded to the nearest quantised value"
    if report.calibration_tokens:
        how = (
            f"calibrated on {report.calibration_tokens} tokens; matrices of experts that no token "
            "reached, if there are any, are rounded to nearest"
        )
    if report.num_kept:
        out.print(
            f"{report.num_kept} matrices of experts are not quantised: this family stores the "
            "experts of a layer in one tensor, and the output format has no names for the parts of "
            "such a tensor",
            soft_wrap=True,
        )
    out.print(
        f"{report.num_matrices} matrices quantised: {how}\nrun serve model.path={report.directory}",
        soft_wrap=True,
        markup=False,
    )
    return 0


def _check_output(output: str) -> None:
    target = Path(output)
    if not output:
        raise ConfigError("run quantize needs a directory for the result: quantize.output=DIR")
    if target.exists() and not (target.is_dir() and not any(target.iterdir())):
        raise ConfigError(
            f"quantize.output={output!r} must be a new or empty directory for the result"
        )
