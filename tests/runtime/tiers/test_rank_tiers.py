"""`RankTiers` with a real KV cache and real files: contents, order, damage, full disks, ends."""

from __future__ import annotations

import hashlib
import random
import resource
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ostinato.models.kv_cache import KVCache, KVCacheSpec
from ostinato.runtime.errors import InvalidRequestError
from ostinato.runtime.tiers import rank_tiers
from ostinato.runtime.tiers.block_file import place_stride
from ostinato.runtime.tiers.rank_tiers import RankTiers
from ostinato.runtime.tiers.tier_calls import (
    AdvanceTiers,
    ClearTiers,
    FlushTiers,
    OpenTiers,
    TierProgress,
    num_buffers,
)
from ostinato.runtime.types.step import BlockTransfer
from tests.waiting import wait_until

NUM_BLOCKS = 6
NUM_HOST_PLACES = 2
OTHER = 1000  # the seed of contents that no test stores
NUM_DISK_PLACES = 4
SPECS = {
    "float32": KVCacheSpec(
        num_layers=2, num_kv_heads=2, head_dim=8, block_size=8, dtype=torch.float32
    ),
    "bfloat16": KVCacheSpec(
        num_layers=3, num_kv_heads=1, head_dim=16, block_size=16, dtype=torch.bfloat16
    ),
    "int8": KVCacheSpec(num_layers=2, num_kv_heads=2, head_dim=16, block_size=8, dtype=torch.int8),
    "values of another size": KVCacheSpec(
        num_layers=2, num_kv_heads=3, head_dim=24, value_dim=7, block_size=8, dtype=torch.bfloat16
    ),
}


def hash_of(contents: bytes) -> bytes:
    return hashlib.sha256(contents).digest()


class Rank:
    """A cache of random contents, its tiers, and what the places must hold."""

    def __init__(
        self, directory: Path, spec: KVCacheSpec = SPECS["float32"], *, num_host_places: int = 0
    ) -> None:
        self.spec = spec
        self.cache: KVCache = spec.allocate(NUM_BLOCKS, torch.device("cpu"))
        self.first = num_host_places  # the first place of the disk
        self.tiers = RankTiers(self.cache, num_host_places=num_host_places, has_disk=True, rank=3)
        self.directory = directory
        self.places: dict[int, bytes] = {}
        self.num_loads = 0
        self.lost: list[int] = []
        self.loaded: dict[int, int] = {}  # transfer id -> blocks
        self.progress = TierProgress([], [], 0, False, True)

    def open(self, identity: str = "model") -> list[tuple[int, bytes]]:
        answer = self.tiers.answer(OpenTiers(str(self.directory), identity, NUM_DISK_PLACES))
        entries = msgspec.json.decode(answer, type=list[tuple[int, str]])
        return [(place, bytes.fromhex(text)) for place, text in entries]

    def fill(self, block_id: int, seed: int) -> bytes:
        """Write random contents to a block; returns them."""
        numbers = random.Random(seed)
        for side in (side for layer in self.cache for side in layer):
            row = side[block_id].view(torch.uint8)
            row.copy_(torch.tensor(list(numbers.randbytes(row.numel()))).view(row.shape))
        return self.contents(block_id)

    def contents(self, block_id: int) -> bytes:
        sides = (side for layer in self.cache for side in layer)
        return b"".join(side[block_id].view(torch.uint8).numpy().tobytes() for side in sides)

    def store(self, block_ids: list[int], places: list[int]) -> BlockTransfer:
        parts = [self.contents(block_id) for block_id in block_ids]
        self.places.update(zip(places, parts, strict=True))
        return BlockTransfer(0, False, block_ids, places, [hash_of(part) for part in parts])

    def load(
        self, block_ids: list[int], places: list[int], hashes: list[bytes] | None = None
    ) -> BlockTransfer:
        self.num_loads += 1
        hashes = hashes or [hash_of(self.places.get(place, b"")) for place in places]
        return BlockTransfer(self.num_loads, True, block_ids, places, hashes)

    def saved(self, block_id: int, place: int, seed: int) -> bytes:
        """Store a block with new contents, and wait until it is written."""
        contents = self.fill(block_id, seed)
        self.tiers.start([self.store([block_id], [place])])
        self.advance_until(lambda: self.progress.num_free_buffers == self.num_buffers)
        return contents

    def ended(self, *transfers: BlockTransfer) -> int:
        """Start transfers, and wait for the last one, a load; returns its number of blocks."""
        self.tiers.start(list(transfers))
        self.advance_until(lambda: transfers[-1].transfer_id in self.loaded)
        return self.loaded[transfers[-1].transfer_id]

    @property
    def num_buffers(self) -> int:
        return num_buffers(self.spec.bytes_per_block)

    def advance(self, timeout_s: float = 0.05) -> None:
        answer = self.tiers.answer(AdvanceTiers(timeout_s))
        self.progress = msgspec.json.decode(answer, type=TierProgress)
        for transfer_id, count, seconds in self.progress.finished_loads:
            assert seconds >= 0
            self.loaded[transfer_id] = count
        self.lost += self.progress.lost_places

    def advance_until(self, condition: Callable[[], object]) -> None:

        def is_true() -> object:
            self.advance()
            return condition()

        wait_until(is_true)


