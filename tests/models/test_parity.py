"""Every architecture against transformers on the same random weights, in float32.

The same logits at every prompt position within 1e-4 and the same greedy continuation, however the
tokens are cut into steps and wherever their keys and values come from.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor

from ostinato.conf.schema import ModelSection
from ostinato.models.base import CausalLM
from ostinato.models.checkpoint import open_checkpoint
from ostinato.models.config import ModelConfig
from ostinato.models.registry import build_model, read_model_config
from ostinato.models.weights import load_weights
from tests.models.checkpoints import VARIANTS, reference_model, save
from tests.models.driver import Driver, Sequence

TOLERANCE = 1e-4  # float32 sums in another order, over 3 layers
NUM_PROMPT = 43
NUM_GREEDY = 64
PROMPT = [(7 * index * index + 13 * index + 5) % 199 for index in range(NUM_PROMPT)]


@dataclass(frozen=True)
class Expected:
    """What transformers computes, and the checkpoint it saved."""

    directory: Path
    prompt_logits: Tensor  # [NUM_PROMPT, vocab]
    greedy: list[int]  # NUM_GREEDY tokens


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory):
    """variant name -> Expected, computed once."""

    @cache
    def compute(name: str) -> Expected:
        model = reference_model(VARIANTS[name])
        directory = save(model, VARIANTS[name], tmp_path_factory.mktemp(name))
        tokens = list(PROMPT)
        with torch.no_grad():
            prompt_logits = model(torch.tensor([tokens])).logits[0]
            logits = prompt_logits
            for _ in range(NUM_GREEDY):
                tokens.append(int(logits[-1].argmax()))
                logits = model(torch.tensor([tokens])).logits[0]
        return Expected(directory, prompt_logits, tokens[NUM_PROMPT:])

    return compute


def load(directory: Path, backend: str = "reference") -> tuple[CausalLM, ModelConfig]:
    checkpoint = open_checkpoint(ModelSection(path=str(directory)))
    config = read_model_config(checkpoint)
    model = build_model(
        config, dtype=torch.float32, device=torch.device("cpu"), attention_backend=backend
    )
    load_weights(model, checkpoint)
    return model, config


def assert_same(driver: Driver, expected: Expected, chunks: list[int]) -> Sequence:
    sequence = Sequence(PROMPT)
    logits = driver.prefill(sequence, chunks)
    torch.testing.assert_close(logits, expected.prompt_logits, atol=TOLERANCE, rtol=0)
    assert driver.greedy(sequence, logits[-1], NUM_GREEDY) == expected.greedy
    return sequence


@pytest.mark.parametrize("name", VARIANTS)
def test_eager_whole_prefill(expected, name: str) -> None:
    model, config = load(expected(name).directory)
    assert_same(Driver(model, config), expected(name), [NUM_PROMPT])
