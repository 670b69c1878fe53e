"""Digests of weight files: equal for equal files, and never an old one from the cache."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ostinato.runtime.tiers import weights_digest as module
from ostinato.runtime.tiers.weights_digest import cached_digest, weights_digest

CONTENTS = {"model-1.safetensors": b"one" * 1000, "model-2.safetensors": b"two"}
LONG_AGO = 1_600_000_000


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "digests.json"


def make(directory: Path, contents: dict[str, bytes] = CONTENTS) -> list[Path]:
    """Files that were modified long ago."""
    directory.mkdir(exist_ok=True)
    for name, data in contents.items():
        (directory / name).write_bytes(data)
        os.utime(directory / name, (LONG_AGO, LONG_AGO))
    return [directory / name for name in contents]


def expected(contents: dict[str, bytes]) -> str:
    text = b"".join(
        name.encode() + b"\0" + hashlib.sha256(data).hexdigest().encode()
        for name, data in sorted(contents.items())
    )
    return hashlib.sha256(text).hexdigest()


def test_it_depends_on_names_and_contents_only(tmp_path: Path, cache: Path) -> None:
    files = make(tmp_path / "a")
    assert cached_digest(files, cache) is None
    digest = weights_digest(files, cache)
    assert digest == expected(CONTENTS)
    assert weights_digest(files[::-1], cache) == digest
    assert cached_digest(files[::-1], cache) == digest
    copies = make(tmp_path / "b")
    assert cached_digest(copies, cache) is None
    assert weights_digest(copies, cache) == digest
    assert cached_digest(files, cache) == digest  # the cache has both now
    renamed = files[0].rename(files[0].with_name("other.safetensors"))
    assert weights_digest([renamed, files[1]], cache) != digest
    assert cache.stat().st_mode & 0o777 == 0o600
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == [cache.name]


def test_files_are_not_read_again(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = make(tmp_path / "a")
    digest = weights_digest(files, cache)

    def refuse(*_: object) -> None:
        raise AssertionError("the cache has this file")

    monkeypatch.setattr(hashlib, "file_digest", refuse)
    assert weights_digest(files, cache) == cached_digest(files, cache) == digest
    os.utime(files[1], (LONG_AGO, LONG_AGO + 1))
    with pytest.raises(AssertionError, match="the cache has this file"):
        weights_digest(files, cache)


def test_a_change_of_time_size_or_inode_is_seen(tmp_path: Path, cache: Path) -> None:
    files = make(tmp_path / "a")
    for change in ("time", "size", "inode"):
        contents = dict(CONTENTS)
        make(tmp_path / "a")
        assert weights_digest(files, cache) == expected(CONTENTS)
        if change == "time":
            contents[files[1].name] = b"TWO"
            files[1].write_bytes(b"TWO")
        elif change == "size":
            contents[files[1].name] = b"longer"
            files[1].write_bytes(b"longer")
            os.utime(files[1], (LONG_AGO, LONG_AGO))
        else:
            contents[files[1].name] = b"TWO"
            replacement = tmp_path / "replacement"
            replacement.write_bytes(b"TWO")
            os.utime(replacement, (LONG_AGO, LONG_AGO))
            replacement.replace(files[1])
        assert cached_digest(files, cache) is None
        assert weights_digest(files, cache) == expected(contents)


def test_files_that_were_just_modified_are_not_cached(tmp_path: Path, cache: Path) -> None:
    files = make(tmp_path / "a")
    now = module.time.time_ns()
    os.utime(files[1], ns=(now, now))
    assert weights_digest(files, cache) == expected(CONTENTS)
    assert cached_digest(files, cache) is None
    assert cached_digest(files[:1], cache) is not None
    os.utime(files[1], ns=(now, now + 10**12))  # a clock that was wrong
    weights_digest(files, cache)
    assert cached_digest(files, cache) is None


def test_a_file_that_changes_while_it_is_read_is_not_cached(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = make(tmp_path / "a")
    file_digest = hashlib.file_digest

    def slow(opened, algorithm):
        digest = file_digest(opened, algorithm)
        Path(opened.name).write_bytes(b"TWO")
        return digest

    with monkeypatch.context() as patch:
        patch.setattr(hashlib, "file_digest", slow)
        weights_digest(files[1:], cache)
    assert cached_digest(files[1:], cache) is None
    assert weights_digest(files[1:], cache) == expected({files[1].name: b"TWO"})


def test_a_link_stands_for_its_target(tmp_path: Path, cache: Path) -> None:
    (blob,) = make(tmp_path / "blobs", {"6d0c": b"one"})
    link = tmp_path / "model.safetensors"
    link.symlink_to(blob)
    assert weights_digest([link], cache) == expected({link.name: b"one"})
    (other,) = make(tmp_path / "blobs", {"77aa": b"two"})
    link.unlink()
    link.symlink_to(other)
    assert cached_digest([link], cache) is None
    assert weights_digest([link], cache) == expected({link.name: b"two"})


def test_names_that_are_not_text(tmp_path: Path, cache: Path) -> None:
    file = tmp_path / os.fsdecode(b"w\xff")
    file.write_bytes(b"one")
    os.utime(file, (LONG_AGO, LONG_AGO))
    digest = weights_digest([file], cache)
    assert cached_digest([file], cache) == digest


def test_files_that_are_gone_leave_the_cache(tmp_path: Path, cache: Path) -> None:
    files = make(tmp_path / "a")
    weights_digest(files, cache)
    files[0].unlink()
    assert cached_digest(files, cache) is None
    with pytest.raises(FileNotFoundError):
        weights_digest(files, cache)
    weights_digest(make(tmp_path / "b"), cache)
    text = cache.read_text()
    assert str(files[0]) not in text
    assert str(files[1]) in text


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_damaged_cache_is_ignored_and_replaced(tmp_path: Path, data: st.DataObject) -> None:
    cache = tmp_path / "digests.json"
    files = make(tmp_path / "a")
    digest = weights_digest(files, cache)
    text = bytearray(cache.read_bytes())
    position = data.draw(st.integers(0, len(text) - 1))
    if data.draw(st.booleans()):
        text[position] ^= data.draw(st.integers(1, 255))
    else:
        del text[position:]
    cache.write_bytes(text)
    assert cached_digest(files, cache) is None
    assert weights_digest(files, cache) == digest
    assert cached_digest(files, cache) == digest


@pytest.mark.parametrize("body", [b"", b"[]", b"{", b'{"a": 1}', b"\xff", b'{"a": {"sha256": ""}}'])
def test_a_cache_of_another_version_is_ignored(tmp_path: Path, cache: Path, body: bytes) -> None:
    files = make(tmp_path / "a")
    cache.write_bytes(hashlib.sha256(body).hexdigest().encode() + b"\n" + body)
    cache.chmod(0o600)
    assert cached_digest(files, cache) is None
    assert weights_digest(files, cache) == cached_digest(files, cache)


def test_a_cache_that_others_can_write_is_ignored(tmp_path: Path, cache: Path) -> None:
    files = make(tmp_path / "a")
    digest = weights_digest(files, cache)
    cache.chmod(0o666)
    assert cached_digest(files, cache) is None
    assert weights_digest(files, cache) == digest
    assert cached_digest(files, cache) == digest
    moved = cache.rename(tmp_path / "moved")
    cache.symlink_to(moved)
    assert cached_digest(files, cache) is None
    assert weights_digest(files, cache) == digest
    assert not cache.is_symlink()  # it was replaced
    cache.unlink()
    os.mkfifo(cache, 0o600)  # a pipe would block its reader
    assert cached_digest(files, cache) is None


def test_a_cache_that_can_not_be_written_is_not_an_error(tmp_path: Path) -> None:
    files = make(tmp_path / "a")
    cache = tmp_path / "missing" / "digests.json"
    assert weights_digest(files, cache) == expected(CONTENTS)
    folder = tmp_path / "folder"
    folder.mkdir()
    assert weights_digest(files, folder) == expected(CONTENTS)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "folder"]
