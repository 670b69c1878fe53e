"""Adapters in a real server: loaded at the start and at run time, named by official clients.

The adapters `one` and `two` are made by PEFT. `one` is also loaded at the start, as `start`.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest

from tests.e2e.adapter_directories import make_adapter
from tests.e2e.json_requests import CHAT, COMPLETIONS, GREEDY, HI, MODEL, post
from tests.e2e.server_process import HTTP, SMALL, ServerProcess
from tests.e2e.streams import run_streams
from tests.waiting import PATIENCE_S

STORY = {"prompt": "Once upon a time there was a cat. " * 12, **GREEDY}
_ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory from which adapters may be loaded."""
    root = tmp_path_factory.mktemp("files")
    make_adapter(root / "adapters" / "one", 1)
    make_adapter(root / "adapters" / "two", 2, rank=16)
    make_adapter(root / "outside", 3)
    return root / "adapters"


@pytest.fixture(scope="module")
def server(directory: Path) -> Iterator[ServerProcess]:
    with ServerProcess(
        f"lora.adapters={{start:{directory}/one}}",
        "lora.max_adapters=3",
        "lora.allow_runtime_loading=true",
        f"lora.directory={directory}",
        "server.restart_backoff_s=0.01",
        "server.max_restarts=50",
    ) as process:
        yield process


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=200) as one:
        yield one


@pytest.fixture
def load(server: ServerProcess) -> Iterator[Any]:
    """Loads an adapter; at the end of the test all adapters but `start` are unloaded."""

    def load(name: str, path: object, **fields: object) -> Any:
        body = {"lora_name": name, "lora_path": str(path), **fields}
        return HTTP.post(f"{server.url}/v1/load_lora_adapter", json=body)

    yield load
    for card in HTTP.get(f"{server.url}/v1/models").json()["data"]:
        if card["id"] not in ("start", MODEL):
            assert unload(server, card["id"]).status_code == 200


def unload(server: ServerProcess, name: str) -> Any:
    return HTTP.post(f"{server.url}/v1/unload_lora_adapter", json={"lora_name": name})


def ask(client: openai.OpenAI, model: str) -> str:
    answer = client.chat.completions.create(
        model=model, messages=HI, temperature=0, max_tokens=24, extra_body={"ignore_eos": True}
    )
    assert answer.model == model
    return answer.choices[0].message.content or ""


def story(server: ServerProcess, model: str, **fields: Any) -> dict[str, Any]:
    return post(server, COMPLETIONS, model=model, **{**STORY, **fields})


def text_of(answer: dict[str, Any]) -> str:
    return answer["choices"][0]["text"]


def test_a_life(server, client, load, directory):
    base, start = ask(client, MODEL), ask(client, "start")
    assert base != start
    assert load("late", "one").text == "Success: LoRA adapter 'late' added successfully."
    assert load("two", directory / "two").status_code == 200
    assert ask(client, "late") == start
    assert ask(client, "two") not in (base, start)
    assert ask(client, MODEL) == base
    cards = {card.id: card for card in client.models.list()}
    assert list(cards) == [MODEL, "start", "late", "two"]
    assert cards["late"].model_dump()["parent"] == MODEL
    assert cards["late"].model_dump()["root"] == str(directory / "one")
    assert client.models.retrieve("late").id == "late"
    assert "adapter 'late' is loaded" in server.wait_for_line("adapter 'late' is loaded")
    assert unload(server, "late").text == "Success: LoRA adapter 'late' removed successfully."
    with pytest.raises(openai.NotFoundError, match=r"and the adapters 'start', 'two'"):
        ask(client, "late")
    assert unload(server, "late").status_code == 404
    assert ask(client, "start") == start


def test_a_reload_under_the_same_name(server, load):
    """No block of the old adapter's cache is used."""
    load("same", "two")
    other = text_of(story(server, "same"))
    again = story(server, "same")
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    assert text_of(again) == other
    assert load("same", "one").status_code == 400
    assert load("same", "one", load_inplace=True).status_code == 200
    answer = story(server, "same", cache_salt="")
    expected = story(server, "start", cache_salt="of a request that shares nothing")
    assert text_of(answer) == text_of(expected) != other


