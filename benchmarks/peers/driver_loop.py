"""The protocol between the benchmark and one engine's process: a line of JSON each way.

A driver runs in its engine's own virtual environment, so this file needs only Python's standard
library. It loads its engine, reports that it is ready, and then answers each request

    {"requests": [{"prompt": [ids], "max_tokens": n}, ...]}

with `{"seconds": s, "peak_rss_mib": m}` when all tokens are generated, or with `{"error": text}`.
The engine's own output goes to standard error.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from collections.abc import Callable

__all__ = ("CACHE_GIB", "Requests", "serve")

CACHE_GIB = 2
"""GiB of an engine's KV cache: more than the requests of any part need together."""

Requests = list[tuple[list[int], int]]
"""(prompt ids, tokens to generate) each; all are sent at once."""


def serve(load: Callable[[], Callable[[Requests], list[int]]]) -> None:
    """Load an engine and run requests until the input ends.

    Args:
        load: returns a function that runs requests, ignoring end-of-sequence tokens, and returns
            the number of output tokens of each.
    """
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # engines print to standard output
    began = time.perf_counter()
    run = load()
    run([(list(range(300, 428)), 2)])
    _answer(answers, {"ready_s": time.perf_counter() - began})
    for line in sys.stdin:
        asked = json.loads(line)
        requests = [(one["prompt"], one["max_tokens"]) for one in asked["requests"]]
        prepare = getattr(run, "prepare", None)
        if prepare is not None:  # untimed work of the engine before requests of this form
            prepare(requests)
        begin = time.perf_counter()
        counts = run(requests)
        seconds = time.perf_counter() - begin
        expected = [max_tokens for _, max_tokens in requests]
        if counts != expected:
            _answer(answers, {"error": f"the answers have {counts} tokens instead of {expected}"})
        else:
            _answer(answers, {"seconds": seconds, "peak_rss_mib": _peak_rss_mib()})


def _peak_rss_mib() -> float:
    own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    children = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    return max(own, children) / 1024


def _answer(answers: object, content: dict[str, object]) -> None:
    print(json.dumps(content), file=answers, flush=True)  # type: ignore[call-overload]
