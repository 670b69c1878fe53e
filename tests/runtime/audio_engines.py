"""Engines that transcribe audio, and transformers on the same weights and features."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import WhisperForConditionalGeneration

from ostinato import LLM, SamplingParams
from ostinato.conf.compose import load_config
from ostinato.runtime.engine.engine import Engine
from ostinato.runtime.types.audio import PromptAudio, audio_digest
from ostinato.runtime.types.request import Request
from tests.models.audio.whisper_checkpoints import load_whisper, make_whisper

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


@dataclass(frozen=True)
class AudioModel:
    """A checkpoint on disk, and the model of transformers with its weights."""

    reference: WhisperForConditionalGeneration
    path: Path
    prompt: list[int]  # <|startoftranscript|><|en|><|transcribe|><|notimestamps|>

    def logits(self, features: torch.Tensor, token_ids: list[int]) -> torch.Tensor:
        """[tokens, V] of transformers."""
        with torch.no_grad():
            ids = torch.tensor([token_ids])
            return self.reference(input_features=features[None], decoder_input_ids=ids).logits[0]


def make_audio_model(path: Path, **settings: Any) -> AudioModel:
    """Save a random model with all files that an engine reads."""
    reference, processor = load_whisper(make_whisper(path, **settings))
    names = ("<|startoftranscript|>", "<|en|>", "<|transcribe|>", "<|notimestamps|>")
    return AudioModel(reference, path, processor.tokenizer.convert_tokens_to_ids(list(names)))


def audio_llm(model: AudioModel, *overrides: str) -> LLM:
    """An engine in this process."""
    settings = ("model.dtype=float32", "cache.block_size=8", "cache.memory_gib=0.01")
    shared = ("device.name=cpu", "graphs.bundle=false", "speculation.method=none")
    steps = ("scheduler.max_num_batched_tokens=64", "scheduler.max_num_seqs=8")
    windows = ("audio.cache_windows=4",)
    values = {"model.path": str(model.path)}
    return LLM(
        config=load_config([*settings, *shared, *steps, *windows, *overrides], values=values)
    )


def sound(seed: int, num_bins: int = 80) -> torch.Tensor:
    """[num_bins, 3000], a spectrogram with the values of a real one: bands that come and go."""
    generator = torch.Generator().manual_seed(seed)
    coarse = torch.rand((1, 1, num_bins // 8, 60), generator=generator)
    smooth = torch.nn.functional.interpolate(coarse, (num_bins, 3000), mode="bilinear")
    return smooth[0, 0] * 2.0 - 0.6


def prompt_audio(features: torch.Tensor) -> PromptAudio:
    data = features.numpy().astype(np.float32).tobytes()
    num_bins, num_frames = features.shape
    return PromptAudio(
        digest=audio_digest(num_bins, num_frames, data),
        num_bins=num_bins,
        num_frames=num_frames,
        features=data,
    )


def request(
    name: str, token_ids: list[int], features: torch.Tensor, sampling: SamplingParams = GREEDY
) -> Request:
    return Request(
        request_id=name,
        prompt_token_ids=token_ids,
        sampling=sampling,
        audio=prompt_audio(features),
    )


def finish(engine: Engine, requests: list[Request]) -> list[list[int]]:
    """The tokens of requests that run at once."""
    tokens: dict[str, list[int]] = {}
    for one in requests:
        engine.add_request(one)
        tokens[one.request_id] = []
    while engine.has_work:
        for output in engine.step():
            assert output.error is None
            tokens.setdefault(output.request_id, []).extend(output.new_token_ids)
    engine.check_integrity()
    return list(tokens.values())


def run(
    engine: Engine,
    prompts: list[tuple[list[int], torch.Tensor]],
    sampling: SamplingParams = GREEDY,
) -> list[list[int]]:
    """The tokens of prompts with their spectrograms, which run at once."""
    return finish(
        engine,
        [request(str(index), *prompt, sampling) for index, prompt in enumerate(prompts)],
    )


def check_greedy(
    model: AudioModel, token_ids: list[int], features: torch.Tensor, answer: list[int]
) -> None:
    """Compare an answer with the likeliest tokens in transformers."""
    logits = model.logits(features, token_ids + answer)
    assert logits[len(token_ids) - 1 : -1].argmax(-1).tolist() == answer
