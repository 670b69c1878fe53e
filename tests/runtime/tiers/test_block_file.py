"""Blocks on disk: the format, parts, restarts, full disks, other processes, files of others."""

from __future__ import annotations

import hashlib
import os
import signal
import struct
import subprocess
import sys
import zlib
from collections.abc import Callable, Sequence
from functools import partial
from itertools import cycle
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ostinato.runtime.tiers.block_file import place_stride
from ostinato.runtime.tiers.own_files import TierBusyError, TierError
from tests.runtime.tiers.block_files import (
    BLOCK_BYTES,
    ENTRY_BYTES,
    HEADER_BYTES,
    STRIDE,
    block_of,
    entries_in,
    hash_of,
    opened,
    read,
    read_in,
    saved,
)

CHILD = (
    "import hashlib, sys\n"
    "from pathlib import Path\n"
    "from ostinato.runtime.tiers.block_file import BlockFile\n"
    "file = BlockFile(Path(sys.argv[1]), block_bytes=5000, num_places=4)\n"
    "name = lambda number: hashlib.sha256(b'%d' % number).digest()\n"
    "data = lambda number: hashlib.shake_256(b'%d' % number).digest(5000)\n"
)


def test_blocks_are_found_again_in_the_order_of_their_writes(tmp_path: Path) -> None:
    file = opened(tmp_path)
    assert file.entries() == []
    for place, number in ((2, 20), (0, 0), (3, 30)):
        file.write(place, hash_of(number), [block_of(number)])
    file.write(2, hash_of(21), [block_of(21)])
    expected = [(0, hash_of(0)), (3, hash_of(30)), (2, hash_of(21))]
    assert file.entries() == expected
    file.sync()
    file.close()
    file = opened(tmp_path)
    assert file.entries() == expected
    assert read(file, 2, 21) == block_of(21)
    assert read(file, 2, 20) is None  # it was overwritten
    assert read(file, 0, 21) is None  # it is in another place
    assert read(file, 1, 0) is None  # an empty place
    assert file.num_errors == 0
    file.write(1, hash_of(10), [block_of(10)])
    assert file.entries() == [*expected, (1, hash_of(10))]
    file.close()


def test_the_order_goes_on_after_a_restart_also_without_a_call_of_entries(tmp_path: Path) -> None:
    saved(tmp_path, [1, 2, 3])
    file = opened(tmp_path)
    file.write(0, hash_of(4), [block_of(4)])
    file.close()
    assert [place for place, _ in entries_in(tmp_path)] == [1, 2, 0]


def test_of_two_places_with_the_same_hash_the_newer_is_kept(tmp_path: Path) -> None:
    saved(tmp_path, [5, 6, 5])
    file = opened(tmp_path)
    assert file.entries() == [(1, hash_of(6)), (2, hash_of(5))]
    assert read(file, 0, 5) is None
    assert read(file, 2, 5) == block_of(5)
    file.close()
    assert entries_in(tmp_path) == [(1, hash_of(6)), (2, hash_of(5))]


@pytest.mark.parametrize(
    ("block_bytes", "stride"), [(1, 4096), (4096, 4096), (4097, 8192), (8192, 8192)]
)
def test_places_are_whole_pages(tmp_path: Path, block_bytes: int, stride: int) -> None:
    assert place_stride(block_bytes) == stride
    file = opened(tmp_path, block_bytes=block_bytes)
    file.write(3, hash_of(1), [block_of(1, block_bytes)])
    file.close()
    blocks = (tmp_path / "blocks.kv").read_bytes()
    assert blocks == bytes(3 * stride) + block_of(1, block_bytes)
    assert (tmp_path / "index.kv").stat().st_size == HEADER_BYTES + 4 * ENTRY_BYTES
    assert {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {0o600}


def test_the_format_of_the_index(tmp_path: Path) -> None:
    file = opened(tmp_path)
    file.write(1, hash_of(1), [block_of(1)])
    file.write(0, hash_of(2), [block_of(2)])
    file.close()
    index = (tmp_path / "index.kv").read_bytes()
    header = b"ostinato" + struct.pack("<QQ", 1, BLOCK_BYTES) + hashlib.sha256().digest()
    assert index[:HEADER_BYTES] == header.ljust(HEADER_BYTES, b"\0")
    entries = b""
    for number, stamp in ((2, 2), (1, 1)):
        checksum = zlib.crc32(hash_of(number) + block_of(number))
        entry = hash_of(number) + struct.pack("<QI16x", stamp, checksum)
        entries += entry + struct.pack("<I", zlib.crc32(entry))
    assert index[HEADER_BYTES:] == entries + bytes(2 * ENTRY_BYTES)


def limited(
    call: Callable[[int, Sequence[memoryview], int], int], most: Callable[[], int]
) -> Callable[[int, Sequence[memoryview], int], int]:
    """A system call that transfers fewer bytes than it could, as the system may do."""

    def transfer(descriptor: int, views: Sequence[memoryview], offset: int) -> int:
        assert len(views) <= 1024
        left, some = most(), []
        for view in views:
            some.append(view[:left])
            left -= len(some[-1])
            if left == 0:
                break
        return call(descriptor, some, offset)

    return transfer


@settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_parts_of_any_lengths_and_calls_that_transfer_less(
    tmp_path: Path, data: st.DataObject
) -> None:
    def parts_of(block: bytearray) -> list[memoryview]:
        cuts = sorted(data.draw(st.lists(st.integers(0, BLOCK_BYTES), max_size=6)))
        bounds = zip([0, *cuts], [*cuts, BLOCK_BYTES], strict=True)
        return [memoryview(block)[begin:end] for begin, end in bounds]

    limits = data.draw(st.lists(st.integers(1, BLOCK_BYTES), min_size=1, max_size=4))
    most = partial(next, cycle(limits))
    number = data.draw(st.integers(0, 9))
    source, target = bytearray(block_of(number)), bytearray(BLOCK_BYTES)
    source_parts, target_parts = parts_of(source), parts_of(target)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "pwritev", limited(os.pwritev, most))
        patch.setattr(os, "preadv", limited(os.preadv, most))
        file = opened(tmp_path)
        file.write(1, hash_of(number), source_parts)
        assert file.read(1, hash_of(number), target_parts)
        file.close()
    assert target == block_of(number)
    assert read_in(tmp_path, 1, number) == block_of(number)


