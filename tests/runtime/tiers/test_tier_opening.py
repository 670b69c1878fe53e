"""`TierOpening`: weights that are read on a thread, directories that cannot be used, early ends."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ostinato.runtime.tiers.own_files import TierError
from ostinato.runtime.tiers.tier_opening import TierOpening
from tests.waiting import wait_until

QUOTA = 1 << 30


def opening(root: Path, *files: Path, model: str = "a") -> TierOpening:
    return TierOpening(str(root), {"model": model}, files, QUOTA)


def taken(root: Path, *files: Path, model: str = "a") -> Path:
    """The engine's folder, which is released again."""
    directory = opening(root, *files, model=model).take()
    directory.close()
    return directory.path


def settled(file: Path, content: bytes) -> Path:
    """Write a file of weights that was changed long ago, so that its digest can be kept."""
    file.write_bytes(content)
    os.utime(file, ns=(10**18, 10**18 + len(content)))
    return file


def test_the_folder_depends_on_the_identity_and_on_the_weights(tmp_path: Path) -> None:
    root, weights = tmp_path / "tier", settled(tmp_path / "weights", b"weights")
    first = taken(root, weights)
    assert first.is_dir()
    assert taken(root, weights) == first
    assert len({first, taken(root), taken(root, weights, model="b")}) == 3
    settled(weights, b"other weights")
    assert taken(root, weights) != first
    settled(weights, b"weights")
    assert taken(root, weights) == first


def test_a_start_waits_only_if_no_weights_are_read(tmp_path: Path) -> None:
    root, pipe = tmp_path / "tier", tmp_path / "pipe"
    alone = opening(root)
    alone.wait_if_short(60)
    assert alone.is_done
    alone.take().close()
    known = settled(tmp_path / "weights", b"weights")
    taken(root, known)
    again = opening(root, known)
    again.wait_if_short(60)
    assert again.is_done
    again.take().close()
    os.mkfifo(pipe)  # reading it waits for a writer, like a very slow disk
    slow = opening(root, known, pipe)
    slow.wait_if_short(1e9)
    assert not slow.is_done
    pipe.write_bytes(b"more weights")
    slow.take().close()
    assert slow.is_done


def test_an_end_during_the_opening_releases_the_folder(tmp_path: Path) -> None:
    root, pipe = tmp_path / "tier", tmp_path / "pipe"
    ready = opening(root)
    wait_until(lambda: ready.is_done)
    assert taken(root).name == "engine-1"
    ready.drop()
    assert taken(root).name == "engine-0"
    os.mkfifo(pipe)
    slow = opening(root, pipe)
    slow.drop()
    pipe.write_bytes(b"weights")
    wait_until(lambda: slow.is_done)
    names = sorted(path.name for path in root.glob("*/engine-*"))
    assert names == ["engine-0", "engine-0", "engine-1"]
    weights = tmp_path / "weights"
    weights.write_bytes(b"weights")
    pipe.unlink()
    weights.rename(pipe)
    assert taken(root, pipe).name == "engine-0"


@pytest.mark.parametrize("has_weights", [False, True])
def test_a_directory_that_cannot_be_used_is_named_with_the_remedy(
    tmp_path: Path, has_weights: bool
) -> None:
    weights = [tmp_path / "pipe"] if has_weights else []
    os.mkfifo(tmp_path / "pipe")  # it is not read, because that would wait for a writer
    (tmp_path / "file").touch()
    refused = tmp_path / "open to all"
    refused.mkdir()
    refused.chmod(0o777)
    for root, reason, remedy in (
        (tmp_path / "file", "File exists", "name a directory on a local disk"),
        (tmp_path / "file" / "below", "Not a directory", "name a directory on a local disk"),
        (refused, "others can write to it", "chmod go-w"),
    ):
        one = opening(root, *weights)
        with pytest.raises(TierError) as caught:
            one.take()
        for part in (str(root), reason, remedy):
            assert part in str(caught.value)
    if has_weights:
        with pytest.raises(TierError, match="no such weights"):
            opening(tmp_path / "tier", tmp_path / "no such weights").take()
