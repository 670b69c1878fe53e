"""A GGUF file over HTTP: its tokens, its chat template, its name, and errors of broken files."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
import transformers

from ostinato.models.checkpoints.checkpoint import resolve_path
from ostinato.runtime.text.tokenizer import Tokenizer
from tests.e2e.server_process import HTTP, ServerProcess
from tests.models.gguf_files import add_tokenizer, write_gguf

NUM_TOKENS = 24
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The demo model as a split GGUF model, and as a checkpoint with the dequantised weights."""
    directory = tmp_path_factory.mktemp("demo")
    checkpoint = directory / "checkpoint"
    checkpoint.mkdir()
    for file in resolve_path("").glob("*.*"):
        if file.suffix in (".json", ".safetensors", ".jinja"):
            shutil.copy(file, checkpoint)
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    model.save_pretrained(checkpoint)

    def metadata(writer: gguf.GGUFWriter) -> None:
        tokenizer = json.loads((checkpoint / "tokenizer.json").read_text())
        add_tokenizer(writer, tokenizer, pre="qwen2", eos_token_id=2, padding_token_id=0)
        writer.add_chat_template((checkpoint / "chat_template.jinja").read_text())

    file = write_gguf(
        checkpoint,
        directory / "small-Q8_0.gguf",
        type_of=lambda name: "Q8_0",
        metadata=metadata,
        split_tensors=20,
    )
    return file, checkpoint


def test_a_split_file_is_served(demo: tuple[Path, Path]) -> None:
    file, checkpoint = demo
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    with ServerProcess(f"model.path={file.parent}") as server:
        listed = HTTP.get(f"{server.url}/v1/models").json()["data"][0]
        answer = HTTP.post(
            f"{server.url}/v1/chat/completions",
            json={
                "messages": QUESTION,
                "max_tokens": NUM_TOKENS,
                "temperature": 0,
                "return_token_ids": True,
            },
        )
        constrained = HTTP.post(
            f"{server.url}/v1/chat/completions",
            json={"messages": QUESTION, "structured_outputs": {"choice": ["Paris", "Rome"]}},
        )
    assert listed["id"] == "small-Q8_0"
    assert answer.status_code == 200, answer.text
    tokenizer = Tokenizer.from_path(file)
    ids = tokenizer.encode(tokenizer.apply_chat_template(QUESTION), add_special_tokens=False)
    body = answer.json()
    assert body["prompt_token_ids"] == ids
    with torch.no_grad():
        expected = model.generate(
            torch.tensor([ids]),
            attention_mask=torch.ones(1, len(ids), dtype=torch.long),
            max_new_tokens=NUM_TOKENS,
            do_sample=False,
        )[0, len(ids) :].tolist()
    # The engine rounds activations to 8 bits. Where two tokens are almost equally likely, it may
    # choose the other one, and later tokens then differ.
    assert body["choices"][0]["token_ids"][:8] == expected[:8]
    assert constrained.json()["choices"][0]["message"]["content"] in ("Paris", "Rome")


def test_run_plan_knows_the_sizes(demo: tuple[Path, Path]) -> None:
    file, _ = demo
    command = [sys.executable, "-m", "ostinato", "plan", f"model.path={file}", "plan.json=true"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    assert '"weights' in done.stdout


def test_a_file_that_is_cut_short_ends_in_one_line(demo: tuple[Path, Path], tmp_path: Path) -> None:
    file, _ = demo
    short = tmp_path / "short.gguf"
    short.write_bytes(file.read_bytes()[:5000])
    command = [sys.executable, "-m", "ostinato", "serve", f"model.path={short}", "server.port=0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode != 0
    assert "short.gguf is broken or cut short" in done.stderr + done.stdout
    assert "Traceback" not in done.stderr + done.stdout
