"""The types of prompts that `LLM` takes: text, token ids, and the dictionaries of vLLM."""

from __future__ import annotations

import reprlib
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NotRequired, TypedDict, cast

import msgspec

from ostinato.runtime.errors import InvalidRequestError

if TYPE_CHECKING:
    import PIL.Image

__all__ = (
    "ImagesPrompt",
    "MediaData",
    "Prompt",
    "Prompts",
    "TextPrompt",
    "TokensPrompt",
    "prompt_list",
    "prompt_text",
)


class MediaData(TypedDict):
    """The images of a prompt, in the order of their placeholders."""

    image: PIL.Image.Image | Sequence[PIL.Image.Image]


class TextPrompt(TypedDict):
    """A prompt as text."""

    prompt: str  # has the text of the model's placeholder once for each image
    multi_modal_data: NotRequired[MediaData]


class TokensPrompt(TypedDict):
    """A prompt as token ids."""

    prompt_token_ids: list[int]  # has the placeholder token once for each image
    multi_modal_data: NotRequired[MediaData]


class ImagesPrompt(msgspec.Struct, frozen=True):
    """A prompt with images of Pillow."""

    prompt: str | Sequence[int]
    images: Sequence[Any]


Prompt = str | Sequence[int]
Prompts = Prompt | TextPrompt | TokensPrompt | Sequence[Prompt | TextPrompt | TokensPrompt]


def prompt_list(prompts: Prompts) -> list[Prompt | ImagesPrompt]:
    """The prompts as a list of texts or token ids; a single prompt becomes a list of one.

    Raises:
        InvalidRequestError: a prompt has another type, or a dictionary is neither
            `{"prompt": ...}` nor `{"prompt_token_ids": ...}`. Or `multi_modal_data` has another
            medium than images.
    """
    if isinstance(prompts, str):
        return [prompts]
    if isinstance(prompts, Mapping):
        return [_unwrap(cast(Mapping[str, object], prompts))]
    if not isinstance(prompts, Iterable):
        raise _not_a_prompt(prompts)
    items = list(cast(Iterable[object], prompts))
    if items and all(isinstance(item, int) for item in items):
        return [cast(list[int], items)]
    return [_one(item) for item in items]


def _one(item: object) -> Prompt | ImagesPrompt:
    """A prompt of a list."""
    if isinstance(item, Mapping):
        return _unwrap(cast(Mapping[str, object], item))
    if not isinstance(item, Iterable):
        raise _not_a_prompt(item)
    return cast(Prompt, item)


def _not_a_prompt(value: object) -> InvalidRequestError:
    return InvalidRequestError(
        'a prompt is a text, token ids, {"prompt": text} or {"prompt_token_ids": ids}, or a list '
        f"has these; got {reprlib.repr(value)}",
        param="prompt",
    )


def prompt_text(prompt: str | TextPrompt) -> str:
    """The text of a prompt that must not be token ids.

    Raises:
        InvalidRequestError: the prompt has token ids, or no text.
    """
    text = _unwrap(cast(Mapping[str, object], prompt)) if isinstance(prompt, Mapping) else prompt
    if not isinstance(text, str):
        raise InvalidRequestError("a score needs texts, got token ids", param="prompt")
    return text


def _unwrap(prompt: Mapping[str, object]) -> Prompt | ImagesPrompt:
    media = prompt.get("multi_modal_data")
    bare = {key: value for key, value in prompt.items() if key != "multi_modal_data"}
    images = [] if media is None else _images(media)
    return ImagesPrompt(_bare(bare), images) if images else _bare(bare)


def _images(media: object) -> Sequence[object]:
    """The images of `multi_modal_data`."""
    fields = cast(Mapping[str, object], media) if isinstance(media, Mapping) else None
    others = [] if fields is None else [key for key in fields if key != "image"]
    if fields is None or others:
        found = f"the key {others[0]!r}" if others else reprlib.repr(media)
        raise InvalidRequestError(
            f'multi_modal_data must be {{"image": ...}}, got {found}; video and audio are not'
            " supported",
            param="multi_modal_data",
        )
    value = fields.get("image", ())
    images = cast(Sequence[object], value) if isinstance(value, list | tuple) else [value]
    for image in images:
        if not hasattr(image, "convert"):
            raise InvalidRequestError(
                "multi_modal_data.image must be an image of Pillow or a list of them, got"
                f" {type(image).__name__}; use PIL.Image.open(FILE)",
                param="multi_modal_data",
            )
    return images


def _bare(prompt: Mapping[str, object]) -> Prompt:
    """The prompt of a dictionary without media."""
    names = set(prompt)
    if names == {"prompt"} and isinstance(prompt["prompt"], str):
        return prompt["prompt"]
    ids = prompt.get("prompt_token_ids")
    # A dictionary from vLLM can have both the text and the ids. The ids are used.
    if names <= {"prompt", "prompt_token_ids"} and isinstance(ids, list | tuple):
        return cast(Sequence[int], ids)
    raise InvalidRequestError(
        'a prompt is a text, token ids, {"prompt": text} or {"prompt_token_ids": ids}, got a '
        f"dictionary with {', '.join(sorted(map(str, names))) or 'nothing'}",
        param="prompt",
    )
