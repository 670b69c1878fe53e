"""The flight recorder keeps the last steps in a file that survives the engine process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ostinato.runtime.engine.flight_recorder import (
    FlightRecorder,
    StepRecord,
    dump_flight,
    keep_flight,
    read_flight,
)
from tests.confinement import full
from tests.waiting import PATIENCE_S

ROOT = Path(__file__).parents[3]


def record(step: int, **fields: object) -> StepRecord:
    return StepRecord(
        **{
            "step": step,
            "began_at": 1000.0 + step,
            "num_tokens": 3,
            "num_seqs": 2,
            "num_running": 2,
            "num_waiting": 0,
            "num_free_blocks": 7,
            "num_decodes": 1,
            "entries": [("a", 0, 2), ("b", 17, 1)],
            **fields,
        }
    )


def test_the_ring_keeps_the_last_steps_in_order(tmp_path: Path) -> None:
    recorder = FlightRecorder(tmp_path / "flight", 4)
    for step in range(1, 11):
        recorder.write(record(step, seconds=0.5))
    assert [one.step for one in read_flight(tmp_path / "flight")] == [7, 8, 9, 10]
    assert read_flight(tmp_path / "flight")[-1] == record(10, seconds=0.5)
    recorder.close()


def test_a_step_is_written_again_when_more_is_known(tmp_path: Path) -> None:
    recorder = FlightRecorder(tmp_path / "flight", 4)
    recorder.write(record(1))
    assert [one.is_done for one in read_flight(tmp_path / "flight")] == [False]
    recorder.write(record(1, kind="captured", seconds=0.25))
    (one,) = read_flight(tmp_path / "flight")
    assert (one.kind, one.is_done) == ("captured", True)
    recorder.close()


def test_entries_fit_their_slot_whatever_the_ids(tmp_path: Path) -> None:
    recorder = FlightRecorder(tmp_path / "flight", 2)
    entries = FlightRecorder.entries([("x" * 500, 1 << 40, 1 << 40)] * 600)
    recorder.write(record(1, entries=entries))
    recorder.write(record(2, entries=[("\U0001f600" * 72, 1, 1)] * 24))
    first, second = read_flight(tmp_path / "flight")
    assert len(first.entries) == 24
    assert first.entries[0] == ("x" * 72, 1 << 40, 1 << 40)
    assert second.entries == []
    recorder.close()


@pytest.mark.parametrize("contents", [b"", b"short", b"x" * 5000, b"OSTFLT01" + b"\xff" * 8])
def test_a_foreign_file_has_no_steps(tmp_path: Path, contents: bytes) -> None:
    (tmp_path / "flight").write_bytes(contents)
    assert read_flight(tmp_path / "flight") == []


def test_a_missing_file_has_no_steps(tmp_path: Path) -> None:
    assert read_flight(tmp_path / "nothing") == []
    assert keep_flight(tmp_path / "nothing", str(tmp_path), "why") is None


def test_a_torn_slot_is_left_out(tmp_path: Path) -> None:
    recorder = FlightRecorder(tmp_path / "flight", 3)
    for step in (1, 2):
        recorder.write(record(step))
    recorder.close()
    data = bytearray((tmp_path / "flight").read_bytes())
    begin = 16 + 4096 * 1  # the slot of step 1
    data[begin + 4 : begin + 40] = b"\xc1" * 36
    (tmp_path / "flight").write_bytes(data)
    assert [one.step for one in read_flight(tmp_path / "flight")] == [2]


CODE = """
import sys, time
from pathlib import Path
from ostinato.runtime.engine.flight_recorder import FlightRecorder, StepRecord

recorder = FlightRecorder(Path(sys.argv[1]), 8)
recorder.write(StepRecord(1, 5.0, 3, 1, 1, 0, 9, 0, [("a", 0, 3)], "eager", 3, 0.125))
recorder.write(StepRecord(2, 6.0, 1, 1, 1, 0, 9, 1, [("a", 3, 1)]))
print("written", flush=True)
time.sleep(600)
"""


def test_it_survives_sigkill(tmp_path: Path) -> None:
    path = tmp_path / "flight"
    process = subprocess.Popen(
        [sys.executable, "-c", CODE, str(path)], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    with process.stdout:
        assert process.stdout.readline() == "written\n"
        os.kill(process.pid, signal.SIGKILL)
        process.wait(PATIENCE_S)
    kept = keep_flight(path, str(tmp_path / "dumps"), "killed")
    assert kept is not None
    dump = json.loads(kept.read_text())
    assert dump["reason"] == "killed"
    assert [(step["step"], step["state"]) for step in dump["steps"]] == [
        (1, "done"),
        (2, "under way"),
    ]
    assert dump["steps"][1]["entries"] == [["a", 3, 1]]


def test_old_dumps_are_removed(tmp_path: Path) -> None:
    for number in range(12):
        (tmp_path / f"flight-20200101-0000{number:02d}-000.json").touch()
    (tmp_path / "flight-notes.txt").touch()
    newest = dump_flight([record(1)], tmp_path, "why")
    names = sorted(path.name for path in tmp_path.glob("flight-*.json"))
    assert len(names) == 10
    assert names[-1] == newest.name
    assert (tmp_path / "flight-notes.txt").exists()


def test_a_full_file_system_is_noticed_when_the_file_is_made(tmp_path: Path):
    """If it were noticed later, a store into the map would end the process with SIGBUS."""
    code = (
        "import sys\n"
        "from pathlib import Path\n"
        "from ostinato.runtime.engine.flight_recorder import FlightRecorder\n"
        "try:\n"
        "    FlightRecorder(Path(sys.argv[1]) / 'ring', 64)\n"
        "except OSError as error:\n"
        "    print(error.strerror)\n"
    )
    command = [*full(tmp_path, 100), sys.executable, "-c", code, str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "No space left on device\n", "")