def test_the_base_model_shares_no_blocks_with_an_adapter(server):
    base = story(server, MODEL)
    first = story(server, "start", cache_salt="new")
    assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert text_of(first) != text_of(base)
    assert text_of(story(server, MODEL)) == text_of(base)


@pytest.mark.parametrize(
    "fields",
    [
        {"n": 3, "temperature": 1, "seed": 3},
        {"best_of": 3, "temperature": 1, "seed": 3},
        {"use_beam_search": True, "best_of": 3, "n": 2},
        {"echo": True, "logprobs": 2, "max_tokens": 4},
        {"prompt_logprobs": 1, "max_tokens": 4},
    ],
)
def test_other_kinds_of_requests(server, load, fields):
    """They give the same as the same adapter under another name, and not what the model gives."""
    load("late", "one")

    def asked(model: str) -> Any:
        return story(server, model, prompt="Once upon a time", **fields)["choices"]

    assert asked("late") == asked("start") != asked(MODEL)


def test_a_mixed_batch_gives_what_each_request_gives_alone(server, load):
    load("two", "two")
    names = [MODEL, "start", "two"] * 4
    alone = {name: text_of(story(server, name)) for name in set(names)}
    assert len(set(alone.values())) == 3
    with ThreadPoolExecutor(len(names)) as pool:
        together = list(pool.map(lambda name: text_of(story(server, name)), names))
    assert together == [alone[name] for name in names]


def test_other_dialects(server, client):
    answer = client.responses.create(
        model="start", input="What is a list?", temperature=0, max_output_tokens=16
    )
    base = client.responses.create(
        model=MODEL, input="What is a list?", temperature=0, max_output_tokens=16
    )
    assert (answer.model, base.model) == ("start", MODEL)
    assert answer.output_text != base.output_text
    with anthropic.Anthropic(base_url=server.url, api_key="none", timeout=200) as claude:
        message = claude.messages.create(
            model="start", messages=HI, max_tokens=12, extra_body={"temperature": 0}
        )
    assert message.model == "start"
    vectors = [
        client.embeddings.create(model=name, input="a list").data[0].embedding
        for name in (MODEL, "start", "start")
    ]
    assert vectors[0] != vectors[1]
    assert vectors[1] == vectors[2]
    body = {"prompt": "a list"}
    assert post(server, "/tokenize", **body, model="start") == post(server, "/tokenize", **body)


def test_paths_that_are_refused(server, load, directory):
    (directory / "out").symlink_to(directory.parent / "outside")
    (directory / "inner").mkdir()
    config = directory.parent / "outside" / "adapter_config.json"
    (directory / "inner" / "adapter_config.json").symlink_to(config)
    for path in ("../outside", directory.parent / "outside", "out", "inner", "absent", "/", "a\0"):
        answer = load("bad", path)
        assert answer.status_code == 400, path
        assert answer.json()["error"]["param"] == "lora_path"


def test_broken_adapters_are_refused_and_the_server_lives(server, client, load, directory):
    before = ask(client, "start")
    pid = server.engine.pid
    make_adapter(directory / "dora", 4, use_dora=True)
    make_adapter(directory / "large", 5, rank=32)  # above lora.max_rank
    make_adapter(directory / "wrong", 6, r=4)  # the file has rank 8
    make_adapter(directory / "cut", 7)
    file = directory / "cut" / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    (directory / "empty").mkdir()
    for name, text in {
        "dora": "use_dora",
        "large": "lora.max_rank",
        "wrong": "adapter_model.safetensors",
        "cut": "adapter_model.safetensors",
        "empty": "adapter_config.json",
    }.items():
        answer = load(name, name)
        assert answer.status_code == 400, name
        assert text in answer.json()["error"]["message"]
    for _ in range(4):  # a refused load gives its slot back
        assert load("cut", "cut").status_code == 400
    assert load("two", "two").status_code == 200
    assert ask(client, "start") == before
    assert server.engine.pid == pid


def test_no_more_adapters_than_slots(server, load):
    assert load("a", "one").status_code == 200
    assert load("b", "two").status_code == 200
    full = load("c", "two")
    assert full.status_code == 400
    assert "lora.max_adapters=3" in full.json()["error"]["message"]
    assert unload(server, "a").status_code == 200
    assert load("c", "two").status_code == 200
    assert server.metrics()["ostinato_adapter_slots_used"] == 3


