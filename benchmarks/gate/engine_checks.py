"""Checks of whole engine steps, beside the memory traffic or the arithmetic that they need.

The model is the 45M shape with dummy weights in bfloat16: larger than a processor's caches, so that
a decode step is bound by memory, and quick to load.
"""

from __future__ import annotations

import msgspec
import torch

from ostinato.benchmarks.gate.check import Check
from ostinato.conf.compose import load_config
from ostinato.runtime.build import build_engine
from ostinato.runtime.engine import Engine
from ostinato.runtime.types import Request, SamplingParams

__all__ = ("NAMES", "EngineChecks")

NAMES = (
    "decode, 1 sequence",
    "decode, 8 sequences",
    "decode and sample, 8 sequences",
    "prefill, 256 tokens",
)

_LENGTH = 2048
_PROMPT = 256
# The 45M shape: 8 layers of 3.08 M, and 16.4 M of the output layer, 2 bytes each.
_WEIGHT_BYTES = 82_000_000
_LAYER_PARAMETERS = 24_640_000
_VOCAB_SIZE = 32_000


class _Decoding:
    """Sequences that decode for ever, in batches of one size and one way to sample."""

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


class EngineChecks:
    """One engine for all of them; one check runs at a time, to its end.

    Raises:
        StartupError: it can not start.
    """

    def __init__(self) -> None:
        config = load_config(
            [
                *("model=llama-45m", f"model.max_model_len={_LENGTH}", "cache.memory_gib=0.5"),
                *("scheduler.max_num_seqs=16", "scheduler.max_num_batched_tokens=1024"),
                "graphs.cost_table_budget_s=0",
            ]
        )
        self._engine = build_engine(config)
        self._weights = torch.ones(_WEIGHT_BYTES // 4, dtype=torch.float32)
        side = 512
        rows = 2 * _LAYER_PARAMETERS // (2 * side)
        self._left = torch.ones(_PROMPT, side, dtype=torch.bfloat16)
        self._right = torch.ones(side, rows // 2, dtype=torch.bfloat16)
        self._number = 0

    def close(self) -> None:
        """Give the engine's memory back."""
        self._engine.abort_all()
        self._engine.close()

    def _stream(self) -> None:
        self._weights.sum().item()

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
        """All of them."""
        endless = SamplingParams(temperature=0.0, max_tokens=_LENGTH // 2, ignore_eos=True)
        greedy, drawn = endless, msgspec.structs.replace(endless, temperature=0.8, top_p=0.9)
        decodes = [
            (NAMES[0], 1, greedy, self._stream, "a read of its bytes"),
            (NAMES[1], 8, greedy, self._stream, "a read of its bytes"),
            (
                *(NAMES[2], 8, drawn),
                *(self._stream, "a read of its bytes"),
            ),
        ]
        found: list[Check] = []
        for name, batch, sampling, reference, words in decodes:
            decoding = _Decoding(self._engine, batch, sampling)
            found.append(
                Check(
                    name=name,
                    what=f"an engine step / {words}",
                    ours=decoding.step,
                    reference=reference,
                    prepare=decoding.prepare,
                    repeats=2,
                    tolerance=0.2,
                )
            )
        found.append(
            Check(
                name=NAMES[3],
                what="an engine step / a matrix product of the layers' arithmetic",
                ours=self._prefill,
                reference=self._matmul,
                repeats=1,
                pairs=15,
                tolerance=0.2,
            )
        )
        return found