def test_more_parts_than_one_system_call_takes(tmp_path: Path) -> None:
    file = opened(tmp_path)
    block = block_of(7)
    file.write(0, hash_of(7), [block[at : at + 1] for at in range(BLOCK_BYTES)])
    target = memoryview(bytearray(BLOCK_BYTES))
    assert file.read(0, hash_of(7), [target[at : at + 2] for at in range(0, BLOCK_BYTES, 2)])
    assert target == block
    file.close()


def test_parts_whose_elements_are_not_bytes(tmp_path: Path) -> None:
    file = opened(tmp_path)
    file.write(0, hash_of(7), [memoryview(block_of(7)).cast("I")])
    target = bytearray(BLOCK_BYTES)
    assert file.read(0, hash_of(7), [memoryview(target).cast("i", (25, 50))])
    assert target == block_of(7)
    file.close()


def test_blocks_of_another_size_or_identity_are_removed(tmp_path: Path) -> None:
    for change in ({"block_bytes": BLOCK_BYTES + 1}, {"identity": "another model"}):
        saved(tmp_path, [1, 2])
        assert len(entries_in(tmp_path)) == 2
        assert entries_in(tmp_path, **change) == []
        assert entries_in(tmp_path) == []
        assert read_in(tmp_path, 0, 1) is None


def test_places_are_added_and_removed(tmp_path: Path) -> None:
    saved(tmp_path, [1, 2, 3])
    assert [place for place, _ in entries_in(tmp_path, num_places=9)] == [0, 1, 2]
    assert [place for place, _ in entries_in(tmp_path, num_places=2)] == [0, 1]
    assert (tmp_path / "blocks.kv").stat().st_size == 2 * STRIDE
    assert [place for place, _ in entries_in(tmp_path, num_places=9)] == [0, 1]
    assert read_in(tmp_path, 2, 3) is None
    assert read_in(tmp_path, 1, 2) == block_of(2)


def test_clear_removes_all_blocks_and_their_bytes(tmp_path: Path) -> None:
    saved(tmp_path, [1, 2])
    file = opened(tmp_path)
    file.clear()
    assert file.entries() == []
    assert read(file, 0, 1) is None
    assert (tmp_path / "blocks.kv").stat().st_blocks == 0
    file.write(1, hash_of(3), [block_of(3)])
    file.close()
    assert entries_in(tmp_path) == [(1, hash_of(3))]
    assert read_in(tmp_path, 1, 3) == block_of(3)


def test_closed_files_give_misses_and_errors(tmp_path: Path) -> None:
    saved(tmp_path, [1])
    file = opened(tmp_path)
    file.close()
    file.close()
    assert read(file, 0, 1) is None
    assert file.num_errors == 1
    for call in (file.entries, file.sync, file.clear):
        with pytest.raises((OSError, ValueError), match="file descriptor"):
            call()
    with pytest.raises(OSError, match="Bad file descriptor"):
        file.write(0, hash_of(2), [block_of(2)])


