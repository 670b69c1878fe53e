"""Sounds, prompts with audio, and transformers on the same checkpoint."""

from __future__ import annotations

import io
import wave
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import (
    GenerationConfig,
    GenerationMixin,
    SuppressTokensAtBeginLogitsProcessor,
    SuppressTokensLogitsProcessor,
    WhisperProcessor,
    WhisperTimeStampLogitsProcessor,
)

from ostinato import LLM, SamplingParams
from tests.runtime.audio_engines import AudioModel

RATE = 16_000
PLAIN = "<|startoftranscript|><|en|><|transcribe|><|notimestamps|>"
TIMED = "<|startoftranscript|><|de|><|translate|>"
GREEDY = SamplingParams(temperature=0.0, max_tokens=24)


def sound_of(seed: int, seconds: float, rate: int = RATE) -> np.ndarray:
    """[n] float32: tones whose loudness changes."""
    generator = np.random.default_rng(seed)
    times = np.arange(int(seconds * rate)) / rate
    tones = [
        np.sin(2 * np.pi * generator.uniform(100, 3000) * times)
        * (1 + np.sin(2 * np.pi * generator.uniform(0.2, 3) * times))
        for _ in range(6)
    ]
    return (np.sum(tones, axis=0) / 16).astype(np.float32)


def wav(samples: np.ndarray) -> bytes:
    target = io.BytesIO()
    with wave.open(target, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(RATE)
        file.writeframes((samples * 32767).astype("<i2").tobytes())
    return target.getvalue()


class Served(NamedTuple):
    model: AudioModel
    processor: WhisperProcessor
    llm: LLM

    def features(self, samples: np.ndarray) -> torch.Tensor:
        """[1, bins, frames] of transformers."""
        return self.processor(samples, sampling_rate=RATE, return_tensors="pt").input_features

    def ids(self, text: str) -> list[int]:
        return self.processor.tokenizer(text, add_special_tokens=False).input_ids

    def greedy(self, features: torch.Tensor, prompt: Sequence[int], max_tokens: int) -> list[int]:
        """The output of transformers for one window, with the rules of the checkpoint."""
        whisper, config = self.model.reference, self.model.reference.generation_config
        begin = len(prompt)
        rules: list[Any] = [
            SuppressTokensLogitsProcessor(config.suppress_tokens),
            SuppressTokensAtBeginLogitsProcessor(config.begin_suppress_tokens, begin),
        ]
        if config.no_timestamps_token_id not in prompt:
            rules.insert(0, WhisperTimeStampLogitsProcessor(config, begin_index=begin))
        plain = GenerationConfig(
            max_new_tokens=max_tokens, eos_token_id=config.eos_token_id, pad_token_id=0
        )
        found = GenerationMixin.generate(
            whisper,
            features,
            decoder_input_ids=torch.tensor([list(prompt)]),
            generation_config=plain,
            logits_processor=rules,
        )
        return found[0, begin:].tolist()


def generate(served: Served, prompts: Any, params: SamplingParams = GREEDY) -> list[list[int]]:
    answers = served.llm.generate(prompts, params, use_progress=False)
    return [answer.outputs[0].token_ids for answer in answers]


def prompt_of(samples: Any, text: str = PLAIN, rate: float = RATE) -> dict[str, Any]:
    return {"prompt": text, "multi_modal_data": {"audio": (samples, rate)}}


def without_end(served: Served, token_ids: list[int]) -> list[int]:
    return [one for one in token_ids if one != served.processor.tokenizer.eos_token_id]
