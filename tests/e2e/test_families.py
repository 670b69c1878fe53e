"""A small checkpoint of each family over HTTP: its greedy tokens are those of transformers."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from ostinato.models.checkpoints.checkpoint import resolve_path
from tests.e2e.server_process import HTTP, ServerProcess
from tests.models.random_checkpoints import VARIANTS, Variant, reference_model, save
from tests.models.traced.traced_variants import UNKNOWN

PROMPT = [(7 * index * index + 13 * index + 5) % 199 for index in range(21)]
NUM_TOKENS = 12
FAMILIES = {variant.model_type: name for name, variant in reversed(VARIANTS.items())}


def greedy(model: torch.nn.Module) -> list[int]:
    """The likeliest continuation of the prompt."""
    token_ids = list(PROMPT)
    with torch.no_grad():
        for _ in range(NUM_TOKENS):
            token_ids.append(int(model(torch.tensor([token_ids])).logits[0, -1].argmax()))
    return token_ids[len(PROMPT) :]


@pytest.mark.slow
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_a_checkpoint_is_served(family: str, tmp_path: Path) -> None:
    check_served(VARIANTS[FAMILIES[family]], tmp_path)


def test_a_checkpoint_is_served_through_transformers(tmp_path: Path) -> None:
    """The code of transformers is traced once. The engine then runs the traced graph."""
    check_served(UNKNOWN["seed_oss"], tmp_path)


def check_served(variant: Variant, tmp_path: Path) -> None:
    """A server that loads the variant's checkpoint continues the prompt as transformers does."""
    model = reference_model(variant)
    directory = save(model, variant, tmp_path / "model")
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(resolve_path("") / file, directory)
    with ServerProcess(f"model.path={directory}", "model.max_model_len=128") as server:
        answer = HTTP.post(
            f"{server.url}/v1/completions",
            json={
                "prompt": PROMPT,
                "max_tokens": NUM_TOKENS,
                "temperature": 0,
                "ignore_eos": True,
                "return_token_ids": True,
            },
        )
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["token_ids"] == greedy(model)
