"""The timelines and figures that the observer derives from steps, against literal values."""

from __future__ import annotations

from pathlib import Path

from ostinato.conf.schema import SchedulerConfig
from ostinato.runtime.engine.engine_state import describe_engine
from ostinato.runtime.engine.flight_recorder import FlightRecorder, read_flight
from ostinato.runtime.engine.step_observer import StepObserver
from ostinato.runtime.kv.kv_cache_manager import KVCacheManager
from ostinato.runtime.scheduling.scheduler import Scheduler
from ostinato.runtime.types.engine_info import ITERATION_TOKENS, EngineStats
from ostinato.runtime.types.outputs import SequenceOutput, TimelineEvent
from ostinato.runtime.types.params import SamplingParams
from ostinato.runtime.types.request import Request
from ostinato.runtime.types.step import StepResult


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Loop:
    """An engine's loop with a real scheduler; a step takes one second, every token is 7."""

    def __init__(
        self, *, total_blocks: int = 9, budget: int = 8, flight: FlightRecorder | None = None
    ) -> None:
        self.clock = Clock()
        self.steps: list[tuple[int, float]] = []  # tokens and seconds
        self.observer = StepObserver(
            flight, self.clock, lambda step, seconds: self.steps.append((step.num_tokens, seconds))
        )
        self.cache = KVCacheManager(total_blocks, 4)
        config = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=budget)
        self.scheduler = Scheduler(config, self.cache, max_model_len=32)

    def add(self, name: str, length: int, *, trace: bool = False, max_tokens: int = 3) -> None:
        request = Request(
            request_id=name,
            prompt_token_ids=list(range(length)),
            sampling=SamplingParams(max_tokens=max_tokens, temperature=0.0),
            arrival_time=self.clock.now,
            trace=trace,
            cache_salt=name,
        )
        self.scheduler.add(request)
        self.observer.add(request)

    def step(self) -> dict[str, SequenceOutput]:
        before = self.scheduler.num_preemptions
        output = self.scheduler.schedule()
        assert output is not None
        if self.scheduler.num_preemptions != before:
            requests = self.scheduler.requests()
            self.observer.preempted(
                [one for one in self.observer.traced if not requests[one].is_running]
            )
        self.observer.begin(output, num_running=1, num_waiting=0, num_free_blocks=3)
        self.observer.launch("captured", output.num_tokens + 2)
        self.clock.now += 1.0
        tokens = [7] * sum(entry.num_logits for entry in output.scheduled)
        outputs = self.scheduler.update(output, StepResult(tokens))
        self.observer.end(output, outputs)
        return {one.request_id: one for one in outputs}


def test_chunks_of_a_prompt_and_the_first_token() -> None:
    loop = Loop()
    loop.clock.now = 50.0
    loop.add("a", 11, trace=True)
    loop.clock.now = 60.0
    assert loop.step() == {}
    first = loop.step()["a"]
    assert first.scheduled_time == 60.0
    assert first.events == [
        TimelineEvent("scheduled", 60.0),
        TimelineEvent("prefill", 60.0, 1.0, 0, 8, 1, "captured", 1),
        TimelineEvent("prefill", 61.0, 1.0, 8, 3, 2, "captured", 1),
        TimelineEvent("first_token", 62.0),
    ]
    assert loop.step()["a"].events is None
    last = loop.step()["a"]
    assert (last.finish_reason, last.num_preemptions, last.scheduled_time) == ("length", 0, 0.0)
    assert list(loop.observer.traced) == []
    assert loop.steps == [(8, 1.0), (3, 1.0), (1, 1.0), (1, 1.0)]


def test_a_request_without_output_shows_how_far_it_came() -> None:
    loop = Loop()
    loop.add("a", 18)
    assert loop.step() == {}
    assert loop.observer.progress == {"a": 8}
    loop.add("b", 2)
    loop.step()
    assert loop.observer.progress == {"a": 16}
    assert set(loop.step()) == {"a", "b"}
    assert loop.observer.progress == {}


def test_an_untraced_request_gets_its_first_row_only() -> None:
    loop = Loop()
    loop.add("a", 3)
    assert (loop.step()["a"].scheduled_time, loop.step()["a"].scheduled_time) == (100.0, 0.0)


