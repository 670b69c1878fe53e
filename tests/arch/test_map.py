"""docs/map.svg shows the folders and arrows that the source tree has."""

import re
from dataclasses import replace
from itertools import combinations

import pytest

from docs.draw_map import LAYERS, Band, Box, count_lines, draw, read_bands
from tests.arch.tree import ROOT

RENEW = "docs/map.svg is out of date; renew it: python docs/draw_map.py"


@pytest.fixture(scope="module")
def bands() -> dict[str, Band]:
    return read_bands(ROOT)


def drawn_sizes() -> dict[str, list[int]]:
    """Lines of each box in docs/map.svg, in its order."""
    found: dict[str, list[int]] = {}
    svg = (ROOT / "docs/map.svg").read_text(encoding="utf-8")
    for name, lines in re.findall(r'data-name="([^"]*)" data-lines="(\d+)"', svg):
        found.setdefault(name, []).append(int(lines))
    return found


def with_sizes(bands: dict[str, Band], sizes: dict[str, list[int]]) -> dict[str, Band]:
    """The bands with the sizes in docs/map.svg. A box that the map lacks keeps its own size."""
    left = {name: list(lines) for name, lines in sizes.items()}
    return {
        layer: {
            name: replace(box, lines=left[name].pop(0) if left.get(name) else box.lines)
            for name, box in band.items()
        }
        for layer, band in bands.items()
    }


def test_the_map_has_the_folders_and_arrows_of_the_tree(bands: dict[str, Band]):
    shown = with_sizes(bands, drawn_sizes())
    assert draw(shown) == (ROOT / "docs/map.svg").read_text(encoding="utf-8"), RENEW


def test_the_map_has_about_the_sizes_of_the_tree(bands: dict[str, Band]):
    shown = with_sizes(bands, drawn_sizes())
    for layer, band in bands.items():
        for name, box in band.items():
            allowed = max(300, 0.3 * box.lines)
            assert abs(shown[layer][name].lines - box.lines) <= allowed, f"{layer}/{name}: {RENEW}"


def test_no_box_covers_another():
    svg = (ROOT / "docs/map.svg").read_text(encoding="utf-8")
    pattern = r'class="box" .*? x="(\d+)" y="(\d+)" width="(\d+)" height="(\d+)"'
    boxes = [tuple(map(int, found)) for found in re.findall(pattern, svg)]
    assert len(boxes) > 50
    for (x, y, width, height), (x2, y2, width2, height2) in combinations(boxes, 2):
        beside = x + width <= x2 or x2 + width2 <= x
        assert beside or y + height <= y2 or y2 + height2 <= y, (x, y, x2, y2)


def test_an_arrow_that_follows_from_others_is_left_out(tmp_path):
    for layer in LAYERS:
        (tmp_path / layer).mkdir()
        (tmp_path / layer / "alone.py").write_text("")
    for name, imported in {"a": ("b", "c"), "b": ("c",), "c": ()}.items():
        folder = tmp_path / "runtime" / name
        folder.mkdir()
        lines = [f"from ostinato.runtime.{other} import x" for other in imported]
        (folder / "module.py").write_text("\n".join(lines))
    runtime = read_bands(tmp_path)["runtime"]
    assert {name: box.imports for name, box in runtime.items() if name.endswith("/")} == {
        "a/": {"b/"},
        "b/": {"c/"},
        "c/": set(),
    }


def test_boxes_with_a_common_import_do_not_overlap():
    band = {"top/": Box("top/", 100, {"left/", "right/"})}
    band |= {name: Box(name, 100, {"low/"}) for name in ("left/", "right/")}
    band["low/"] = Box("low/", 100)
    svg = draw(dict.fromkeys(LAYERS, band))
    tops = re.findall(r'data-name="(?:left|right)/".* y="(\d+)"', svg)[:2]
    assert abs(int(tops[0]) - int(tops[1])) >= 40


def test_lines_are_rounded(tmp_path):
    file = tmp_path / "module.py"
    file.write_text("x = 1\n" * 349)
    assert count_lines([file]) == 300
