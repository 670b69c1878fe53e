"""A worker process of a sweep: reads a line of overrides, writes a line with the result."""

from __future__ import annotations

import json
import os
import queue
import signal
import sys
import threading
import traceback
from typing import Any

from ostinato.benchmarks.bench.command import measure_kind
from ostinato.benchmarks.bench.context import BenchContext
from ostinato.conf.compose import load_config
from ostinato.conf.errors import ConfigError
from ostinato.runtime.errors import EngineError
from ostinato.runtime.startup.model_cache import LoadedModelCache

__all__ = ("main",)


def main(config_dir: str) -> None:
    """Measure points until the input ends; the loaded model is kept between them."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the sweep, which ends this process
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # output of libraries goes to standard error
    model_cache = LoadedModelCache()
    lines: queue.Queue[str] = queue.Queue()
    idle = threading.Event()
    idle.set()
    threading.Thread(target=_read, args=(lines, idle), name="input", daemon=True).start()
    while line := lines.get():
        words: list[str] = json.loads(line)
        answer: dict[str, Any]
        try:
            context = BenchContext(words, config_dir or None, model_cache=model_cache, quiet=True)
            config = load_config(words, config_dir=config_dir or None)
            before = model_cache.num_reused
            record = measure_kind(config, context)
            record.conditions["model_reused"] = model_cache.num_reused > before
            answer = {"record": record.to_dict()}
        except (ConfigError, EngineError) as error:
            answer = {"error": " ".join(str(error).split())}
        except Exception as error:  # an error of one point must not end the sweep
            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {error}"}
        idle.set()  # set before the answer, because the next line arrives after the answer
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def _read(lines: queue.Queue[str], idle: threading.Event) -> None:
    """Put input lines into the queue, and an empty text at the end of the input.

    If the input ends while a point runs, the parent process has ended, and this process exits.
    """
    while line := sys.stdin.readline():
        idle.clear()
        lines.put(line)
    if not idle.is_set():
        os._exit(1)
    lines.put("")


if __name__ == "__main__":
    main(sys.argv[1])
