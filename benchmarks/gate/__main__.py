"""The performance gate: compares this tree's speed with stored ratios, or with another commit.

    python -m ostinato.benchmarks.gate
    python -m ostinato.benchmarks.gate --only scheduler,prefix
    python -m ostinato.benchmarks.gate --store            # store the measured ratios
    python -m ostinato.benchmarks.gate --against HEAD     # compare engine steps with a commit's

Each check times its work and a reference in turns. The stored values are the ratios of the two, one
set for each kind of machine (ratios.json). `--against` needs no stored values and detects smaller
losses (benchmarks/gate/versions.py). Both take less than a minute on an idle machine.

The exit code is 0 if no check is slower, 1 if one is, and 2 if nothing could be compared. A check
for which this kind of machine has no stored ratio does not fail; a line names it.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from ostinato.benchmarks.gate.check import (
    Check,
    Finding,
    read_ratios,
    run_check,
    write_ratios,
)
from ostinato.benchmarks.gate.host_checks import host_checks
from ostinato.benchmarks.gate.versions import (
    ALLOWED,
    Worker,
    compare_works,
    extract,
)
from ostinato.conf.errors import ConfigError
from ostinato.runtime.errors import EngineError
from ostinato.runtime.machine_info import cpu_name

__all__ = ("main",)

_STORE_RUNS = 3  # runs of each check; their median is stored
_RATIOS = Path(__file__).parent / "ratios.json"


def main(arguments: list[str]) -> int:
    """Run the gate; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m ostinato.benchmarks.gate", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--only", help="checks whose names contain one of these words, a,b")
    parser.add_argument("--store", action="store_true", help="store the ratios for this machine")
    parser.add_argument("--file", type=Path, default=_RATIOS, help="the stored ratios")
    parser.add_argument("--against", metavar="COMMIT", help="compare engine steps with a commit's")
    options = parser.parse_args(arguments)
    words = options.only.split(",") if options.only else []
    if options.against:
        return _against(options.against, words)
    machine = cpu_name()
    try:
        stored = {} if options.store else read_ratios(options.file, machine)
        findings = _run(words, stored, _STORE_RUNS if options.store else 1)
    except (ConfigError, EngineError) as error:
        print(f"gate: {error}", file=sys.stderr)
        return 2
    if not findings:
        print(f"gate: no check has {options.only!r} in its name", file=sys.stderr)
        return 2
    _print(machine, findings)
    if options.store:
        write_ratios(options.file, machine, {one.name: one.ratio for one in findings})
        print(f"stored in {options.file}")
        return 0
    return _verdict(machine, findings)


def _against(revision: str, words: list[str]) -> int:
    """Compare with a commit; returns the exit code."""
    root = Path(__file__).resolve().parents[2]
    with tempfile.TemporaryDirectory() as directory:
        there = Path(directory)
        try:
            name = extract(revision, root, there / "tree")
            with (
                Worker(root, there / "ours") as ours,
                Worker(there / "tree", there / "theirs") as theirs,
            ):
                found = compare_works(ours, theirs, words, _tell)
        except EngineError as error:
            print(f"gate: {error}", file=sys.stderr)
            return 2
    if not found:
        print(f"gate: no step has one of {words} in its name", file=sys.stderr)
        return 2
    table = Table(
        box=box.SIMPLE_HEAD, pad_edge=False, title=f"against {name}", title_justify="left"
    )
    table.add_column("step")
    for heading in ("ours, ms", "ours / theirs", "lower bound", "pairs"):
        table.add_column(heading, justify="right")
    table.add_column("")
    for one in found:
        figures = (f"{one.ours_ms:.2f}", f"{one.ratio:.3f}", f"{one.at_least:.3f}")
        mark = "slower" if one.is_slower else ""
        table.add_row(one.name, *figures, str(one.num_pairs), mark)
    Console(width=110, highlight=False).print(table)
    slower = [one for one in found if one.is_slower]
    for one in slower:
        print(
            f"gate: {one.name} takes {one.ratio:.3f} times as long as in {name}; with 99 % "
            f"confidence the ratio is above {one.at_least:.3f} ({1 + ALLOWED:.2f} is allowed)"
        )
    if not slower:
        print(f"gate: {len(found)} kinds of steps are as fast as in {name}")
    return 1 if slower else 0


def _tell(text: str) -> None:
    print(f"gate: {text}", file=sys.stderr, flush=True)


def _verdict(machine: str, findings: list[Finding]) -> int:
    slower = [one for one in findings if one.is_regression]
    for one in slower:
        assert one.change is not None, "only a check with a stored ratio can regress"
        print(
            f"gate: {one.name} is {one.change:.0%} slower than stored ({one.tolerance:.0%} allowed)"
        )
    missing = [one.name for one in findings if one.stored is None]
    if missing:
        print(
            f"gate: nothing stored for {machine}: {', '.join(missing)}; run with --store on a "
            "version whose speed is right"
        )
    if slower:
        return 1
    print(f"gate: {len(findings) - len(missing)} checks passed")
    return 0


def _run(words: list[str], stored: dict[str, float], num_runs: int) -> list[Finding]:
    def run(check: Check) -> Finding:
        findings = [run_check(check, stored.get(check.name)) for _ in range(num_runs)]
        return sorted(findings, key=lambda one: one.ratio)[num_runs // 2]

    def wanted(checks: Iterable[Check]) -> list[Check]:
        return [one for one in checks if not words or any(word in one.name for word in words)]

    findings = [run(one) for one in wanted(host_checks())]
    from ostinato.benchmarks.gate.engine_checks import NAMES, EngineChecks

    if words and not any(word in name for word in words for name in NAMES):
        return findings

    engine = EngineChecks()
    try:
        findings += [run(one) for one in wanted(engine.checks())]
    finally:
        engine.close()
    return findings


def _print(machine: str, findings: list[Finding]) -> None:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, title=machine, title_justify="left")
    for heading in ("check", "ours / reference"):
        table.add_column(heading)
    for heading in ("ours, ms", "ratio", "stored", "change"):
        table.add_column(heading, justify="right")
    table.add_column("")
    for one in findings:
        table.add_row(
            one.name,
            one.what,
            f"{one.ours_ms:.3f}",
            f"{one.ratio:.3f}",
            "" if one.stored is None else f"{one.stored:.3f}",
            "" if one.change is None else f"{one.change:+.1%}",
            "slower" if one.is_regression else "",
        )
    Console(width=130, highlight=False).print(table)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
