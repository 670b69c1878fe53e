"""The CUDA control flow of the engine on a device that works as late, or as early, as it may.

A buffer that the host rewrites while a copy still needs it, or a result that is read before its
event, fails here; the planted races show that. Everything of the engine is real: overlap, capture
and replay, preemption, masks of reasoning limits, staged draws, beams, log-probabilities.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from ostinato import LLM, SamplingParams
from ostinato.graphs.buffers import StaticBuffers
from ostinato.runtime.sampling.sampler import PendingTokens
from ostinato.runtime.startup import loading
from tests.runtime.drafters import ReplayDrafter, make_llm
from tests.runtime.engine.test_engine import generate, make_prompts
from tests.runtime.engine.test_overlap import SAMPLING, flat
from tests.runtime.late_device import DeviceRaceError, LateDevice, Timing
from tests.runtime.tiny import VOCAB_SIZE, tiny_config

PROMPTS = [prompt[:12] for prompt in make_prompts(9, seed=5)]
MIXED = [list(SAMPLING.values())[index % len(SAMPLING)] for index in range(9)]
LONG = SamplingParams(temperature=0.9, seed=2, max_tokens=40, ignore_eos=True)
TIGHT_GIB = 15 * 8 * 2 * 2 * 2 * 16 * 4 / 2**30  # 15 blocks


@pytest.fixture(params=[Timing.late, pytest.param(Timing.early, marks=pytest.mark.slow)])
def device(request: pytest.FixtureRequest) -> LateDevice:
    return LateDevice(request.param)


def on(
    device: LateDevice,
    monkeypatch: pytest.MonkeyPatch,
    *overrides: str,
    drafter: ReplayDrafter | None = None,
    **values: object,
) -> LLM:
    """An engine on the device, which must be installed. Its steps are captured without Inductor."""
    load: Callable[..., None] = loading._load

    def load_there(*arguments: Any) -> None:
        with device.entered():
            load(*arguments)

    monkeypatch.setattr(loading, "_load", load_there)
    monkeypatch.setattr(loading, "_compile", lambda *arguments: None)
    words = ["device.name=cuda", "graphs.mode=captured", "graphs.attention=triton"]
    return make_llm(tiny_config(*words, *overrides, **values), drafter)


@pytest.fixture(scope="module")
def plain() -> LLM:
    return LLM(config=tiny_config())


@pytest.fixture(scope="module")
def expected(plain: LLM) -> list[Any]:
    return flat(plain.generate(PROMPTS, MIXED, use_progress=False))


def tokens(found: list[Any]) -> list[Any]:
    return [[one[:3] for one in output] for output in found]


def test_all_kinds_of_requests(
    device: LateDevice, monkeypatch: pytest.MonkeyPatch, expected: list[Any]
) -> None:
    with device.installed(monkeypatch):
        llm = on(device, monkeypatch)
        assert llm.stats().steps_by_kind["captured"] == 0
        found = flat(llm.generate(PROMPTS, MIXED, use_progress=False))
        assert llm.stats().steps_by_kind["captured"] > 0
    assert tokens(found) == tokens(expected)
    assert (device.num_late > 1000) == (device.timing is Timing.late)


@pytest.mark.slow
def test_preemption(device: LateDevice, monkeypatch: pytest.MonkeyPatch, plain: LLM) -> None:
    prompts = [prompt[:6] for prompt in PROMPTS]
    expected = generate(plain, prompts, LONG)
    with device.installed(monkeypatch):
        tight = on(device, monkeypatch, model__max_model_len=112, cache__memory_gib=TIGHT_GIB)
        assert generate(tight, prompts, LONG) == expected
        assert tight.stats().num_preemptions > 0


@pytest.mark.slow
def test_several_tokens_a_step(
    device: LateDevice, monkeypatch: pytest.MonkeyPatch, plain: LLM
) -> None:
    expected = generate(plain, PROMPTS, LONG)
    drafter = ReplayDrafter(max_drafts=3, vocab_size=VOCAB_SIZE)
    drafter.memorize(PROMPTS, expected)
    with device.installed(monkeypatch):
        llm = on(device, monkeypatch, "scheduler.overlap=false", drafter=drafter)
        assert generate(llm, PROMPTS, LONG) == expected
        drafts = llm.stats().speculation
    assert drafts is not None
    assert drafts.num_accepted_tokens > 0


@pytest.mark.slow
def test_a_batch_that_is_rewritten_while_it_is_copied_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device = LateDevice(Timing.late)
    with device.installed(monkeypatch):
        llm = on(device, monkeypatch)
        monkeypatch.setattr(StaticBuffers, "wait_for_upload", lambda self: None)
        with pytest.raises(DeviceRaceError, match=r"buffers\.py:\d+ had started to copy"):
            generate(llm, PROMPTS, LONG)


def outcome(llm: LLM) -> object:
    """The tokens, or the error that nonsense in place of tokens leads to."""
    try:
        return generate(llm, PROMPTS, LONG)
    except (ValueError, OverflowError, IndexError) as error:
        return error


def test_tokens_that_are_read_before_their_event_are_found(
    monkeypatch: pytest.MonkeyPatch, plain: LLM
) -> None:
    expected = generate(plain, PROMPTS, LONG)
    device = LateDevice(Timing.late)
    with device.installed(monkeypatch):
        llm = on(device, monkeypatch)
        read = PendingTokens.read

        def hasty(self: PendingTokens) -> Any:
            self._copied = None
            return read(self)

        monkeypatch.setattr(PendingTokens, "read", hasty)
        assert outcome(llm) != expected


@pytest.mark.slow
def test_tokens_that_are_read_from_a_graph_after_its_next_replay_are_found(
    monkeypatch: pytest.MonkeyPatch, plain: LLM
) -> None:
    """The next step is launched before this one is read, and writes to the same tensor."""
    expected = generate(plain, PROMPTS, LONG)
    device = LateDevice(Timing.late)
    with device.installed(monkeypatch):
        llm = on(device, monkeypatch)
        read = PendingTokens.read

        def tardy(self: PendingTokens) -> Any:
            self._host = self.last_tokens.cpu()
            return read(self)

        monkeypatch.setattr(PendingTokens, "read", tardy)
        assert outcome(llm) != expected
