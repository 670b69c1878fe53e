"""Engines of small models that take sounds, and transformers on the same weights and sounds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch
from transformers import PreTrainedModel

from ostinato import LLM, SamplingParams
from ostinato.conf.compose import load_config
from ostinato.runtime.engine.engine import Engine
from ostinato.runtime.types.audio import PromptSound, audio_digest
from ostinato.runtime.types.request import Request
from tests.models.audio.sound_models import (
    RATE,
    Samples,
    hf_logits,
    hf_windows,
    load_sound_model,
    make_sound_model,
    random_sound,
)


class SoundPrompt(NamedTuple):
    """Token ids with all placeholder tokens, and the sounds."""

    token_ids: list[int]
    sounds: list[PromptSound]
    samples: list[Samples]


@dataclass(frozen=True)
class SoundModel:
    """A checkpoint on disk, and the model and the processor of transformers with its files."""

    family: str
    reference: PreTrainedModel
    processor: Any
    path: Path

    @property
    def banned(self) -> list[int]:
        """The special tokens. transformers takes generated placeholders for further sounds."""
        return sorted(self.processor.tokenizer.get_added_vocab().values())

    @property
    def greedy(self) -> SamplingParams:
        """Eight tokens of text."""
        bias = dict.fromkeys(self.banned, -100.0)
        return SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, logit_bias=bias)

    def prompt(self, *pieces: list[int] | Samples) -> SoundPrompt:
        """A prompt of texts and sounds. Its features are those of transformers."""
        token_ids: list[int] = []
        sounds: list[PromptSound] = []
        samples: list[Samples] = []
        for piece in pieces:
            if isinstance(piece, list):
                token_ids += piece
                continue
            samples.append(piece)
            for window in _windows(self.processor, piece, len(token_ids)):
                token_ids += [self.processor.audio_token_id] * window.num_tokens
                sounds.append(window)
        return SoundPrompt(token_ids, sounds, samples)

    def logits(self, prompt: SoundPrompt, answer: Sequence[int] = ()) -> torch.Tensor:
        """[tokens, vocab_size] of transformers for a prompt and its answer."""
        token_ids = [*prompt.token_ids, *answer]
        return hf_logits(self.reference, self.processor, token_ids, prompt.samples)

    def check_greedy(self, prompt: SoundPrompt, answer: list[int]) -> None:
        """Compare an answer with the likeliest tokens in transformers."""
        logits = self.logits(prompt, answer)
        logits[:, self.banned] = -torch.inf
        assert logits[len(prompt.token_ids) - 1 : -1].argmax(-1).tolist() == answer

    def check_run(
        self, llm: LLM, prompts: list[SoundPrompt], max_tokens: int = 8
    ) -> list[list[int]]:
        """The tokens of prompts that run at once, compared with transformers."""
        params = msgspec.structs.replace(self.greedy, max_tokens=max_tokens)
        answers = run(llm._engine, prompts, params)
        for prompt, answer in zip(prompts, answers, strict=True):
            assert len(answer) == max_tokens
            self.check_greedy(prompt, answer)
        return answers


def load_model(path: Path, family: str) -> SoundModel:
    """Save a random model whose windows last a second: 100 frames, 25 embeddings."""
    make_sound_model(path, family, window_s=1, max_position_embeddings=1024)
    return SoundModel(family, *load_sound_model(path), path)


def sound_llm(model: SoundModel, *overrides: str) -> LLM:
    """An engine in this process."""
    settings = ("model.dtype=float32", "cache.block_size=8", "cache.memory_gib=0.01")
    shared = ("device.name=cpu", "graphs.bundle=false", "speculation.method=none")
    steps = ("scheduler.max_num_batched_tokens=64", "scheduler.max_num_seqs=8")
    values = {"model.path": str(model.path)}
    return LLM(config=load_config([*settings, *shared, *steps, *overrides], values=values))


def sound(seed: int, num_frames: int) -> Samples:
    """Random samples whose spectrogram has so many frames."""
    return random_sound(seed, num_frames * RATE // 100)


def run(engine: Engine, prompts: list[SoundPrompt], sampling: SamplingParams) -> list[list[int]]:
    """The tokens of requests that run at once."""
    for index, prompt in enumerate(prompts):
        engine.add_request(request(str(index), prompt, sampling))
    tokens: list[list[int]] = [[] for _ in prompts]
    while engine.has_work:
        for output in engine.step():
            assert output.error is None
            tokens[int(output.request_id)] += output.new_token_ids
    engine.check_integrity()
    return tokens


def request(name: str, prompt: SoundPrompt, sampling: SamplingParams) -> Request:
    return Request(
        request_id=name,
        prompt_token_ids=prompt.token_ids,
        sampling=sampling,
        sounds=prompt.sounds,
    )


def _windows(processor: Any, samples: Samples, begin: int) -> list[PromptSound]:
    """The windows of a sound whose first placeholder is token `begin`."""
    inputs, counts = hf_windows(processor, [samples])
    features, mask = inputs.values()
    windows: list[PromptSound] = []
    for window, length, num_tokens in zip(features, mask.sum(-1).tolist(), counts, strict=True):
        if not num_tokens:
            continue
        num_states = (length - 1) // 2 + 1
        kept = np.ascontiguousarray(window[:, : 2 * num_states + 1].numpy())
        num_bins, num_frames = kept.shape
        data = kept.tobytes()
        windows.append(
            PromptSound(
                digest=audio_digest(num_bins, num_frames, data),
                begin=begin,
                num_tokens=num_tokens,
                num_bins=num_bins,
                num_frames=num_frames,
                features=data,
            )
        )
        begin += num_tokens
    return windows