@contextmanager
def rank(
    directory: Path, spec: KVCacheSpec = SPECS["float32"], *, num_host_places: int = 0
) -> Iterator[Rank]:
    made = Rank(directory, spec, num_host_places=num_host_places)
    try:
        yield made
    finally:
        made.tiers.close()


BLOCKS = st.permutations(range(NUM_BLOCKS))
PLACES = st.permutations(range(NUM_HOST_PLACES + NUM_DISK_PLACES))


@pytest.mark.parametrize("name", SPECS)
@settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    rounds=st.lists(
        st.tuples(st.integers(1, 4), BLOCKS, PLACES, st.integers(0, 4), BLOCKS, PLACES),
        min_size=1,
        max_size=6,
    )
)
def test_contents_come_back_bit_for_bit(
    name: str,
    rounds: list[tuple[int, list[int], list[int], int, list[int], list[int]]],
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """Each round stores blocks, overwrites them as a step would, and loads blocks."""
    directory = tmp_path_factory.mktemp("tier")
    with rank(directory, SPECS[name], num_host_places=NUM_HOST_PLACES) as one:
        assert one.tiers._blocks.block_bytes == SPECS[name].bytes_per_block
        assert one.open() == []
        for number, (num_stores, sources, to, num_loads, targets, places) in enumerate(rounds):
            for block_id in sources:
                one.fill(block_id, NUM_BLOCKS * number + block_id)
            store = one.store(sources[:num_stores], to[:num_stores])
            known = [place for place in places if place in one.places][:num_loads]
            load = one.load(targets[: len(known)], known)
            one.tiers.start([store])
            for block_id in sources:
                one.fill(block_id, OTHER)
            before = [one.contents(block_id) for block_id in range(NUM_BLOCKS)]
            assert one.ended(load) == len(known)
            expected = dict(enumerate(before))
            expected.update(zip(targets, (one.places[place] for place in known), strict=False))
            assert [one.contents(b) for b in range(NUM_BLOCKS)] == list(expected.values())
        assert one.lost == []
        one.tiers.answer(FlushTiers(60))
    with rank(directory, SPECS[name], num_host_places=NUM_HOST_PLACES) as later:
        # Host memory does not survive, and the disk does.
        later.places = {p: part for p, part in one.places.items() if p >= NUM_HOST_PLACES}
        entries = {NUM_HOST_PLACES + place: block_hash for place, block_hash in later.open()}
        assert entries == {place: hash_of(part) for place, part in later.places.items()}
        for place, part in later.places.items():
            assert later.ended(later.load([1], [place])) == 1
            assert later.contents(1) == part


def test_a_load_waits_for_the_writes_of_its_places(tmp_path: Path) -> None:
    with rank(tmp_path) as one:
        one.open()
        for block_id in range(1, NUM_BLOCKS):
            one.fill(block_id, block_id)
        stores = [one.store([1, 2, 3], [0, 1, 2])] * 30 + [one.store([4, 5, 1], [0, 1, 2])]
        assert one.ended(*stores, one.load([2, 3, 4], [0, 1, 2])) == 3
        assert [one.contents(b) for b in (2, 3, 4)] == [one.places[p] for p in (0, 1, 2)]


def test_what_is_not_there_ends_a_load(tmp_path: Path) -> None:
    """The blocks before are loaded. The same for another hash, an empty place, and damage."""
    with rank(tmp_path) as one:
        one.open()
        for place in range(3):
            one.saved(1, place, place)
        assert one.ended(one.load([2, 3, 4, 5], [0, 1, 3, 2])) == 2
        other = [hash_of(one.places[place]) for place in (0, 2, 2)]
        assert one.ended(one.load([2, 3, 4], [0, 1, 2], other)) == 1
        file = tmp_path / "rank-3" / "blocks.kv"
        stride = place_stride(one.spec.bytes_per_block)
        data = bytearray(file.read_bytes())
        data[stride + 17] ^= 1
        file.write_bytes(data)
        assert one.ended(one.load([2, 3, 4], [0, 1, 2])) == 1
        assert one.contents(2) == one.places[0]
        assert one.ended(one.load([4], [2])) == 1
        file.write_bytes(b"")
        assert one.ended(one.load([2], [0])) == 0


@contextmanager
def longest_file(num_bytes: int) -> Iterator[None]:
    """Writes beyond this many bytes of a file fail, like those to a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_is_still_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with rank(tmp_path, num_host_places=1) as one:
        one.open()
        one.saved(1, 1, 1)
        stride = place_stride(one.spec.bytes_per_block)
        with longest_file(2 * stride + 100):
            one.saved(1, 2, 2)
            assert one.progress.can_write
            one.fill(1, 3)
            one.tiers.start([one.store([1, 1], [3, 4])])
            one.advance_until(lambda: len(one.lost) == 2)
            assert one.lost == [3, 4]
            assert not one.progress.can_write
        # Nothing is written any more, also if there is room again.
        one.tiers.start([one.store([1, 1], [4, 0])])
        one.advance()
        assert one.lost == [3, 4, 4]
        assert one.progress.num_free_buffers == one.num_buffers
        assert one.ended(one.load([2, 3, 4], [0, 1, 2])) == 3
        assert [one.contents(b) for b in (2, 3, 4)] == [one.places[p] for p in (0, 1, 2)]
        assert one.ended(one.load([4], [3])) == 0
    lines = [line for line in caplog.messages if "cache.disk_dir" in line]
    assert len(lines) == 1
    assert "not written to cache.disk_dir any more: File too large; free space" in lines[0]


def test_stores_without_a_buffer_are_lost(tmp_path: Path) -> None:
    """A block takes a quarter of the memory of all buffers."""
    spec = KVCacheSpec(
        num_layers=1, num_kv_heads=1, head_dim=16384, block_size=128, dtype=torch.float32
    )
    with rank(tmp_path, spec) as one:
        one.open()
        assert one.num_buffers == 4
        one.tiers.start([BlockTransfer(0, False, [1] * 6, [0] * 6, [bytes(32)] * 6)])
        one.advance_until(lambda: one.progress.num_free_buffers == 4)
        assert one.lost == [0, 0]
        assert one.progress.can_write


def test_clear_forgets_what_is_written_and_what_waits(tmp_path: Path) -> None:
    with rank(tmp_path) as one:
        one.open()
        one.saved(1, 0, 1)
        one.tiers.start([one.store([1, 1, 1], [1, 2, 3])])
        one.tiers.answer(ClearTiers())
        one.advance()
        assert one.progress.num_free_buffers == one.num_buffers
        for place in range(4):
            assert one.ended(one.load([2], [place])) == 0
        part = one.saved(1, 1, 7)
        assert one.ended(one.load([2], [1])) == 1
        assert one.contents(2) == part
    with rank(tmp_path) as later:
        assert later.open() == [(1, hash_of(part))]
    with rank(tmp_path) as other:
        assert other.open("another model") == []


def test_an_end_with_work_in_the_queues_does_not_hang(tmp_path: Path) -> None:
    before = threading.active_count()
    one = Rank(tmp_path)
    one.open()
    one.fill(1, 1)
    store = one.store([1, 1, 1, 1], [0, 1, 2, 3])
    one.tiers.start([*[store] * 200, one.load([2], [0])])
    one.tiers.close()
    assert threading.active_count() == before
    with rank(tmp_path) as later:  # what was written is whole
        later.places = one.places
        for place, _ in later.open():
            assert later.ended(later.load([2], [place])) == 1
    never_opened = Rank(tmp_path)
    never_opened.tiers.answer(FlushTiers(60))
    never_opened.tiers.answer(ClearTiers())
    never_opened.tiers.close()


def test_files_that_another_process_is_about_to_release(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank of an engine that was killed can live a moment longer."""
    first = Rank(tmp_path)
    first.open()
    part = first.saved(1, 2, 1)
    with rank(tmp_path) as second:
        closing = threading.Timer(0.2, first.tiers.close)
        closing.start()
        assert second.open() == [(2, hash_of(part))]
        closing.join()
        monkeypatch.setattr(rank_tiers, "_RELEASE_S", 0.05)
        with (
            rank(tmp_path) as third,
            pytest.raises(InvalidRequestError, match=r"index\.kv is in use by another process"),
        ):
            third.open()
    (tmp_path / "file").touch()
    with rank(tmp_path / "file") as fourth, pytest.raises(InvalidRequestError, match="rank-3"):
        fourth.open()
