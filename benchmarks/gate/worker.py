"""A worker process of `--against`: runs engine steps on request, one process for each version.

The process is started by path, with the tree of the version that it measures. It imports only
modules of the engine that old versions have too, and none of the gate. For each line with the name
of a kind of step, it runs such steps on one thread and answers with the seconds of processor time.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable

if __name__ == "__main__":
    sys.path.insert(0, sys.argv[2])

from ostinato.conf.compose import load_config

try:
    from ostinato.runtime.engine.engine import Engine
    from ostinato.runtime.startup.build_engine import build_engine
    from ostinato.runtime.types.params import SamplingParams
    from ostinato.runtime.types.request import Request
except ModuleNotFoundError:  # a version from before `runtime/` had folders (0.1.0)
    from ostinato.runtime.build import build_engine  # pyright: ignore
    from ostinato.runtime.engine import Engine  # pyright: ignore
    from ostinato.runtime.types import Request, SamplingParams  # pyright: ignore

__all__ = ("main",)

_LENGTH = 2048
_PROMPT = 256
_SHAPE = ("model=llama-45m", f"model.max_model_len={_LENGTH}", "cache.memory_gib=0.25")
_LIMITS = ("scheduler.max_num_seqs=8", "scheduler.max_num_batched_tokens=512")
_START = ("graphs.cost_table_budget_s=0", "device.name=cpu", "device.threads=1")
# A model with almost no arithmetic, so that a step's time is the host's work.
_TINY = tuple(
    f"model.config.{name}={size}"
    for name, size in (
        *(("hidden_size", 64), ("intermediate_size", 64), ("num_hidden_layers", 2)),
        *(("num_attention_heads", 2), ("num_key_value_heads", 1), ("head_dim", 32)),
        ("vocab_size", 512),
    )
)


class _Decoding:
    """Sequences that decode without end, in batches of one size."""

    def __init__(self, engine: Engine, batch: int, num_steps: int, temperature: float) -> None:
        self._engine, self._batch, self._num_steps = engine, batch, num_steps
        self._temperature = temperature
        self._steps_left = 0

    def prepare(self) -> None:
        self._engine.abort_all()
        for index in range(self._batch):
            sampling = SamplingParams(
                temperature=self._temperature,
                top_p=0.9 if self._temperature else 1.0,
                max_tokens=_LENGTH // 2,
                ignore_eos=True,
                seed=index,
            )
            prompt = [1 + index, 2, 3, 4]
            self._engine.add_request(
                Request(request_id=f"d-{index}", prompt_token_ids=prompt, sampling=sampling)
            )
        self._engine.step()
        self._engine.step()

    def run(self) -> None:
        for _ in range(self._num_steps):
            self._engine.step()


class _Prefill:
    """Prefills a new prompt in each run, so that it is not in the prefix cache."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self._number = engine, 0

    def prepare(self) -> None:
        self._number += 1
        self._engine.abort_all()
        prompt = [(self._number + 7 * place) % 32_000 for place in range(_PROMPT)]
        sampling = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
        self._engine.add_request(
            Request(request_id=f"p-{self._number}", prompt_token_ids=prompt, sampling=sampling)
        )

    def run(self) -> None:
        self._engine.step()


def main(bundles: str) -> None:
    """Serve until the input ends.

    Args:
        bundles: a directory for compiled bundles.
    """
    large, tiny = (
        build_engine(load_config([*_SHAPE, *_LIMITS, *_START, *more]))
        for more in (
            (f"graphs.bundle_dir={bundles}/large",),
            (f"graphs.bundle_dir={bundles}/tiny", *_TINY),
        )
    )
    works: dict[str, _Decoding | _Prefill] = {
        "host work, 1 sequence": _Decoding(tiny, 1, 24, 0.0),
        "host work, 8 sequences": _Decoding(tiny, 8, 16, 0.0),
        "decode, 1 sequence": _Decoding(large, 1, 4, 0.0),
        "decode, 8 sequences": _Decoding(large, 8, 3, 0.0),
        "decode and sample, 8 sequences": _Decoding(large, 8, 1, 0.8),
        "prefill, 256 tokens": _Prefill(large),
    }
    _answer(list(works))
    for line in sys.stdin:
        work = works[line.strip()]
        work.prepare()
        run: Callable[[], None] = work.run
        begin = time.thread_time()
        run()
        _answer(time.thread_time() - begin)


def _answer(what: object) -> None:
    sys.stdout.write(f"gate {json.dumps(what)}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1])