def test_a_full_disk_is_an_error_of_the_write_and_keeps_the_other_blocks(tmp_path: Path) -> None:
    code = CHILD + (
        "import resource\n"
        "file.write(2, name(2), [data(2)])\n"
        "most = resource.getrlimit(resource.RLIMIT_FSIZE)[1]\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (2 * 8192 + 100, most))\n"
        "file.write(1, name(1), [data(1)])\n"
        "try:\n"
        "    file.write(2, name(3), [data(3)])\n"
        "except OSError as error:\n"
        "    print(error.strerror)\n"
        "found = [file.read(2, name(number), [memoryview(bytearray(5000))]) for number in (2, 3)]\n"
        "print(found, [place for place, _ in file.entries()])\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))\n"
        "file.write(2, name(3), [data(3)])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert (done.stdout, done.stderr) == ("File too large\n[False, False] [2, 1]\n", "")
    assert read_in(tmp_path, 1, 1) == block_of(1)
    assert read_in(tmp_path, 2, 3) == block_of(3)


def test_only_one_process_has_the_files_and_a_killed_one_leaves_its_blocks(tmp_path: Path) -> None:
    code = CHILD + (
        "number = 0\n"
        "while True:\n"
        "    file.write(number % 4, name(number), [data(number)])\n"
        "    print(number, flush=True)\n"
        "    number += 1\n"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    try:
        assert [int(child.stdout.readline()) for _ in range(50)] == list(range(50))
        with pytest.raises(TierBusyError, match=r"index\.kv is in use by another process; wait"):
            opened(tmp_path)
        child.send_signal(signal.SIGKILL)
        last = max([49, *(int(line) for line in child.stdout if line.endswith("\n"))])
    finally:
        child.kill()
        child.wait()
        child.stdout.close()
    file = opened(tmp_path)
    assert len(file.entries()) == 4
    # Place (last + 1) % 4 may have been in the middle of a write, and has block last - 3, or that
    # of the write if it had ended, or none. The three others have their blocks.
    for number in range(last - 2, last + 1):
        assert read(file, number % 4, number) == block_of(number)
    for number in (last - 3, last + 1):
        assert read(file, (last + 1) % 4, number) in (None, block_of(number))
    file.close()


def test_two_of_one_process_do_not_share_files_and_a_forked_child_keeps_no_lock(
    tmp_path: Path,
) -> None:
    file = opened(tmp_path)
    with pytest.raises(TierBusyError):
        opened(tmp_path)
    source, sink = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(sink)
        os.read(source, 1)  # until the parent closes its end
        os._exit(0)
    os.close(source)
    try:
        file.close()
        opened(tmp_path).close()
    finally:
        os.close(sink)
        os.waitpid(child, 0)


@pytest.mark.parametrize("name", ["index.kv", "blocks.kv"])
class TestFilesOfOthers:
    def refused(self, directory: Path) -> str:
        with pytest.raises(TierError) as caught:
            opened(directory)
        return str(caught.value)

    @pytest.mark.parametrize("mode", [0o620, 0o602])
    def test_that_others_can_write(self, tmp_path: Path, name: str, mode: int) -> None:
        saved(tmp_path, [1])
        file = tmp_path / name
        file.chmod(mode)
        assert self.refused(tmp_path) == (
            f"{file} is not used for KV blocks: others can write to it (mode {mode:o}); "
            f"chmod go-w {file}"
        )
        file.chmod(0o600)
        assert read_in(tmp_path, 0, 1) == block_of(1)  # nothing was removed, and no lock is left

    @pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
    def test_that_belong_to_others(self, tmp_path: Path, name: str) -> None:
        saved(tmp_path, [1])
        os.chown(tmp_path / name, 1234, -1)
        assert "it belongs to the user with id 1234, not to 0; name a " in self.refused(tmp_path)

    def test_that_are_links(self, tmp_path: Path, name: str) -> None:
        target = tmp_path / "target"
        target.write_bytes(b"not blocks")
        (tmp_path / name).symlink_to(target)
        assert self.refused(tmp_path).endswith(
            f"{name} is not used for KV blocks: it is a link; remove it"
        )
        assert target.read_bytes() == b"not blocks"

    def test_that_are_no_files(self, tmp_path: Path, name: str) -> None:
        os.mkfifo(tmp_path / name, 0o600)
        assert "it is not a regular file; remove it" in self.refused(tmp_path)
        (tmp_path / name).unlink()
        (tmp_path / name).mkdir()
        assert "cannot be opened: Is a directory; name a directory" in self.refused(tmp_path)


def test_a_directory_that_is_missing(tmp_path: Path) -> None:
    with pytest.raises(TierError, match="cannot be opened: No such file or directory; name a"):
        opened(tmp_path / "missing")
