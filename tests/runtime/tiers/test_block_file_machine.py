"""Compares `BlockFile` with a plain model of its two files, also after writes that are half lost."""

from __future__ import annotations

import hashlib
import shutil
import tempfile
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from ostinato.runtime.tiers.block_file import BlockFile, place_stride
from tests.runtime.tiers.block_files import ENTRY_BYTES, HEADER_BYTES, hash_of

MOST_PLACES = 5
PLACES = st.integers(0, MOST_PLACES - 1)
NUMBERS = st.integers(0, 7)
SIZES = st.sampled_from([1, 10, 4096, 5000])


class BlockFileMachine(RuleBasedStateMachine):
    """`entries` and `blocks` are the index and the file of blocks as they should be.

    entries: place -> (number of the block, number of the write). blocks: the bytes of the file.
    """

    def __init__(self) -> None:
        super().__init__()
        self.directory = Path(tempfile.mkdtemp())
        self.entries: dict[int, tuple[int, int]] = {}
        self.blocks = bytearray()
        self.num_writes = 0

    @initialize(block_bytes=SIZES, num_places=st.integers(1, MOST_PLACES))
    def begin(self, block_bytes: int, num_places: int) -> None:
        self.open(block_bytes, num_places)

    def open(self, block_bytes: int, num_places: int) -> None:
        self.block_bytes = block_bytes
        self.stride = place_stride(block_bytes)
        self.num_places = num_places
        self.file = BlockFile(self.directory, block_bytes=block_bytes, num_places=num_places)

    def block_of(self, number: int) -> bytes:
        return hashlib.shake_256(b"%d" % number).digest(self.block_bytes)

    def put(self, offset: int, data: bytes) -> None:
        """Write to the model of the file of blocks."""
        self.blocks.extend(bytes(max(0, offset + len(data) - len(self.blocks))))
        self.blocks[offset : offset + len(data)] = data

    @rule(place=PLACES, number=NUMBERS)
    def write(self, place: int, number: int) -> None:
        place %= self.num_places
        self.file.write(place, hash_of(number), [self.block_of(number)])
        self.put(place * self.stride, self.block_of(number))
        self.num_writes += 1
        self.entries[place] = number, self.num_writes

    @rule(
        place=PLACES,
        number=NUMBERS,
        kept=st.floats(0, 1) | st.sampled_from([0.0, 1.0]),
        kept_of_entry=st.integers(0, ENTRY_BYTES) | st.sampled_from([0, ENTRY_BYTES]),
    )
    def write_that_is_half_lost(
        self, place: int, number: int, kept: float, kept_of_entry: int
    ) -> None:
        """A killed process leaves the beginning of its writes; a loss of power, any part of them."""
        place %= self.num_places
        begin, end = place * self.stride, place * self.stride + self.block_bytes
        entry_begin = HEADER_BYTES + ENTRY_BYTES * place
        index, blocks = self.directory / "index.kv", self.directory / "blocks.kv"
        old_block = bytes(self.blocks[begin:end]).ljust(self.block_bytes, b"\0")
        old_entry = index.read_bytes()[entry_begin : entry_begin + ENTRY_BYTES]
        before = self.entries.pop(place, None)

        self.file.write(place, hash_of(number), [self.block_of(number)])
        self.num_writes += 1
        self.file.close()

        cut = round(kept * self.block_bytes)
        block = self.block_of(number)[:cut] + old_block[cut:]
        with blocks.open("r+b") as opened:
            opened.seek(begin)
            opened.write(block)
        self.put(begin, block)
        new_entry = index.read_bytes()[entry_begin : entry_begin + ENTRY_BYTES]
        entry = new_entry[:kept_of_entry] + old_entry[kept_of_entry:]
        with index.open("r+b") as opened:
            opened.seek(entry_begin)
            opened.write(entry)
        if entry == new_entry:
            self.entries[place] = number, self.num_writes
        elif entry == old_entry and before is not None:
            self.entries[place] = before
        self.open(self.block_bytes, self.num_places)

    @rule()
    def read_everything(self) -> None:
        for place in range(self.num_places):
            begin = place * self.stride
            there = bytes(self.blocks[begin : begin + self.block_bytes])
            number_there = self.entries.get(place, (None, 0))[0]
            for number in range(8):
                target = bytearray(self.block_bytes)
                is_hit = self.file.read(place, hash_of(number), [memoryview(target)])
                assert is_hit == (number == number_there and there == self.block_of(number))
                assert not is_hit or target == self.block_of(number)
        assert self.file.num_errors == 0

    @rule()
    def list_entries(self) -> None:
        by_age = sorted(self.entries.items(), key=lambda item: item[1][1])
        newest = {number: place for place, (number, _) in by_age}
        self.entries = {place: found for place, found in by_age if newest[found[0]] == place}
        expected = [(place, hash_of(number)) for place, (number, _) in self.entries.items()]
        assert self.file.entries() == expected

    @rule(num_places=st.integers(1, MOST_PLACES))
    def reopen(self, num_places: int) -> None:
        self.file.close()
        self.open(self.block_bytes, num_places)
        del self.blocks[num_places * self.stride :]
        self.entries = {place: found for place, found in self.entries.items() if place < num_places}

    @rule(block_bytes=SIZES)
    def reopen_for_blocks_of_a_size(self, block_bytes: int) -> None:
        if block_bytes != self.block_bytes:
            self.blocks.clear()
            self.entries.clear()
        self.file.close()
        self.open(block_bytes, self.num_places)

    @rule()
    def clear(self) -> None:
        self.file.clear()
        self.blocks.clear()
        self.entries.clear()

    @rule()
    def sync(self) -> None:
        self.file.sync()
        assert (self.directory / "blocks.kv").read_bytes() == self.blocks

    def teardown(self) -> None:
        if hasattr(self, "file"):
            self.read_everything()
            self.list_entries()
            self.file.close()
        shutil.rmtree(self.directory)


TestBlockFile = BlockFileMachine.TestCase
TestBlockFile.settings = settings(max_examples=40, stateful_step_count=25)
