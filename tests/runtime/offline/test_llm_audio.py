"""Audio in `LLM` and `AsyncEngine`, against transformers on the same checkpoint."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    WhisperProcessor,
)

from ostinato import LLM, AsyncEngine, SamplingParams
from ostinato.conf.compose import load_config
from ostinato.runtime.errors import InvalidRequestError
from ostinato.runtime.types.transcript_rules import TranscriptRules
from tests.runtime.audio_engines import audio_llm, make_audio_model
from tests.runtime.offline.offline_sounds import (
    GREEDY,
    PLAIN,
    RATE,
    TIMED,
    Served,
    generate,
    prompt_of,
    sound_of,
    without_end,
)
from tests.runtime.tiny import tiny_config


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    model = make_audio_model(tmp_path_factory.mktemp("model"))
    with audio_llm(model) as llm:
        yield Served(model, WhisperProcessor.from_pretrained(model.path), llm)


def test_outputs_are_those_of_transformers(served):
    sounds = [sound_of(seed, 3 + 2 * seed) for seed in range(4)]
    answers = generate(served, [prompt_of(one) for one in sounds])
    for samples, answer in zip(sounds, answers, strict=True):
        expected = served.model.reference.generate(
            served.features(samples), language="en", task="transcribe", max_new_tokens=24
        )
        assert without_end(served, answer) == without_end(served, expected[0].tolist())
    assert len({tuple(answer) for answer in answers}) > 1


def test_outputs_with_timestamps_are_those_of_transformers(served):
    sounds = [sound_of(seed, 3 + 2 * seed) for seed in range(4)]
    prompt = served.ids(TIMED)
    answers = served.llm.generate([prompt_of(one, TIMED) for one in sounds], GREEDY)
    for samples, answer in zip(sounds, answers, strict=True):
        [output] = answer.outputs
        assert output.token_ids == served.greedy(served.features(samples), prompt, 24)
        assert output.text.startswith("<|0."), "timestamps are in the text, as in vLLM"
        assert (answer.prompt, answer.prompt_token_ids) == (TIMED, prompt)


def test_all_forms_of_a_prompt(served):
    samples = sound_of(3, 5)
    media, ids = {"audio": (samples, RATE)}, served.ids(PLAIN)
    [expected] = generate(served, prompt_of(samples))
    encoder = {"prompt": "", "multi_modal_data": media}
    forms: list[Any] = [
        {"prompt_token_ids": ids, "multi_modal_data": media},
        {"prompt": PLAIN, "multi_modal_data": {"audio": [(samples, RATE)]}},
        {"encoder_prompt": encoder, "decoder_prompt": PLAIN},
        {"encoder_prompt": {"multi_modal_data": media}, "decoder_prompt": ids},
        {"encoder_prompt": encoder, "decoder_prompt": {"prompt": PLAIN}},
        {"encoder_prompt": encoder, "decoder_prompt": {"prompt_token_ids": ids}},
    ]
    assert generate(served, forms) == [expected] * len(forms)
    streamed = served.llm.stream(forms[2], GREEDY)
    assert [one for output in streamed for one in output.new_token_ids] == expected


def test_all_forms_of_samples(served):
    samples = (sound_of(3, 5) * 32767).astype(np.int16)
    floats = samples.astype(np.float32) / 32768
    [expected] = generate(served, prompt_of(floats))
    stereo = np.stack([floats, floats])
    forms = [
        (samples, RATE),
        (floats.astype(np.float64), float(RATE)),
        (torch.from_numpy(floats), RATE),
        (torch.from_numpy(samples), RATE),
        (stereo, RATE),
        (stereo.T, RATE),
        (torch.from_numpy(stereo).requires_grad_(), RATE),
    ]
    assert generate(served, [prompt_of(*[one], rate=rate) for one, rate in forms]) == [
        expected
    ] * len(forms)
    # The spectrogram of resampled audio is near, so its first token is the same.
    [other] = generate(served, prompt_of(sound_of(3, 5, 48_000), rate=48_000))
    assert other[0] == expected[0]


def test_a_whole_window_and_no_more(served):
    assert len(generate(served, prompt_of(sound_of(1, 30.0)))) == 1
    assert len(generate(served, prompt_of(sound_of(1, 30.0, 11_025), rate=11_025))) == 1
    message = r"audio is 30\.1 s long.*one window of 30 s; use LLM\.transcribe"
    with pytest.raises(InvalidRequestError, match=message) as refused:
        generate(served, prompt_of(sound_of(1, 30.1)))
    assert refused.value.code == "audio_too_long"


def test_a_prompt_that_asks_for_the_language_has_no_rules(served):
    """As vLLM's example does: the model writes all that follows."""
    samples, start = sound_of(1, 4), served.ids("<|startoftranscript|>")
    [answer] = generate(served, prompt_of(samples, "<|startoftranscript|>"))
    logits = served.model.logits(served.features(samples)[0], [*start, *answer])
    assert logits[:-1].argmax(-1).tolist() == answer


def test_own_rules_replace_those_of_the_checkpoint(served):
    samples = sound_of(1, 4)
    end = served.processor.tokenizer.eos_token_id
    [before] = generate(served, prompt_of(samples))
    rules = TranscriptRules(suppressed=(before[0],), end_id=end)
    params = SamplingParams(temperature=0.0, max_tokens=24, transcript=rules)
    [answer] = generate(served, prompt_of(samples), params)
    assert before[0] not in answer


