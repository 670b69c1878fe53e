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
from transformers import PreTrainedModel

from ostinato.conf.schema import GraphForm, ModelSection
from ostinato.graphs.compiler.compile import compile_model
from ostinato.models.base import CausalLM
from ostinato.models.checkpoints.checkpoint import open_checkpoint
from ostinato.models.checkpoints.weights import load_weights
from ostinato.models.config.model_config import ModelConfig
from ostinato.models.linear_layers import LinearBase
from ostinato.models.registry import build_model, read_model_config
from ostinato.models.weight_methods.choose import choose_weights
from ostinato.models.weight_methods.packed import Packed
from ostinato.ops.attention import select_backend
from tests.models.driver import Driver, Sequence
from tests.models.random_checkpoints import VARIANTS, reference_model, save

TOLERANCE = 1e-4  # float32 sums in another order, over 3 layers
NUM_PROMPT = 43
NUM_GREEDY = 64
PROMPT = [(7 * index * index + 13 * index + 5) % 199 for index in range(NUM_PROMPT)]
CHUNKINGS = [[16, 16, 11], [5, 1, 17, 20], [42, 1], [1] * NUM_PROMPT]
SLOW = pytest.mark.slow  # each part of their layers is in one that is not
PACKED = ["gpt2", "llama3", "llama-linear-bias", "mixtral", "phi3", "qwen3-moe-mixed", "qwen3-tied"]
COMPILED = [
    (GraphForm.layer, "bloom"),
    pytest.param(GraphForm.layer, "falcon-40b", marks=SLOW),
    (GraphForm.layer, "gemma3"),
    (GraphForm.layer, "gpt-neox"),
    (GraphForm.layer, "gpt2"),
    (GraphForm.layer, "llama3"),
    pytest.param(GraphForm.layer, "mpt", marks=SLOW),
    pytest.param(GraphForm.layer, "olmo2", marks=SLOW),
    pytest.param(GraphForm.layer, "mistral", marks=SLOW),
    (GraphForm.layer, "qwen3-moe-mixed"),  # two kinds of layers
    (GraphForm.layer, "qwen2-window"),  # two kinds of layers
    (GraphForm.layer, "qwen3-tied"),
    (GraphForm.model, "gpt2"),
    (GraphForm.model, "qwen2-window"),
    (GraphForm.model, "qwen3-tied"),
]


@dataclass(frozen=True)
class Expected:
    """A model of transformers, the checkpoint that it saved, and what it computes."""

    model: PreTrainedModel
    directory: Path
    prompt_logits: Tensor  # [NUM_PROMPT, vocab_size]

    def check_greedy(self, continuation: list[int]) -> None:
        """Each token is the likeliest after all before it, so this is the greedy continuation."""
        assert len(continuation) == NUM_GREEDY
        with torch.no_grad():
            logits = self.model(torch.tensor([PROMPT + continuation])).logits[0]
        assert logits[NUM_PROMPT - 1 : -1].argmax(-1).tolist() == continuation


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory):
    """variant name -> Expected, computed once."""

    @cache
    def compute(name: str) -> Expected:
        model = reference_model(VARIANTS[name])
        directory = save(model, VARIANTS[name], tmp_path_factory.mktemp(name))
        with torch.no_grad():
            prompt_logits = model(torch.tensor([PROMPT])).logits[0]
        return Expected(model, directory, prompt_logits)

    return compute


def load(
    directory: Path, backend: str, dtype: torch.dtype = torch.float32, *, pack: bool = False
) -> tuple[CausalLM, ModelConfig]:
    section = ModelSection(path=str(directory))
    checkpoint = open_checkpoint(section)
    config = read_model_config(checkpoint)
    device = torch.device("cpu")
    weights = choose_weights(section, checkpoint.hf_config, pack=pack, device=device, dtype=dtype)
    spec = config.attention_spec(Driver.block_size, dtype, device)
    model = build_model(
        config,
        dtype=dtype,
        device=device,
        attention_backend=select_backend(backend, spec),
        weights=weights,
    )
    load_weights(model, checkpoint)
    return model, config


def check_whole(driver: Driver, expected: Expected) -> Sequence:
    """One step for the prompt, then one for every token; returns the finished sequence."""
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


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("name", VARIANTS)
def test_eager(expected, name: str, backend: str) -> None:
    model, config = load(expected(name).directory, backend)
    check_all(Driver(model, config), expected(name))


@pytest.mark.parametrize("name", PACKED)
def test_packed(expected, name: str) -> None:
    model, config = load(expected(name).directory, "cpu", pack=True)
    # A layer has 4 matrices, and a router before experts; the output head is one more, tied or not.
    matrices = [module for module in model.modules() if isinstance(module, LinearBase)]
    expected_count = 4 * config.num_layers + 1 + sum(config.moe.layers if config.moe else ())
    assert sum(module.method == Packed() for module in matrices) == expected_count
    check_all(Driver(model, config), expected(name))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["gpt2", "llama3", "qwen3-tied"])
def test_half_precision(expected, name: str, dtype: torch.dtype) -> None:
    """As near to the float32 logits as transformers comes in the same dtype."""
    model, config = load(expected(name).directory, "cpu", dtype, pack=True)
    exact = expected(name).prompt_logits
    ours = Driver(model, config).prefill(Sequence(PROMPT), [20, NUM_PROMPT - 20])
    with torch.no_grad():
        theirs = reference_model(VARIANTS[name]).to(dtype)(torch.tensor([PROMPT])).logits[0]
    assert ours.dtype == torch.float32
    assert float((ours - exact).norm()) < 1.25 * float((theirs.float() - exact).norm())


@pytest.mark.parametrize(("form", "name"), COMPILED)
def test_compiled(expected, form: GraphForm, name: str) -> None:
    model, config = load(
        expected(name).directory, "cpu", pack=name in ("qwen3-moe-mixed", "qwen3-tied")
    )
    driver = Driver(model, config)
    example = driver.batch([(Sequence(PROMPT), 5), (Sequence(PROMPT), 7)])
    driver.forward = compile_model(model, form, example, driver.cache)(model)
    check_all(driver, expected(name))
