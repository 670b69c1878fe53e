"""Scheduler: a request of many sequences gives rows to other requests."""

from __future__ import annotations

import itertools

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from ostinato.runtime.scheduling.scheduler import Scheduler
from ostinato.runtime.scheduling.sequences.sequence import Sequence
from ostinato.runtime.types.params import PoolingParams, SamplingParams
from ostinato.runtime.types.request import Request
from ostinato.runtime.types.step import StepResult
from tests.runtime.scheduling.scheduler_steps import make_request, make_scheduler, must_schedule


def many(name: str, count: int, max_tokens: int = 20) -> list[Request]:
    """The sequences of one request, as `make_requests` places them."""
    return [
        make_request(f"{name}:{place}", [5, 6, 7], place=place, max_tokens=max_tokens)
        for place in range(count)
    ]


def run_step(scheduler: Scheduler) -> tuple[list[str], list[str]]:
    """Run a step; returns the ids that it admitted, and those that it ended."""
    output = must_schedule(scheduler)
    num_samples = sum(entry.num_logits for entry in output.scheduled)
    ended = scheduler.update(output, StepResult([9] * num_samples))
    scheduler.check_integrity()
    admitted = [one.request.request_id for one in output.admitted]
    return admitted, [one.request_id for one in ended if one.finish_reason is not None]


def test_a_step_with_decodes_admits_few_further_sequences() -> None:
    """16 besides the first sequence of each request, although there are rows for all."""
    scheduler = make_scheduler(
        *many("one", 1), max_num_seqs=64, max_num_batched_tokens=512, num_blocks=1000
    )
    run_step(scheduler)
    for request in [*many("large", 40), *many("other", 1)]:
        scheduler.add(request)
    counts = []
    while scheduler.num_waiting:
        admitted = run_step(scheduler)[0]
        counts.append(sum(not name.endswith(":0") for name in admitted))
    assert counts == [16, 16, 7]


def test_a_new_request_gets_the_row_of_the_last_sequence_of_a_large_one() -> None:
    scheduler = make_scheduler(*many("large", 8))
    assert run_step(scheduler)[0] == [f"large:{place}" for place in range(4)]
    load = scheduler.load()
    assert load.num_free_rows == 2  # those of places 2 and 3, which give way to a new request
    assert load.num_waiting == 0  # no sequence that a new request has to wait for
    scheduler.add(make_request("new", [8]))
    assert run_step(scheduler)[0] == ["new"]
    running = sorted(one.request.request_id for one in scheduler.queues.running)
    assert running == ["large:0", "large:1", "large:2", "new"]
    scheduler.add(make_request("second", [8]))
    assert run_step(scheduler)[0] == []  # the turn of place 2 is before that of this request
    assert scheduler.num_preemptions == 1


def test_two_large_requests_share_the_rows() -> None:
    scheduler = make_scheduler(*many("one", 8))
    run_step(scheduler)
    for request in many("other", 8):
        scheduler.add(request)
    run_step(scheduler)
    running = sorted(one.request.request_id for one in scheduler.queues.running)
    assert running == ["one:0", "one:1", "one:2", "other:0"]
    for place in range(3):
        scheduler.abort(f"one:{place}")
    run_step(scheduler)
    running = sorted(one.request.request_id for one in scheduler.queues.running)
    assert running == ["one:3", "other:0", "other:1", "other:2"]


def test_beams_give_way_as_well() -> None:
    sampling = SamplingParams(use_beam_search=True, n=4, best_of=4, max_tokens=10)
    search = Request(request_id="beams", prompt_token_ids=[5, 6], sampling=sampling)
    scheduler = make_scheduler(search)
    group = scheduler._beams._groups["beams"]
    first = group.sequences[0]
    places = [group.fork(first).order[2] - first.order[2] for _ in range(3)]
    assert places == [1, 2, 3]
    group.free_place(group.fork(first))  # a beam of place 4 that is dropped
    assert group.fork(first).order[2] - first.order[2] == 4


def test_a_preempted_text_whose_vector_arrives_is_not_computed_again() -> None:
    def pooled(name: str, place: int = 0) -> Request:
        return Request(
            request_id=name,
            prompt_token_ids=[5, 6, 7],
            sampling=SamplingParams(max_tokens=1),
            pooling=PoolingParams(),
            place=place,
        )

    scheduler = make_scheduler(*(pooled(f"large:{place}", place) for place in range(4)))
    first = must_schedule(scheduler)
    scheduler.add(pooled("new"))
    scheduler.schedule()  # preempts the last text in flight
    assert scheduler.num_preemptions == 1
    outputs = scheduler.update(first, StepResult([], pooled=[b"v"] * 4))
    assert [one.request_id for one in outputs] == [f"large:{place}" for place in range(4)]
    second = must_schedule(scheduler)
    assert [one.request.request_id for one in second.admitted] == ["new"]
    scheduler.update(second, StepResult([], pooled=[b"v"]))
    scheduler.check_integrity()
    assert not scheduler.has_work


@given(st.lists(st.tuples(st.integers(1, 12), st.integers(0, 6)), min_size=1, max_size=6))
def test_every_sequence_ends_however_many_come_later(arrivals: list[tuple[int, int]]) -> None:
    """Requests of 1 to 12 sequences arrive up to 6 steps apart. Every sequence ends."""
    scheduler = make_scheduler(num_blocks=30)
    ended: list[str] = []
    expected: set[str] = set()
    for number, (count, num_steps) in enumerate(arrivals):
        for request in many(f"r{number}", count, max_tokens=5):
            scheduler.add(request)
            expected.add(request.request_id)
        for _ in itertools.takewhile(lambda _: scheduler.has_work, range(num_steps)):
            ended += run_step(scheduler)[1]
    for _ in range(5 * 12 * 6 * 2):
        if not scheduler.has_work:
            break
        ended += run_step(scheduler)[1]
    assert set(ended) == expected
    assert len(ended) == len(expected)


