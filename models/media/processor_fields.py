"""Typed access to the fields of a processor's file; every error names the file and the key.

Image processors, video processors and feature extractors of audio have files of the same form.

This module imports no torch.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = (
    "ProcessorFields",
    "TokenId",
    "read_areas",
    "read_colours",
    "read_id",
    "read_object",
    "read_processor_fields",
    "read_resample",
    "text_of_id",
)

TokenId = Callable[[str], int | None]
"""Gives the id of an added token's text; None if there is no such token."""

_FILE = "preprocessor_config.json"
_COMBINED_FILE = "processor_config.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessorFields:
    """The fields of a processor; a missing key has the default of the processor's class."""

    source: str  # where the fields stand, for errors
    stated: Mapping[str, Any]  # the fields of the file; null takes the place of the default too
    defaults: Mapping[str, Any]
    medium: str = "images"  # what the processor prepares, for errors

    def get(self, key: str) -> Any:
        """The value of a key: the stated one, which can be None, else the default, else None."""
        return self.stated.get(key, self.defaults.get(key))

    def refusal(self, key: str, supported: str) -> ValueError:
        """The error for a value that is not supported."""
        return ValueError(
            f"{self.source}: {key}={json.dumps(self.get(key))} is not supported; {supported}"
        )

    def refuse_unknown(self, known: Collection[str]) -> None:
        """Refuse keys whose effect is not known.

        Raises:
            ValueError: a stated key is not among `known`.
        """
        for key, value in self.stated.items():
            if value is not None and key not in known:
                raise self.refusal(key, f"remove the key if it has no effect on {self.medium}")

    def flag(self, key: str) -> bool:
        """A boolean; null is false, and so is a missing key without a default.

        Raises:
            ValueError: the value is not a boolean.
        """
        value = self.get(key)
        if value is None:
            return False
        if not isinstance(value, bool):
            raise self.refusal(key, "it must be true or false")
        return value

    def integer(self, key: str) -> int:
        """An integer of at least 1.

        Raises:
            ValueError: the value is something else.
        """
        value = self.get(key)
        if not _is_positive(value):
            raise self.refusal(key, "it must be an integer of at least 1")
        return value

    def factor(self, key: str) -> float:
        """A finite number above 0.

        Raises:
            ValueError: the value is something else.
        """
        value = self.get(key)
        if not _is_number(value) or value <= 0:
            raise self.refusal(key, "it must be a number above 0")
        return float(value)

    def colours(self, key: str) -> tuple[float, float, float]:
        """Numbers for R, G and B; a single number is used for all three.

        Raises:
            ValueError: the value is something else.
        """
        value = self.get(key)
        numbers = value if isinstance(value, list | tuple) else [value] * 3
        if len(numbers) != 3 or not all(map(_is_number, numbers)):
            raise self.refusal(key, "it must be three numbers, for R, G and B")
        red, green, blue = map(float, numbers)
        return red, green, blue

    def lengths(self, key: str, keys: str) -> dict[str, int]:
        """A mapping of names to lengths or areas in pixels.

        Args:
            key: the key of the mapping.
            keys: what the mapping must have, for the error.

        Raises:
            ValueError: the value is not a mapping, or a length is not an integer of at least 1.
        """
        value = self.get(key)
        if not isinstance(value, dict) or not all(map(_is_positive, value.values())):
            raise self.refusal(key, f"it must have {keys}, each an integer of at least 1")
        return value


def read_processor_fields(
    checkpoint_directory: Path,
    combined_key: str = "image_processor",
    *,
    medium: str = "images",
    auto_class: str = "AutoImageProcessor",
) -> tuple[str, dict[str, Any]]:
    """The fields of a checkpoint's processor.

    They stand in preprocessor_config.json. Newer checkpoints have them under a key of
    processor_config.json, which has priority in transformers too.

    Args:
        checkpoint_directory: has at least one of the files.
        combined_key: the key in processor_config.json.
        medium: what the processor prepares, for errors.
        auto_class: the class of transformers that writes the file, for errors.

    Returns:
        Where the fields stand, for errors, and the fields.

    Raises:
        ValueError: there are none, or a file is not a JSON object.
    """
    source, fields = f"{_COMBINED_FILE}: {combined_key}", None
    combined = read_object(checkpoint_directory / _COMBINED_FILE)
    if combined is not None:
        fields = combined.get(combined_key)
    if fields is None:
        source, fields = _FILE, read_object(checkpoint_directory / _FILE)
    if fields is None:
        raise ValueError(
            f"{checkpoint_directory} has no {_FILE}, which says how the model takes {medium}; copy "
            "this file from the model's original repository, or write it with "
            f"{auto_class}.from_pretrained(...).save_pretrained(...) of transformers"
        )
    if not isinstance(fields, dict):
        raise ValueError(f"{source} must be a JSON object, got {json.dumps(fields)}")  # noqa: TRY004
    return source, fields


