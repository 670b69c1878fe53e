"""The common style of all plots: colours, sizes, and axes with plain numbers.

matplotlib is imported when a plot is drawn.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

__all__ = (
    "AXIS",
    "COLOURS",
    "INK",
    "STYLE",
    "THEME",
    "WIDTH",
    "dress",
    "make_axes",
    "plain_log",
    "whole_ticks",
)

# COLOURS fit light and dark backgrounds. A page replaces INK, AXIS and GRID by its own (THEME).
COLOURS = ("#3a80b5", "#d1495b", "#3a9a60", "#dd9a2a", "#8a68bd", "#7b8790", "#2aa7a1", "#b8683f")
INK, AXIS, GRID = "#2a3238", "#8a949d", "#e3e7eb"
THEME = {INK: "--ink", AXIS: "--axis", GRID: "--grid"}
WIDTH, HEIGHT = 8.0, 3.2
STYLE: dict[Any, Any] = {
    "font.size": 9,
    "axes.titlesize": 10,
    "svg.fonttype": "path",
    "axes.edgecolor": AXIS,
    "xtick.color": INK,
    "ytick.color": INK,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.formatter.useoffset": False,
}


def make_axes(columns: int = 1, height: float = HEIGHT) -> tuple[Figure, list[Axes]]:
    """A figure with axes side by side; height in inches."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    found = [figure.add_subplot(1, columns, index + 1) for index in range(columns)]
    for axes in found:
        dress(axes)
    return figure, found


def dress(axes: Axes) -> None:
    """Put the grid behind the data, and remove the frame at the top and on the right."""
    axes.grid(True, color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def plain_log(axis: Axis) -> None:
    """Label a logarithmic axis 0.1, 1, 10 instead of powers of ten, up to a million.

    A short axis also has labels between them, such as 2, 3, 4 and 6.
    """
    from matplotlib.ticker import FuncFormatter, LogFormatter

    class Minor(LogFormatter):
        def __call__(self, x: float, pos: int | None = None) -> str:
            return f"{x:g}" if super().__call__(x, pos) else ""

    axis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,g}" if x < 1e6 else f"{x:.0e}"))
    axis.set_minor_formatter(Minor(minor_thresholds=(2, 0.5)))


def whole_ticks(axis: Axis) -> None:
    """Put ticks at whole numbers, for counts."""
    from matplotlib.ticker import MaxNLocator

    axis.set_major_locator(MaxNLocator(integer=True, nbins=6))
