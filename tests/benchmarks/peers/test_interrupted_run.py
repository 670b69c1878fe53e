"""A comparison with other engines that is ended early keeps its complete rounds."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from ostinato.benchmarks import peers
from ostinato.benchmarks.peers.__main__ import main
from tests.waiting import wait_until

# An engine that takes 0.1 ms for each token.
DRIVER = f"""#!{sys.executable}
import sys, time
sys.path.insert(0, {str(Path(peers.__file__).parent)!r})
from driver_loop import serve

def run(requests):
    time.sleep(1e-4 * sum(count for _, count in requests))
    return [count for _, count in requests]

serve(lambda: run)
"""


def read(path: Path) -> dict:
    return json.loads(path.read_text()) if path.exists() else {"rounds": {"complete": 0}}


def test_a_run_that_is_ended_keeps_its_complete_rounds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    driver, path = tmp_path / "driver", tmp_path / "result.json"
    driver.write_text(DRIVER)
    driver.chmod(0o755)
    arguments = ["--model", str(tmp_path), "--only-quantized", "--parts", "decode", "--warmup", "0"]
    arguments += ["--vllm", str(driver), "--transformers", str(driver)]
    command = [sys.executable, "-m", "ostinato.benchmarks.peers", *arguments]
    with subprocess.Popen(
        ["nohup", *command, "--rounds", "9999", "--json", str(path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    ) as run:
        wait_until(lambda: read(path)["rounds"]["complete"] >= 2 or run.poll() is not None)
        children = psutil.Process(run.pid).children(recursive=True)
        engines = [child for child in children if str(driver) in child.cmdline()]
        run.send_signal(signal.SIGHUP)  # nohup ignores it
        run.terminate()
        table, log = run.communicate(timeout=240)
    assert run.returncode == 128 + signal.SIGTERM, log
    assert len(engines) == 2
    assert not any(engine.is_running() for engine in engines)

    record = read(path)
    complete = record["rounds"]["complete"]
    assert record["rounds"]["asked"] == 9999
    assert [(each["round"], each["engine"]) for each in record["results"]] == [
        (round_, name) for round_ in range(complete) for name in ("vllm", "transformers")
    ]
    assert f"{complete} of 9999 rounds are complete" in table
    assert "round 2 of 9999 took" in log
    assert log.rstrip().endswith("ended by SIGTERM")
    assert main(["--show", str(path)]) == 0
    assert capsys.readouterr().out == table
