"""Folders of engines: found again, never shared, never of another identity, and removed in turn."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from filelock import FileLock
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ostinato.runtime.tiers import tier_directory
from ostinato.runtime.tiers.own_files import TierError
from ostinato.runtime.tiers.tier_directory import TierDirectory, open_directory, rank_folder

IDENTITY = {"model": "tiny", "dtype": "float32"}
GIB = 1 << 30
PAGE = 4096


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "tiers"


@pytest.fixture
def engines() -> Iterator[list[TierDirectory]]:
    """Folders that are closed at the end of the test."""
    folders: list[TierDirectory] = []
    yield folders
    for folder in folders:
        folder.close()


def use(
    root: Path, identity: dict[str, str], num_bytes: int = 0, last_use: int | None = None
) -> Path:
    """Let an engine run and end. Returns its identity's folder, with `num_bytes` of blocks."""
    engine = open_directory(str(root), identity, GIB)
    (rank_folder(engine.path, 0) / "blocks.kv").write_bytes(bytes(num_bytes))
    engine.close()
    if last_use is not None:
        os.utime(engine.path / "LOCK", (last_use, last_use))
    return engine.path.parent


def bytes_in(*folders: Path) -> int:
    return sum(
        file.stat().st_blocks * 512
        for folder in folders
        for file in folder.rglob("*")
        if file.is_file()
    )


def refused(root: Path) -> str:
    with pytest.raises(TierError) as caught:
        open_directory(str(root), IDENTITY, GIB)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_an_engine_finds_its_folder_again(root: Path) -> None:
    first = open_directory(str(root), IDENTITY, GIB)
    (rank_folder(first.path, 1) / "blocks.kv").write_bytes(b"blocks")
    first.close()
    first.close()
    again = open_directory(str(root), dict(reversed(IDENTITY.items())), GIB)
    assert again.path == first.path
    assert again.path.name == "engine-0"
    assert (rank_folder(again.path, 1) / "blocks.kv").read_bytes() == b"blocks"
    assert json.loads((again.path.parent / "identity.json").read_text()) == IDENTITY
    again.close()
    paths = [root, *root.rglob("*")]
    assert {path.stat().st_mode & 0o777 for path in paths if path.is_dir()} == {0o700}
    assert {path.stat().st_mode & 0o777 for path in paths if path.is_file()} <= {0o600, 0o644}


def test_engines_and_identities_have_folders_of_their_own(
    root: Path, engines: list[TierDirectory]
) -> None:
    for _ in range(3):
        engines.append(open_directory(str(root), IDENTITY, GIB))
    engines.append(open_directory(str(root), IDENTITY | {"dtype": "bfloat16"}, GIB))
    folder = engines[0].path.parent
    assert [engine.path for engine in engines[:3]] == [folder / f"engine-{n}" for n in range(3)]
    assert engines[3].path.name == "engine-0"
    assert engines[3].path.parent != folder
    engines[1].close()
    engines[1] = open_directory(str(root), IDENTITY, GIB)
    assert engines[1].path == folder / "engine-1"  # the first that is free


def test_engines_that_start_at_once_have_folders_of_their_own(
    root: Path, engines: list[TierDirectory]
) -> None:
    with ThreadPoolExecutor(8) as pool:
        engines += pool.map(lambda _: open_directory(str(root), IDENTITY, GIB), range(8))
    assert {engine.path.name for engine in engines} == {f"engine-{n}" for n in range(8)}


