"""Engines that take images, against transformers on the same weights and pixels."""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import NamedTuple

import msgspec
import pytest
from PIL import Image

from ostinato import LLM, SamplingParams
from ostinato.runtime.errors import InvalidRequestError, StartupError
from ostinato.runtime.types.request import Request
from tests.api.media.image_apps import data_url
from tests.runtime.image_engines import (
    GREEDY,
    ImageModel,
    check_greedy,
    image_llm,
    make_image_model,
    picture,
    prompt,
    run,
)
from tests.runtime.test_quantize_model import quantise
from tests.runtime.toy_tower import toy_image

CAT, DOG = picture(1), picture(2, width=40, height=8)


ENGINES = [
    *("llava", "gemma3", "pixtral", "mistral3", "internvl", "smolvlm"),
    *("qwen2-vl", "qwen2.5-vl", "qwen3-vl", "qwen3.5"),
]


class Served(NamedTuple):
    model: ImageModel
    llm: LLM


@pytest.fixture(scope="module", params=ENGINES)
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    model = make_image_model(request.param, tmp_path_factory.mktemp("model"))
    with image_llm(model, "scheduler.max_num_batched_tokens=16") as llm:
        yield Served(model, llm)


def test_answers_are_those_of_transformers(served):
    model, llm = served
    prompts = [
        prompt(llm, [3, 4, 5], CAT, [6]),
        prompt(llm, CAT, [8, 9], DOG, [10, 11]),
        prompt(llm, [20, 21, 22, 23], DOG, [25], DOG, [24]),
        prompt(llm, [30, 31, 32]),
    ]
    answers = run(llm._engine, prompts)
    for (token_ids, images), answer in zip(prompts, answers, strict=True):
        assert len(answer) == GREEDY.max_tokens
        check_greedy(model, token_ids, images, answer)


def test_other_pixels_give_another_answer(served):
    llm = served.llm
    first, second = prompt(llm, [3], CAT, [6]), prompt(llm, [3], picture(5), [6])
    assert first[0] == second[0]
    one, two = run(llm._engine, [first, second])
    assert one != two
    assert run(llm._engine, [second, first]) == [two, one]


def test_chat_has_the_tokens_of_the_processor(served):
    """The template writes one placeholder, and tiles have texts between them."""
    model, llm = served
    _, images = prompt(llm, CAT)
    image = {"type": "image_pil", "image_pil": Image.open(io.BytesIO(CAT))}
    messages = [{"role": "user", "content": [{"type": "text", "text": "w95"}, image]}]
    (result,) = llm.chat(messages, GREEDY, use_progress=False)
    token_ids = result.prompt_token_ids
    assert token_ids.count(llm.model.images.placeholder_id) == sum(one.num_rows for one in images)
    check_greedy(model, token_ids, images, result.outputs[0].token_ids)
    small = {"type": "image_url", "image_url": {"url": data_url(CAT), "detail": "low"}}
    (result,) = llm.chat([{"role": "user", "content": [small]}], GREEDY, use_progress=False)
    count = result.prompt_token_ids.count(llm.model.images.placeholder_id)
    assert count == images[0].num_rows  # they have 24 x 16 pixels, or are one tile


def test_a_cached_prefix_with_an_image_is_used(served):
    model, llm = served
    llm.reset_prefix_cache()
    token_ids, images = prompt(llm, [1, 2, 3], CAT, [4] * 12)
    run(llm._engine, [(token_ids, images)])
    before = llm._engine.stats()
    longer = [*token_ids[:-4], 5, 6]
    (answer,) = run(llm._engine, [(longer, images)])
    after = llm._engine.stats()
    cached = after.prefix_hits - before.prefix_hits
    assert images[0].end <= cached <= len(longer)
    assert after.num_inputs_encoded == before.num_inputs_encoded
    check_greedy(model, longer, images, answer)


