"""Kernels of Triton's cache in an archive, and in the cache of another machine."""

from __future__ import annotations

import json
import zipfile
from io import BytesIO
from pathlib import Path

import pytest

from ostinato.graphs.bundle import Bundle
from ostinato.graphs.kernel_archive import (
    adopt_triton_kernels,
    pack_triton_kernels,
    triton_entry,
    unpack_triton_kernels,
)


def add_kernel(cache: Path, key: str, name: str) -> None:
    """Writes the files that Triton leaves in its cache for a kernel."""
    folder = cache / key
    folder.mkdir(parents=True)
    files = {f"{name}.{end}": f"{end} of {key}" for end in ("cubin", "json", "ptx", "ttir")}
    for file, text in files.items():
        (folder / file).write_text(text)
    paths = {file: str(folder / file) for file in files}
    (folder / f"__grp__{name}.json").write_text(json.dumps({"child_paths": paths}))


def test_kernels_move_to_another_cache(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    add_kernel(here, "AAA", "first")
    add_kernel(here, "BBB", "second")
    data = pack_triton_kernels(here)
    assert pack_triton_kernels(here) == data, "the same kernels give other bytes"
    assert unpack_triton_kernels(data, there) == 2
    group = json.loads((there / "BBB" / "__grp__second.json").read_text())["child_paths"]
    assert group == {
        f"second.{end}": str(there / "BBB" / f"second.{end}") for end in ("cubin", "json")
    }
    assert {file: Path(path).read_text() for file, path in group.items()} == {
        "second.cubin": "cubin of BBB",
        "second.json": "json of BBB",
    }
    assert pack_triton_kernels(there) == data


def test_kernels_that_are_there_are_kept(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    add_kernel(here, "AAA", "first")
    add_kernel(there, "AAA", "first")
    (there / "AAA" / "first.cubin").write_text("its own")
    assert unpack_triton_kernels(pack_triton_kernels(here), there) == 0
    assert (there / "AAA" / "first.cubin").read_text() == "its own"


@pytest.mark.parametrize("name", ["../AAA/x.cubin", "/AAA/x.cubin", "AAA/../x.cubin", "x.cubin"])
def test_files_outside_of_the_cache_are_refused(tmp_path: Path, name: str) -> None:
    data = BytesIO()
    with zipfile.ZipFile(data, "w") as archive:
        archive.writestr(name, "a")
    with pytest.raises(ValueError, match="is not a file of a kernel's folder"):
        unpack_triton_kernels(data.getvalue(), tmp_path / "cache")
    assert not (tmp_path / "x.cubin").exists()


@pytest.mark.parametrize("group", [{}, [], 7, {"child_paths": None}])
def test_kernels_without_paths_are_left_out_with_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, group: object
) -> None:
    name = triton_entry()
    if name is None:
        pytest.skip("Triton is not installed")
    data = BytesIO()
    with zipfile.ZipFile(data, "w") as archive:
        archive.writestr("AAA/__grp__first.json", json.dumps(group))
    bundle = Bundle(tmp_path, "tiny", {})
    bundle.put(name, data.getvalue())
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    adopt_triton_kernels(bundle)
    (record,) = caplog.records
    assert record.getMessage() == (
        "the bundle's kernels are not used: a kernel's file of paths must hold an object with "
        f"child_paths, got {json.dumps(group)}"
    )
    assert list((tmp_path / "cache").glob("*/*")) == []