def test_a_killed_process_gives_its_folder_back(root: Path) -> None:
    code = (
        "import sys\n"
        "from ostinato.runtime.tiers.tier_directory import open_directory\n"
        "engine = open_directory(sys.argv[1], {'model': 'tiny', 'dtype': 'float32'}, 1 << 30)\n"
        "print(engine.path.name, flush=True)\n"
        "sys.stdin.read()\n"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", code, str(root)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with child:
        assert child.stdout is not None
        assert child.stdout.readline() == "engine-0\n"
        second = open_directory(str(root), IDENTITY, GIB)
        assert second.path.name == "engine-1"
        second.close()
        child.send_signal(signal.SIGKILL)
        child.wait()
    third = open_directory(str(root), IDENTITY, GIB)
    assert third.path.name == "engine-0"
    third.close()


@pytest.mark.parametrize("text", ["", "{", "{}", json.dumps(IDENTITY | {"dtype": "int8"}), None])
def test_a_folder_with_another_or_no_identity_is_begun_anew(root: Path, text: str | None) -> None:
    folder = use(root, IDENTITY, num_bytes=PAGE)
    if text is None:
        (folder / "identity.json").unlink()
    else:
        (folder / "identity.json").write_text(text)
    engine = open_directory(str(root), IDENTITY, GIB)
    assert engine.path.parent == folder
    assert list(rank_folder(engine.path, 0).iterdir()) == []
    assert json.loads((folder / "identity.json").read_text()) == IDENTITY
    engine.close()


def test_a_folder_with_another_identity_that_is_in_use_is_refused(
    root: Path, engines: list[TierDirectory]
) -> None:
    engines.append(open_directory(str(root), IDENTITY, GIB))
    (rank_folder(engines[0].path, 0) / "blocks.kv").write_bytes(b"blocks")
    (engines[0].path.parent / "identity.json").write_text("{}")
    assert "identity.json is damaged or another model's; stop the other engine" in refused(root)
    assert (rank_folder(engines[0].path, 0) / "blocks.kv").read_bytes() == b"blocks"


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    others=st.lists(st.tuples(st.integers(0, 5), st.booleans()), max_size=4),
    quota=st.integers(0, 12),
)
def test_folders_of_other_identities_are_removed_the_least_recently_used_first(
    tmp_path: Path, others: list[tuple[int, bool]], quota: int
) -> None:
    root = tmp_path / "tiers"
    shutil.rmtree(root, ignore_errors=True)
    folders, running = [], []
    for number, (pages, is_running) in enumerate(others):
        identity = IDENTITY | {"model": str(number)}
        folders.append(use(root, identity, pages * PAGE, last_use=10**9 + number))
        if is_running:
            running.append(open_directory(str(root), identity, GIB))
            os.utime(running[-1].path / "LOCK", (10**9 + number, 10**9 + number))
    unrelated = root / "notes"
    unrelated.mkdir(parents=True, exist_ok=True, mode=0o700)
    own = use(root, IDENTITY, 20 * PAGE, last_use=0)
    sizes = {folder: bytes_in(folder) for folder in folders}
    engine = open_directory(str(root), IDENTITY, quota * PAGE)
    engine.close()
    expected = dict(sizes)
    for folder, (_, is_running) in zip(folders, others, strict=True):
        if sum(expected.values()) > quota * PAGE and not is_running:
            del expected[folder]
    assert {folder for folder in folders if folder.exists()} == expected.keys()
    assert bytes_in(*expected) == sum(expected.values())
    assert bytes_in(own) >= 20 * PAGE
    assert unrelated.exists()
    for other in running:
        other.close()


def test_a_folder_in_use_is_used_most_recently(root: Path) -> None:
    old = use(root, IDENTITY | {"model": "old"}, PAGE, last_use=1)
    new = use(root, IDENTITY | {"model": "new"}, PAGE, last_use=2)
    assert use(root, IDENTITY | {"model": "old"}, PAGE) == old  # opening is a use
    open_directory(str(root), IDENTITY, bytes_in(old)).close()
    assert old.exists()
    assert not new.exists()


