"""Tokenizers, specs and sounds that the tests of sounds in requests share."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import AddedToken

from ostinato.models.audio.sound_spec import SoundSpec
from ostinato.runtime.types.engine_info import ServedModel
from tests.api.media.image_apps import served
from tests.runtime.audio.audio_files import RATE, encode
from tests.runtime.text import tokenizer_builders

SOUND = "<|AUDIO|>"
START, END = "<|audio_bos|>", "<|audio_eos|>"
SHOWN = f"{START}{SOUND}{END}"
# Reads texts and parts, as the template of Qwen2-Audio does.
TEMPLATE = (
    "{% for m in messages %}<|begin|>{{ m['role'] }}\n"
    "{% if m['content'] is string %}{{ m['content'] }}{% else %}{% for c in m['content'] %}"
    "{% if 'audio' in c or 'audio_url' in c or c['type'] == 'audio' %}"
    f"{SHOWN}"
    "{% elif 'text' in c %}{{ c['text'] }}{% endif %}{% endfor %}{% endif %}<|end|>{% endfor %}"
)


def save_sound_model(directory: Path, template: str = TEMPLATE) -> int:
    """Write a tokenizer with the tokens of sounds, and a template. Returns the placeholder's id."""
    tokenizer = type(tokenizer_builders.byte_level_bpe()).from_str(
        tokenizer_builders.byte_level_bpe().to_str()
    )
    texts = (SOUND, START, END)
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in texts])
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "chat_template.jinja").write_text(template, encoding="utf-8")
    token_id = tokenizer.token_to_id(SOUND)
    assert token_id is not None
    return token_id


def sound_spec(placeholder_id: int, **fields: Any) -> SoundSpec:
    """Windows of one second, which have 25 embeddings; a sound has at most 3 windows."""
    values: dict[str, Any] = {
        "sampling_rate": RATE, "num_bins": 16, "fft_size": 400, "hop_size": 160, "window_s": 1,
        "placeholder_id": placeholder_id, "placeholder": SOUND, "marked_placeholder": SHOWN,
        "max_windows": 3,
    }  # fmt: skip
    return SoundSpec(**{**values, **fields})


def served_sounds(directory: Path, spec: SoundSpec | None, **fields: Any) -> ServedModel:
    return served(directory, None, **{"name": "listener", "sounds": spec, **fields})


def noise(seconds: float, seed: int = 0) -> NDArray[np.float32]:
    """[n] float32 at 16 kHz. Its values are those of a wav file of 16 bits."""
    generator = np.random.default_rng(seed)
    values = generator.normal(0, 3000, round(seconds * RATE)).clip(-32768, 32767)
    return values.astype(np.int16).astype(np.float32) / 32768


def wav(seconds: float, seed: int = 0) -> bytes:
    return encode(noise(seconds, seed), RATE)


def audio_url(data: bytes, media_type: str = "audio/wav") -> str:
    return f"data:{media_type};base64,{base64.b64encode(data).decode()}"


def url_part(data: bytes, **fields: Any) -> dict[str, Any]:
    """A part as in vLLM's API."""
    return {"type": "audio_url", "audio_url": {"url": audio_url(data)}, **fields}


def input_part(data: bytes, kind: str = "wav", **fields: Any) -> dict[str, Any]:
    """A part as in OpenAI's API."""
    content = {"data": base64.b64encode(data).decode(), "format": kind}
    return {"type": "input_audio", "input_audio": content, **fields}