def test_the_rest_of_an_image_after_a_cached_part_has_its_embeddings(served):
    """The cached prefix ends inside the image, or inside one of its tiles."""
    model, llm = served
    llm.reset_prefix_cache()
    # Recurrent layers keep their states where the second prompt begins to differ from the first.
    for last in (4, 7):
        run(llm._engine, [prompt(llm, [1, 2, 3, 4, 5, 6], CAT, [last] * 8)])
    before = llm._engine.stats().prefix_hits
    token_ids, images = prompt(llm, [1, 2, 3, 4, 5, 6], CAT, [5] * 8)
    (answer,) = run(llm._engine, [(token_ids, images)])
    cached = llm._engine.stats().prefix_hits - before
    assert any(one.begin < cached < one.end for one in images)
    check_greedy(model, token_ids, images, answer)


def test_preempted_sequences_keep_their_images(tmp_path):
    model = make_image_model("qwen2.5-vl", tmp_path)
    with image_llm(model, "cache.memory_gib=0.00008", "model.max_model_len=64") as llm:
        prompts = [prompt(llm, [seed], picture(seed), [seed + 9]) for seed in range(6)]
        long = msgspec.structs.replace(GREEDY, max_tokens=24)
        answers = run(llm._engine, prompts, long)
        assert llm._engine.stats().num_preemptions > 0
    for (token_ids, images), answer in zip(prompts, answers, strict=True):
        check_greedy(model, token_ids, images, answer)


WAYS = [
    "graphs.mode=eager",
    "graphs.mode=captured",
    "speculation.method=ngram speculation.max_tokens=3",
    "scheduler.max_num_batched_tokens=7 scheduler.max_num_seqs=3",
    "images.cache_tokens=20",
]
# They start processes, so the quick tests run one model with them. The quick tests of sounds have
# `graphs.form=model`, which compiles for long.
LONG_WAYS = ["parallel.tensor=2", "parallel.pipeline=2"]


@pytest.mark.parametrize(
    ("name", "way"),
    [
        *((name, way) for name in ("gemma3", "qwen3-vl") for way in WAYS),
        ("mistral3", WAYS[3]),  # chunks of a few tokens
        *(("qwen3.5-moe", way) for way in (WAYS[1], *WAYS[3:])),
        *(("qwen3-vl", way) for way in LONG_WAYS),
        *(pytest.param("llava", way, marks=pytest.mark.slow) for way in (*WAYS, *LONG_WAYS)),
        *(
            pytest.param(name, way, marks=pytest.mark.slow)
            for name in ("gemma3", "mistral3", "internvl", "smolvlm", "qwen3.5")
            for way in LONG_WAYS
        ),
        *(
            pytest.param(name, "graphs.form=model", marks=pytest.mark.slow)
            for name in ("gemma3", "llava", "qwen3-vl", "qwen3.5")
        ),
    ],
)
def test_every_way_to_run_gives_the_same_answers(name, way, tmp_path):
    model = make_image_model(name, tmp_path)
    with image_llm(model, *way.split()) as llm:
        prompts = [
            prompt(llm, [3, 4, 5], CAT, [6]),
            prompt(llm, [20, 21], DOG, [24]),
            prompt(llm, [30, 31, 32]),
        ]
        answers = run(llm._engine, prompts)
    for (token_ids, images), answer in zip(prompts, answers, strict=True):
        check_greedy(model, token_ids, images, answer)


@pytest.mark.parametrize("tokens", [15, 16, 17, 23])
def test_a_step_has_an_image_as_a_whole_or_not_at_all(served, tokens):
    """Prompts of these lengths before an image end the first chunk at each place in it."""
    model, llm = served
    llm.reset_prefix_cache()
    prompts = [prompt(llm, [4 + tokens] * tokens, CAT, [7], DOG, [6]), prompt(llm, [1], DOG, [2])]
    prompts += [prompt(llm, [number, 3, 5]) for number in range(6)]
    answers = run(llm._engine, prompts)
    for (token_ids, images), answer in zip(prompts, answers, strict=True):
        check_greedy(model, token_ids, images, answer)