def test_an_unloaded_adapter_serves_the_requests_that_named_it(server, load):
    load("late", "two")
    expected = text_of(story(server, "late"))
    body = {**STORY, "model": "late"}
    with (
        server.held_engine(),
        server.sent(COMPLETIONS, body, "kept") as connection,
    ):
        assert unload(server, "late").status_code == 200
        server.engine.resume()
        answer = json.loads(connection.getresponse().read())
    assert (answer["model"], text_of(answer)) == ("late", expected)


def test_streams_survive_the_death_of_the_engine(server, client, load):
    load("two", "two")
    names = (MODEL, "start", "two")
    requests = [
        (
            COMPLETIONS,
            {
                "model": names[number % 3],
                "prompt": f"Story {number}",
                "max_tokens": 100,
                "ignore_eos": True,
                "temperature": 0.9,
                "seed": number,
                "stream": True,
                "stream_options": {"include_usage": True},
            },
        )
        for number in range(9)
    ]

    expected = run_streams(server, requests)
    assert run_streams(server, requests, kill_at=200) == expected
    assert ask(client, "start") != ask(client, MODEL)
    assert ask(client, "two") != ask(client, MODEL)


def test_an_adapter_whose_files_are_gone_after_a_restart(server, client, load, directory):
    files = shutil.copytree(directory / "two", directory / "gone")
    load("gone", "gone")
    expected, restarts = ask(client, "gone"), server.num_restarts()
    shutil.rmtree(files)
    server.engine.kill()
    with pytest.raises(openai.NotFoundError, match="not loaded in this engine") as caught:
        ask(client, "gone")
    assert server.num_restarts() == restarts + 1
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.APIError, match="not loaded in this engine"):
        next(iter(client.completions.create(model="gone", prompt="a", stream=True)))
    shutil.copytree(directory / "two", files)
    assert load("gone", "gone", load_inplace=True).status_code == 200
    assert ask(client, "gone") == expected


def test_metrics(server):
    before = server.metrics()['ostinato_adapter_requests_total{adapter="start"}']
    post(server, CHAT, model="start", messages=HI, max_tokens=1)
    metrics = server.metrics()
    assert metrics['ostinato_adapter_requests_total{adapter="start"}'] == before + 1
    assert metrics["ostinato_adapter_slots"] == 3
    assert any(name.startswith('vllm:lora_requests_info{max_lora="3"}') for name in metrics)


def test_a_batch_file(directory, tmp_path):
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    rows = [
        {"custom_id": name, "url": COMPLETIONS, "body": {**STORY, "model": name}}
        for name in ("start", MODEL, "none")
    ]
    load = {"lora_name": "a", "lora_path": "one"}
    rows.append({"custom_id": "load", "url": "/v1/load_lora_adapter", "body": load})
    source.write_text("\n".join(map(json.dumps, rows)))
    overrides = [one for one in SMALL if not one.startswith("server.")]
    subprocess.run(
        [
            *(sys.executable, "-m", "ostinato", "batch", str(source), str(target), *overrides),
            f"lora.adapters={{start:{directory}/one}}",
        ],
        cwd=_ROOT,
        check=True,
        timeout=PATIENCE_S,
    )
    found = {row["custom_id"]: row for row in map(json.loads, target.read_text().splitlines())}
    assert found["start"]["response"]["body"]["model"] == "start"
    texts = [text_of(found[name]["response"]["body"]) for name in ("start", MODEL)]
    assert texts[0] != texts[1]
    assert found["none"]["response"]["status_code"] == 404
    assert found["load"]["error"]["code"] == "invalid_line"


def test_a_start_with_a_broken_adapter_fails(tmp_path):
    overrides = [*SMALL, f"lora.adapters={{bad:{tmp_path}}}"]
    done = subprocess.run(
        [sys.executable, "-m", "ostinato", "serve", *overrides],
        cwd=_ROOT,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 1
    assert "bad" in done.stderr.splitlines()[-1]
    assert "adapter_config.json" in done.stderr.splitlines()[-1]
