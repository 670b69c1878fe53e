"""Bundles that are kept, moved, damaged, foreign or stale; unsafe and read-only directories."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ostinato.graphs.bundle import Bundle, digest_of_sources, trusted_directories

FILES = {"layer-0": b"a program" * 50, "cost-table": b"\x00\xff", "empty": b""}
IDENTITY = {"model": "tiny", "dtype": "float32"}


def make(root: Path, files: dict[str, bytes] = FILES) -> Bundle:
    bundle = Bundle(root, "tiny on a CPU", IDENTITY)
    for name, data in files.items():
        bundle.put(name, data)
    bundle.save()
    return bundle


def contents(bundle: Bundle) -> dict[str, bytes | None]:
    return {entry.name: bundle.get(entry.name) for entry in bundle.entries}


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name.endswith("bundle")]


def test_what_is_saved_is_found_again_also_in_another_place(tmp_path: Path) -> None:
    first = make(tmp_path / "a")
    assert first.is_saved
    again = Bundle(tmp_path / "a", "tiny on a CPU", IDENTITY)
    assert contents(again) == FILES
    assert again.is_saved
    assert again.directory.name.startswith("tiny-on-a-CPU-")
    shutil.copytree(tmp_path / "a", tmp_path / "elsewhere" / "b")
    assert contents(Bundle(tmp_path / "elsewhere" / "b", "tiny on a CPU", IDENTITY)) == FILES


def test_another_model_has_another_directory(tmp_path: Path) -> None:
    make(tmp_path)
    other = Bundle(tmp_path, "tiny on a CPU", IDENTITY | {"dtype": "bfloat16"})
    assert other.entries == []
    other.put("layer-0", b"x")
    other.save()
    assert contents(Bundle(tmp_path, "tiny on a CPU", IDENTITY)) == FILES


def test_saving_replaces_what_was_there(tmp_path: Path) -> None:
    make(tmp_path)
    bundle = Bundle(tmp_path, "tiny on a CPU", IDENTITY)
    bundle.put("layer-0", b"new")
    assert not bundle.is_saved
    bundle.save()
    assert contents(Bundle(tmp_path, "tiny on a CPU", IDENTITY)) == FILES | {"layer-0": b"new"}
    assert [path.name for path in tmp_path.iterdir()] == [bundle.directory.name]


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_one_altered_byte_anywhere_sets_it_aside(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, data: st.DataObject
) -> None:
    directory = make(tmp_path).directory
    file = data.draw(st.sampled_from(sorted(p for p in directory.iterdir() if p.stat().st_size)))
    content = bytearray(file.read_bytes())
    position = data.draw(st.integers(0, len(content) - 1))
    content[position] ^= data.draw(st.integers(1, 255))
    file.write_bytes(content)
    caplog.clear()
    bundle = Bundle(tmp_path, "tiny on a CPU", IDENTITY)
    if contents(bundle) == FILES:  # only white space of the manifest was changed
        assert file.name == "manifest.json"
        assert (
            bytes(content).split()
            == make(tmp_path / "other").directory.joinpath("manifest.json").read_bytes().split()
        )
        return
    assert bundle.entries == []
    (line,) = warnings_of(caplog)
    assert line.startswith(f"the bundle {directory} is set aside and built anew: ")
    assert not directory.exists()
    assert directory.with_name(f"{directory.name}.set-aside").exists()


@pytest.mark.parametrize("name", ["layer-0", "manifest.json"])
def test_a_file_that_is_cut_short_or_gone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    for spoil in (lambda file: file.write_bytes(file.read_bytes()[:-7]), Path.unlink):
        directory = make(tmp_path).directory
        spoil(directory / name)
        caplog.clear()
        assert Bundle(tmp_path, "tiny on a CPU", IDENTITY).entries == []
        assert "is set aside and built anew: " in warnings_of(caplog)[0]


def rewrite(directory: Path, **changes: object) -> None:
    """Change the manifest's body and its digest, as in an undamaged bundle of another machine."""
    manifest = msgspec.json.decode((directory / "manifest.json").read_bytes())
    for key, values in changes.items():
        manifest["body"][key] |= values
    body = msgspec.json.encode(manifest["body"])
    manifest["sha256"] = hashlib.sha256(body).hexdigest()
    (directory / "manifest.json").write_bytes(msgspec.json.encode(manifest))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"made_by": {"torch": "1.0"}}, "it was made with torch 1.0, not with "),
        ({"made_by": {"sources": "0123"}}, "it was made with sources 0123, not with "),
        ({"made_by": {"platform": "plan9 vax"}}, "it was made with platform plan9 vax, not with "),
        ({"identity": {"dtype": "float16"}}, "it is for {"),
    ],
)
def test_one_from_other_sources_versions_or_machines(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, changes: dict[str, object], reason: str
) -> None:
    directory = make(tmp_path).directory
    rewrite(directory, **changes)
    assert Bundle(tmp_path, "tiny on a CPU", IDENTITY).entries == []
    assert reason in warnings_of(caplog)[0]
    make(tmp_path)  # built anew, in the same place
    assert contents(Bundle(tmp_path, "tiny on a CPU", IDENTITY)) == FILES


