"""Engines that take sounds, against transformers on the same weights and features."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest
import torch

from ostinato import LLM, SamplingParams
from ostinato.runtime.errors import InvalidRequestError
from ostinato.runtime.types.outputs import TokenLogprobs
from tests.models.audio.sound_models import FAMILIES, hf_windows
from tests.runtime.sound_engines import (
    SoundModel,
    load_model,
    request,
    run,
    sound,
    sound_llm,
)
from tests.runtime.toy_tower import toy_image

FLAMINGO = "audioflamingo3"
SPEECH, MUSIC = sound(1, 50), sound(2, 35)  # 12 and 9 embeddings


class Served(NamedTuple):
    model: SoundModel
    llm: LLM


@pytest.fixture(scope="module", params=FAMILIES)
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    model = load_model(tmp_path_factory.mktemp("model"), request.param)
    with sound_llm(model, "scheduler.max_num_batched_tokens=16") as llm:
        yield Served(model, llm)


@pytest.fixture(scope="module")
def flamingo(tmp_path_factory: pytest.TempPathFactory) -> SoundModel:
    return load_model(tmp_path_factory.mktemp("model"), FLAMINGO)


def hits(llm: LLM) -> int:
    return llm._engine.stats().prefix_hits


def encoded(llm: LLM) -> int:
    return llm._engine.stats().num_inputs_encoded


def test_answers_are_those_of_transformers(served: Served) -> None:
    """Steps of 16 tokens divide most of these sounds."""
    model, llm = served
    prompts = [
        model.prompt([3, 4, 5], SPEECH, [6]),
        model.prompt(SPEECH, [8, 9], MUSIC, [10, 11]),
        model.prompt([20], SPEECH, MUSIC, [21]),
        model.prompt([22, 23], sound(3, 100), [24], sound(4, 6), [25]),
        model.prompt([26], sound(5, 98), [27]),  # an odd last state, which no embedding reads
        model.prompt([30, 31, 32]),
    ]
    assert [len(prompt.sounds) for prompt in prompts] == [1, 2, 2, 2, 1, 0]
    assert [one.num_tokens for one in prompts[3].sounds] == [25, 1]
    answers = model.check_run(llm, prompts)
    assert len(set(map(tuple, answers))) == len(answers)
    assert not llm._engine.stats().late_compiles


def test_the_answer_is_that_of_generate(served: Served) -> None:
    model, llm = served
    prompt = model.prompt([40, 41], SPEECH, [42], MUSIC, [43])
    (answer,) = model.check_run(llm, [prompt])
    inputs, _ = hf_windows(model.processor, prompt.samples)
    reference: Any = model.reference
    found = reference.generate(
        input_ids=torch.tensor([prompt.token_ids]),
        attention_mask=torch.ones(1, len(prompt.token_ids), dtype=torch.int64),
        **inputs,
        max_new_tokens=len(answer),
        do_sample=False,
        suppress_tokens=model.banned,
    )
    assert found[0, len(prompt.token_ids) :].tolist() == answer


def test_the_windows_of_a_long_sound_follow_each_other(flamingo: SoundModel) -> None:
    with sound_llm(flamingo, "scheduler.max_num_batched_tokens=16") as llm:
        long = sound(6, 230)
        beat = sound(7, 100)
        prompts = [
            flamingo.prompt([3, 4, 5], long, [6]),
            flamingo.prompt(sound(8, 101), [8, 9], long, [10, 11]),  # the last frame has no token
            flamingo.prompt([12], np.concatenate((beat, beat)), [13]),
        ]
        tokens = [[one.num_tokens for one in prompt.sounds] for prompt in prompts]
        assert tokens == [[25, 25, 7], [25, 25, 25, 7], [25, 25]]
        flamingo.check_run(llm, prompts)
        assert encoded(llm) == 5, "equal windows were encoded more than once"


def test_other_sounds_give_other_answers(served: Served) -> None:
    model, llm = served
    first, second = (model.prompt([3], sound(seed, 60), [6]) for seed in (11, 12))
    assert first.token_ids == second.token_ids
    one, two = model.check_run(llm, [first, second])
    assert one != two
    assert run(llm._engine, [second, first], model.greedy) == [two, one]


def test_equal_sounds_are_encoded_once(served: Served) -> None:
    model, llm = served
    fresh = sound(21, 45)
    before = llm._engine.stats()
    prompts = [model.prompt([1], fresh, [2], fresh, [3]), model.prompt([4], fresh, [5])]
    model.check_run(llm, prompts)
    after = llm._engine.stats()
    assert after.num_inputs_encoded - before.num_inputs_encoded == 1
    assert after.num_encoding_hits - before.num_encoding_hits == 1


def test_a_cached_prefix_can_end_before_a_sound(served: Served) -> None:
    model, llm = served
    llm.reset_prefix_cache()
    text = list(range(50, 62))
    first, second = (model.prompt(text, sound(seed, 50), [4] * 8) for seed in (31, 32))
    model.check_run(llm, [first])
    before = hits(llm)
    model.check_run(llm, [second])
    assert hits(llm) - before == 8  # a block


def test_a_cached_prefix_can_end_inside_a_sound(served: Served) -> None:
    model, llm = served
    llm.reset_prefix_cache()
    first, second = (model.prompt([1, 2, 3], SPEECH, [last] * 8) for last in (4, 5))
    model.check_run(llm, [first])
    before, before_encoded = hits(llm), encoded(llm)
    model.check_run(llm, [second])
    (one,) = second.sounds
    assert one.begin < hits(llm) - before < one.end
    assert encoded(llm) == before_encoded


def test_a_cached_prefix_can_end_after_a_sound(served: Served) -> None:
    model, llm = served
    llm.reset_prefix_cache()
    prompt = model.prompt([1, 2, 3], SPEECH, [4] * 12)
    model.check_run(llm, [prompt])
    before = hits(llm)
    longer = prompt._replace(token_ids=[*prompt.token_ids[:-4], 5, 6])
    model.check_run(llm, [longer])
    assert prompt.sounds[0].end <= hits(llm) - before <= len(longer.token_ids)


def test_a_sound_that_goes_on_shares_no_block(served: Served) -> None:
    """All states see each other, so the first embeddings depend on what follows."""
    model, llm = served
    llm.reset_prefix_cache()
    long = sound(33, 90)
    short = long[: len(long) // 2]
    model.check_run(llm, [model.prompt([1], long, [4])])
    before = hits(llm)
    model.check_run(llm, [model.prompt([1], short, [4] * 12)])
    assert hits(llm) == before


def test_requests_that_end_early_give_up_their_rows(served: Served) -> None:
    model, llm = served
    prompts = [model.prompt([seed], sound(seed, 40), [2]) for seed in range(41, 46)]
    for index, prompt in enumerate(prompts):
        llm._engine.add_request(request(str(index), prompt, model.greedy))
    assert llm._engine.stats().num_waiting_for_encodings == 5
    llm._engine.step()
    for index in range(4):
        assert llm._engine.abort(str(index)) is not None
    while llm._engine.has_work:
        llm._engine.step()
    llm._engine.check_integrity()
    model.check_run(llm, prompts)


def test_requests_that_cannot_be_served_are_refused(served: Served) -> None:
    model, llm = served
    prompt = model.prompt([1], SPEECH, [2])
    (one,) = prompt.sounds
    replace = msgspec.structs.replace
    many = [
        replace(one, digest=number.to_bytes(32, "little"))
        for number in range(1 + llm.model.media_cache_tokens // one.num_tokens)
    ]
    good = request("a", prompt, model.greedy)
    cases = [
        (replace(good, sounds=many), r"audio\.cache_tokens"),
        (replace(good, sounds=[replace(one, num_tokens=11)]), "11 placeholder.*must have 12"),
        (replace(good, sounds=[replace(one, num_bins=80)]), r"\[80, 51\].*takes 128 mel bins"),
        (replace(good, sounds=[replace(one, num_frames=50)]), r"\[128, 50\].*odd number"),
        (replace(good, sounds=[replace(one, num_frames=101)]), r"\[128, 101\].* or 100 frames"),
        (replace(good, images=[toy_image(1, 2, 2)]), "has images, and this model takes none"),
    ]
    for bad, text in cases:
        with pytest.raises(InvalidRequestError, match=text):
            llm._engine.add_request(bad)
    assert not llm._engine.has_work


def test_preempted_sequences_keep_their_sounds(flamingo: SoundModel) -> None:
    with sound_llm(flamingo, "cache.memory_gib=0.00012", "model.max_model_len=64") as llm:
        prompts = [flamingo.prompt([seed], sound(seed, 30), [seed + 9]) for seed in range(6)]
        flamingo.check_run(llm, prompts, max_tokens=24)
        assert llm._engine.stats().num_preemptions > 0


@pytest.mark.parametrize(
    "overrides",
    [
        ("graphs.mode=eager",),
        ("graphs.mode=captured",),
        ("graphs.form=model",),
        ("speculation.method=ngram", "speculation.max_tokens=3"),
        ("scheduler.max_num_batched_tokens=5", "scheduler.max_num_seqs=3"),
        ("audio.cache_tokens=50",),
        ("parallel.tensor=2",),
        ("parallel.pipeline=2",),
    ],
    ids=lambda overrides: overrides[0],
)
def test_every_way_to_run_gives_the_same_answers(
    overrides: tuple[str, ...], flamingo: SoundModel
) -> None:
    with sound_llm(flamingo, *overrides) as llm:
        prompts = [
            flamingo.prompt([3, 4, 5], sound(6, 140), [6]),
            flamingo.prompt([20, 21], MUSIC, [24], SPEECH, [25]),
            flamingo.prompt([30, 31, 32]),
        ]
        flamingo.check_run(llm, prompts)


def test_rounded_models_are_near(flamingo: SoundModel) -> None:
    """The first token's log-probabilities are near those of transformers in float32."""
    rounded = ("model.quantization=int8", "cache.dtype=int8", "model.dtype=bfloat16")
    prompts = [flamingo.prompt([3, 4], sound(seed, 130), [6]) for seed in (50, 53)]
    expected = [flamingo.logits(prompt)[-1].log_softmax(-1) for prompt in prompts]
    with sound_llm(flamingo, *rounded, "scheduler.max_num_batched_tokens=16") as llm:
        first = run(llm._engine, prompts, flamingo.greedy)
        assert run(llm._engine, prompts, flamingo.greedy) == first  # from cached blocks
        params = SamplingParams(temperature=0.0, max_tokens=1, logprobs=20)
        for index, prompt in enumerate(prompts):
            llm._engine.add_request(request(str(index), prompt, params))
        found: dict[str, TokenLogprobs] = {}
        while llm._engine.has_work:
            for output in llm._engine.step():
                assert output.logprobs is not None
                (found[output.request_id],) = output.logprobs
    for index in range(2):
        one = found[str(index)]
        values = torch.tensor(one.top_logprobs)
        own, other = (expected[place][one.top_ids] for place in (index, 1 - index))
        assert (values - own).abs().max() < 0.3
        assert (values - other).abs().max() > 1.0  # the sound matters more than the rounding


def test_without_sounds_there_is_no_tower(flamingo: SoundModel) -> None:
    with sound_llm(flamingo, "audio.max_per_request=0") as llm:
        assert llm.model.sounds is None
        flamingo.check_run(llm, [flamingo.prompt([3, 4, 5])])
        heard = request("a", flamingo.prompt([1], SPEECH), flamingo.greedy)
        with pytest.raises(InvalidRequestError, match=r"has audio in its messages.*takes none"):
            llm._engine.add_request(heard)
