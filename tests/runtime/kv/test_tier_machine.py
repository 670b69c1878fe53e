"""`TierIndex` against a model of the device's memory and of the places, in random order.

The model applies the copies that the index plans. So it knows what each place really holds.
"""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from ostinato.conf.sections.cache_schema import StorePolicy
from tests.runtime.kv.tier_indexes import LEAST_BYTES, hash_of, make_index

BLOCK_IDS = range(1, 6)
NUM_CONTENTS = 7
CONTENTS = st.integers(0, NUM_CONTENTS - 1)
FIRST_CONTENTS = st.lists(CONTENTS, max_size=2, unique=True)
WHICH = st.integers(0, 11)


@dataclass
class Load:
    step: int  # it begins with this step
    places: list[int]
    contents: list[int]
    block_ids: list[int]


class Tier:
    """What the model knows of host memory or of the disk."""

    def __init__(self, first_place: int, num_places: int) -> None:
        self.range = range(first_place, first_place + num_places)
        self.places: dict[int, int] = {}  # place -> content
        self.wanted: set[int] = set()  # contents on the device that must get a copy
        self.may_come: set[int] = set()  # contents that the next step may copy
        self.takes_stores = True
        self.num_loaded = 0

    def find(self, content: int) -> int | None:
        return next((place for place, one in self.places.items() if one == content), None)

    def want(self, content: int) -> None:
        if self.takes_stores:
            self.may_come.add(content)
            if self.find(content) is None:
                self.wanted.add(content)

    def forget(self) -> None:
        self.places.clear()
        self.wanted.clear()
        self.may_come.clear()