def test_the_digest_of_sources_changes_with_each_file_and_its_folder(tmp_path: Path) -> None:
    files = {"conf/environment.py": b"a", "ops/one.py": b"b", "ops/native/one.cpp": b"c"}
    changes: list[dict[str, bytes]] = [{name: files[name] + b"\n"} for name in files]
    renamed = {"ops/one.py": b"", "models/one.py": b"b"}  # empty = the file is not there
    digests = []
    for number, change in enumerate([{}, *changes, renamed, {"runtime/one.py": b"d"}]):
        for name, data in {**files, **change}.items():
            file = tmp_path / str(number) / name
            file.parent.mkdir(parents=True, exist_ok=True)
            if data:
                file.write_bytes(data)
        digests.append(digest_of_sources(tmp_path / str(number)))
    assert len(set(digests)) == 5
    assert digests[0] == digests[-1]  # the runtime makes no programs


@pytest.mark.parametrize("mode", [0o770, 0o777, 0o702])
@pytest.mark.parametrize("parent", [False, True])
def test_code_is_not_loaded_from_where_others_can_write(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, mode: int, parent: bool
) -> None:
    root = tmp_path / "root"
    directory = make(root).directory
    opened = root if parent else directory
    opened.chmod(mode)
    bundle = Bundle(root, "tiny on a CPU", IDENTITY)
    assert bundle.entries == []
    (line,) = warnings_of(caplog)
    assert line.startswith(f"the bundle {directory} is not loaded: {opened} can be written by ")
    assert line.endswith(f"a bundle is code; chmod go-w {opened}")
    assert list(trusted_directories(root)) == []
    bundle.put("layer-0", b"mine")
    bundle.save()  # must not replace files that another user may have written
    assert (directory / "layer-0").read_bytes() == FILES["layer-0"]
    assert not bundle.is_saved
    opened.chmod(0o700)
    assert contents(Bundle(root, "tiny on a CPU", IDENTITY)) == FILES
    assert list(trusted_directories(root)) == [directory]


def test_a_place_that_can_not_be_written_gives_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root = tmp_path / "file"
    root.write_text("not a directory")
    bundle = make(root)
    assert not bundle.is_saved
    assert contents(bundle) == FILES  # the start itself goes on
    (line,) = warnings_of(caplog)
    assert line.startswith("the compiled bundle is not kept, the next start compiles again: ")
    assert line.endswith("set graphs.bundle_dir to a directory that can be written")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs limits of a process")
def test_a_full_disk_gives_one_warning_and_leaves_nothing(tmp_path: Path) -> None:
    code = (
        "import logging, resource, signal, sys\n"
        "from pathlib import Path\n"
        "from ostinato.graphs.bundle import Bundle\n"
        "logging.basicConfig()\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))\n"
        "bundle = Bundle(Path(sys.argv[1]), 'tiny', {})\n"
        "bundle.put('layer-0', b'x' * 1000)\n"
        "bundle.save()\n"
        "print(bundle.is_saved, list(Path(sys.argv[1]).iterdir()))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True
    )
    assert done.stdout == "False []\n"
    assert "cannot be written: File too large" in done.stderr