def test_several_completions_and_beams(served):
    samples, prompt = sound_of(2, 5), served.ids(PLAIN)
    params = SamplingParams(n=3, temperature=1.0, seed=5, max_tokens=8)
    [answer] = served.llm.generate(prompt_of(samples), params, use_progress=False)
    assert len({tuple(one.token_ids) for one in answer.outputs}) > 1
    beams = SamplingParams(use_beam_search=True, best_of=3, n=1, max_tokens=8, temperature=0.0)
    [answer] = served.llm.generate(prompt_of(samples), beams, use_progress=False)
    expected = served.model.reference.generate(
        served.features(samples),
        language="en",
        task="transcribe",
        max_new_tokens=8,
        num_beams=3,
    )
    found = answer.outputs[0].token_ids
    assert without_end(served, found) == without_end(served, expected[0].tolist())
    assert prompt == answer.prompt_token_ids


@pytest.mark.parametrize(
    ("prompt", "text"),
    [
        ("hello", r"prompt has no audio, and .* transcribes audio; use LLM\.transcribe"),
        ([1, 2], "prompt has no audio"),
        ({"prompt": PLAIN, "multi_modal_data": {"audio": []}}, "prompt has no audio"),
        ({"prompt": PLAIN, "multi_modal_data": {"image": 7}}, "must be an image of Pillow"),
        (prompt_of(sound_of(1, 1), "hello"), r"no <\|startoftranscript\|>"),
        (prompt_of(sound_of(1, 1), ""), r"no <\|startoftranscript\|>"),
        (prompt_of([0.1] * 100), r"multi_modal_data\.audio must be \(samples, sampling_rate\)"),
        (prompt_of(sound_of(1, 1), rate=0.5), "a whole number"),
        (prompt_of(np.zeros(100), rate=10), "sampling rate is 10 Hz"),
        (prompt_of(np.zeros((2, 2, 9))), r"shape \[2, 2, 9\]"),
        (prompt_of(np.zeros(0)), r"shape \[0\]"),
        (prompt_of(np.array(0.5)), r"shape \[\]"),
        (prompt_of(np.full(100, np.nan)), "no finite numbers"),
        (prompt_of(np.zeros(100, np.complex64)), "complex64"),
        (
            {"prompt": PLAIN, "multi_modal_data": {"audio": sound_of(1, 1)}},
            r"must be \(samples, sampling_rate\)",
        ),
        (
            {"prompt": PLAIN, "multi_modal_data": {"audio": [(sound_of(1, 1), RATE)] * 2}},
            "has 2 items, and a prompt takes one",
        ),
        ({"prompt": PLAIN, "multi_modal_data": {"video": 1}}, "must be an array of frames"),
        ({"decoder_prompt": PLAIN}, "encoder_prompt and decoder_prompt is"),
        ({"encoder_prompt": "a", "decoder_prompt": PLAIN}, "encoder_prompt and decoder_prompt is"),
        (
            {
                "encoder_prompt": {"prompt": "a", "multi_modal_data": {"audio": ()}},
                "decoder_prompt": PLAIN,
            },
            r"encoder_prompt\.prompt must be left out",
        ),
        (
            {"encoder_prompt": {"multi_modal_data": {"audio": ()}}, "decoder_prompt": None},
            "decoder_prompt must be",
        ),
        (
            {
                "encoder_prompt": {"multi_modal_data": {"audio": ()}},
                "decoder_prompt": prompt_of(1),
            },
            "decoder_prompt must be",
        ),
    ],
)
def test_prompts_that_are_refused(served, prompt, text):
    with pytest.raises(InvalidRequestError, match=text):
        generate(served, prompt)


def test_what_a_model_that_transcribes_does_not_do(served):
    llm = served.llm
    with pytest.raises(InvalidRequestError, match=r"no conversations; use LLM\.transcribe"):
        llm.chat([{"role": "user", "content": "hi"}])
    with pytest.raises(InvalidRequestError, match="does not give embeddings"):
        llm.embed("hi")
    params = SamplingParams(truncate_prompt_tokens=2)
    with pytest.raises(InvalidRequestError, match="truncate_prompt_tokens cannot be combined"):
        generate(served, prompt_of(sound_of(1, 1)), params)


def test_a_text_model_takes_no_audio():
    with LLM(config=tiny_config()) as llm:
        prompt = {"prompt_token_ids": [3], "multi_modal_data": {"audio": (sound_of(1, 1), RATE)}}
        with pytest.raises(InvalidRequestError, match="takes no sounds; send text only"):
            llm.generate(prompt)
        with pytest.raises(InvalidRequestError, match="does not transcribe audio"):
            llm.transcribe(b"RIFF")


def test_the_async_engine_takes_the_same_prompts(served):
    prompts = [prompt_of(sound_of(1, 3)), prompt_of(sound_of(2, 3), TIMED)]
    expected = generate(served, prompts)
    settings = ("model.dtype=float32", "cache.block_size=8", "cache.memory_gib=0.01")
    shared = ("device.name=cpu", "graphs.mode=eager", "graphs.bundle=false")
    config = load_config(
        [*settings, *shared, "speculation.method=none"],
        values={"model.path": str(served.model.path)},
    )

    async def run() -> list[list[int]]:
        async with AsyncEngine(config=config) as engine:
            with pytest.raises(InvalidRequestError, match="prompt has no audio"):
                async for _ in engine.generate("hi", GREEDY):
                    pass
            return [
                [
                    token
                    async for output in engine.generate(prompt, GREEDY)
                    for token in output.new_token_ids
                ]
                for prompt in prompts
            ]

    assert asyncio.run(run()) == expected
