"""`LLM.transcribe`, against transformers on the windows that HTTP cuts."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from transformers import (
    WhisperProcessor,
)

from ostinato.conf.sections.audio_schema import AudioConfig
from ostinato.runtime.audio.audio_inputs import prepare_samples
from ostinato.runtime.audio.segments import WindowTranscript, text_ids, transcript_segments
from ostinato.runtime.errors import InvalidRequestError
from tests.runtime.audio_engines import audio_llm, make_audio_model
from tests.runtime.offline.offline_sounds import (
    PLAIN,
    RATE,
    TIMED,
    Served,
    generate,
    prompt_of,
    sound_of,
    wav,
    without_end,
)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    model = make_audio_model(tmp_path_factory.mktemp("model"))
    with audio_llm(model) as llm:
        yield Served(model, WhisperProcessor.from_pretrained(model.path), llm)


def expected_of(served: Served, samples: np.ndarray, prompt: list[int], max_tokens: int):
    """Windows as over HTTP, each transcribed by transformers."""
    spec = served.llm.model.audio
    prepared = prepare_samples(samples, RATE, spec, AudioConfig())
    windows, texts = [], []
    decode = served.llm.tokenizer.decode
    for place in prepared.windows:
        audio = place.audio
        features = torch.frombuffer(bytearray(audio.features), dtype=torch.float32)
        features = features.view(1, audio.num_bins, audio.num_frames)
        token_ids = served.greedy(features, prompt, max_tokens)
        logits = served.model.logits(features[0], [*prompt, *token_ids]).log_softmax(-1)
        rows = logits[len(prompt) - 1 : -1]
        start = served.model.logits(features[0], [spec.start_id])[0]
        windows.append(
            WindowTranscript(
                token_ids=token_ids,
                logprobs=rows.gather(1, torch.tensor(token_ids)[:, None])[:, 0].tolist(),
                begin_s=place.begin_s,
                end_s=place.end_s,
                no_speech_prob=start.softmax(-1)[spec.no_speech_id].item(),
            )
        )
        texts.append(decode(text_ids(token_ids, spec)))
    return "".join(texts).strip(), transcript_segments(windows, spec, decode)


def language_of(served: Served, samples: np.ndarray) -> str:
    """The likeliest language in transformers."""
    detected = served.model.reference.detect_language(served.features(samples[: 29 * RATE]))
    return served.processor.tokenizer.decode(detected[0]).strip("<|>")


def test_long_files_and_several_at_once(served):
    long, short = sound_of(1, 95), sound_of(2, 4)
    prompt = served.ids(PLAIN.replace("en", "fr"))
    found = served.llm.transcribe([(long, RATE), (short, RATE)], language="french", max_tokens=12)
    for samples, one in zip((long, short), found, strict=True):
        text, _ = expected_of(served, samples, prompt, 12)
        assert (one.text, one.language, one.segments) == (text, "fr", None)
        assert one.duration == len(samples) / RATE


def test_segments(served):
    long = sound_of(1, 70)
    [found] = served.llm.transcribe(
        (long, RATE), language="de", task="translate", timestamps=True, max_tokens=16
    )
    text, segments = expected_of(served, long, served.ids(TIMED), 16)
    assert found.text == text
    assert len(segments) > 3
    assert len(found.segments) == len(segments)
    for one, other in zip(found.segments, segments, strict=True):
        for name in ("id", "seek", "start", "end", "text", "tokens", "temperature"):
            assert getattr(one, name) == getattr(other, name)
        for name in ("avg_logprob", "compression_ratio", "no_speech_prob"):
            assert getattr(one, name) == pytest.approx(getattr(other, name), rel=1e-3)
        assert 0 < one.no_speech_prob < 1


def test_the_language_of_each_file_is_detected(served):
    sounds = [sound_of(seed, 3) * loud for seed in range(4) for loud in (0.05, 1.0)]
    found = served.llm.transcribe([(one, RATE) for one in sounds], max_tokens=8)
    assert [one.language for one in found] == [language_of(served, one) for one in sounds]
    for samples, one in zip(sounds, found, strict=True):
        prompt = served.ids(PLAIN.replace("en", one.language))
        assert one.text == expected_of(served, samples, prompt, 8)[0]


def test_paths_and_bytes(served, tmp_path):
    samples = np.round(sound_of(3, 5) * 32767).astype(np.int16)
    data = wav(samples / 32767)
    path = tmp_path / "speech"
    path.write_bytes(data)
    found = served.llm.transcribe(
        [path, str(path), data, bytearray(data), (samples, RATE)], max_tokens=8
    )
    assert all(one == found[0] for one in found)
    assert served.llm.transcribe(path, max_tokens=8) == found[:1]
    assert served.llm.transcribe([]) == []


def test_the_prompt_comes_before_every_window(served):
    before = served.ids(" the quick fox")
    samples = sound_of(1, 40)
    prompt = [*served.ids("<|startofprev|>"), *before, *served.ids(PLAIN)]
    [found] = served.llm.transcribe(
        (samples, RATE), language="en", prompt="the quick fox ", max_tokens=8
    )
    assert found.text == expected_of(served, samples, prompt, 8)[0]


def test_sampling(served):
    audio = (sound_of(2, 5), RATE)
    one, again, other = (
        served.llm.transcribe(audio, temperature=1.5, seed=seed, max_tokens=8)[0].text
        for seed in (1, 1, 2)
    )
    assert one == again != other


def test_a_window_may_fill_the_context(served):
    """And not the 16 tokens that are the default of `SamplingParams`."""
    sounds = [sound_of(seed, 5) for seed in range(6)]
    found = served.llm.transcribe([(one, RATE) for one in sounds], language="en")
    expected = [served.greedy(served.features(one), served.ids(PLAIN), 444) for one in sounds]
    assert [one.text for one in found] == [
        served.llm.tokenizer.decode(without_end(served, one)).strip() for one in expected
    ]
    assert max(map(len, expected)) > 16


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"language": "xx"}, r"language='xx' is not a language.*de, en, fr, ja"),
        ({"task": "answer"}, "task='answer' must be one of transcribe, translate"),
        ({"prompt": "<|en|>"}, "special token"),
        ({"stop": "a"}, "stop is not a parameter of transcribe; sampling has temperature"),
        ({"temperature": -1.0}, "temperature must be"),
        ({"temperature": "hot"}, "temperature"),
        ({"max_tokens": 500}, "set max_tokens to at most 444"),
    ],
)
def test_arguments_that_are_refused(served, arguments, text):
    with pytest.raises(InvalidRequestError, match=text):
        served.llm.transcribe((sound_of(1, 1), RATE), **arguments)
    assert not served.llm._engine.has_work


def test_audio_that_is_refused(served, tmp_path):
    good = wav(sound_of(1, 1))
    refused = [
        (tmp_path / "none.wav", r"audio\[1\]: the file .*none\.wav cannot be read \(No such"),
        (tmp_path, "cannot be read"),
        (b"", "file is empty"),
        (b"words", "cannot be read as audio"),
        (7, r"audio\[1\] must be a path, the bytes of a file, or \(samples, sampling_rate\)"),
        (None, "must be a path"),
        ((sound_of(1, 1), "x"), "whole number"),
        ((np.zeros(1801 * 1000, np.int16), 1000), r"longer than the 1800 s.*audio\.max_s"),
    ]
    for audio, text in refused:
        with pytest.raises(InvalidRequestError, match=text):
            served.llm.transcribe([good, audio])
    assert not served.llm._engine.has_work


def test_limits_are_those_of_the_settings(served, tmp_path):
    path = tmp_path / "a.wav"
    path.write_bytes(wav(sound_of(1, 3)))
    with audio_llm(served.model, "audio.max_mib=0.05") as llm:
        for audio in (path, path.read_bytes()):
            with pytest.raises(InvalidRequestError, match=r"audio\.max_mib") as refused:
                llm.transcribe(audio)
            assert refused.value.code == "audio_too_large"


def test_only_files_and_other_rates_need_pyav(served, monkeypatch):
    samples, slow = sound_of(1, 2), sound_of(1, 2, 8000)
    data = wav(samples)
    monkeypatch.setitem(sys.modules, "av", None)
    assert served.llm.transcribe((samples, RATE), max_tokens=4)
    assert generate(served, prompt_of(samples))
    for run in (
        lambda: served.llm.transcribe(data),
        lambda: served.llm.transcribe((slow, 8000)),
        lambda: generate(served, prompt_of(slow, rate=8000)),
    ):
        with pytest.raises(InvalidRequestError, match=r"pip install \"ostinato\[audio\]") as no:
            run()
        assert no.value.code == "missing_package"


def test_an_english_model(tmp_path):
    model = make_audio_model(tmp_path, multilingual=False)
    with audio_llm(model) as llm:
        served = Served(model, WhisperProcessor.from_pretrained(model.path), llm)
        samples, text = sound_of(1, 40), "<|startoftranscript|><|notimestamps|>"
        expected, _ = expected_of(served, samples, served.ids(text), 8)
        for language in (None, "english"):
            [found] = llm.transcribe((samples, RATE), language=language, max_tokens=8)
            assert (found.text, found.language) == (expected, "en")
        timed = served.ids("<|startoftranscript|>")
        [answer] = generate(served, prompt_of(samples[:RATE], "<|startoftranscript|>"))
        assert answer == served.greedy(served.features(samples[:RATE]), timed, 24)
        with pytest.raises(InvalidRequestError, match="cannot translate"):
            llm.transcribe((samples, RATE), task="translate")
        with pytest.raises(InvalidRequestError, match="language='de'"):
            llm.transcribe((samples, RATE), language="de")
