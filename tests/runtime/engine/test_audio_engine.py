"""Engines that transcribe audio, against transformers on the same weights and features."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import msgspec
import pytest
import torch

from ostinato import LLM, SamplingParams
from ostinato.runtime.errors import InvalidRequestError, StartupError
from ostinato.runtime.types.params import PoolingParams
from ostinato.runtime.types.request import Request
from tests.runtime.audio_engines import (
    GREEDY,
    AudioModel,
    audio_llm,
    check_greedy,
    finish,
    make_audio_model,
    prompt_audio,
    request,
    run,
    sound,
)
from tests.runtime.test_quantize_model import quantise
from tests.runtime.toy_tower import toy_image


class Served(NamedTuple):
    model: AudioModel
    llm: LLM


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    model = make_audio_model(tmp_path_factory.mktemp("model"))
    with audio_llm(model) as llm:
        yield Served(model, llm)


def prompts_of(model: AudioModel) -> list[tuple[list[int], torch.Tensor]]:
    """Prompts of several lengths. Two have the same audio."""
    longer = [*range(40, 61), *model.prompt]
    return [
        (model.prompt, sound(1)),
        (model.prompt, sound(2)),
        (longer, sound(1)),
        (model.prompt[:1], sound(3)),
    ]


def check_all(
    model: AudioModel, prompts: list[tuple[list[int], torch.Tensor]], answers: list[list[int]]
) -> None:
    for (token_ids, features), answer in zip(prompts, answers, strict=True):
        assert len(answer) >= GREEDY.max_tokens
        check_greedy(model, token_ids, features, answer)


def test_answers_are_those_of_transformers(served):
    model, llm = served
    before = llm._engine.stats()
    prompts = prompts_of(model)
    answers = run(llm._engine, prompts)
    check_all(model, prompts, answers)
    assert answers[0] != answers[1], "the answers do not depend on the audio"
    after = llm._engine.stats()
    assert after.num_inputs_encoded - before.num_inputs_encoded == 3
    assert after.num_encoding_hits - before.num_encoding_hits == 1
    assert not after.late_compiles


def test_keys_of_other_audio_are_not_shared(served):
    """The prompts have whole blocks of equal tokens."""
    model, llm = served
    llm.reset_prefix_cache()
    token_ids = [*range(40, 60), *model.prompt]
    first = run(llm._engine, [(token_ids, sound(11))])
    hits = llm._engine.stats().prefix_hits
    second = run(llm._engine, [(token_ids, sound(12))])
    assert llm._engine.stats().prefix_hits == hits
    again = run(llm._engine, [(token_ids, sound(11))])
    assert llm._engine.stats().prefix_hits > hits
    assert again == first != second
    check_greedy(model, token_ids, sound(12), second[0])


def test_more_windows_than_there_is_room_for_take_turns(served):
    model, llm = served
    prompts = [(model.prompt, sound(20 + number)) for number in range(7)]
    check_all(model, prompts, run(llm._engine, prompts))


def test_an_evicted_window_is_encoded_again(served):
    model, llm = served
    (first,) = run(llm._engine, [(model.prompt, sound(31))])
    run(llm._engine, [(model.prompt, sound(32 + number)) for number in range(4)])
    before = llm._engine.stats().num_inputs_encoded
    assert run(llm._engine, [(model.prompt, sound(31))]) == [first]
    assert llm._engine.stats().num_inputs_encoded == before + 1


def test_preempted_sequences_keep_their_audio(tmp_path):
    model = make_audio_model(tmp_path)
    with audio_llm(model, "cache.memory_gib=0.0003", "model.max_model_len=64") as llm:
        prompts = [(model.prompt, sound(1 + seed % 3)) for seed in range(8)]
        long = msgspec.structs.replace(GREEDY, max_tokens=40)
        answers = run(llm._engine, prompts, long)
        assert llm._engine.stats().num_preemptions > 0
    check_all(model, prompts, answers)


@pytest.mark.parametrize(
    "overrides",
    [
        ("graphs.mode=eager",),
        ("graphs.mode=captured",),
        pytest.param(("graphs.form=model",), marks=pytest.mark.slow),  # its compilation
        ("graphs.attention=reference", "graphs.mode=eager"),
        ("speculation.method=ngram", "speculation.max_tokens=3"),
        ("scheduler.max_num_batched_tokens=5", "scheduler.max_num_seqs=3"),
        ("audio.cache_windows=1",),
        ("parallel.tensor=2",),
        ("parallel.pipeline=2",),
    ],
    ids=lambda overrides: overrides[0],
)
def test_every_way_to_run_gives_the_same_answers(overrides, tmp_path):
    model = make_audio_model(tmp_path, num_bins=128, tie_word_embeddings=False)
    with audio_llm(model, *overrides) as llm:
        prompts = [(tokens, sound(seed, 128)) for seed, (tokens, _) in enumerate(prompts_of(model))]
        answers = run(llm._engine, prompts)
    check_all(model, prompts, answers)


@pytest.mark.parametrize(
    "overrides",
    [("cache.dtype=int8",), ("model.quantization=int8",), ("model.dtype=bfloat16",)],
    ids=lambda overrides: overrides[0],
)
def test_rounded_models_are_near(overrides, tmp_path):
    """The first tokens' log-probabilities are near those of transformers in float32."""
    model = make_audio_model(tmp_path)
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
    token_ids, features = [*range(40, 52), *model.prompt], sound(1)
    with audio_llm(model, *overrides) as llm:
        one = request("a", token_ids, features, params)
        llm._engine.add_request(one)
        outputs = []
        while llm._engine.has_work:
            outputs += llm._engine.step()
    found = [each for output in outputs for each in output.prompt_logprobs or []]
    expected = model.logits(features, token_ids).log_softmax(-1)
    errors = [
        abs(expected[place, token_ids[place + 1]].item() - each.logprob)
        for place, each in enumerate(found)
    ]
    assert len(errors) == len(token_ids) - 1
    assert max(errors) < 0.5
    assert sum(errors) / len(errors) < 0.15