def test_two_processes_that_save_at_once_leave_a_whole_one(tmp_path: Path) -> None:
    code = (
        "import sys\n"
        "from pathlib import Path\n"
        "from ostinato.graphs.bundle import Bundle\n"
        "for number in range(60):\n"
        "    bundle = Bundle(Path(sys.argv[1]), 'tiny', {})\n"
        "    bundle.put('layer-0', sys.argv[2].encode() * (number + 1) * 1000)\n"
        "    bundle.put('layer-1', sys.argv[2].encode() * (number + 1) * 1000)\n"
        "    bundle.save()\n"
        "    assert bundle.is_saved\n"
    )
    writers = [
        subprocess.Popen([sys.executable, "-c", code, str(tmp_path), letter]) for letter in "ab"
    ]
    assert [writer.wait(120) for writer in writers] == [0, 0]
    bundle = Bundle(tmp_path, "tiny", {})
    assert len(bundle.entries) == 2
    assert bundle.get("layer-0") == bundle.get("layer-1")
    leftovers = [p.name for p in tmp_path.iterdir() if p != bundle.directory]
    assert [name for name in leftovers if not name.endswith(".set-aside")] == []


def test_a_process_that_is_always_too_late_does_not_count_its_bundle_as_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    make(tmp_path)
    bundle = Bundle(tmp_path, "tiny on a CPU", IDENTITY)
    rename = Path.rename

    def too_late(source: Path, target: Path) -> Path:
        if target == bundle.directory:  # another process saves its bundle just before
            shutil.copytree(saved, target)
        return rename(source, target)

    saved = shutil.copytree(bundle.directory, tmp_path / "elsewhere")
    monkeypatch.setattr(Path, "rename", too_late)
    bundle.put("layer-0", b"new")
    bundle.save()
    assert not bundle.is_saved
    (line,) = warnings_of(caplog)
    assert line == (
        f"the compiled bundle is not kept: other processes replaced {bundle.directory} 10 times "
        "while it was written; the next start loads theirs"
    )
    monkeypatch.setattr(Path, "rename", rename)
    assert contents(Bundle(tmp_path, "tiny on a CPU", IDENTITY)) == FILES
    assert {path.name for path in tmp_path.iterdir()} == {bundle.directory.name, "elsewhere"}
    bundle.save()
    assert bundle.is_saved
    assert Bundle(tmp_path, "tiny on a CPU", IDENTITY).get("layer-0") == b"new"


def test_the_second_of_two_starts_waits_for_what_the_first_one_saves(tmp_path: Path) -> None:
    first = Bundle(tmp_path, "tiny", {})
    first.take_turn()
    code = (
        "import sys\n"
        "from pathlib import Path\n"
        "from ostinato.graphs.bundle import Bundle\n"
        "bundle = Bundle(Path(sys.argv[1]), 'tiny', {})\n"
        "print(len(bundle.entries), flush=True)\n"
        "bundle.take_turn()\n"
        "print(bundle.get('layer-0'))\n"
    )
    second = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert second.stdout is not None
    assert second.stdout.readline() == "0\n"
    first.put("layer-0", b"compiled once")
    first.save()
    assert second.communicate(timeout=240)[0] == "b'compiled once'\n"
    third = Bundle(tmp_path, "tiny", {})
    third.take_turn()  # it has files, so there is nothing to wait for
    third.end_turn()


def test_a_start_that_fails_lets_the_next_one_compile(tmp_path: Path) -> None:
    first = Bundle(tmp_path, "tiny", {})
    first.take_turn()
    first.end_turn()
    second = Bundle(tmp_path, "tiny", {})
    second.take_turn()
    assert second.entries == []
    second.end_turn()
