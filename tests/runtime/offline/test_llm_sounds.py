"""Sounds in prompts of `LLM` and `AsyncEngine`, against transformers on the same samples."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from ostinato import LLM, AsyncEngine
from ostinato.conf.compose import load_config
from ostinato.runtime.errors import InvalidRequestError
from tests.api.media.sound_apps import input_part, url_part
from tests.models.audio.sound_models import FAMILIES, PLACEHOLDERS, RATE, Samples
from tests.runtime.audio.audio_files import encode
from tests.runtime.sound_engines import SoundModel, SoundPrompt, load_model, sound, sound_llm

SPEECH, MUSIC = sound(1, 50), sound(2, 35)  # 12 and 9 embeddings
SETTINGS = (
    *("model.dtype=float32", "cache.block_size=8", "cache.memory_gib=0.01", "device.name=cpu"),
    *("graphs.mode=eager", "graphs.bundle=false", "speculation.method=none"),
)


class Served(NamedTuple):
    model: SoundModel
    llm: LLM

    @property
    def mark(self) -> str:
        return PLACEHOLDERS[self.model.family]

    def generate(self, prompts: Any) -> list[tuple[list[int], list[int]]]:
        """The token ids and the answer of each prompt."""
        outputs = self.llm.generate(prompts, self.model.greedy, use_progress=False)
        return [(one.prompt_token_ids, list(one.outputs[0].token_ids)) for one in outputs]

    def chat(self, *parts: Any) -> tuple[list[int], list[int]]:
        messages = [{"role": "user", "content": list(parts)}]
        (one,) = self.llm.chat(messages, self.model.greedy, use_progress=False)
        return one.prompt_token_ids, list(one.outputs[0].token_ids)

    def check(self, token_ids: list[int], answer: list[int], *samples: Samples) -> None:
        self.model.check_greedy(SoundPrompt(token_ids, [], list(samples)), answer)

    def template_ids(self, content: list[dict[str, str]], *samples: Samples) -> list[int]:
        """The prompt of transformers for a message."""
        processor = self.model.processor
        text = processor.apply_chat_template(
            [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
        )
        found = processor(text=[text], audio=list(samples), sampling_rate=RATE, return_tensors="pt")
        return found.input_ids[0].tolist()


@pytest.fixture(scope="module", params=FAMILIES)
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    model = load_model(tmp_path_factory.mktemp("model"), request.param)
    with sound_llm(model) as llm:
        yield Served(model, llm)


def text_part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def wav(samples: Samples) -> bytes:
    """A file with exactly these samples."""
    return encode(samples, RATE, "wav", "pcm_f32le")


def test_conversations_are_those_of_transformers(served: Served):
    token_ids, answer = served.chat(url_part(wav(SPEECH)), text_part("What is it?"))
    content = [{"type": "audio", "audio": "a"}, text_part("What is it?")]
    assert token_ids == served.template_ids(content, SPEECH)
    served.check(token_ids, answer, SPEECH)
    _, other = served.chat(url_part(wav(sound(3, 50))), text_part("What is it?"))
    assert other != answer


def test_several_sounds(served: Served):
    prompt = f"a{served.mark}b{served.mark}c"
    media = {"audio": [(SPEECH, RATE), MUSIC]}
    ((token_ids, answer),) = served.generate({"prompt": prompt, "multi_modal_data": media})
    assert token_ids.count(served.model.processor.audio_token_id) == 21
    served.check(token_ids, answer, SPEECH, MUSIC)
    first = served.chat(text_part("a"), input_part(wav(SPEECH)))
    if served.model.family == "qwen2_audio":
        parts = [input_part(wav(SPEECH)), text_part("and"), url_part(wav(MUSIC)), text_part("?")]
        token_ids, answer = served.chat(*parts)
        shown = {"type": "audio", "audio": "a"}
        content = [shown, text_part("and"), shown, text_part("?")]
        assert token_ids == served.template_ids(content, SPEECH, MUSIC)
        served.check(token_ids, answer, SPEECH, MUSIC)
    else:  # its template shows one sound of a message
        with pytest.raises(InvalidRequestError, match="once, but 2 sounds"):
            served.chat(text_part("a"), input_part(wav(SPEECH)), input_part(wav(MUSIC)))
    assert served.chat(text_part("a"), input_part(wav(SPEECH))) == first


def test_a_long_sound(served: Served):
    long = sound(4, 230)
    prompt = {"prompt": f"a{served.mark}b", "multi_modal_data": {"audio": long}}
    if served.model.family == "qwen2_audio":
        with pytest.raises(InvalidRequestError, match="longer than the 1 s that the model takes"):
            served.generate(prompt)
        return
    ((token_ids, answer),) = served.generate(prompt)
    assert token_ids.count(served.model.processor.audio_token_id) == 57
    served.check(token_ids, answer, long)
    token_ids, answer = served.chat(input_part(wav(long)), text_part("b"))
    assert token_ids == served.template_ids([{"type": "audio"}, text_part("b")], long)
    served.check(token_ids, answer, long)


def test_all_forms_have_one_answer(served: Served, tmp_path: Path):
    (tmp_path / "a.wav").write_bytes(wav(SPEECH))
    forms = [
        (SPEECH, RATE),
        SPEECH,
        SPEECH.tolist(),
        wav(SPEECH),
        tmp_path / "a.wav",
        (np.stack([SPEECH, SPEECH]), RATE),
    ]
    text = f"a{served.mark}b"
    answers = served.generate(
        [{"prompt": text, "multi_modal_data": {"audio": form}} for form in forms]
    )
    assert answers == [answers[0]] * len(forms)
    served.check(*answers[0], SPEECH)
    ids = served.model.processor.tokenizer(text).input_ids
    given: Any = {"prompt_token_ids": ids, "multi_modal_data": {"audio": SPEECH}}
    assert served.generate(given) == answers[:1]
    streamed = served.llm.stream(given, served.model.greedy)
    assert [one for output in streamed for one in output.new_token_ids] == answers[0][1]


def test_the_async_engine_takes_the_same_prompts(served: Served):
    prompt: Any = {"prompt": f"a{served.mark}", "multi_modal_data": {"audio": SPEECH}}
    chat = [{"role": "user", "content": [input_part(wav(MUSIC)), text_part("a")]}]
    expected = [served.generate(prompt)[0][1], served.chat(*chat[0]["content"])[1]]
    config = load_config(SETTINGS, values={"model.path": str(served.model.path)})

    async def run() -> list[list[int]]:
        async with AsyncEngine(config=config) as engine:
            return [
                [
                    token
                    async for output in engine.generate(one, served.model.greedy)
                    for token in output.new_token_ids
                ]
                for one in (prompt, chat)
            ]

    assert asyncio.run(run()) == expected
