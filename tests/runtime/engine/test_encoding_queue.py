"""Requests that wait for embeddings of images or sounds, against a rank with real tables."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import msgspec
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from ostinato.runtime.engine.accepted_inputs import AcceptedInputs
from ostinato.runtime.engine.encoding_queue import EncodingQueue
from ostinato.runtime.engine.pending_requests import PendingRequests
from ostinato.runtime.errors import InvalidRequestError
from ostinato.runtime.execution.encoding.image_encoder import ImageEncoder
from ostinato.runtime.execution.encoding.input_encoder import InputEncoder
from ostinato.runtime.execution.encoding.rank_encoder import RankEncoder
from ostinato.runtime.execution.encoding.sound_encoder import SoundEncoder
from ostinato.runtime.execution.executor import AdvanceEncodings, BeginEncoding, RankCall
from ostinato.runtime.types.audio import PromptSound
from ostinato.runtime.types.images import PromptImage
from ostinato.runtime.types.params import SamplingParams
from ostinato.runtime.types.request import Request
from tests.runtime.toy_sounds import SOUND_SPEC, ToySoundTower, toy_sound, toy_sound_embeddings
from tests.runtime.toy_tower import (
    SPEC,
    WIDTH,
    ToyTower,
    toy_embeddings,
    toy_image,
    toy_pair,
    with_ends,
)

NUM_ROWS = 12
Medium = PromptImage | PromptSound


@dataclasses.dataclass
class _Ranks:
    """An executor of two ranks. The second has no table, like a later stage of a pipeline."""

    table: torch.Tensor
    has_sounds: bool = False
    calls: list[RankCall] = dataclasses.field(default_factory=list)

    def __post_init__(self) -> None:
        encoder: InputEncoder = ImageEncoder(ToyTower(), [self.table], SPEC)
        if self.has_sounds:
            encoder = SoundEncoder(ToySoundTower(), self.table, SOUND_SPEC)
        self.rank = RankEncoder(encoder)
        self.rank.warm_up()
        self.other = RankEncoder(None)

    def call(self, call: RankCall) -> list[str]:
        self.calls.append(call)
        if isinstance(call, BeginEncoding):
            self.rank.begin(call)
            self.other.begin(call)
            return ["", ""]
        assert isinstance(call, AdvanceEncodings)
        call = msgspec.structs.replace(call, seconds=0.0)  # one unit
        return [
            " ".join(digest.hex() for digest in rank.advance(call))
            for rank in (self.rank, self.other)
        ]


def make_queue(
    num_rows: int = NUM_ROWS, *, has_sounds: bool = False
) -> tuple[EncodingQueue, _Ranks]:
    ranks = _Ranks(torch.zeros(1 + num_rows, WIDTH), has_sounds)
    return EncodingQueue(ranks, num_rows), ranks  # pyright: ignore[reportArgumentType]


def request(
    name: str, media: Sequence[Medium], *, group: int = 0, place: int = 0, size: int = 1
) -> Request:
    return Request(
        request_id=name,
        prompt_token_ids=[1],
        sampling=SamplingParams(),
        images=[one for one in media if isinstance(one, PromptImage)],
        sounds=[one for one in media if isinstance(one, PromptSound)],
        group=group,
        place=place,
        group_size=size,
    )


class EncodingQueueMachine(RuleBasedStateMachine):
    """Random requests, aborts and ends. What is in the tables is compared with the pixels."""

    inputs = AcceptedInputs(NUM_ROWS)

    def __init__(self) -> None:
        super().__init__()
        has_sounds = self.inputs.sounds is not None
        self.queue, self.ranks = make_queue(has_sounds=has_sounds)
        self.waiting: dict[str, list[Medium]] = {}  # in the order in which they came
        self.ready: dict[str, list[Medium]] = {}
        self.count = 0

    def make(self, seed: int, height: int, width: int, is_other: bool) -> Medium:
        """An image, of which one has tokens that end rows, or a pair of frames."""
        if is_other:
            return toy_pair(seed, height, width)
        image = toy_image(seed, height, width)
        return with_ends(image) if seed == 1 else image

    def embeddings(self, one: Medium) -> torch.Tensor:
        """What the tower gives for it."""
        assert isinstance(one, PromptImage)
        return toy_embeddings(one)

    @rule(
        seeds=st.lists(
            st.tuples(st.integers(0, 4), st.integers(1, 3), st.integers(1, 2), st.booleans()),
            min_size=1,
            max_size=3,
        ),
        group=st.integers(0, 2),
        place=st.integers(0, 3),
    )
    def add(self, seeds: list[tuple[int, int, int, bool]], group: int, place: int) -> None:
        media = [self.make(*numbers) for numbers in seeds]
        self.count += 1
        one = request(f"r{self.count}", media, group=group, place=place, size=4 if group else 1)
        try:
            self.inputs.check(one)
        except InvalidRequestError:
            sizes = {each.digest: each.num_rows for each in media}
            assert sum(sizes.values()) > NUM_ROWS
            return
        bare = self.queue.add(one)
        assert [each.data for each in bare.media] == [b""] * len(media)
        self.waiting[one.request_id] = media

    @rule(is_busy=st.booleans())
    def advance(self, is_busy: bool) -> None:
        if not self.queue.num_waiting:
            return
        for name in self.queue.advance(is_busy=is_busy):
            self.ready[name] = self.waiting.pop(name)

    @rule(number=st.integers(0, 9))
    def end(self, number: int) -> None:
        names = [*self.waiting, *self.ready]
        if names:
            name = names[number % len(names)]
            assert self.queue.release(name) == (name in self.waiting)
            self.waiting.pop(name, None)
            self.ready.pop(name, None)

    @invariant()
    def the_embeddings_of_ready_requests_stay(self) -> None:
        for media in self.ready.values():
            for one in media:
                rows = self.ranks.rank.rows_of(one.digest)
                assert torch.equal(self.ranks.table[rows], self.embeddings(one))
                assert rows.tolist() == self.ranks.other.rows_of(one.digest).tolist()

    @invariant()
    def row_0_is_zero_and_rows_have_one_use(self) -> None:
        assert not self.ranks.table[0].any()
        self.queue.check_integrity()
        assert self.queue.num_waiting == len(self.waiting)

    def teardown(self) -> None:
        """Without further requests, all waiting ones become ready when the others end."""
        for _ in range(2000):
            for name in list(self.ready):
                self.end_ready(name)
            if not self.waiting:
                return
            self.advance(is_busy=False)
        raise AssertionError(f"{list(self.waiting)} wait for ever")

    def end_ready(self, name: str) -> None:
        self.queue.release(name)
        del self.ready[name]


class SoundQueueMachine(EncodingQueueMachine):
    """The same with windows of sounds."""

    inputs = AcceptedInputs(NUM_ROWS, sounds=SOUND_SPEC)

    def make(self, seed: int, height: int, width: int, is_other: bool) -> Medium:
        """A window of a sound; some have a state that no embedding reads."""
        return toy_sound(seed, height * width, is_odd=is_other)

    def embeddings(self, one: Medium) -> torch.Tensor:
        assert isinstance(one, PromptSound)
        return toy_sound_embeddings(one)


TestEncodingQueue = EncodingQueueMachine.TestCase
TestEncodingQueue.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestSoundQueue = SoundQueueMachine.TestCase
TestSoundQueue.settings = settings(max_examples=30, stateful_step_count=40, deadline=None)


def run(queue: EncodingQueue, most: int = 50) -> list[str]:
    """Advance until nothing waits; returns the requests in the order in which they got ready."""
    ready: list[str] = []
    for _ in range(most):
        if not queue.num_waiting:
            break
        ready += queue.advance(is_busy=True)
    return ready


def num_begun(ranks: _Ranks) -> int:
    return sum(isinstance(call, BeginEncoding) for call in ranks.calls)


def test_the_same_image_is_computed_once():
    queue, ranks = make_queue()
    cat, dog = toy_image(1, 2, 2), toy_image(2, 2, 2)
    queue.add(request("a", [cat, dog, cat]))
    queue.add(request("b", [dog]))
    assert run(queue) == ["a", "b"]
    queue.release("a")
    queue.release("b")
    queue.add(request("c", [cat]))
    assert run(queue) == ["c"]
    assert (num_begun(ranks), queue.num_encoded, queue.num_hits) == (2, 2, 2)


def test_the_image_that_was_used_longest_ago_gives_up_its_rows():
    queue, ranks = make_queue(8)
    old, new, third = (toy_image(seed, 2, 2) for seed in (1, 2, 3))
    for name, image in (("a", old), ("b", new), ("c", old), ("d", third)):
        queue.add(request(name, [image]))
        run(queue)
        queue.release(name)
    queue.add(request("e", [old]))
    run(queue)
    assert num_begun(ranks) == 3  # `new` was dropped for `third`


def test_a_later_request_does_not_overtake_one_that_waits_for_rows():
    queue, ranks = make_queue(8)
    queue.add(request("a", [toy_image(1, 3, 2)]))
    assert run(queue) == ["a"]
    queue.add(request("large", [toy_image(2, 2, 2)]))
    queue.add(request("small", [toy_image(3, 1, 1)]))
    num_calls = len(ranks.calls)
    assert queue.advance(is_busy=False) == []
    assert len(ranks.calls) == num_calls  # the ranks have nothing to compute
    queue.release("a")
    assert run(queue) == ["large", "small"]


def test_a_file_of_many_windows_leaves_rows_and_turns_to_later_requests():
    """The windows have two rows each, and the ranks compute one unit at a time."""
    queue, _ = make_queue(8)
    for place in range(6):
        window = [toy_image(10 + place, 2, 1)]
        queue.add(request(f"file-{place}", window, group=7, place=place, size=6))
    ready = queue.advance(is_busy=True)
    queue.add(request("x", [toy_image(1, 2, 1)]))
    queue.add(request("y", [toy_image(2, 2, 1)]))
    ready += run(queue, 12)
    assert ready == ["file-0", "x", "file-1", "file-2"]  # y lacks rows, file-3 has its share
    queue.release("x")
    assert run(queue, 12) == ["y"]
    for place in range(6):
        queue.release(f"file-{place}")
        run(queue, 12)
    assert queue.num_waiting == 0
    queue.check_integrity()


def test_an_image_waits_for_few_pairs_of_an_earlier_video():
    """The ranks compute one unit at a time. A pair of two embeddings takes two units and an end."""
    queue, _ = make_queue(16)
    pairs = [toy_pair(seed, 2, 1, time_offset=seed - 1, first=seed == 1) for seed in range(1, 7)]
    queue.add(request("video", pairs))
    for _ in range(4):
        assert queue.advance(is_busy=True) == []
    queue.add(request("image", [toy_image(9, 2, 1)]))
    encoding: list[str | None] = []
    ready: list[str] = []
    while queue.num_waiting:
        encoding.append(queue.encoding)
        ready += queue.advance(is_busy=True)
        assert len(encoding) < 40
    assert ready == ["image", "video"]
    assert encoding == ["image"] * 3 + ["video"] * 14
    queue.check_integrity()


def test_completions_of_one_prompt_share_their_image_at_once():
    queue, ranks = make_queue(8)
    for place in range(3):
        queue.add(request(f"n{place}", [toy_image(1, 3, 2)], group=7, place=place, size=3))
    assert run(queue) == ["n0", "n1", "n2"]
    assert num_begun(ranks) == 1


def test_the_end_of_a_waiting_request_makes_room_for_the_next():
    queue, _ = make_queue(8)
    queue.add(request("a", [toy_image(1, 3, 2)]))
    queue.add(request("b", [toy_image(2, 3, 2)]))
    queue.advance(is_busy=True)
    assert queue.release("a")
    assert run(queue) == ["b"]


def test_a_dropped_image_that_comes_again_is_computed_again():
    queue, ranks = make_queue()
    image = toy_image(1, 3, 2)
    queue.add(request("a", [image]))
    queue.advance(is_busy=True)
    queue.release("a")
    queue.add(request("b", [image]))
    assert run(queue) == ["b"]
    rows = ranks.rank.rows_of(image.digest)
    assert torch.equal(ranks.table[rows], toy_embeddings(image))


def test_a_short_sound_waits_for_few_windows_of_an_earlier_one():
    """Sounds have the turns of videos: a window of two embeddings takes two units and an end."""
    queue, _ = make_queue(16, has_sounds=True)
    queue.add(request("long", [toy_sound(seed, 2) for seed in range(1, 7)]))
    for _ in range(4):
        assert queue.advance(is_busy=True) == []
    queue.add(request("short", [toy_sound(9, 2)]))
    assert run(queue) == ["short", "long"]


def test_the_request_for_which_embeddings_are_computed_is_named():
    """So it is a suspect if the engine dies, and the engine is not taken for hung."""
    ranks = _Ranks(torch.zeros(1 + NUM_ROWS, WIDTH))
    pending = PendingRequests(ranks, AcceptedInputs(NUM_ROWS))  # pyright: ignore[reportArgumentType]
    assert pending.add(request("a", [toy_image(1, 3, 1)]))
    assert pending.add(request("b", [toy_image(2, 1, 1)]))
    assert not pending.add(request("text", []))
    announced: list[str] = []
    encoding: list[str | None] = []
    complete: list[str] = []
    for _ in range(6):
        ready = pending.take_ready(lambda ids, seconds: announced.extend(ids), is_busy=True)
        encoding.append(ready.encoding)
        complete += [one.request_id for one in ready.complete]
    assert announced == ["a", "b"]
    assert encoding == ["a"] * 4 + ["b"] * 2
    assert complete == ["a", "b"]
    assert pending.num_waiting == 0


def test_a_request_whose_image_is_encoded_does_not_wait_for_rows():
    queue, _ = make_queue(8)
    queue.add(request("a", [toy_image(1, 3, 2)]))
    assert run(queue) == ["a"]
    queue.add(request("large", [toy_image(2, 2, 2)]))
    queue.add(request("again", [toy_image(1, 3, 2)]))
    assert queue.advance(is_busy=True) == ["again"]
    queue.release("a")
    queue.release("again")
    assert run(queue) == ["large"]


def test_the_time_of_waiting_requests_is_predicted_from_earlier_ones():
    queue, _ = make_queue(8)
    queue.add(request("a", [toy_image(1, 2, 1)]))
    assert queue.predicted_seconds == 0.0  # nothing has been measured
    run(queue)
    assert queue.predicted_seconds == 0.0  # nothing waits
    for seed in (2, 3, 4):
        queue.add(request(f"r{seed}", [toy_image(seed, 2, 1)]))
    assert queue.predicted_seconds == pytest.approx(3 * queue.encode_seconds)
    assert queue.encode_seconds > 0.0
    run(queue)
    later = toy_pair(3, 1, 1, 1, time_offset=1, first=False)
    queue.add(request("b", [toy_pair(2, 1, 1), later, toy_image(1, 2, 1, 2)]))
    queue.add(request("c", [toy_pair(3, 1, 1)]))
    missing = 2 / queue.num_encoded  # two pairs, one of which two requests need
    assert queue.predicted_seconds == pytest.approx(missing * queue.encode_seconds)


def test_a_lower_rank_comes_first():
    ranks = _Ranks(torch.zeros(9, WIDTH))
    queue = EncodingQueue(ranks, 8, rank=lambda one: one.priority)  # pyright: ignore[reportArgumentType]
    queue.add(request("a", [toy_image(1, 2, 1)]))
    queue.add(msgspec.structs.replace(request("b", [toy_image(2, 2, 1)]), priority=-1))
    assert run(queue) == ["b", "a"]
