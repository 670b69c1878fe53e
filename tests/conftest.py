"""Settings for all tests: the number of workers, and a check that no engine compiles late."""

from __future__ import annotations

import logging
import os
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from ostinato.ops.native.instruction_sets import runnable_levels

_MOST_WORKERS = 4  # a worker and its servers may take 2 GiB

# Set before anything imports torch; the servers that tests start inherit it. Threads that wait for
# each other at the end of a loop sleep, because other workers need the cores.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# Hundreds of processes that tests start import the package. Without stored bytecode each of them
# compiles its source. That takes a sixth of a server's start.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# Every run draws the same examples, however slow the machine is. `--hypothesis-profile=search`
# draws new ones. A long run with it is worth while now and then.
settings.register_profile("repeat", derandomize=True, deadline=None)
settings.register_profile("search", deadline=None)
settings.load_profile("repeat")


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """One worker more than there are cores, at most four; none for the tests of a single file.

    Workers wait for servers and compilers in a quarter of their time, so one more uses the cores.
    """
    paths = {Path(argument.partition("::")[0]) for argument in config.args}
    if len(paths) == 1 and paths.pop().is_file():
        return 0
    return min(_MOST_WORKERS, len(os.sched_getaffinity(0)) + 1)


# These files take longest. They begin first. Otherwise one worker would run one of them at the end,
# while the others have nothing left to do.
_BEGIN_FIRST = (
    "test_interpreted_kernels.py",
    "test_bench_kinds.py",
    "test_native_build.py",
    "test_recovery.py",
    "test_video_engine.py",
    "test_image_engine.py",
    "test_terminal_commands.py",
    "test_parity.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Order the files: the longest ones, then those with most tests.

    The option --no-loadscope-reorder keeps this order. Without it, a file of few tests comes last.
    """
    counts = Counter(item.path for item in items)
    items.sort(key=lambda item: (item.path.name not in _BEGIN_FIRST, -counts[item.path]))


def pytest_report_header(config: pytest.Config) -> str:
    return f"CPU kernels run on: {', '.join(runnable_levels())}, and AMX in emulation"


class _Collector(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


@pytest.fixture(autouse=True)
def nothing_compiles_late(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fails a test in which an engine of this process compiles after it was ready.

    The mark `compiles_late` allows it. Each monitor logs the first compilation of each kind and
    shape (graphs/compile_monitor.py). For engines in other processes, `ServerProcess`
    checks the log, and tests/runtime/client/engine_clients.py checks the engine's statistics.
    """
    logger = logging.getLogger("ostinato.graphs.compile_monitor")
    level, collector = logger.level, _Collector()
    logger.addHandler(collector)
    logger.setLevel(logging.WARNING)  # a test may set another `server.log_level` on the root
    yield
    logger.removeHandler(collector)
    logger.setLevel(level)
    if request.node.get_closest_marker("compiles_late") is None:
        assert collector.lines == [], (
            "an engine compiled after it was ready; see graphs/compile_monitor.py"
        )