class TestLevels:
    """Sequences of HTTP requests. Each HTTP request has a number, `Request.group`."""

    def parts(self, group: int, count: int, max_tokens: int) -> list[Request]:
        return [
            msgspec.structs.replace(one, group=group, group_size=count)
            for one in many(f"r{group}", count, max_tokens)
        ]

    def test_a_large_request_never_keeps_later_ones_waiting(self) -> None:
        """Each later request gets a row at once. The large one keeps some rows, and ends."""
        scheduler = make_scheduler(
            *self.parts(1, 30, 30), max_num_seqs=8, num_blocks=200, max_num_batched_tokens=200
        )
        run_step(scheduler)
        ended: list[str] = []
        for group in range(2, 60):
            (small,) = self.parts(group, 1, 1)
            scheduler.add(small)
            admitted, some = run_step(scheduler)
            assert small.request_id in admitted
            running = [one.request.group for one in scheduler.queues.running]
            if not any(name.startswith("r1:") for name in some):
                assert running.count(1) >= 4
            ended += some
        while scheduler.has_work:
            ended += run_step(scheduler)[1]
        assert len(ended) == len(set(ended)) == 30 + 58

    def test_when_the_first_ones_end_the_next_move_up(self) -> None:
        scheduler = make_scheduler(*self.parts(1, 10, 20), max_num_seqs=10)
        run_step(scheduler)
        for place in (0, 2, 3, 4):
            scheduler.abort(f"r1:{place}")
            scheduler.check_integrity()
        levels = {one.request.place: one.order[1] for one in scheduler.requests().values()}
        assert levels == {1: 0, 5: 1, 6: 1, 7: 1, 8: 1, 9: 2}

    @given(
        sizes=st.lists(st.integers(5, 20), min_size=1, max_size=3),
        num_steps=st.integers(1, 60),
        num_blocks=st.integers(14, 60),
    )
    def test_a_later_request_waits_only_for_the_first_sequence_of_each_large_one(
        self, sizes: list[int], num_steps: int, num_blocks: int
    ) -> None:
        """It runs at once if it fits beside these, whatever the other sequences hold."""
        scheduler = make_scheduler(num_blocks=num_blocks, max_num_seqs=8)
        for group, size in enumerate(sizes, 1):
            for request in self.parts(group, size, 36):
                scheduler.add(request)
        for _ in itertools.takewhile(lambda _: scheduler.has_work, range(num_steps)):
            run_step(scheduler)
        firsts: dict[int, Sequence] = {}
        for one in sorted(scheduler.requests().values(), key=lambda one: one.request.place):
            firsts.setdefault(one.request.group, one)
        # Blocks of 4 tokens. Each of the first sequences also has a spare block.
        num_held = sum(one.num_tokens // 4 + 2 for one in firsts.values())
        (later,) = self.parts(9, 1, 1)
        scheduler.add(later)
        admitted, _ = run_step(scheduler)
        assert later.request_id in admitted or num_held + 1 > num_blocks

    def test_sequences_that_move_up_go_behind_the_requests_that_wait(self) -> None:
        """Four sequences of the large request fill the cache. It does not keep the cache."""
        scheduler = make_scheduler(
            *self.parts(1, 12, 36), num_blocks=40, max_num_seqs=64, max_num_batched_tokens=200
        )
        while len(scheduler.queues.running) != 4:
            run_step(scheduler)
        small = [self.parts(group, 1, 30)[0] for group in range(2, 22)]
        for request in small:
            scheduler.add(request)
        waiting, ended = {one.request_id for one in small}, []
        while waiting:
            admitted, some = run_step(scheduler)
            waiting -= set(admitted)
            ended += [name for name in some if name.startswith("r1:")]
        assert len(ended) <= 4
        while scheduler.has_work:
            ended += run_step(scheduler)[1]
        assert sum(name.startswith("r1:") for name in ended) == 12

    def test_a_sequence_with_a_costly_grammar_does_not_keep_its_blocks(self) -> None:
        """It gets a token in few steps. Later requests wait for at most 64 steps without one."""
        scheduler = make_scheduler(*self.parts(1, 1, 36), num_blocks=10)
        costly = scheduler.requests()["r1:0"]
        for _ in range(30):
            run_step(scheduler)
        for group in range(2, 5):
            scheduler.add(make_request(f"r{group}", range(10 * group, 10 * group + 12)))
        num_steps = 0
        while scheduler.has_work:
            output = must_schedule(scheduler)
            assert scheduler.num_preemptions == 0 or num_steps >= 64
            assert scheduler.num_preemptions > 0 or num_steps < 64
            entries = zip(scheduler._in_flight[0].sequences, output.scheduled, strict=True)
            counts = [
                int(sequence is not costly or num_steps % 100 == 99)
                for sequence, entry in entries
                if entry.num_logits
            ]
            scheduler.update(output, StepResult([9] * sum(counts), counts=counts))
            scheduler.check_integrity()
            num_steps += 1
        assert costly.num_output_tokens == 36

    def test_small_requests_are_served_in_their_order(self) -> None:
        scheduler = make_scheduler(*self.parts(1, 4, 20), *self.parts(2, 4, 20))
        assert len(run_step(scheduler)[0]) == 4
        running = sorted(one.request.request_id for one in scheduler.queues.running)
        assert running == ["r1:0", "r1:1", "r1:2", "r2:0"]
