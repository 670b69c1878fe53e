"""A second start loads what the first compiled. A damaged bundle is rebuilt with a warning."""

from __future__ import annotations

from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.e2e.server_process import HTTP, ServerProcess

COMPILED = ("graphs.mode=captured", "graphs.attention=auto", "graphs.pack_weights=true")


class Start:
    """The results of one start."""

    def __init__(self, directory: Path) -> None:
        with ServerProcess(*COMPILED, f"graphs.bundle_dir={directory}") as server:
            reply = HTTP.post(
                f"{server.url}/v1/completions",
                json={"prompt": "Once upon a time", "max_tokens": 12, "temperature": 0},
            )
            self.text = reply.json()["choices"][0]["text"]
            metrics = HTTP.get(f"{server.url}/metrics").text
            self.output = list(server.output)
        self.phases = {
            sample.labels["phase"]
            for family in text_string_to_metric_families(metrics)
            for sample in family.samples
            if sample.name == "ostinato_startup_seconds"
        }


@pytest.fixture(scope="module")
def starts(tmp_path_factory: pytest.TempPathFactory) -> list[Start]:
    """A cold start, a warm one, and one after a changed byte in the compiled layer."""
    directory = tmp_path_factory.mktemp("bundles")
    cold, warm = Start(directory), Start(directory)
    (program,) = directory.glob("*/layer-0")
    content = bytearray(program.read_bytes())
    content[len(content) // 2] ^= 1
    program.write_bytes(content)
    return [cold, warm, Start(directory)]


def test_the_second_start_compiles_nothing(starts: list[Start]) -> None:
    cold, warm, _ = starts
    assert {"launch", "imports", "open", "weights", "warm-up", "tokenizer", "ready"} <= cold.phases
    assert "compile" in cold.phases
    assert "compile" not in warm.phases
    assert "load programs" in warm.phases


def test_a_damaged_bundle_is_set_aside_and_built_anew(starts: list[Start]) -> None:
    _, _, damaged = starts
    lines = [line for line in damaged.output if "set aside" in line]
    assert len(lines) == 1
    assert "is set aside and built anew: layer-0 is damaged" in lines[0]
    assert "compile" in damaged.phases


def test_all_answer_the_same(starts: list[Start]) -> None:
    assert len({start.text for start in starts}) == 1
    assert len(starts[0].text) > 20
