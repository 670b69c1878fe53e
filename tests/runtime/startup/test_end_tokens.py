"""The tokens that end a sequence: those of the model's files, and the tokenizer's own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ostinato import LLM, SamplingParams
from ostinato.runtime.text.tokenizer_files import TokenizerFiles
from ostinato.runtime.types.outputs import FinishReason
from tests.runtime.text import tokenizer_builders as build
from tests.runtime.tiny import MODEL, tiny_config

STATED = 7
OWN = build.byte_level_bpe().token_to_id("<|end|>")


def write(directory: Path, tokenizer_config: dict[str, Any]) -> Path:
    """A directory with a model's configuration and a tokenizer."""
    build.byte_level_bpe().save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
    (directory / "config.json").write_text(json.dumps({**MODEL, "eos_token_id": STATED}))
    return directory


@pytest.mark.parametrize(
    ("tokenizer_config", "expected"),
    [
        ({"eos_token": "<|end|>"}, OWN),
        ({"eos_token": {"content": "<|end|>", "special": True}}, OWN),
        ({"eos_token": "x", "added_tokens_decoder": {"12": {"content": "x"}}}, 12),
        ({"eos_token": "not in the vocabulary"}, None),
        ({"eos_token": None}, None),
        ({}, None),
    ],
)
def test_the_id_of_a_tokenizers_end(
    tmp_path: Path, tokenizer_config: dict[str, Any], expected: int | None
) -> None:
    assert TokenizerFiles(write(tmp_path, tokenizer_config)).eos_token_id() == expected


def test_both_end_a_sequence(tmp_path: Path) -> None:
    path = write(tmp_path, {"eos_token": "<|end|>"})
    config = {**MODEL, "eos_token_id": STATED}
    with LLM(config=tiny_config(f"model.path={path}", model__config=config)) as llm:
        assert llm.model.eos_token_ids == (STATED, OWN)
        assert llm.model.architecture == "LlamaForCausalLM"
        for token_id, reason in (
            (STATED, FinishReason.stop),
            (OWN, FinishReason.stop),
            (9, FinishReason.length),
        ):
            sampling = SamplingParams(max_tokens=3, logit_bias={token_id: 100.0})
            (found,) = llm.generate([[3, 4]], sampling, use_progress=False)
            assert found.outputs[0].finish_reason == reason


def test_ids_outside_of_the_vocabulary_are_left_out() -> None:
    """Masking them for `min_tokens` failed, which ended the engine."""
    config = {**MODEL, "eos_token_id": [-1, STATED, MODEL["vocab_size"]]}
    with LLM(config=tiny_config(model__config=config)) as llm:
        assert llm.model.eos_token_ids == (STATED,)
        sampling = SamplingParams(max_tokens=3, min_tokens=2, logit_bias={STATED: 100.0})
        (found,) = llm.generate([[3, 4]], sampling, use_progress=False)
        assert found.outputs[0].token_ids[2:] == [STATED]


def test_the_demo_models_tokenizer_ends_no_other_model() -> None:
    with LLM(config=tiny_config()) as llm:
        assert llm.model.eos_token_ids == (MODEL["eos_token_id"],)


def test_the_vocabulary_of_a_gguf_file_is_not_read_for_its_end_token() -> None:
    # Its configuration has the id. To read the vocabulary would delay the start.
    assert TokenizerFiles("absent.gguf").eos_token_id() is None
