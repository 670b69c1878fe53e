"""Prompts, rules and the sampler together: greedy outputs are those of transformers' `generate`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import WhisperForConditionalGeneration

from ostinato.models.audio.audio_fields import read_audio_spec
from ostinato.models.audio.audio_spec import AudioSpec
from ostinato.runtime.audio.transcript_prompt import rules_of, transcript_prompt
from ostinato.runtime.sampling.sampler import Sampler
from ostinato.runtime.types.params import SamplingParams
from ostinato.runtime.types.request import Request
from tests.models.audio.whisper_checkpoints import load_whisper, make_whisper

NUM_TOKENS = 60


def outputs(
    model: WhisperForConditionalGeneration,
    spec: AudioSpec,
    features: Tensor,
    prompt: list[int],
    has_timestamps: bool,
) -> list[int]:
    """The tokens that the sampler draws from the logits of transformers' model."""
    sampler = Sampler(
        max_num_seqs=1, vocab_size=model.config.vocab_size, device=torch.device("cpu")
    )
    rules = rules_of(spec, has_timestamps)
    params = SamplingParams(temperature=0.0, transcript=rules)
    sampler.admit(0, Request(request_id="r", prompt_token_ids=prompt, sampling=params), [])
    states = model.get_encoder()(features)
    ids = list(prompt)
    for _ in range(NUM_TOKENS):
        hidden = model(encoder_outputs=states, decoder_input_ids=torch.tensor([ids]))
        ids += sampler.sample(hidden.logits[:, -1].float(), [0], [len(ids)]).token_ids
        if ids[-1] == spec.end_id:
            break
    return ids[len(prompt) :]


@pytest.mark.parametrize("multilingual", [True, False])
@torch.inference_mode()
def test_greedy_outputs_are_those_of_generate(tmp_path: Path, multilingual: bool) -> None:
    path = make_whisper(tmp_path / "model", multilingual=multilingual)
    model, processor = load_whisper(path)
    spec = read_audio_spec(
        path,
        json.loads((path / "config.json").read_text()),
        json.loads((path / "generation_config.json").read_text()),
        token_id=processor.tokenizer.get_vocab().get,
    )
    generator = torch.Generator().manual_seed(1)
    seen = set[tuple[int, ...]]()
    for index in range(3):
        samples = torch.randn(16000 * (1 + 7 * index), generator=generator).numpy()
        features = processor(samples, sampling_rate=16000, return_tensors="pt").input_features
        for has_timestamps in (False, True):
            prompt = transcript_prompt(
                spec,
                language="de" if multilingual else None,
                task="transcribe",
                has_timestamps=has_timestamps,
                previous_ids=(),
                max_model_len=448,
            )
            chosen = {"language": "de", "task": "transcribe"} if multilingual else {}
            # The whole output of the first window: with timestamps, `generate` cuts it and goes on.
            expected = model.generate(
                features,
                return_timestamps=has_timestamps,
                return_segments=True,
                max_new_tokens=NUM_TOKENS,
                num_beams=1,
                **chosen,
            )["segments"][0][0]["result"].tolist()
            assert expected[: len(prompt)] == prompt
            expected = expected[len(prompt) :]
            got = outputs(model, spec, features, prompt, has_timestamps)
            # `generate` leaves the end token out, or repeats it as padding.
            while expected and expected[-1] == spec.end_id:
                expected.pop()
            if got[-1] == spec.end_id:
                got.pop()
            assert got == expected
            seen.add(tuple(got))
    assert len(seen) > 3
