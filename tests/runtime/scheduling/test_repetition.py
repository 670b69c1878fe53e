"""The repetition detector, compared with a plain search, and its use by the scheduler."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ostinato.conf.schema import SchedulerConfig
from ostinato.runtime.kv.kv_cache_manager import KVCacheManager
from ostinato.runtime.scheduling.scheduler import Scheduler
from ostinato.runtime.scheduling.sequences.repetition import RepetitionDetector
from ostinato.runtime.types.outputs import FinishReason, SequenceOutput
from ostinato.runtime.types.params import RepetitionDetectionParams, SamplingParams
from ostinato.runtime.types.request import Request
from ostinato.runtime.types.step import StepResult


def ends_in_circles(tokens: list[int], params: RepetitionDetectionParams) -> bool:
    """The definition of a repetition, tried for every pattern size."""
    for size in range(max(1, params.min_pattern_size), params.max_pattern_size + 1):
        length = size * params.min_count
        if length <= len(tokens) and tokens[-length:] == tokens[-size:] * params.min_count:
            return True
    return False


@st.composite
def detections(draw: st.DrawFn) -> RepetitionDetectionParams:
    largest = draw(st.integers(1, 6))
    return RepetitionDetectionParams(
        max_pattern_size=largest,
        min_pattern_size=draw(st.integers(0, largest)),
        min_count=draw(st.integers(2, 4)),
    )


# Few different tokens, and runs of repeated patterns among them.
OUTPUTS = st.lists(
    st.tuples(st.lists(st.integers(0, 2), min_size=1, max_size=6), st.integers(1, 5)), max_size=6
).map(lambda parts: [token for pattern, count in parts for token in pattern * count])


@given(OUTPUTS, detections(), st.data())
def test_it_finds_what_the_definition_says_wherever_it_begins(tokens, params, data):
    resumed_at = data.draw(st.integers(0, len(tokens)))
    detector = RepetitionDetector(params)
    resumed = None
    for end, token in enumerate(tokens, 1):
        detector.append(token)
        assert detector.found == ends_in_circles(tokens[:end], params)
        if resumed is not None:
            resumed.append(token)
        if end == resumed_at:
            resumed = RepetitionDetector(params, tokens[:end])
        assert resumed is None or resumed.found == detector.found


def test_the_work_is_bounded_by_the_pattern_and_not_by_the_count():
    """Huge parameters do not slow a step down: a token costs at most 512 entries."""
    params = RepetitionDetectionParams(max_pattern_size=512, min_count=(1 << 31) - 1)
    detector = RepetitionDetector(params)
    for _ in range(3000):
        detector.append(7)
    assert len(detector._runs) == 512
    assert not detector.found


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"max_pattern_size": -1}, "max_pattern_size must be in [0, 512], got -1"),
        ({"max_pattern_size": 513}, "max_pattern_size must be in [0, 512], got 513"),
        (
            {"max_pattern_size": 2, "min_pattern_size": 3, "min_count": 2},
            "min_pattern_size must be in [0, 2, which is max_pattern_size], got 3",
        ),
        ({"max_pattern_size": 2}, "min_count must be in [2, 2147483647], got 0"),
        ({"max_pattern_size": 2, "min_count": 1}, "min_count must be in [2, 2147483647], got 1"),
    ],
)
def test_ranges(fields, problem):
    with pytest.raises(ValueError) as refused:
        RepetitionDetectionParams(**fields)
    assert str(refused.value) == f"repetition_detection.{problem}"


def test_zero_is_off_and_beams_are_refused():
    off = RepetitionDetectionParams()
    SamplingParams(use_beam_search=True, repetition_detection=off)
    on = RepetitionDetectionParams(max_pattern_size=2, min_count=2)
    with pytest.raises(ValueError, match=r"^repetition_detection must be off with use_beam_search"):
        SamplingParams(use_beam_search=True, repetition_detection=on)


# --- in the scheduler -----------------------------------------------------------------------------

DETECTION = RepetitionDetectionParams(max_pattern_size=3, min_count=2)
END = (FinishReason.repetition, "repetition_detected")


def run(request: Request, tokens: list[int], *, overlap: bool) -> list[SequenceOutput]:
    """The outputs of one request whose model gives these tokens."""
    config = SchedulerConfig(max_num_seqs=2, max_num_batched_tokens=8)
    scheduler = Scheduler(config, KVCacheManager(32, 4), max_model_len=64)
    scheduler.add(request)
    # The request crosses a process border unchanged.
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(request), type=Request) == request
    outputs, left, ahead = [], list(tokens), None
    while scheduler.has_work:
        output = ahead or scheduler.schedule()
        assert output is not None
        ahead = scheduler.schedule() if overlap else None
        samples = sum(entry.num_logits for entry in output.scheduled)
        # With overlap one token more is computed than the request will have.
        result = StepResult([left.pop(0) if left else 0 for _ in range(samples)])
        outputs += scheduler.update(output, result)
    scheduler.check_integrity()
    return outputs


def request_of(**fields: object) -> Request:
    sampling = {"max_tokens": 20, "repetition_detection": DETECTION, **fields}
    return Request(
        request_id="a",
        prompt_token_ids=list(range(20)),  # in chunks of 8
        sampling=msgspec.convert(sampling, SamplingParams),
    )


@pytest.mark.parametrize("overlap", [False, True])
def test_a_sequence_ends_with_its_first_repetition(overlap):
    outputs = run(request_of(), [5, 6, 7, 5, 6, 7, 9, 9], overlap=overlap)
    assert [one.new_token_ids for one in outputs] == [[5], [6], [7], [5], [6], [7]]
    assert [one.finish_reason for one in outputs[:-1]] == [None] * 5
    assert (outputs[-1].finish_reason, outputs[-1].stop_reason) == END


@pytest.mark.parametrize("overlap", [False, True])
def test_another_engine_goes_on_with_what_it_gave(overlap):
    request = msgspec.structs.replace(request_of(), output_token_ids=[1, 5, 6, 7, 5])
    outputs = run(request, [6, 7, 9], overlap=overlap)
    assert [one.new_token_ids for one in outputs] == [[6], [7]]
    assert (outputs[-1].finish_reason, outputs[-1].stop_reason) == END


def test_not_before_min_tokens_and_the_limit_comes_first():
    outputs = run(request_of(min_tokens=4), [5, 5, 6, 7, 8, 8], overlap=False)
    assert len(outputs) == 6
    assert outputs[-1].finish_reason is FinishReason.repetition
    outputs = run(request_of(max_tokens=2), [5, 5], overlap=False)
    assert outputs[-1].finish_reason is FinishReason.length
    # The prompt does not count.
    outputs = run(request_of(max_tokens=2), [19, 4], overlap=False)
    assert outputs[-1].finish_reason is FinishReason.length
