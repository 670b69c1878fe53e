"""Draws docs/map.svg, the map of the code, from the imports that the source tree really has.

    python docs/draw_map.py

One band per layer, from the layer that imports all others down to `conf`. Within a band there is
one box per folder and one per group of modules that lie beside the folders. An arrow means
"imports". An arrow that follows from others (a -> c beside a -> b -> c) is left out. A size
is lines of source, rounded. tests/arch/test_map.py compares the drawing with the tree.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from html import escape
from pathlib import Path

__all__ = ("LAYERS", "Band", "Box", "count_lines", "draw", "read_bands")

ROOT = Path(__file__).resolve().parents[1]
LAYERS = {
    "benchmarks": "run bench, run tune, run simulate, the performance gate",
    "api": "HTTP server, OpenAI and Anthropic dialects, command line",
    "runtime": "scheduler, KV cache, engine, processes",
    "graphs": "torch.compile, capture and replay, compiled bundles",
    "models": "model code, checkpoints, weight loading",
    "ops": "custom ops, attention backends, C++ kernels",
    "conf": "typed configuration",
}
"""The layers from top to bottom, and what each is for."""

CODE = {".py", ".cpp", ".h", ".js", ".html", ".css"}

LEAST_WIDTH = 1120
LEAST_GAP, MOST_GAP = 26.0, 80.0  # between columns; arrows need room
MARGIN = 14
MAX_LINE = 18  # characters of a box's name
BOX_HEIGHT = 40
LINE_HEIGHT = 15
CHAR_WIDTH = 7.3
GAP = 10
TITLE_HEIGHT = 34
BAND_GAP = 22

STYLE = """
svg { font: 12px ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; }
.page { fill: #ffffff; }
.band { fill: #f4f6f8; stroke: #d5dbe1; }
.box { fill: #ffffff; stroke: #8a97a5; }
.name { fill: #1d2733; text-anchor: middle; }
.size { fill: #66727f; font-size: 10.5px; text-anchor: middle; }
.layer { fill: #1d2733; font-size: 15px; font-weight: 600; }
.about { fill: #66727f; }
.total { fill: #66727f; text-anchor: end; }
.arrow { fill: none; stroke: #5d7fa8; stroke-width: 1.2; marker-end: url(#head); }
.head { fill: #5d7fa8; }
@media (prefers-color-scheme: dark) {
  .page { fill: #0d1117; }
  .band { fill: #151b23; stroke: #313944; }
  .box { fill: #1f2731; stroke: #6b7885; }
  .name, .layer { fill: #e3e9ef; }
  .size, .about, .total { fill: #9aa6b2; }
  .arrow { stroke: #7aa2d6; }
  .head { fill: #7aa2d6; }
}
"""


@dataclass(slots=True)
class Box:
    """A folder, or a group of modules that lie beside the folders (`_group_modules`)."""

    name: str
    lines: int
    imports: set[str] = field(default_factory=set)  # names of boxes in the same band


Band = dict[str, Box]
"""The boxes of one layer by name."""


def read_bands(root: Path) -> dict[str, Band]:
    """The input of `draw`, read from the sources under `root`."""
    return {layer: _read_band(root, layer) for layer in LAYERS}


def count_lines(files: Iterable[Path]) -> int:
    """Lines of source code in `files`, rounded to 100."""
    total = sum(len(file.read_text(encoding="utf-8").splitlines()) for file in files)
    return max(100, round(total, -2))


def _read_band(root: Path, layer: str) -> Band:
    """The boxes of one layer, with arrows reduced to those that do not follow from others."""
    files: dict[str, list[Path]] = defaultdict(list)  # by part: a folder or a module of the layer
    for file in sorted((root / layer).rglob("*")):
        if file.suffix in CODE and "__pycache__" not in file.parts and file.name != "__init__.py":
            files[_part_of(file.relative_to(root / layer))].append(file)
    imports = {
        part: {
            name
            for file in its_files
            if file.suffix == ".py"
            for name in _imported_parts(file, layer)
            if name != part and name in files
        }
        for part, its_files in files.items()
    }
    group_of = _group_modules(imports)
    band: Band = {}
    for part, group in group_of.items():
        if group not in band:
            members = [name for name in files if group_of[name] == group]
            band[group] = Box(group, count_lines(file for name in members for file in files[name]))
        band[group].imports |= {group_of[name] for name in imports[part]} - {group}
    _reduce(band)
    return band


def _part_of(path: Path) -> str:
    """The folder `a/` of a file within a layer, or its name if it lies beside the folders."""
    return f"{path.parts[0]}/" if len(path.parts) > 1 else path.name


def _imported_parts(file: Path, layer: str) -> Iterable[str]:
    """The parts of `layer` that a module imports, local and type-checking imports included."""
    prefix = f"ostinato.{layer}."
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        for name in names:
            if name.startswith(prefix):
                first = name.removeprefix(prefix).split(".")[0]
                yield from (f"{first}/", f"{first}.py")


def _reachable(imports: Mapping[str, set[str]], start: str) -> set[str]:
    """Everything that `start` imports, directly or through others."""
    found: set[str] = set()
    waiting = list(imports[start])
    while waiting:
        name = waiting.pop()
        if name not in found:
            found.add(name)
            waiting += imports[name]
    return found


def _group_modules(imports: Mapping[str, set[str]]) -> dict[str, str]:
    """Name of the box of each part. Modules beside the folders share a box when they import the
    same folders and are imported by the same folders; so no arrow can run in a circle."""
    below = {part: _reachable(imports, part) for part in imports}
    folders = {part for part in imports if part.endswith("/")}
    groups: dict[tuple[frozenset[str], frozenset[str]], list[str]] = defaultdict(list)
    for part in sorted(imports.keys() - folders):
        above = frozenset(folder for folder in folders if part in below[folder])
        groups[above, frozenset(below[part] & folders)].append(part)
    names = {folder: folder for folder in folders}
    for members in groups.values():
        stems = ", ".join(member.removesuffix(".py") for member in members)
        names |= dict.fromkeys(members, stems)
    return names


def _reduce(band: Band) -> None:
    """Removes arrows that follow from others."""
    direct = {name: set(box.imports) for name, box in band.items()}
    for box in band.values():
        for name in direct[box.name]:
            box.imports -= _reachable(direct, name)


# ---- layout ----


def _levels(band: Band) -> dict[str, int]:
    """Column of each box, counted from the right: one left of the leftmost box that it imports."""
    levels: dict[str, int] = {}

    def level(name: str) -> int:
        if name not in levels:
            levels[name] = 1 + max((level(other) for other in band[name].imports), default=-1)
        return levels[name]

    for name in sorted(band):
        level(name)
    return levels


@dataclass(slots=True)
class _Node:
    """A box in its column, or the point at which a long arrow crosses a column."""

    name: str
    level: int
    text: list[str] = field(default_factory=list)  # empty where an arrow passes
    left: list[_Node] = field(default_factory=list)  # importers
    right: list[_Node] = field(default_factory=list)  # imported
    y: float = 0  # its middle

    @property
    def height(self) -> float:
        return BOX_HEIGHT + LINE_HEIGHT * (len(self.text) - 1) if self.text else 6

    @property
    def width(self) -> float:
        return max((len(line) for line in self.text), default=0) * CHAR_WIDTH + 18


def _wrapped(name: str, limit: int) -> list[str]:
    """A box's name in lines of at most `limit` characters."""
    lines = [""]
    for word in name.split(" "):
        if lines[-1] and len(lines[-1]) + 1 + len(word) > limit:
            lines.append(word)
        else:
            lines[-1] = f"{lines[-1]} {word}".strip()
    return lines


def _link(importer: _Node, imported: _Node) -> None:
    importer.right.append(imported)
    imported.left.append(importer)


def _columns(band: Band) -> list[list[_Node]]:
    """Nodes by level, ordered and placed so that few arrows cross."""
    levels = _levels(band)
    columns: list[list[_Node]] = [[] for _ in range(max(levels.values()) + 1)]
    limit = MAX_LINE if len(band) > 1 else 6 * MAX_LINE
    nodes = {name: _Node(name, levels[name], _wrapped(name, limit)) for name in sorted(band)}
    for node in nodes.values():
        columns[node.level].append(node)
    for name in sorted(band):
        for other in sorted(band[name].imports):
            last = nodes[name]
            for level in range(levels[name] - 1, levels[other], -1):
                passing = _Node(f"{name} -> {other}", level)
                columns[level].append(passing)
                _link(last, passing)
                last = passing
            _link(last, nodes[other])
    for column in columns:
        _place(column)
    for _ in range(12):
        for column in [*columns, *reversed(columns)]:
            for node in column:
                near = [*node.left, *node.right]
                if near:
                    node.y = sum(other.y for other in near) / len(near)
            column.sort(key=lambda node: (node.y, node.name))
            _place(column)
    return columns


def _place(column: list[_Node]) -> None:
    """Moves nodes apart as little as possible until none overlaps the next, in their order."""
    # A cluster: nodes that touch, and for each node the top of the cluster that would leave this
    # node where it is.
    clusters: list[tuple[list[_Node], list[float]]] = []
    for node in column:
        nodes, wishes = [node], [node.y - node.height / 2]
        while clusters and _top(clusters[-1][1]) + _extent(clusters[-1][0]) > _top(wishes):
            before, their_wishes = clusters.pop()
            wishes = their_wishes + [wish - _extent(before) for wish in wishes]
            nodes = before + nodes
        clusters.append((nodes, wishes))
    for nodes, wishes in clusters:
        y = _top(wishes)
        for node in nodes:
            node.y = y + node.height / 2
            y += node.height + GAP


def _top(wishes: list[float]) -> float:
    return sum(wishes) / len(wishes)


def _extent(nodes: list[_Node]) -> float:
    return sum(node.height + GAP for node in nodes)


# ---- drawing ----


def draw(bands: Mapping[str, Band]) -> str:
    """The map as SVG text."""
    columns = {layer: _columns(bands[layer])[::-1] for layer in LAYERS}
    width = max(LEAST_WIDTH, *(_least_width(one) for one in columns.values()))
    body: list[str] = []
    y = float(MARGIN)
    for layer, about in LAYERS.items():
        if y > MARGIN:
            path = f"M{width / 2:.0f} {y - BAND_GAP + 2:.0f} V{y - 2:.0f}"
            body.append(f'<path class="arrow" d="{path}"/>')
        drawn, height = _draw_band(layer, about, bands[layer], columns[layer], y, width)
        body += drawn
        y += height + BAND_GAP
    height = y - BAND_GAP + MARGIN
    head = (
        '<marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
        'orient="auto"><path class="head" d="M0 0.8 L8 4 L0 7.2 z"/></marker>'
    )
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" '
            f'width="{width:.0f}" height="{height:.0f}" role="img" '
            'aria-label="The folders of the code by layer; arrows say which folder imports which">',
            f"<style>{STYLE}</style>",
            f"<defs>{head}</defs>",
            f'<rect class="page" width="{width:.0f}" height="{height:.0f}"/>',
            *body,
            "</svg>\n",
        ]
    )


def _widths(columns: list[list[_Node]]) -> list[float]:
    return [max(node.width for node in column) for column in columns]


def _least_width(columns: list[list[_Node]]) -> float:
    """The width of a picture in which the columns do not overlap."""
    return 4 * MARGIN + sum(_widths(columns)) + LEAST_GAP * (len(columns) - 1)


def _draw_band(
    layer: str, about: str, band: Band, columns: list[list[_Node]], top: float, page_width: float
) -> tuple[list[str], float]:
    """(elements, height) of one layer, importers on the left."""
    nodes = [node for column in columns for node in column]
    highest = min(node.y - node.height / 2 for node in nodes)
    for node in nodes:
        node.y += top + TITLE_HEIGHT - highest
    height = max(node.y + node.height / 2 for node in nodes) - top + MARGIN
    widths = _widths(columns)
    gap = min(MOST_GAP, (page_width - 4 * MARGIN - sum(widths)) / max(1, len(columns) - 1))
    edges: dict[int, tuple[float, float]] = {}  # left and right edge of each level's column
    x = 2.0 * MARGIN
    for column, width in zip(columns, widths, strict=True):
        edges[column[0].level] = (x, x + width)
        x += width + gap
    lines = sum(box.lines for box in band.values())
    drawn = [
        f'<rect class="band" x="{MARGIN}" y="{top:.0f}" width="{page_width - 2 * MARGIN:.0f}" '
        f'height="{height:.0f}" rx="8"/>',
        f'<text class="layer" x="{2 * MARGIN}" y="{top + 22:.0f}">{layer}/'
        f'<tspan class="about" font-size="12" font-weight="400" dx="12">{escape(about)}'
        f"</tspan></text>",
        f'<text class="total" x="{page_width - 2 * MARGIN:.0f}" y="{top + 22:.0f}">{lines:,} '
        "lines</text>",
    ]
    boxes = [node for node in nodes if node.text]
    drawn += [_draw_arrow(node, other, edges) for node in boxes for other in node.right]
    for node in boxes:
        left, right = edges[node.level]
        drawn += _draw_box(node, band[node.name].lines, (left + right) / 2)
    return drawn, height


def _box_edges(node: _Node, edges: Mapping[int, tuple[float, float]]) -> tuple[float, float]:
    """Left and right edge of a box, which stands in the middle of its column."""
    left, right = edges[node.level]
    spare = (right - left - node.width) / 2 if node.text else 0
    return left + spare, right - spare


def _draw_box(node: _Node, lines: int, x: float) -> list[str]:
    """A rectangle with the folder's name and its size."""
    top = node.y - node.height / 2
    text = [
        f'<text class="name" x="{x:.0f}" y="{top + 17 + LINE_HEIGHT * number:.0f}">'
        f"{escape(line)}</text>"
        for number, line in enumerate(node.text)
    ]
    return [
        f'<rect class="box" data-name="{escape(node.name)}" data-lines="{lines}" '
        f'x="{x - node.width / 2:.0f}" y="{top:.0f}" width="{node.width:.0f}" '
        f'height="{node.height:.0f}" rx="5"/>',
        *text,
        f'<text class="size" x="{x:.0f}" y="{top + node.height - 8:.0f}">{lines:,}</text>',
    ]


def _draw_arrow(importer: _Node, imported: _Node, edges: Mapping[int, tuple[float, float]]) -> str:
    """A smooth line from a box to one that it imports, past the boxes in between."""
    x, y = _box_edges(importer, edges)[1], importer.y
    path = f"M{x:.0f} {y:.0f}"
    while True:
        left, right = _box_edges(imported, edges)
        end = left - 1 if imported.text else left
        half = (x + end) / 2
        path += f" C{half:.0f} {y:.0f} {half:.0f} {imported.y:.0f} {end:.0f} {imported.y:.0f}"
        if imported.text:
            return f'<path class="arrow" d="{path}"/>'
        path += f" H{right:.0f}"
        x, y = right, imported.y
        [imported] = imported.right


if __name__ == "__main__":
    (ROOT / "docs/map.svg").write_text(draw(read_bands(ROOT)), encoding="utf-8")
