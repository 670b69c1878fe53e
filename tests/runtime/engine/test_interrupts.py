"""A Ctrl-C during `LLM.generate` ends the call, and leaves an engine that answers later calls."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ostinato import LLM
from ostinato.runtime.engine.interrupts import interrupts_later
from ostinato.runtime.errors import RankFailedError
from tests.runtime.tiny import tiny_config

ROOT = Path(__file__).parents[3]
CODE = """
import os, signal
from ostinato import LLM, SamplingParams
from tests.runtime.tiny import tiny_config

signal.signal(signal.SIGINT, signal.default_int_handler)  # a parent may ignore it
llm = LLM(config=tiny_config())
long = SamplingParams(max_tokens=200, ignore_eos=True, temperature=0.0)
short = SamplingParams(max_tokens=8, ignore_eos=True, temperature=0.0)
expected = llm.generate([[3, 4, 5]], short)[0].outputs[0].token_ids
step, count, is_armed = llm._engine._read, 0, False
def interrupted():
    global count
    count += 1
    if is_armed and count % 7 == 0:
        os.kill(os.getpid(), signal.SIGINT)
    return step()
llm._engine._read = interrupted
for _ in range(3):
    is_armed = True
    try:
        llm.generate([[3, 4, 5 + each] for each in range(8)], long)
    except KeyboardInterrupt:
        print("interrupted", flush=True)
    is_armed = False
    assert llm.generate([[3, 4, 5]], short)[0].outputs[0].token_ids == expected
assert llm.stats().num_running == 0
print("the same tokens")
"""


def test_the_engine_goes_on_after_interrupts() -> None:
    run = subprocess.run(
        [sys.executable, "-c", CODE], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines() == ["interrupted"] * 3 + ["the same tokens"]


@pytest.fixture
def handler() -> Iterator[None]:
    """Python's own handler. A worker of the tests has another one."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_an_interrupt_comes_at_the_end_and_a_second_one_at_once(handler: None) -> None:
    done: list[int] = []

    def work(num_interrupts: int) -> None:
        with interrupts_later():
            for _ in range(num_interrupts):
                os.kill(os.getpid(), signal.SIGINT)
            done.append(num_interrupts)

    with pytest.raises(KeyboardInterrupt):
        work(1)
    with pytest.raises(KeyboardInterrupt):
        work(2)
    work(0)
    assert done == [1, 0]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_engine_with_a_failed_step_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    with LLM(config=tiny_config()) as llm:

        def fail(*arguments: object) -> None:
            raise ZeroDivisionError("a planted error")

        with monkeypatch.context() as patch:
            patch.setattr(llm._engine._executor, "launch", fail)
            with pytest.raises(ZeroDivisionError):
                llm.generate([[3, 4, 5]])
        with pytest.raises(RankFailedError) as caught:
            llm.generate([[3, 4, 5]])
    assert str(caught.value) == (
        "the engine has ended and a new one must be made: a step ended with "
        "ZeroDivisionError('a planted error')"
    )