def test_requests_that_cannot_be_served_are_refused(served):
    llm = served.llm
    audio = prompt_audio(sound(1))
    plain = Request(request_id="a", prompt_token_ids=[1], sampling=GREEDY)
    vector = msgspec.structs.replace(plain, pooling=PoolingParams())
    picture = msgspec.structs.replace(plain, images=[toy_image(1, 2, 2)])
    for one in (plain, vector, picture):
        with pytest.raises(InvalidRequestError, match=r"has no audio.*/v1/audio/transcriptions"):
            llm._engine.add_request(one)
    with pytest.raises(InvalidRequestError, match="takes none"):
        llm._engine.add_request(msgspec.structs.replace(picture, audio=audio))
    wrong = prompt_audio(sound(1, 128))
    with pytest.raises(InvalidRequestError, match=r"\[128, 3000\].*\[80, 3000\]"):
        llm._engine.add_request(msgspec.structs.replace(plain, audio=wrong))
    assert not llm._engine.has_work


def test_requests_that_end_early_give_up_their_windows(served):
    model, llm = served
    requests = [request(str(seed), model.prompt, sound(50 + seed)) for seed in range(6)]
    for one in requests:
        llm._engine.add_request(one)
    llm._engine.step()
    for one in requests[:5]:
        assert llm._engine.abort(one.request_id) is not None
    assert finish(llm._engine, [request("x", model.prompt, sound(55))])
    assert llm._engine.stats().num_waiting == 0
    llm._engine.check_integrity()


def test_what_models_with_audio_do_not_have(tmp_path):
    model = make_audio_model(tmp_path / "model")
    with pytest.raises(StartupError, match=r"lora\.max_adapters=1, but .* takes audio"):
        audio_llm(model, "lora.max_adapters=1")
    overrides = [f"model.path={model.path}", f"quantize.output={tmp_path / 'new'}"]
    with pytest.raises(StartupError, match="models that take audio are not quantised"):
        quantise(*overrides)
    (model.path / "preprocessor_config.json").unlink()
    with pytest.raises(StartupError, match=r"preprocessor_config\.json"):
        audio_llm(model)
