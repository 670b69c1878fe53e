"""Compares a model in float32 with the transformers model that saved its checkpoint.

The logits at every prompt position must agree within 1e-4, and the greedy continuations must be
equal. The logits are also compared for prompts that are computed in several steps, and for prompts
that begin with blocks of another sequence.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ostinato.conf.schema import ModelSection
from ostinato.models.base import CausalLM
from ostinato.models.checkpoints.checkpoint import open_checkpoint
from ostinato.models.checkpoints.weights import load_weights
from ostinato.models.choose_weights import choose_weights
from ostinato.models.config.model_config import ModelConfig
from ostinato.models.layers.adapter_slots import AdapterSpace
from ostinato.models.registry import build_model, read_model_config
from ostinato.models.sharding import WHOLE, Shard
from ostinato.ops.attention import select_backend
from tests.models.driver import Driver, Sequence
from tests.models.random_checkpoints import Variant, reference_model, save

TOLERANCE = 1e-4  # float32 sums in another order, over 3 layers
NUM_PROMPT = 43
NUM_GREEDY = 64
PROMPT = [(7 * index * index + 13 * index + 5) % 199 for index in range(NUM_PROMPT)]
CHUNKINGS = [[16, 16, 11], [5, 1, 17, 20], [42, 1], [1] * NUM_PROMPT]


@dataclass(frozen=True)
class Expected:
    """A model of transformers, the checkpoint that it saved, and what it computes."""

    model: PreTrainedModel
    directory: Path
    prompt_logits: Tensor  # [NUM_PROMPT, vocab_size]

    def check_greedy(self, continuation: list[int]) -> None:
        """Check that each token of a continuation is the likeliest after all tokens before it."""
        assert len(continuation) == NUM_GREEDY
        with torch.no_grad():
            logits = self.model(torch.tensor([PROMPT + continuation])).logits[0]
        assert logits[NUM_PROMPT - 1 : -1].argmax(-1).tolist() == continuation


def expect(variant: Variant, directory: Path) -> Expected:
    """Save a variant's checkpoint and compute what its model gives."""
    model = reference_model(variant)
    save(model, variant, directory)
    with torch.no_grad():
        prompt_logits = model(torch.tensor([PROMPT])).logits[0]
    return Expected(model, directory, prompt_logits)


def load(
    directory: Path,
    backend: str,
    dtype: torch.dtype = torch.float32,
    *,
    pack: bool = False,
    shard: Shard = WHOLE,
    adapters: AdapterSpace | None = None,
    **settings: Any,
) -> tuple[CausalLM, ModelConfig]:
    """Load a checkpoint; `settings` are those of the section `model`."""
    section = ModelSection(path=str(directory), **settings)
    checkpoint = open_checkpoint(section)
    config = read_model_config(checkpoint, section.implementation)
    device = torch.device("cpu")
    weights = choose_weights(section, checkpoint, pack=pack, device=device, dtype=dtype)
    spec = config.attention_spec(Driver.block_size, dtype, device, shard=shard)
    model = build_model(
        config,
        dtype=dtype,
        device=device,
        attention_backend=select_backend(backend, spec),
        weights=weights,
        shard=shard,
        adapters=adapters,
    )
    load_weights(model, checkpoint)
    assert isinstance(model, CausalLM)
    return model, config


def check_whole(driver: Driver, expected: Expected) -> Sequence:
    """Check one step for the prompt, and then one for each token; returns the finished sequence."""
    sequence = Sequence(PROMPT)
    logits = driver.prefill(sequence, [NUM_PROMPT])
    torch.testing.assert_close(logits, expected.prompt_logits, atol=TOLERANCE, rtol=0)
    expected.check_greedy(driver.greedy(sequence, logits[-1], NUM_GREEDY))
    return sequence


def check_chunked(driver: Driver, expected: Expected) -> None:
    for chunks in CHUNKINGS:
        logits = driver.prefill(Sequence(PROMPT), chunks)
        torch.testing.assert_close(logits, expected.prompt_logits, atol=TOLERANCE, rtol=0)


def check_cached(driver: Driver, expected: Expected, first: Sequence) -> None:
    """A second sequence computes only what follows the first one's five full blocks."""
    sequence = Sequence(PROMPT)
    driver.adopt(sequence, first, 40)
    logits = driver.prefill(sequence, [NUM_PROMPT - 40])
    torch.testing.assert_close(logits, expected.prompt_logits[40:], atol=TOLERANCE, rtol=0)
    driver.greedy(sequence, logits[-1], NUM_GREEDY)
    assert sequence.token_ids == first.token_ids
    assert sequence.block_ids[:5] == first.block_ids[:5]


def check_batched(driver: Driver, expected: Expected, greedy: list[int]) -> None:
    """Three sequences join one after the other: prefill, chunks and decode share steps."""
    one, two, three = Sequence(PROMPT), Sequence(PROMPT[:30]), Sequence(PROMPT)
    driver.step([(one, 42)])
    want = expected.prompt_logits
    got = driver.step([(two, 30), (one, 1)])
    torch.testing.assert_close(got[0], want[:30], atol=TOLERANCE, rtol=0)
    torch.testing.assert_close(got[1], want[42:], atol=TOLERANCE, rtol=0)
    one.token_ids.append(greedy[0])
    two.token_ids.append(PROMPT[30])
    got = driver.step([(one, 1), (three, 43), (two, 1)])
    assert int(got[0].argmax()) == greedy[1]
    torch.testing.assert_close(got[1], want, atol=TOLERANCE, rtol=0)
    torch.testing.assert_close(got[2], want[30:31], atol=TOLERANCE, rtol=0)


def check_all(driver: Driver, expected: Expected) -> None:
    first = check_whole(driver, expected)
    check_chunked(driver, expected)
    check_cached(driver, expected, first)
    check_batched(driver, expected, first.token_ids[NUM_PROMPT:])
