"""Video files in prompts of `LLM` and `AsyncEngine`, against transformers on the same frames."""

from __future__ import annotations

import asyncio
import base64
from typing import Any

import msgspec
import numpy as np
import pytest

from ostinato import AsyncEngine
from ostinato.conf.compose import load_config
from ostinato.conf.sections.images_schema import ImagesConfig
from ostinato.conf.sections.video_schema import VideoConfig
from ostinato.runtime.errors import InvalidRequestError
from ostinato.runtime.types.images import PromptImage
from ostinato.runtime.video.video_inputs import prepare_video
from ostinato.runtime.video.video_sources import FrameSampling
from tests.runtime.image_engines import GREEDY, ImageModel, image_llm
from tests.runtime.video.video_files import decoded_by_pyav, encode, noise
from tests.runtime.video_engines import check_answer, make_video_model

FILM = encode(noise(40, 48, 32), "mp4-h264", fps=10)  # four seconds, so eight frames
SHOWN = "<|vision_start|><|video_pad|><|vision_end|>"
SETTINGS = (
    *("model.dtype=float32", "cache.block_size=8", "cache.memory_gib=0.01", "device.name=cpu"),
    *("graphs.mode=eager", "graphs.bundle=false", "speculation.method=none"),
)


@pytest.fixture(scope="module", params=["qwen2-vl", "qwen2.5-vl", "qwen3-vl"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ImageModel:
    return make_video_model(request.param, tmp_path_factory.mktemp("model"))


def pairs_in(token_ids: list[int], spec: Any) -> list[PromptImage]:
    """The pairs of `FILM`, at the places where the placeholder tokens are."""
    pairs = prepare_video(
        FILM, FrameSampling(), spec, ImagesConfig(), VideoConfig(), "x", max_tokens=10**9
    ).parts
    places = [at for at, token in enumerate(token_ids) if token == spec.video.placeholder_id]
    assert len(places) == sum(pair.num_tokens for pair in pairs)
    placed: list[PromptImage] = []
    for pair in pairs:
        placed.append(msgspec.structs.replace(pair, begin=places[0]))
        assert places[: pair.num_tokens] == list(range(places[0], places[0] + pair.num_tokens))
        del places[: pair.num_tokens]
    return placed


def prompts() -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """A prompt and a conversation with the same video."""
    url = f"data:video/mp4;base64,{base64.b64encode(FILM).decode()}"
    content = [
        {"type": "text", "text": "w95"},
        {"type": "video_url", "video_url": {"url": url}},
        {"type": "text", "text": "w96"},
    ]
    prompt = {"prompt": f"w95 {SHOWN} w97", "multi_modal_data": {"video": FILM}}
    return prompt, [{"role": "user", "content": content}]


def test_answers_are_those_of_transformers(model: ImageModel):
    prompt, chat = prompts()
    with image_llm(model) as llm:
        spec = llm.model.images
        assert spec is not None
        for outputs in (
            llm.generate(prompt, GREEDY, use_progress=False),  # type: ignore[arg-type]
            llm.chat(chat, GREEDY, use_progress=False),
        ):
            token_ids = outputs[0].prompt_token_ids
            answer = outputs[0].outputs[0].token_ids
            check_answer(model, spec, token_ids, pairs_in(token_ids, spec), list(answer))


def test_files_and_their_frames_have_the_same_answer(model: ImageModel):
    """The frames that the rules choose, given as an array with their times."""
    indices = [0, 6, 11, 17, 22, 28, 33, 39]
    whole = decoded_by_pyav(FILM)
    metadata = {"fps": 10.0, "frames_indices": indices, "total_num_frames": 40}
    frames = np.stack([whole[index] for index in indices])
    prompt, _ = prompts()
    given = {**prompt, "multi_modal_data": {"video": (frames, metadata)}}
    with image_llm(model) as llm:
        first, second = llm.generate([prompt, given], GREEDY, use_progress=False)  # type: ignore[list-item]
        assert first.prompt_token_ids == second.prompt_token_ids
        assert first.outputs[0].token_ids == second.outputs[0].token_ids
        again = llm.generate(given, GREEDY, use_progress=False)[0]  # type: ignore[arg-type]
        assert again.num_cached_tokens > 0


def test_async_engine(model: ImageModel):
    prompt, chat = prompts()
    with image_llm(model) as llm:
        expected = [
            *llm.generate(prompt, GREEDY, use_progress=False),  # type: ignore[arg-type]
            *llm.chat(chat, GREEDY, use_progress=False),
        ]

    async def text_of(engine: AsyncEngine, one: Any) -> str:
        return "".join([output.text_delta async for output in engine.generate(one, GREEDY)])

    async def run() -> list[str]:
        config = load_config(SETTINGS, values={"model.path": str(model.path)})
        async with AsyncEngine(config=config) as engine:
            broken = {**prompt, "multi_modal_data": {"video": b"x"}}
            with pytest.raises(InvalidRequestError, match="cannot be read as a video"):
                await text_of(engine, broken)
            return [await text_of(engine, prompt), await text_of(engine, chat)]

    assert asyncio.run(run()) == [one.outputs[0].text for one in expected]