def test_a_step_has_room_for_an_image(tmp_path):
    """Where tokens of an image see each other, steps of less than an image are refused."""
    model = make_image_model("gemma3", tmp_path)
    small = ("scheduler.max_num_batched_tokens=6", "scheduler.max_num_seqs=3")
    with pytest.raises(StartupError, match=r"max_num_batched_tokens=6 .* all 4 .* at least 7"):
        image_llm(model, *small)
    with image_llm(model, *small, "images.max_per_request=0") as llm:
        assert llm.model.images is None
    with pytest.raises(StartupError, match=r"max_num_batched_tokens=4 .* at least 5, or set"):
        image_llm(model, "scheduler.max_num_batched_tokens=4", "scheduler.max_num_seqs=null")
    with image_llm(model, small[0], "scheduler.max_num_seqs=null") as llm:
        assert llm._engine.stats().max_num_seqs == 2
        prompts = [prompt(llm, [3, 4, 5], CAT, [6]), *(prompt(llm, [one, 8]) for one in range(4))]
        for (token_ids, images), answer in zip(prompts, run(llm._engine, prompts), strict=True):
            check_greedy(model, token_ids, images, answer)
        # Without an image, the placeholder in a text is encoded as it is.
        (output,) = llm.generate(["w1 <|vision_start|> w2"], GREEDY)
        assert output.prompt_token_ids.count(192) == 1
        assert len(output.prompt_token_ids) == 3


def test_images_and_grammars_are_waited_for_together(served):
    llm = served.llm
    requests = [
        Request(
            request_id=str(number),
            prompt_token_ids=token_ids,
            sampling=SamplingParams(temperature=0.0, max_tokens=4),
            images=images,
            grammar="start: /[a-c]{4}/" if number % 2 else "",
        )
        for number, (token_ids, images) in enumerate(
            [prompt(llm, [1], picture(seed), [2]) for seed in (11, 12, 13, 14)]
        )
    ]
    for one in requests:
        llm._engine.add_request(one)
    assert llm._engine.stats().num_waiting == 4
    assert llm._engine.abort("0") is not None
    tokens: dict[str, list[int]] = {}
    while llm._engine.has_work:
        for output in llm._engine.step():
            assert output.error is None
            tokens.setdefault(output.request_id, []).extend(output.new_token_ids)
    assert set(tokens) == {"1", "2", "3"}
    assert {*tokens["1"], *tokens["3"]} <= {64, 65, 66}
    assert not set(tokens["2"]) <= {64, 65, 66}
    llm._engine.check_integrity()
    assert llm._engine.stats().num_waiting == 0


def test_requests_that_cannot_be_served_are_refused(served):
    llm = served.llm
    token_ids, images = prompt(llm, [1], CAT, [2])
    many = [
        msgspec.structs.replace(images[0], digest=number.to_bytes(32, "little"))
        for number in range(1 + llm.model.media_cache_tokens // images[0].num_rows)
    ]
    request = Request(request_id="a", prompt_token_ids=token_ids, sampling=GREEDY, images=many)
    with pytest.raises(InvalidRequestError, match=r"images\.cache_tokens"):
        llm._engine.add_request(request)
    assert not llm._engine.has_work


def test_what_models_with_images_do_not_have(tmp_path):
    model = make_image_model("llava", tmp_path / "model")
    with pytest.raises(StartupError, match=r"lora\.max_adapters=1, but .* takes images"):
        image_llm(model, "lora.max_adapters=1")
    overrides = [f"model.path={model.path}", f"quantize.output={tmp_path / 'new'}"]
    with pytest.raises(StartupError, match="models that take images are not quantised"):
        quantise(*overrides)
    (model.path / "preprocessor_config.json").unlink()
    with pytest.raises(StartupError, match=r"preprocessor_config\.json"):
        image_llm(model)


def test_without_images_there_is_no_tower(tmp_path):
    model = make_image_model("qwen3-vl", tmp_path)
    with image_llm(model, "images.max_per_request=0") as llm:
        assert llm.model.images is None
        (answer,) = run(llm._engine, [([3, 4, 5], [])])
        with pytest.raises(InvalidRequestError, match="takes none"):
            llm._engine.add_request(
                Request(
                    request_id="a",
                    prompt_token_ids=[1],
                    sampling=GREEDY,
                    images=[toy_image(1, 2, 2)],
                )
            )
    check_greedy(model, [3, 4, 5], [], answer)
