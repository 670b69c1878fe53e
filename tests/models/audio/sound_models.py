"""Small random models of transformers that take sounds, and what transformers computes of them.

The directories have all files of a published checkpoint. That of Qwen2-Audio has
preprocessor_config.json, and that of Audio Flamingo 3 has processor_config.json.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import (
    AudioFlamingo3Config,
    AudioFlamingo3ForConditionalGeneration,
    AudioFlamingo3Processor,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2AudioConfig,
    Qwen2AudioForConditionalGeneration,
    Qwen2AudioProcessor,
    WhisperFeatureExtractor,
)

from ostinato.models.audio.sound_tower import SoundTower

FAMILIES = ("qwen2_audio", "audioflamingo3")
"""The `model_type` of the models that take sounds."""
ARCHITECTURES = (
    "Qwen2AudioForConditionalGeneration",
    "AudioFlamingo3ForConditionalGeneration",
)
PLACEHOLDERS = {"qwen2_audio": "<|AUDIO|>", "audioflamingo3": "<sound>"}
RATE = 16_000  # Hz
Samples = NDArray[np.float32]

_CHAT = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_ADDED = {
    "qwen2_audio": (*_CHAT, "<|AUDIO|>", "<|audio_bos|>", "<|audio_eos|>"),
    "audioflamingo3": (*_CHAT, "<sound>"),
}
_SENTENCES = (
    "The quick brown fox jumps over the lazy dog, and the dog looks at the fox.",
    "She said that the weather would be better on Thursday than on Wednesday.",
    "Transcribe the input speech. What is the sound in the background?",
)
_NUM_TEXT_TOKENS = 340
_TEXT: dict[str, Any] = {
    "model_type": "qwen2",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.15,
    "bos_token_id": None,
    "pad_token_id": None,
}
# As the template of the published checkpoint, which shows one sound of a message at most.
_FLAMINGO_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['content'] is string %}{{ m['content'] }}{% else %}"
    "{% set found = namespace(audio=False, text='') %}"
    "{% for c in m['content'] %}{% if c.get('type') == 'audio' or 'audio' in c %}"
    "{% set found.audio = True %}{% else %}{% set found.text = found.text + c['text'] %}"
    "{% endif %}{% endfor %}"
    "{% if found.audio %}<sound>{% endif %}{{ found.text }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_sound_model(
    path: Path,
    family: str = "qwen2_audio",
    *,
    window_s: int = 30,
    num_bins: int = 128,
    max_seconds: int = 600,
    max_position_embeddings: int = 4096,
    activation: str = "gelu",
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
) -> Path:
    """Write a random model with its tokenizer, chat template and processor files.

    Greedy outputs depend on the sounds, and are text.

    Args:
        path: a directory, which is created.
        family: one of `FAMILIES`.
        window_s: seconds of a window. 25 embeddings stand for a second.
        num_bins: mel bins.
        max_seconds: seconds of the longest sound of Audio Flamingo 3.
        max_position_embeddings: the longest context in tokens.
        activation: of the encoder's layers and, in Audio Flamingo 3, of the projector.
        seed: of the weights.
        dtype: of the stored weights.

    Returns:
        `path`.
    """
    tokenizer = _make_tokenizer(family)
    ids = tokenizer.get_vocab()
    text = {
        **_TEXT,
        "vocab_size": len(tokenizer),
        "max_position_embeddings": max_position_embeddings,
        "eos_token_id": ids["<|im_end|>"],
    }
    config = _config(family, text, ids, window_s, num_bins, activation)
    is_qwen = family == "qwen2_audio"
    kind: Any = Qwen2AudioForConditionalGeneration
    if not is_qwen:
        kind = AudioFlamingo3ForConditionalGeneration
    torch.manual_seed(seed)
    model = kind(config).eval()
    _set_weights(model, ids)
    path.mkdir(parents=True, exist_ok=True)
    model.to(dtype).save_pretrained(path)
    extractor = WhisperFeatureExtractor(
        feature_size=num_bins, chunk_length=window_s, return_attention_mask=True
    )
    if is_qwen:
        extractor.save_pretrained(path)
        tokenizer.chat_template = Qwen2AudioProcessor(extractor, tokenizer).chat_template
        tokenizer.save_pretrained(path)
    else:
        AudioFlamingo3Processor(
            extractor,
            tokenizer,
            chat_template=_FLAMINGO_TEMPLATE,
            max_audio_len=max_seconds,
        ).save_pretrained(path)
    return path


def load_sound_model(path: Path) -> tuple[PreTrainedModel, Any]:
    """The model of transformers in float32, and its processor."""
    if json.loads((path / "config.json").read_text())["model_type"] == "qwen2_audio":
        kind, processor = Qwen2AudioForConditionalGeneration, Qwen2AudioProcessor
    else:
        kind, processor = AudioFlamingo3ForConditionalGeneration, AudioFlamingo3Processor
    model = kind.from_pretrained(path, dtype=torch.float32).eval()
    return model, processor.from_pretrained(path)


def random_sound(seed: int, num_samples: int) -> Samples:
    """[num_samples] from -1 to 1, at 16 kHz: tones that come and go, and noise."""
    generator = np.random.default_rng(seed)
    time = np.arange(num_samples) / RATE
    samples = 0.05 * generator.standard_normal(num_samples)
    for _ in range(4):
        pitch, beat, phase = generator.uniform((100, 0.5, 0), (4000, 3, 6))
        samples += 0.2 * np.sin(6.283 * pitch * time) * np.sin(6.283 * beat * time + phase)
    return np.clip(samples, -1, 1).astype(np.float32)


def hf_windows(processor: Any, sounds: Sequence[Samples]) -> tuple[dict[str, Tensor], list[int]]:
    """Keyword arguments of transformers for sounds in one prompt.

    The processors of transformers are not called for the prompt, because that of Audio Flamingo 3
    takes one sound only.

    Returns:
        The arguments, and the number of placeholder tokens of each window. The windows of a sound
        follow each other.
    """
    is_qwen = isinstance(processor, Qwen2AudioProcessor)
    extractor = processor.feature_extractor
    size = extractor.n_samples
    windows = [
        sound[start : start + size] for sound in sounds for start in range(0, len(sound), size)
    ]
    assert not is_qwen or len(windows) == len(sounds), "a sound of Qwen2-Audio is one window"
    found = extractor(
        windows,
        sampling_rate=extractor.sampling_rate,
        padding="max_length",
        return_attention_mask=True,
        return_tensors="pt",
    )
    mask = found.attention_mask
    counts = [((int(length) - 1) // 2 - 1) // 2 + 1 for length in mask.sum(-1)]
    name = "feature_attention_mask" if is_qwen else "input_features_mask"
    return {"input_features": found.input_features, name: mask}, counts


def cut_features(inputs: dict[str, Tensor]) -> list[Tensor]:
    """The spectrograms of `hf_windows` that give embeddings, without frames of later silence.

    Returns:
        For each window [num_bins, T] float32. With n states, T is 2n + 1, or 2n in a full window.
    """
    features, mask = inputs.values()
    numbers = [(int(length) + 1) // 2 for length in mask.sum(-1)]
    return [
        window[:, : 2 * count + 1]
        for window, count in zip(features, numbers, strict=True)
        if count >= 2
    ]


def run_tower(tower: SoundTower, features: Tensor, rows_per_unit: int = 256) -> tuple[Tensor, int]:
    """The embeddings of a window, and the number of units."""
    units = tower.encode(features, rows_per_unit)
    count = 0
    while True:
        try:
            next(units)
        except StopIteration as end:
            return end.value, count
        count += 1


@torch.no_grad()
def hf_embeddings(model: PreTrainedModel, processor: Any, sound: Samples) -> list[Tensor]:
    """What transformers puts in place of the placeholders of each window: [tokens, D]."""
    inputs, counts = hf_windows(processor, [sound])
    found: list[Tensor] = []
    inner: Any = model.model
    hook = inner.multi_modal_projector.register_forward_hook(
        lambda _module, _inputs, result: found.append(result)
    )
    ids = torch.tensor([[1, *[processor.audio_token_id] * sum(counts), 2]])
    model(input_ids=ids, attention_mask=torch.ones_like(ids), **inputs)
    hook.remove()
    (result,) = found
    return [window[:count] for window, count in zip(result, counts, strict=True)]


@torch.no_grad()
def hf_logits(
    model: PreTrainedModel, processor: Any, token_ids: list[int], sounds: Sequence[Samples]
) -> Tensor:
    """Logits [tokens, vocab_size] of transformers for a prompt with all its placeholder tokens."""
    inputs = hf_windows(processor, sounds)[0] if sounds else {}
    ids = torch.tensor([token_ids])
    return model(input_ids=ids, attention_mask=torch.ones_like(ids), **inputs).logits[0]


def _config(
    family: str,
    text: dict[str, Any],
    ids: dict[str, int],
    window_s: int,
    num_bins: int,
    activation: str,
) -> Any:
    shared = {
        "num_mel_bins": num_bins,
        "max_source_positions": window_s * 50,
        "activation_function": activation,
        "initializer_range": 0.15,
    }
    if family == "qwen2_audio":
        audio = {
            "model_type": "qwen2_audio_encoder",
            "d_model": 32,
            "encoder_layers": 2,
            "encoder_attention_heads": 2,
            "encoder_ffn_dim": 48,
        }
        return Qwen2AudioConfig(
            audio_config={**shared, **audio},
            text_config=text,
            audio_token_index=ids["<|AUDIO|>"],
        )
    audio = {
        "model_type": "audioflamingo3_encoder",
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 48,
    }
    return AudioFlamingo3Config(
        audio_config={**shared, **audio},
        text_config=text,
        audio_token_id=ids["<sound>"],
        projector_hidden_act=activation,
    )


def _make_tokenizer(family: str) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer with the special tokens of the family after the text tokens."""
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trained.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=_NUM_TEXT_TOKENS,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    trained.train_from_iterator(_SENTENCES, trainer)
    trained.add_special_tokens([AddedToken(text, special=True) for text in _ADDED[family]])
    return PreTrainedTokenizerFast(
        tokenizer_object=trained, eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )


@torch.no_grad()
def _set_weights(model: Any, ids: dict[str, int]) -> None:
    """Draw vectors too, because 0 and 1 would hide errors; make outputs readable text."""
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:
            torch.nn.init.normal_(parameter, 1.0 if "norm" in name else 0.0, 0.2)
    unreadable = [index for name, index in ids.items() if len(name) == 1 and not name.isascii()]
    head = model.lm_head.weight
    head[unreadable] *= 0.5
    head[min(ids[name] for name in _CHAT) :] *= 0.1