def test_a_preempted_request_says_when_and_for_how_long() -> None:
    loop = Loop(total_blocks=9, budget=32)  # 8 blocks of 4 tokens hold one sequence of 32
    loop.add("first", 11, max_tokens=20)
    loop.add("second", 11, trace=True, max_tokens=16)
    events: list[TimelineEvent] = []
    while "second" in loop.scheduler.requests():
        for name, one in loop.step().items():
            if name == "second":
                events += one.events or ()
                last = one
    names = [one.name for one in events]
    assert names[:3] == ["scheduled", "prefill", "first_token"]
    assert names.count("preempted") == names.count("resumed") == last.num_preemptions >= 1
    preempted, resumed = (next(one for one in events if one.name == n) for n in names[3:5])
    assert preempted.at < resumed.at
    assert names[3:5] == ["preempted", "resumed"]


def test_an_aborted_request_leaves_nothing() -> None:
    loop = Loop()
    loop.add("a", 3, trace=True)
    loop.step()
    loop.scheduler.abort("a")
    loop.observer.forget("a")
    assert list(loop.observer.traced) == []
    loop.add("a", 3)
    assert loop.step()["a"].scheduled_time == loop.clock.now - 1.0


def test_tokens_padding_and_sizes_of_steps() -> None:
    loop = Loop()
    loop.add("a", 11)
    for _ in range(4):
        loop.step()
    observer = loop.observer
    assert observer.num_scheduled_tokens == 13
    counts = dict(zip((*ITERATION_TOKENS, "more"), observer.iteration_tokens, strict=True))
    assert {bound: count for bound, count in counts.items() if count} == {1: 2, 4: 1, 8: 1}
    assert [one.num_tokens for one in observer.recent] == [8, 3, 1, 1]


def test_the_flight_recorder_gets_every_step(tmp_path: Path) -> None:
    flight = FlightRecorder(tmp_path / "flight", 8)
    loop = Loop(flight=flight)
    loop.add("a", 11)
    loop.step()
    output = loop.scheduler.schedule()
    assert output is not None
    loop.observer.begin(output, num_running=1, num_waiting=0, num_free_blocks=3)
    done, under_way = read_flight(tmp_path / "flight")
    assert (done.step, done.kind, done.seconds, done.entries) == (1, "captured", 1.0, [("a", 0, 8)])
    assert (under_way.is_done, under_way.kind, under_way.entries) == (False, "", [("a", 8, 3)])
    flight.close()


class TestEngineState:
    def state(self, loop: Loop):
        return describe_engine(
            loop.scheduler.requests().values(),
            loop.cache,
            EngineStats(num_running=loop.scheduler.num_running),
            loop.observer.recent,
            [4, 1, 4],
        )

    def test_rows_queue_and_blocks(self) -> None:
        loop = Loop(total_blocks=17, budget=32)
        loop.add("a", 5, max_tokens=9)
        loop.step()
        loop.add("b", 6)
        state = self.state(loop)
        (row,) = state.rows
        assert (row.request_id, row.num_prompt_tokens, row.num_output_tokens) == ("a", 5, 1)
        assert (row.num_computed_tokens, row.max_num_tokens, row.num_blocks) == (5, 14, 2)
        assert [one.request_id for one in state.waiting] == ["b"]
        assert state.blocks.counts == [14, 0, 2, 0]
        assert state.blocks.kinds == [2, 2] + [0] * 14
        assert state.bucket_tokens == [1, 4]
        assert state.steps[-1].num_tokens == 5

    def test_shared_prefixes_have_a_colour_and_freed_ones_stay_cached(self) -> None:
        loop = Loop(total_blocks=17, budget=32)
        for name in ("a", "b"):
            request = Request(
                request_id=name,
                prompt_token_ids=list(range(9)),
                sampling=SamplingParams(max_tokens=4, temperature=0.0),
            )
            loop.scheduler.add(request)
        loop.step()
        state = self.state(loop)
        assert state.blocks.counts == [12, 0, 2, 2]
        shared = [i for i, kind in enumerate(state.blocks.kinds) if kind == 3]
        assert [state.blocks.groups[i] for i in shared] == [state.rows[0].group] * 2
        assert state.rows[0].group == state.rows[1].group > 0
        assert [row.num_shared_blocks for row in state.rows] == [2, 2]
        while loop.scheduler.has_work:
            loop.step()
        assert self.state(loop).blocks.counts[1:] == [3, 0, 0]

    def test_a_large_pool_is_shown_in_few_cells(self) -> None:
        loop = Loop(total_blocks=10_001, budget=32)
        loop.add("a", 5)
        loop.step()
        blocks = self.state(loop).blocks
        assert blocks.num_blocks == 10_000
        assert blocks.blocks_per_cell == 5
        assert len(blocks.kinds) == len(blocks.groups) == 2000
        assert sum(blocks.counts) == 10_000
