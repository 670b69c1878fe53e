"""The types of prompts that `LLM` takes: text, token ids, and the dictionaries of vLLM."""

from __future__ import annotations

import reprlib
from collections.abc import Iterable, Mapping, Sequence
from typing import TypedDict, cast

from ostinato.runtime.errors import InvalidRequestError

__all__ = ("Prompt", "Prompts", "TextPrompt", "TokensPrompt", "prompt_list", "prompt_text")


class TextPrompt(TypedDict):
    """A prompt as text."""

    prompt: str


class TokensPrompt(TypedDict):
    """A prompt as token ids."""

    prompt_token_ids: list[int]


Prompt = str | Sequence[int]
Prompts = Prompt | TextPrompt | TokensPrompt | Sequence[Prompt | TextPrompt | TokensPrompt]


def prompt_list(prompts: Prompts) -> list[Prompt]:
    """The prompts as a list of texts or token ids; a single prompt becomes a list of one.

    Raises:
        InvalidRequestError: a prompt has another type, or a dictionary is neither
            `{"prompt": ...}` nor `{"prompt_token_ids": ...}`.
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


def _one(item: object) -> Prompt:
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


def _unwrap(prompt: Mapping[str, object]) -> Prompt:
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
