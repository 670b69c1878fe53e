"""Prompts of the decoder: literals from Whisper, and the cut of earlier text."""

from __future__ import annotations

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import GenerationConfig, WhisperConfig
from transformers.models.whisper.generation_whisper import WhisperGenerationMixin

from ostinato.runtime.audio.transcript_prompt import detection_prompt, rules_of, transcript_prompt
from ostinato.runtime.errors import InvalidRequestError
from tests.api.audio.whisper_spec import ENGLISH, MULTILINGUAL


def prompt(spec=MULTILINGUAL, language="de", task="transcribe", timestamps=False, previous=()):
    return transcript_prompt(
        spec,
        language=language,
        task=task,
        has_timestamps=timestamps,
        previous_ids=previous,
        max_model_len=448,
    )


def test_the_parts_of_a_prompt() -> None:
    assert prompt() == [50258, 50261, 50359, 50363]
    assert prompt(timestamps=True) == [50258, 50261, 50359]
    assert prompt(task="translate") == [50258, 50261, 50358, 50363]
    assert prompt(previous=[5, 6]) == [50361, 5, 6, 50258, 50261, 50359, 50363]
    assert detection_prompt(MULTILINGUAL) == [50258]


def test_an_english_model_has_neither_languages_nor_tasks() -> None:
    assert prompt(ENGLISH, None) == [50257, 50362]
    assert prompt(ENGLISH, "en", timestamps=True, previous=[5]) == [50360, 5, 50257]
    with pytest.raises(InvalidRequestError, match=r"language='de'.* codes.*: en") as raised:
        prompt(ENGLISH, "de")
    assert raised.value.param == "language"
    with pytest.raises(InvalidRequestError, match=r"cannot translate.*multilingual model"):
        prompt(ENGLISH, None, task="translate")


def test_an_unknown_language_is_refused_with_the_known_codes() -> None:
    with pytest.raises(InvalidRequestError, match=r"language='xx'.*: de, en, zh$"):
        prompt(language="xx")


def test_a_model_without_the_token_of_earlier_text_gets_none() -> None:
    spec = msgspec.structs.replace(MULTILINGUAL, start_of_previous_id=None)
    assert prompt(spec, previous=[5, 6]) == prompt(spec)


@given(
    previous=st.lists(st.integers(0, 50256), min_size=1, max_size=300),
    max_model_len=st.sampled_from([4, 20, 448]),
)
def test_earlier_text_is_cut_as_in_transformers(previous: list[int], max_model_len: int) -> None:
    expected, _ = WhisperGenerationMixin._prepare_decoder_input_ids(
        cur_bsz=1,
        init_tokens=torch.tensor([[50258, 50261, 50359]]),
        current_segments=[[{"tokens": torch.tensor(previous)}]],
        batch_idx_map=[0],
        do_condition_on_prev_tokens=[True],
        prompt_ids=None,
        generation_config=GenerationConfig(prev_sot_token_id=50361, pad_token_id=50257),
        config=WhisperConfig(max_target_positions=max_model_len),
        device="cpu",
        suppress_tokens=None,
        timestamp_begin=50364,
        kwargs={},
    )
    got = transcript_prompt(
        MULTILINGUAL,
        language="de",
        task="transcribe",
        has_timestamps=True,
        previous_ids=previous,
        max_model_len=max_model_len,
    )
    assert got == expected[0].tolist()


def test_a_context_of_two_tokens_has_no_room_for_earlier_text() -> None:
    tokens = transcript_prompt(
        ENGLISH,
        language=None,
        task="transcribe",
        has_timestamps=True,
        previous_ids=[5, 6],
        max_model_len=2,
    )
    assert tokens == [50257]


def test_rules() -> None:
    plain = rules_of(MULTILINGUAL, False)
    assert plain.first_timestamp_id is None
    assert (plain.suppressed, plain.suppressed_first) == ((1, 2, 7, 50258), (220, 50257))
    timed = rules_of(MULTILINGUAL, True)
    assert (timed.first_timestamp_id, timed.no_timestamps_id) == (50364, 50363)
    assert (timed.end_id, timed.max_initial_timestamp) == (50257, 50)
