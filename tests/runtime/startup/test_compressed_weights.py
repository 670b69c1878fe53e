"""Engines with compressed weights give the answers of engines with packed weights, bit for bit."""

from __future__ import annotations

import pytest

from ostinato import LLM, SamplingParams
from ostinato.models.choose_weights import WeightsByRole
from ostinato.models.weight_methods.compressed import Compressed
from ostinato.models.weight_methods.packed import Packed
from ostinato.ops.native.instruction_sets import detect_isa
from ostinato.runtime.startup.plan.engine_plan import make_plan
from tests.runtime.startup.test_expert_kernels import MOE
from tests.runtime.tiny import MODEL, tiny_config

PROMPTS = [list(range(3, 3 + length)) for length in (1, 9, 17, 40)]
BFLOAT16 = "model.dtype=bfloat16"


def _answers(model: dict[str, object], *words: str) -> list[tuple[list[int], list[float]]]:
    """Tokens and log-probabilities of greedy answers, in one batch."""
    llm = LLM(config=tiny_config(BFLOAT16, *words, model__config=model))
    params = SamplingParams(max_tokens=12, temperature=0.0, logprobs=1, ignore_eos=True)
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], params)
    answers: list[tuple[list[int], list[float]]] = []
    for output in outputs:
        (completion,) = output.outputs
        tokens = list(completion.token_ids)
        assert completion.logprobs is not None
        chances = [step.logprob for step in completion.logprobs]
        answers.append((tokens, chances))
    return answers


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (MODEL, ()),
        ({**MODEL, "tie_word_embeddings": True}, ("graphs.mode=captured",)),
        (MOE, ("graphs.mode=captured",)),
        (MODEL, ("model.quantization=int8", "model.quantization_head=none")),
        ({**MODEL, "head_dim": 20}, ("parallel.tensor=2",)),
    ],
    ids=["eager", "tied", "experts", "head", "ranks"],
)
def test_the_answers_are_those_of_packed_weights(
    model: dict[str, object], words: tuple[str, ...]
) -> None:
    """With heads of 20 values, the matrices of a rank share panels of 32 rows."""
    packed, compressed = (
        _answers(model, f"graphs.compress_weights={chosen}", *words) for chosen in ("false", "true")
    )
    assert packed == compressed


@pytest.mark.parametrize("isa", ["auto", "portable"])
def test_compression_is_the_default_with_amx_and_avx2(isa: str) -> None:
    weights = make_plan(tiny_config(BFLOAT16, f"device.isa={isa}").engine, 1).source.weights
    assert isinstance(weights, WeightsByRole)
    is_compressed = isa == "auto" and detect_isa() in ("amx", "avx2")
    assert weights.layers == (Compressed() if is_compressed else Packed())