class TierMachine(RuleBasedStateMachine):
    """Between two calls of `step`, the rules do what planning a step does in random order."""

    @initialize(
        num_host_places=st.sampled_from([0, 0, 1, 2]),
        expects_disk=st.sampled_from([False, True, True]),
        num_per_step=st.sampled_from([1, 3, 64]),
        policy=st.sampled_from(list(StorePolicy)),
        first_contents=st.none() | FIRST_CONTENTS,
    )
    def begin(
        self,
        num_host_places: int,
        expects_disk: bool,
        num_per_step: int,
        policy: StorePolicy,
        first_contents: list[int] | None,
    ) -> None:
        self.policy = policy
        self.num_per_step = self.least_per_step = self.num_left = num_per_step
        self.num_host_places = num_host_places
        self.index = make_index(
            num_host_places=num_host_places,
            expects_disk=expects_disk,
            num_per_step=num_per_step,
            policy=policy,
        )
        self.host = Tier(0, num_host_places)
        self.disk = Tier(num_host_places, 0)
        self.disk.takes_stores = expects_disk
        self.is_disk_closed = not expects_disk
        self.num_buffers = 0
        self.device: dict[int, int] = {}  # content -> block id, as lookups find it
        self.memory: dict[int, int] = {}  # block id -> content, before the next step writes
        self.filled: dict[int, int] = {}  # block id -> content that the next step writes
        self.loads: list[Load] = []
        self.num_steps = 0
        self.has_evicted = False  # since the last step
        if expects_disk and first_contents is not None:
            self.open_disk(first_contents)

    @precondition(lambda self: not (self.is_disk_closed or self.disk.range))
    @rule(contents=FIRST_CONTENTS)
    def open_disk(self, contents: list[int]) -> None:
        """Every second place has contents, the last place first."""
        first, num_places = self.num_host_places, 2 * len(contents) + 1
        kept = dict(zip(range(num_places - 1, -1, -2), contents, strict=False))
        self.disk.range = range(first, first + num_places)
        self.disk.places = {first + place: content for place, content in kept.items()}
        self.disk.wanted -= set(kept.values())
        self.index.open_disk(num_places, [(p, hash_of(content)) for p, content in kept.items()])

    def tiers(self) -> list[Tier]:
        return [self.host] * bool(self.num_host_places) + [self.disk] * (not self.is_disk_closed)

    def free_blocks(self) -> list[int]:
        used = {*self.device.values(), *self.filled}
        used.update(block_id for load in self.loads for block_id in load.block_ids)
        return [block_id for block_id in BLOCK_IDS if block_id not in used]

    def place(self, content: int) -> int | None:
        found = (tier.find(content) for tier in self.tiers())
        return next((place for place in found if place is not None), None)

    @rule(content=CONTENTS, is_kept=st.booleans())
    def register(self, content: int, is_kept: bool) -> None:
        """A step is planned that fills a block."""
        free = self.free_blocks()
        if content in self.device or not free:
            return
        self.device[content] = free[0]
        self.filled[free[0]] = content
        self.note_registered(content, is_kept)

    def note_registered(self, content: int, is_kept: bool) -> None:
        if is_kept:
            self.index.on_register(self.device[content], hash_of(content))
        if is_kept and self.policy is not StorePolicy.reused:
            for tier in self.tiers():
                tier.want(content)

    @precondition(lambda self: self.device)
    @rule(which=st.lists(WHICH, min_size=1, max_size=3), num_more=st.integers(0, 2))
    def hit(self, which: list[int], num_more: int) -> None:
        contents = list({self.on_device(one): None for one in which})
        hashes = [hash_of(one) for one in [*contents, *range(num_more)]]
        self.index.on_hit([self.device[one] for one in contents], hashes)
        for tier in self.tiers():
            for content in contents:
                tier.want(content)

    @precondition(lambda self: self.device)
    @rule(which=WHICH)
    def preempt(self, which: int) -> None:
        content = self.on_device(which)
        self.index.on_preempt(self.device[content], hash_of(content))
        for tier in self.tiers():
            tier.want(content)

    @precondition(lambda self: self.device)
    @rule(which=WHICH)
    def evict(self, which: int) -> None:
        content = self.on_device(which)
        if self.device[content] in self.filled:
            return  # the sequence of the planned step holds it
        self.index.on_evict(self.device.pop(content), hash_of(content))
        self.has_evicted = True
        for tier in self.tiers():
            tier.wanted.discard(content)

    def on_device(self, which: int) -> int:
        return list(self.device)[which % len(self.device)]

    @precondition(lambda self: self.device)
    @rule(which=WHICH)
    def swap(self, which: int) -> None:
        """A sequence is preempted, and its block is reused in the same step."""
        self.preempt(which)
        self.evict(which)

    @precondition(lambda self: not self.has_evicted)
    @rule(num_buffers=st.integers(0, 4))
    def set_buffers(self, num_buffers: int) -> None:
        self.index.set_buffers(num_buffers)
        self.num_buffers = num_buffers

    @rule(seconds=st.sampled_from([0.0, 0.01, 0.5]))
    def observe_step(self, seconds: float) -> None:
        self.index.observe_step(seconds)
        block_bytes = LEAST_BYTES // self.least_per_step
        self.num_per_step = max(self.least_per_step, int(seconds * 0.02 * 4e9) // block_bytes)

    @rule(contents=st.lists(CONTENTS, min_size=1, max_size=3, unique=True))
    def begin_load(self, contents: list[int]) -> None:
        found = [(one, self.index.find(hash_of(one))) for one in contents]
        pairs = [(one, place) for one, place in found if place is not None]
        free = self.free_blocks()
        if pairs and len(free) >= len(pairs):
            contents, places = (list(column) for column in zip(*pairs, strict=True))
            self.index.hold(places)
            self.loads.append(Load(self.num_steps, places, contents, free[: len(places)]))

    @rule(which=st.integers(0, 5), num_loaded=st.integers(0, 3), is_kept=st.booleans())
    def finish_load(self, which: int, num_loaded: int, is_kept: bool) -> None:
        begun = [load for load in self.loads if load.step < self.num_steps]
        if not begun:
            return
        load = begun[which % len(begun)]
        self.loads.remove(load)
        readable = [
            content == self.host.places.get(place, self.disk.places.get(place))
            for place, content in zip(load.places, load.contents, strict=True)
        ]
        num_loaded = min(num_loaded, [*readable, False].index(False))
        for content, block_id in zip(
            load.contents[:num_loaded], load.block_ids[:num_loaded], strict=True
        ):
            self.memory[block_id] = content
            if content not in self.device:
                self.device[content] = block_id
                self.note_registered(content, is_kept)
        self.index.release(load.places, num_loaded)
        for place in load.places[:num_loaded]:
            (self.host if place in self.host.range else self.disk).num_loaded += 1
        if num_loaded < len(load.places):
            self.forget_place(load.places[num_loaded])

    def forget_place(self, place: int) -> None:
        for tier in (self.host, self.disk):
            tier.places.pop(place, None)

    @precondition(lambda self: not self.has_evicted)
    @rule(which=WHICH)
    def lose(self, which: int) -> None:
        """A copy of an earlier step could not be written."""
        places = [*self.host.places, *self.disk.places, 99]
        place = places[which % len(places)]
        self.index.lose(place)
        self.forget_place(place)

    @precondition(lambda self: not (self.is_disk_closed or self.disk.range))
    @rule()
    def close_disk(self) -> None:
        self.index.close_disk()
        self.is_disk_closed = True
        self.disk.forget()

    @precondition(lambda self: self.disk.range and not self.has_evicted)
    @rule()
    def stop_disk_stores(self) -> None:
        self.index.stop_disk_stores()
        self.disk.takes_stores = False
        self.disk.wanted.clear()
        self.disk.may_come.clear()

    @precondition(lambda self: not self.loads)
    @rule()
    def clear(self) -> None:
        self.index.clear()
        self.device.clear()
        self.host.forget()
        self.disk.forget()
        self.has_evicted = False

    @rule()
    def step(self) -> None:
        """Plan no more, and make the copies. Then the step writes."""
        held = {place for load in self.loads if load.step < self.num_steps for place in load.places}
        stored: list[int] = []
        for transfer in self.index.take_stores():
            assert not transfer.is_load
            assert transfer.transfer_id == 0
            for block_id, place, block_hash in zip(
                transfer.block_ids, transfer.places, transfer.hashes, strict=True
            ):
                content = block_hash[0]
                tier = self.host if place in self.host.range else self.disk
                assert place in tier.range
                assert place not in held, "a load reads this place"
                assert content in tier.may_come, "nothing asked for this copy"
                assert self.memory.get(block_id) == content, "the block has other contents"
                tier.places[place] = content
                tier.wanted.discard(content)
                stored.append(place)
        num_on_disk = sum(place in self.disk.range for place in stored)
        assert len(stored) <= self.num_left, "more copies than the step has time for"
        assert num_on_disk <= self.num_buffers, "more copies than there are buffers"
        # What was planned is made now, so everything else must still be on the device.
        for tier in self.tiers():
            tier.may_come = {
                one for one in tier.may_come if one in self.device and tier.find(one) is None
            }
        self.num_left = self.num_per_step
        self.num_buffers -= num_on_disk
        self.memory.update(self.filled)
        self.filled.clear()
        self.num_steps += 1
        self.has_evicted = False
        self.compare()

    def compare(self) -> None:
        for content in range(NUM_CONTENTS):
            assert self.index.find(hash_of(content)) == self.place(content)
        for load in self.loads:
            for place, content in zip(load.places, load.contents, strict=True):
                kept = self.host.places.get(place, self.disk.places.get(place, content))
                assert kept == content, "a place was overwritten while a load reads it"
        used = {name: len(tier.places) for name, tier in self.named().items()}
        assert {name: one.num_used_places for name, one in self.index.stats().items()} == used

    def named(self) -> dict[str, Tier]:
        tiers = {"host": self.host} if self.num_host_places else {}
        return tiers if self.is_disk_closed else {**tiers, "disk": self.disk}

    @precondition(lambda self: not self.loads)
    @rule()
    def drain(self) -> None:
        """With time and buffers, every block gets its copy."""
        self.index.set_buffers(99)
        self.num_buffers = 99
        for _ in range(30):
            if not self.index.has_stores:
                break
            self.step()
        assert not self.index.has_stores
        assert self.index.take_stores() == []
        self.step()
        for tier in self.tiers():
            assert not (tier.range and tier.wanted), "blocks were forgotten"

    @invariant()
    def counts_fit(self) -> None:
        for name, tier in self.named().items():
            stats = self.index.stats()[name]
            assert stats.num_places == len(tier.range)
            assert stats.num_loaded_blocks == tier.num_loaded
            assert 0 <= stats.num_used_places <= stats.num_places


TestTierMachine = TierMachine.TestCase
TestTierMachine.settings = settings(max_examples=250, stateful_step_count=60)
