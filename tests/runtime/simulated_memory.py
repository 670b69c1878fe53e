"""The KV memory of a simulated device, and the digests that its two layers compute over it.

The first layer belongs to the first group of the cache, the second layer to the last group. A block
of the pool has the same memory for both. So if a block is used by both groups at a time, each
write of one layer destroys what the other layer has written.
"""

from __future__ import annotations

from ostinato.models.kv_groups import KVGroup

Entry = tuple[int, int, int] | int | None


def mix(digest: int, entry: object) -> int:
    """One step of a rolling digest. Entries of integers give the same digest in any process."""
    return hash((digest, entry))


class Digests:
    """The digest of a layer's last entries: all, or those within a window."""

    def __init__(self, window: int) -> None:
        self._window = window
        self._entries: list[object] = []
        self.digest = 0

    def add(self, entry: object) -> int:
        """The digest that the token with this entry computes."""
        if not self._window:
            self.digest = mix(self.digest, entry)
            return self.digest
        self._entries = [*self._entries, entry][-self._window :]
        self.digest = 0
        for one in self._entries:
            self.digest = mix(self.digest, one)
        return self.digest


class SimulatedMemory:
    """Entries of two layers, by block of the pool."""

    def __init__(self, total_blocks: int, block_size: int, groups: tuple[KVGroup, ...]) -> None:
        self._total_blocks = total_blocks
        self.groups = groups
        self.windows = (groups[0].window, groups[-1].window)
        self.sizes = [group.units * block_size for group in groups]
        size = max(self.sizes)
        self._entries: list[list[list[Entry]]] = [
            [[None] * size for _ in range(total_blocks)] for _ in range(2)
        ]
        self._owners = [0] * total_blocks  # the group that wrote to each block last

    def place(self, tables: list[list[int]], layer: int, position: int) -> tuple[int, int]:
        """The block and the offset in it of a position."""
        group = self._group(layer)
        index, offset = divmod(position, self.sizes[group])
        return tables[group][index], offset

    def write(self, tables: list[list[int]], layer: int, position: int, entry: Entry) -> None:
        block_id, offset = self.place(tables, layer, position)
        assert 0 < block_id < self._total_blocks, f"position {position} is written to {block_id}"
        if self._owners[block_id] != self._group(layer):
            self._owners[block_id] = self._group(layer)
            for entries in self._entries:
                entries[block_id] = [None] * len(entries[block_id])
        self._entries[layer][block_id][offset] = entry

    def digests(self, tables: list[list[int]], layer: int, positions: range) -> list[int]:
        """The digest of what each of these consecutive tokens reads."""
        window = self.windows[layer]
        digests = Digests(window)
        first = max(0, positions.start - window + 1) if window else 0
        found = [digests.add(self.read(tables, layer, one)) for one in range(first, positions.stop)]
        return found[positions.start - first :]

    def read(self, tables: list[list[int]], layer: int, position: int) -> object:
        block_id, offset = self.place(tables, layer, position)
        entry = self._entries[layer][block_id][offset]
        assert entry is not None, f"layer {layer} reads position {position} before it is written"
        return entry

    def copy(self, copies: list[tuple[int, int]]) -> None:
        targets = [target for _, target in copies]
        assert len(set(targets)) == len(targets), "two copies go to one block"
        contents = [(self.save(source), self._owners[source]) for source, _ in copies]
        for target, (content, owner) in zip(targets, contents, strict=True):
            self.load(target, content)
            self._owners[target] = owner

    def save(self, block_id: int) -> tuple[list[Entry], ...]:
        return tuple(entries[block_id][:] for entries in self._entries)

    def load(self, block_id: int, contents: tuple[list[Entry], ...]) -> None:
        for entries, content in zip(self._entries, contents, strict=True):
            entries[block_id] = content[:]

    def _group(self, layer: int) -> int:
        return layer if len(self.groups) > 1 else 0