def read_object(path: Path) -> dict[str, Any] | None:
    """The JSON object in a file; None if there is no file.

    Raises:
        ValueError: the file has something else.
    """
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise ValueError(f"{path.name} is not valid JSON: {error}; copy the file again") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path.name} must be a JSON object, got {json.dumps(content)}")  # noqa: TRY004
    return content


def read_areas(fields: ProcessorFields) -> tuple[int, int]:
    """The least and largest height * width.

    `min_pixels` and `max_pixels` take the place of `size.shortest_edge` and `size.longest_edge`.
    `size` has the same names in some files, but there they have no effect.

    Raises:
        ValueError: `size` has something else, or the least area is above the largest.
    """
    needed = "shortest_edge and longest_edge (areas in pixels)"
    if fields.get("size") is None:
        areas = dict(fields.defaults["size"])
    else:
        areas = dict(fields.lengths("size", needed))
    for key, name in (("min_pixels", "shortest_edge"), ("max_pixels", "longest_edge")):
        if fields.get(key) is not None:
            areas[name] = fields.integer(key)
            areas.pop(key, None)
    if set(areas) != {"shortest_edge", "longest_edge"}:
        raise fields.refusal("size", f"it must have {needed}")
    if areas["shortest_edge"] > areas["longest_edge"]:
        raise fields.refusal(
            "size",
            f"the least area {areas['shortest_edge']} (shortest_edge or min_pixels) must be at "
            f"most the largest area {areas['longest_edge']} (longest_edge or max_pixels)",
        )
    return areas["shortest_edge"], areas["longest_edge"]


def read_colours(
    fields: ProcessorFields,
) -> tuple[tuple[float, float, float], tuple[float, float, float], float]:
    """Mean, standard deviation and factor of the colours.

    Raises:
        ValueError: a value is not supported.
    """
    rescale = fields.factor("rescale_factor") if fields.flag("do_rescale") else 1.0
    if not fields.flag("do_normalize"):
        return (0.0, 0.0, 0.0), (1.0, 1.0, 1.0), rescale
    mean, std = fields.colours("image_mean"), fields.colours("image_std")
    if 0.0 in std:
        raise fields.refusal("image_std", "0 is not allowed")
    return mean, std, rescale


def read_resample(fields: ProcessorFields) -> int:
    """The number of Pillow's filter.

    Raises:
        ValueError: it is something else.
    """
    value = fields.get("resample")
    if isinstance(value, bool) or value not in range(6):
        raise fields.refusal("resample", "it must be a number of Pillow's filters, 0 to 5")
    return int(value)


def read_id(hf_config: Mapping[str, Any], key: str, default: int) -> int:
    """The id of a token, from config.json.

    Raises:
        ValueError: it is not an integer of at least 0.
    """
    value = hf_config.get(key)
    value = default if value is None else value
    if type(value) is not int or value < 0:
        raise ValueError(f"config.json: {key}={json.dumps(value)} must be an integer of at least 0")
    return value


def text_of_id(token_id: int, key: str, token_text: Callable[[int], str]) -> str:
    """The text of a token.

    Args:
        token_id: the token.
        key: the key of config.json that names it, for the error.
        token_text: gives the text of a token id.

    Raises:
        ValueError: it has none.
    """
    text = token_text(token_id)
    if not text:
        raise ValueError(
            f"config.json: {key}={token_id} has no text in the tokenizer; copy the tokenizer's "
            "files of this checkpoint again"
        )
    return text


def _is_positive(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
