"""Reads the config.json of a model of images or sounds: the object with its decoder's keys."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from ostinato.models.config.hf_fields import (
    HFConfig,
    read_first,
    read_flag,
    read_name,
    read_object,
    refuse_other_values,
)
from ostinato.models.config_json.decoder_fields import MUST_BE
from ostinato.ops.rope import Rope

__all__ = (
    "flat_axes",
    "interleaved_axes",
    "read_text_config",
    "take_sections",
    "text_kind",
)

_ROPE_OBJECTS = ("rope_parameters", "rope_scaling")
_SECTIONS, _INTERLEAVED = "mrope_section", "mrope_interleaved"


def read_text_config(
    hf_config: HFConfig, defaults: HFConfig, *, is_tied: bool | None = None
) -> dict[str, Any]:
    """The keys of the decoder, as in the config.json of a model of texts alone.

    Args:
        hf_config: the parsed config.json. The keys of the decoder are in `text_config`. Older files
            of Qwen2-VL have them at the top level.
        defaults: the keys of the decoder that a config.json may leave out.
        is_tied: whether the output head is tied to the embedding; None = if `tie_word_embeddings`
            is true at the top level or among the keys of the decoder.

    Returns:
        The keys, with the `architectures` and the dtype of the whole model.

    Raises:
        ValueError: `text_config` is not an object, or a key has a value that is not supported.
    """
    refuse_other_values(hf_config, MUST_BE)
    nested = read_object(hf_config, "text_config")
    stated = hf_config if hf_config.get("text_config") is None else nested
    if is_tied is None:
        outer, inner = (
            read_flag(each, "tie_word_embeddings", False) for each in (hf_config, stated)
        )
        is_tied = outer or inner
    dtype = read_first(hf_config, "dtype", "torch_dtype")
    if dtype is None:
        dtype = read_first(stated, "dtype", "torch_dtype")
    return {
        **defaults,
        **stated,
        "architectures": hf_config.get("architectures"),
        "tie_word_embeddings": is_tied,
        "dtype": dtype,
    }


def text_kind(hf_config: HFConfig, supported: Collection[str], default: str) -> str:
    """The type of the decoder, `text_config.model_type`.

    Args:
        hf_config: the parsed config.json.
        supported: the types that the family has.
        default: the type if none is stated.

    Raises:
        ValueError: it is not supported.
    """
    nested, key = read_object(hf_config, "text_config"), "text_config.model_type"
    return read_name({key: nested.get("model_type", default)}, key, supported, default)


def take_sections(
    text_config: HFConfig, default: Sequence[int], *, is_interleaved: bool
) -> tuple[dict[str, Any], tuple[int, ...]]:
    """Separate the keys of M-RoPE (arXiv:2409.12191) from those of the rotary embedding.

    Args:
        text_config: the keys of the decoder.
        default: the sections if none are stated.
        is_interleaved: whether the family interleaves the axes.

    Returns:
        The keys without those of M-RoPE, and `mrope_section`.

    Raises:
        ValueError: the sections are not a list of integers, or `mrope_interleaved` is not that of
            the family.
    """
    cleaned = dict(text_config)
    sections: object = default
    for name in _ROPE_OBJECTS:
        parameters = text_config.get(name)
        if not isinstance(parameters, Mapping):
            continue
        refuse_other_values(parameters, {_INTERLEAVED: is_interleaved})
        if parameters.get(_SECTIONS) is not None:
            sections = parameters[_SECTIONS]
        others = {
            key: "default" if key in ("type", "rope_type") and value == "mrope" else value
            for key, value in parameters.items()
            if key not in (_SECTIONS, _INTERLEAVED)
        }
        cleaned[name] = others
    if (
        not isinstance(sections, Sequence)
        or len(sections) < 3
        or any(type(one) is not int or one < 0 for one in sections)
    ):
        raise ValueError(
            f"config.json: mrope_section must be at least three numbers of pairs, got {sections!r}"
        )
    return cleaned, tuple(sections)


def flat_axes(sections: tuple[int, ...], rope: Rope | None) -> tuple[int, ...]:
    """`ModelConfig.rope_axes` of Qwen2-VL: the pairs of each section have the next axis.

    Raises:
        ValueError: the sections do not have as many pairs as the rotary embedding.
    """
    num_pairs = 0 if rope is None else rope.rotary_dim // 2
    if sum(sections) != num_pairs:
        raise ValueError(
            f"config.json: mrope_section={list(sections)} must add up to the {num_pairs} rotated "
            "pairs of a head"
        )
    return tuple(number % 3 for number, size in enumerate(sections) for _ in range(size))


def interleaved_axes(sections: tuple[int, ...], rope: Rope | None) -> tuple[int, ...]:
    """`ModelConfig.rope_axes` of Qwen3-VL: the axes alternate.

    The sections of rows and columns say how many pairs these axes have. All other pairs have the
    axis of time.

    Raises:
        ValueError: there are not three sections.
    """
    if len(sections) != 3:
        raise ValueError(f"config.json: mrope_section must be three numbers, got {list(sections)}")
    num_pairs = 0 if rope is None else rope.rotary_dim // 2
    return tuple(pair % 3 if pair < 3 * sections[pair % 3] else 0 for pair in range(num_pairs))