def test_what_a_killed_removal_left_is_removed_later(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Killed(BaseException):
        pass

    use(root, IDENTITY)
    other = use(root, IDENTITY | {"model": "other"}, PAGE)
    rmtree = shutil.rmtree

    def killed(folder: Path) -> None:
        rmtree(folder)
        raise Killed

    monkeypatch.setattr(shutil, "rmtree", killed)
    with pytest.raises(Killed):
        open_directory(str(root), IDENTITY, 0)
    monkeypatch.setattr(shutil, "rmtree", rmtree)
    assert [path.name for path in other.iterdir()] == ["identity.json"]
    (other / "engine-0").mkdir()
    (other / "engine-0" / "rest").write_bytes(bytes(PAGE))
    open_directory(str(root), IDENTITY, 0).close()
    assert not other.exists()


def test_folders_that_look_alike_stay(root: Path, tmp_path: Path) -> None:
    use(root, IDENTITY)
    target = tmp_path / "target"
    target.mkdir()
    (target / "identity.json").write_text("{}")
    (root / "0123456789abcdef").symlink_to(target)
    (root / "fedcba9876543210").mkdir(mode=0o700)
    (root / "fedcba9876543210" / "photo").write_bytes(bytes(PAGE))
    open_directory(str(root), IDENTITY, 0).close()
    assert (root / "0123456789abcdef" / "identity.json").exists()
    assert (root / "fedcba9876543210" / "photo").exists()


@pytest.mark.parametrize("mode", [0o770, 0o702, 0o1777])
def test_a_root_that_others_can_write_is_refused(root: Path, mode: int) -> None:
    root.mkdir()
    root.chmod(mode)
    assert refused(root) == (
        f"{root} is not used for KV blocks: others can write to it (mode {mode:o}); "
        f"chmod go-w {root}"
    )
    assert list(root.iterdir()) == []
    root.chmod(0o755)  # others may read the names in it
    open_directory(str(root), IDENTITY, GIB).close()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory away")
@pytest.mark.parametrize("is_link", [False, True])
def test_a_root_of_another_user_is_refused(root: Path, tmp_path: Path, is_link: bool) -> None:
    target = tmp_path / "target" if is_link else root
    target.mkdir(mode=0o700)
    os.chown(target, 1234, -1)
    if is_link:
        root.symlink_to(target)
    assert "target" not in str(root)
    assert refused(root).startswith(
        f"{target} is not used for KV blocks: it belongs to the user with id 1234, not to 0; name a"
    )
    os.chown(target, 0, -1)
    open_directory(str(root), IDENTITY, GIB).close()


@pytest.mark.parametrize("inner", ["", "engine-0", "engine-0/rank-0"])
def test_a_folder_that_others_can_write_or_that_is_a_link_is_refused(
    root: Path, tmp_path: Path, inner: str
) -> None:
    folder = use(root, IDENTITY) / inner

    def open_rank() -> None:
        engine = open_directory(str(root), IDENTITY, GIB)
        try:
            rank_folder(engine.path, 0)
        finally:
            engine.close()

    def reason() -> str:
        with pytest.raises(TierError) as caught:
            open_rank()
        return str(caught.value)

    folder.chmod(0o770)
    assert reason().startswith(f"{folder} is not used for KV blocks: others can write to it")
    folder.chmod(0o700)
    folder.rename(tmp_path / "moved")
    folder.symlink_to(tmp_path / "moved")
    assert reason() == f"{folder} is not used for KV blocks: it is not a directory; remove it"
    folder.unlink()
    folder.write_text("")
    assert reason() == f"{folder} is not used for KV blocks: it is not a directory; remove it"


def test_a_root_that_can_not_be_made(root: Path) -> None:
    root.write_text("a file")
    assert refused(root) == (
        f"the directory {root} cannot be used for KV blocks: File exists; name a directory on a "
        "local disk that can be written"
    )
    assert "Not a directory; name a directory" in refused(root / "inner")


def test_a_root_whose_other_engine_never_ends_its_start(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(root, IDENTITY)
    monkeypatch.setattr(tier_directory, "_LONGEST_TURN_S", 0.05)
    with FileLock(root / "LOCK"):
        assert "could not be acquired" in refused(root)


def test_the_home_directory_has_a_short_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    engine = open_directory("~/blocks", IDENTITY, GIB)
    assert engine.path.is_relative_to(tmp_path / "blocks")
    engine.close()
