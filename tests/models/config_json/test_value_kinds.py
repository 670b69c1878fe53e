"""Values of a config.json that have another kind or are out of range are refused by their key."""

from __future__ import annotations

from typing import Any

import pytest

from tests.models.config_json.test_config import EXPERTS, MISTRAL, read

GEMMA2 = {"architectures": ["Gemma2ForCausalLM"]}
LLAMA4 = {"architectures": ["Llama4ForCausalLM"], **EXPERTS, "intermediate_size_mlp": 64}


@pytest.mark.parametrize("window", [-16, 2.5, True, "7", [7]])
def test_a_sliding_window_is_an_integer(window: Any) -> None:
    """A negative window would be attention in chunks."""
    with pytest.raises(ValueError, match="sliding_window must be an integer of at least 0, got "):
        read(**{**MISTRAL, "sliding_window": window})


def test_a_sliding_window_of_0_is_none() -> None:
    assert read(**{**MISTRAL, "sliding_window": 0}).sliding_windows == (0,) * 4


def test_null_is_no_cap_and_a_false_flag() -> None:
    """As in transformers. A missing key has the default of the family."""
    config = read(**GEMMA2, attn_logit_softcapping=None, tie_word_embeddings=None)
    assert (config.attention_soft_cap, config.logit_soft_cap) == (0.0, 30.0)
    assert not config.tie_word_embeddings
    assert read(**GEMMA2).tie_word_embeddings


def test_a_number_may_be_an_integer_or_a_text() -> None:
    """model.config reads 1e-5 as a text."""
    assert read(rms_norm_eps="1e-5") == read(rms_norm_eps=1e-5)
    assert read(**GEMMA2, final_logit_softcapping=30) == read(**GEMMA2)


def test_the_temperature_of_published_llama_4_files() -> None:
    """They state 4 where transformers has a flag."""
    assert read(**LLAMA4, attn_temperature_tuning=4) == read(**LLAMA4)
    assert read(**LLAMA4, attn_temperature_tuning=0).query_temperature is None


def test_the_first_token_is_one_integer_or_none() -> None:
    assert read(bos_token_id=[5]).bos_token_id == read(bos_token_id=5).bos_token_id == 5
    assert read().bos_token_id is read(bos_token_id=None).bos_token_id is None


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"rms_norm_eps": -1}, "rms_norm_eps must be a number of at least 0, got -1"),
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings must be true or false, got 'false"),
        ({"bos_token_id": "<s>"}, "bos_token_id must be an integer or several, got '<s>'"),
        ({"bos_token_id": [1, 2]}, r"bos_token_id must be one integer, got \[1, 2\]"),
        (GEMMA2 | {"query_pre_attn_scalar": 0}, "scalar must be a number above 0, got 0"),
        (LLAMA4 | {"no_rope_layer_interval": 0}, "must be an integer of at least 1, got 0"),
        ({"partial_rotary_factor": 1.5}, "partial_rotary_factor must be at most 1, got 1.5"),
        (
            {"rope_parameters": {"rope_type": "linear", "factor": -2}},
            "factor must be a number above 0, got -2",
        ),
        (
            {"architectures": ["MptForCausalLM"], "attn_config": "x"},
            "attn_config must be an object, got 'x'",
        ),
    ],
)
def test_values_out_of_range_are_named(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        read(**settings)


@pytest.mark.parametrize(
    ("base", "key"),
    [
        (MISTRAL, "num_hidden_layers"),
        ({"architectures": ["SmolLM3ForCausalLM"]}, "num_hidden_layers"),
        ({"architectures": ["BertModel"]}, "num_hidden_layers"),
        ({"architectures": ["GPT2LMHeadModel"]}, "n_layer"),
        ({"architectures": ["MixtralForCausalLM"], **EXPERTS}, "num_local_experts"),
    ],
    ids=str,
)
@pytest.mark.parametrize("number", [10_001, 1 << 31, 10**400], ids=["10001", "2**31", "10**400"])
def test_a_number_of_parts_that_cannot_be_built(
    base: dict[str, Any], key: str, number: int
) -> None:
    """Each of them would be built, so a file could make a start endless."""
    with pytest.raises(ValueError, match=f"{key} must be at most 10000, got {number}"):
        read(**{**base, key: number})
