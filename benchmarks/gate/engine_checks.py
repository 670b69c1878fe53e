"""Gate checks of whole engine steps; the references are matrix products of the same size.

The model is the 45M shape with dummy weights in bfloat16. It is larger than a processor's caches
and quick to load. It runs on one thread and is timed by processor time. With two threads, one would
wait for the other whenever another program takes a core, and a step could take three times as long.
A separate check measures the gain of a second thread, by the wall clock. Its result is the 10 %
quantile of the ratios. It is skipped while other programs use the cores.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import msgspec
import torch

from ostinato.benchmarks.gate.check import Check
from ostinato.benchmarks.machine.probes import LoadMeter
from ostinato.conf.compose import load_config
from ostinato.runtime.engine.engine import Engine
from ostinato.runtime.host_resources import available_cores
from ostinato.runtime.startup.build_engine import build_engine
from ostinato.runtime.types.params import SamplingParams
from ostinato.runtime.types.request import Request

__all__ = ("NAMES", "SCALING", "EngineChecks")

SCALING = "decode on two threads, 8 sequences"
NAMES = (
    "decode, 1 sequence",
    "decode, 8 sequences",
    "decode and sample, 8 sequences",
    "prefill, 256 tokens",
    SCALING,
)

_MOST_OTHERS = 0.2  # share of the cores that other programs may use when two threads are measured
_LENGTH = 2048
_PROMPT = 256
# The 45M shape: 8 layers of 3.08 M parameters each, and 16.4 M in the output layer.
_LAYER_PARAMETERS = 24_640_000
_PARAMETERS = 41_000_000
_WIDTH = 512
_VOCAB_SIZE = 32_000


class _Decoding:
    """Sequences that decode without end, with one batch size and one way to sample."""

    def __init__(self, engine: Engine, batch: int, sampling: SamplingParams) -> None:
        self._engine, self._batch, self._sampling = engine, batch, sampling
        self._steps_left = 0

    def prepare(self) -> None:
        if self._steps_left > 20:
            return
        self.end()
        self._steps_left = _LENGTH // 4
        for index in range(self._batch):
            self._engine.add_request(
                Request(
                    request_id=f"{self._batch}-{index}",
                    prompt_token_ids=[1 + index, 2, 3, 4],
                    sampling=msgspec.structs.replace(self._sampling, seed=index),
                )
            )
        self.step()

    def step(self) -> None:
        self._engine.step()
        self._steps_left -= 1

    def end(self) -> None:
        self._engine.abort_all()
        self._steps_left = 0


def _build(threads: int) -> Engine:
    """An engine that decodes on `threads` threads."""
    engine = build_engine(
        load_config(
            [
                *("model=llama-45m", f"model.max_model_len={_LENGTH}", "cache.memory_gib=0.5"),
                *("scheduler.max_num_seqs=16", "scheduler.max_num_batched_tokens=1024"),
                *("graphs.cost_table_budget_s=0", f"device.threads={threads}"),
            ]
        )
    )
    torch.set_num_threads(1)  # for the products that the steps are compared with
    return engine


class EngineChecks:
    """Checks with an engine on one thread and, for `SCALING`, with a second engine on two threads.

    Checks must run one after the other.

    Raises:
        StartupError: an engine cannot start.
    """

    def __init__(self) -> None:
        self._others = LoadMeter()
        self._engine = _build(1)
        self._on_two: Engine | None = None
        # The reference is a product by torch with as many parameters as a step reads. It has the
        # same mix of memory traffic and arithmetic as the step, in other code. A plain read of
        # memory is not a good reference: on shared machines its speed varies by a factor of two,
        # and the speed of the steps does not.
        self._weights = torch.ones(_PARAMETERS // _WIDTH, _WIDTH, dtype=torch.bfloat16)
        self._left = torch.ones(_PROMPT, _WIDTH, dtype=torch.bfloat16)
        self._right = torch.ones(_WIDTH, _LAYER_PARAMETERS // (2 * _WIDTH), dtype=torch.bfloat16)
        self._number = 0

    def close(self) -> None:
        """Free the engines' memory."""
        for engine in (self._engine, self._on_two):
            if engine is not None:
                engine.abort_all()
                engine.close()

    def _product(self, batch: int) -> Callable[[], object]:
        rows = torch.ones(batch, _WIDTH, dtype=torch.bfloat16)
        return lambda: torch.nn.functional.linear(rows, self._weights)

    def _matmul(self) -> None:
        torch.mm(self._left, self._right)

    def _prefill(self) -> None:
        self._number += 1
        self._engine.abort_all()
        self._engine.add_request(
            Request(
                request_id=f"prompt-{self._number}",
                prompt_token_ids=[(self._number + 7 * i) % _VOCAB_SIZE for i in range(_PROMPT)],
                sampling=SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True),
            )
        )
        self._engine.step()

    def checks(self) -> list[Check]:
        """All checks of this module."""
        endless = SamplingParams(temperature=0.0, max_tokens=_LENGTH // 2, ignore_eos=True)
        greedy, drawn = endless, msgspec.structs.replace(endless, temperature=0.8, top_p=0.9)
        decodes = [(NAMES[0], 1, greedy), (NAMES[1], 8, greedy), (NAMES[2], 8, drawn)]
        found: list[Check] = []
        for name, batch, sampling in decodes:
            decoding = _Decoding(self._engine, batch, sampling)
            found.append(
                Check(
                    name=name,
                    what="an engine step / a product with as many parameters",
                    ours=decoding.step,
                    reference=self._product(batch),
                    prepare=decoding.prepare,
                    repeats=2,
                    tolerance=0.2,
                    clock=time.thread_time,
                )
            )
        found.append(
            Check(
                name=NAMES[3],
                what="an engine step / a matrix product of the layers' arithmetic",
                ours=self._prefill,
                reference=self._matmul,
                repeats=1,
                pairs=25,
                tolerance=0.2,
                clock=time.thread_time,
            )
        )
        if available_cores() > 1 and self._others.stop() < _MOST_OTHERS:
            self._on_two = _build(2)
            found.append(
                self._scaling(
                    _Decoding(self._engine, 8, greedy), _Decoding(self._on_two, 8, greedy)
                )
            )
        return found

    def _scaling(self, on_one: _Decoding, on_two: _Decoding) -> Check:
        def one_thread() -> None:
            on_one.prepare()
            on_one.step()

        def two_threads() -> None:
            on_two.prepare()
            on_two.step()
            torch.set_num_threads(1)

        return Check(
            name=SCALING,
            what="an engine step on two threads / on one, by the wall clock",
            ours=two_threads,
            reference=one_thread,
            repeats=2,
            pairs=60,
            tolerance=0.25,
            share=0.1,
        )
