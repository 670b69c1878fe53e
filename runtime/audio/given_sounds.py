"""Reads the sounds that a Python program gives: samples, the bytes of files, paths, and URLs."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from numbers import Real
from pathlib import Path
from typing import Any, TypeGuard, cast

from ostinato.runtime.audio.offline_audio import sample_array, sample_pair
from ostinato.runtime.audio.sound_sources import GivenSamples, SoundSource
from ostinato.runtime.errors import InvalidRequestError
from ostinato.runtime.media_files.part_keys import check_keys

__all__ = ("SOUND_KINDS", "SoundInput", "is_number_list", "sound_list", "sound_of_part")

SoundInput = Any
"""A path, the bytes of a file, `(samples, sampling_rate)`, or samples at the rate of the model.

Samples are an array of NumPy or torch: [n], with a rate also [n, channels] or [channels, n].
Without a rate, they can be a list of numbers. In `multi_modal_data`, [sounds, n] without a rate is
several sounds.
"""

SOUND_KINDS = ("input_audio", "audio_url", "audio")
"""The types of parts of a message that are sounds."""

_OTHERS = "a path, the bytes of a file, an array of samples at the rate of the model, or "


def sound_list(items: Sequence[object], param: str, most: int | None = None) -> list[SoundSource]:
    """The sounds of `multi_modal_data`.

    Args:
        items: each a `SoundInput`.
        param: the name of the sounds in errors.
        most: the most sounds of an array, `audio.max_per_request`; None = any number.

    Raises:
        InvalidRequestError: an item has another type, or too many sounds.
    """
    sounds: list[SoundSource] = []
    for item in items:
        array = sample_array(item)
        if array is not None and array.ndim == 2:
            if most is not None and len(array) > most:
                raise _too_many_rows(array, param, most)
            sounds += [SoundSource(samples=GivenSamples(row)) for row in array]
        else:
            sounds.append(_source(item, param))
    return sounds


def sound_of_part(part: Mapping[str, Any], place: str) -> SoundSource:
    """The sound of a part of a message.

    Args:
        part: `{"type": "audio_url", "audio_url": URL or {"url": URL}}`, `{"type": "input_audio",
            "input_audio": {"data": BASE64, "format": TEXT}}`, or `{"type": "audio", "audio":
            SOUND}` with a URL as text or a `SoundInput`. All can have `uuid`, which has no effect,
            like `format`.
        place: the name of the part in errors.

    Raises:
        InvalidRequestError: the part has another key, or a value of another type.
    """
    kind = str(part["type"])
    check_keys(part, {"type", kind, "uuid"}, place)
    value = part.get(kind)
    if kind == "input_audio":
        fields = cast("Mapping[str, Any]", value) if isinstance(value, Mapping) else {}
        check_keys(fields, {"data", "format"}, f"{place}.input_audio")
        data = fields.get("data")
        if not isinstance(data, str):
            raise _refusal(f"{place}.input_audio", "must have the key data with base64 as text")
        return SoundSource(base64=data)
    if kind == "audio_url" and isinstance(value, Mapping):
        fields = cast("Mapping[str, Any]", value)
        check_keys(fields, {"url"}, f"{place}.audio_url")
        value = fields.get("url")
    if isinstance(value, str):
        return SoundSource(url=value)
    if kind == "audio_url":
        raise _refusal(f"{place}.audio_url", f"must be a URL as text, got {type(value).__name__}")
    array = sample_array(value)
    if array is not None and array.ndim == 2:
        raise _refusal(
            f"{place}.audio",
            f"has the shape {list(array.shape)} without a rate, and a part has one sound; give"
            " (samples, rate), or one part for each sound",
        )
    return _source(value, f"{place}.audio")


def _source(value: object, param: str) -> SoundSource:
    """One sound without a URL."""
    if isinstance(value, bytes | bytearray | memoryview):
        return SoundSource(file=bytes(value))
    if isinstance(value, str | os.PathLike):
        return SoundSource(file=Path(cast("str | os.PathLike[str]", value)))
    array = _numbers(value, param) if is_number_list(value) else sample_array(value)
    if array is not None:
        return SoundSource(samples=GivenSamples(array))
    samples, rate = sample_pair(value, param, _OTHERS)
    return SoundSource(samples=GivenSamples(samples, rate))


def is_number_list(value: object) -> TypeGuard[list[Real]]:
    """Whether a value is a list of numbers, of Python or NumPy, and not empty."""
    if not isinstance(value, list):
        return False
    types = {type(one) for one in cast("list[object]", value)}
    return bool(types) and all(issubclass(one, Real) and one is not bool for one in types)


def _numbers(values: list[Real], param: str) -> Any:
    """A list of numbers as an array [n]."""
    import numpy as np

    try:
        with np.errstate(over="ignore"):  # an infinite sample is refused later
            return np.asarray(values, np.float32)
    except OverflowError as error:  # an int above all floats
        raise _refusal(
            param,
            "has a whole number that is out of range; samples are numbers from -1 to 1; scale them",
        ) from error


def _too_many_rows(array: Any, param: str, most: int) -> InvalidRequestError:
    rows, columns = array.shape
    problem = f"has the shape [{rows}, {columns}] without a rate, which is {rows} sounds"
    remedy = "give (samples, rate) if the axes are [n, channels], or fewer sounds"
    return InvalidRequestError(
        f"{param} {problem}, and audio.max_per_request allows {most}; {remedy}",
        param=param.partition(".")[0],
        code="too_many_sounds",
    )


def _refusal(place: str, problem: str) -> InvalidRequestError:
    return InvalidRequestError(f"{place} {problem}", param=place, code="invalid_audio")
