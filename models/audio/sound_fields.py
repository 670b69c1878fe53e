"""Reads how a model takes sounds from the files of its checkpoint.

The facts are those of Qwen2-Audio and Audio Flamingo 3 in transformers 5.24: which key has which
effect, and which default. This module imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from ostinato.models.audio.mel_fields import read_mel_spec
from ostinato.models.audio.sound_spec import SoundSpec
from ostinato.models.config.audio_config import SoundConfig
from ostinato.models.config.hf_fields import HFConfig
from ostinato.models.media.processor_fields import (
    ProcessorFields,
    TokenId,
    read_id,
    read_object,
    text_of_id,
)

__all__ = ("read_sound_spec",)

_FILE = "processor_config.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Family:
    """What differs between the models that take sounds."""

    processor: str  # the class in transformers
    id_keys: tuple[str, ...]  # the keys of config.json for the placeholder; all mean the same
    default_id: int
    marks: dict[str, str]  # the keys of the tokens before and after a sound -> their default texts
    ending: str  # follows a sound in a prompt whose template reads no sounds
    defaults: dict[str, Any]  # the other keys of the processor that have an effect
    unused: tuple[str, ...] = ()  # its keys without effect


_FAMILIES = {
    "qwen2_audio": _Family(
        processor="Qwen2AudioProcessor",
        id_keys=("audio_token_index", "audio_token_id"),
        default_id=151646,
        marks={"audio_bos_token": "<|audio_bos|>", "audio_eos_token": "<|audio_eos|>"},
        ending="\n",
        defaults={},
    ),
    "audioflamingo3": _Family(
        processor="AudioFlamingo3Processor",
        id_keys=("audio_token_id",),
        default_id=151669,
        marks={},
        ending="",
        defaults={"max_audio_len": 600},
        unused=("default_transcription_prompt",),
    ),
}
_KNOWN = ("feature_extractor", "processor_class", "auto_map", "audio_token", "chat_template")


def read_sound_spec(
    path: Path,
    hf_config: HFConfig,
    sound: SoundConfig,
    *,
    token_text: Callable[[int], str],
    token_id: TokenId,
) -> SoundSpec:
    """Read how a model takes sounds.

    Args:
        path: a directory with preprocessor_config.json, or with processor_config.json that has the
            key `feature_extractor`.
        hf_config: the parsed config.json.
        sound: what it says about the encoder.
        token_text: gives the text of a token id.
        token_id: gives the id of an added token's text; None if there is no such token.

    Raises:
        ValueError: a file is missing, or a key has a value that is not supported. The message
            names the file, the key and the value.
    """
    family = _FAMILIES.get(str(hf_config.get("model_type")))
    if family is None:
        raise ValueError(
            f"config.json: sounds for model_type={hf_config.get('model_type')!r} are not "
            f"supported; supported: {', '.join(_FAMILIES)}"
        )
    fields = _read_processor(path, family)
    mel = read_mel_spec(
        path,
        num_positions=sound.encoder.num_positions,
        num_bins=sound.encoder.num_bins,
        place="audio_config.",
    )
    key, placeholder_id = _read_placeholder(hf_config, family)
    placeholder = text_of_id(placeholder_id, key, token_text)
    if fields.get("audio_token") not in (None, placeholder):
        raise fields.refusal(
            "audio_token", f"it must be the text of config.json: {key}={placeholder_id}"
        )
    marks = _read_marks(fields, family, token_id)
    return SoundSpec(
        **msgspec.structs.asdict(mel),
        placeholder_id=placeholder_id,
        placeholder=placeholder,
        marked_placeholder=(placeholder.join(marks) if marks else placeholder) + family.ending,
        max_windows=_read_max_windows(fields, mel.window_s),
    )


def _read_processor(path: Path, family: _Family) -> ProcessorFields:
    """The keys of the processor, which stand beside those of the feature extractor."""
    stated = read_object(path / _FILE) or {}
    defaults = {**family.defaults, **family.marks}
    fields = ProcessorFields(source=_FILE, stated=stated, defaults=defaults, medium="audio")
    name = fields.get("processor_class")
    if name is None and "AutoProcessor" in (fields.get("auto_map") or {}):
        raise fields.refusal(
            "auto_map",
            f"code of the checkpoint is not run; set processor_class={family.processor}",
        )
    if name not in (None, family.processor):
        raise fields.refusal("processor_class", f"supported: {family.processor}")
    fields.refuse_unknown({*_KNOWN, *defaults, *family.unused})
    return fields


def _read_placeholder(hf_config: HFConfig, family: _Family) -> tuple[str, int]:
    """The key of config.json that names the placeholder token, and its id."""
    stated = [key for key in family.id_keys if hf_config.get(key) is not None]
    ids = [read_id(hf_config, key, family.default_id) for key in stated]
    if len(set(ids)) > 1:
        shown = " and ".join(f"{key}={value}" for key, value in zip(stated, ids, strict=True))
        raise ValueError(f"config.json: {shown} must be the same; remove one")
    return (stated[0], ids[0]) if ids else (family.id_keys[0], family.default_id)


def _read_marks(fields: ProcessorFields, family: _Family, token_id: TokenId) -> list[str]:
    """The texts of the tokens before and after a sound.

    There are none if the family has none, or if the tokenizer lacks those of the class.
    """
    texts: list[str] = []
    for key in family.marks:
        text = fields.get(key)
        if not isinstance(text, str) or token_id(text) is None:
            if key in fields.stated:
                raise fields.refusal(key, "it must be an added token of the tokenizer")
            return []
        texts.append(text)
    return texts


def _read_max_windows(fields: ProcessorFields, window_s: int) -> int:
    """Windows of the longest sound."""
    key = "max_audio_len"
    if key not in fields.defaults:
        return 1
    seconds = fields.integer(key)
    if seconds < window_s:
        raise fields.refusal(
            key, f"it must be at least {window_s}, the seconds of a window (chunk_length)"
        )
    return seconds // window_s
