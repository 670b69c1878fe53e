"""Turns the prompts and conversations of `LLM` and `AsyncEngine` into token ids and images."""

from __future__ import annotations

import asyncio
import reprlib
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, cast

import msgspec

from ostinato.conf.images.images_schema import ImagesConfig
from ostinato.runtime.errors import InvalidRequestError
from ostinato.runtime.images.image_inputs import check_images, prepare_images, urls_to_fetch
from ostinato.runtime.images.image_sources import ImageSource
from ostinato.runtime.images.placeholders import expand_placeholders
from ostinato.runtime.images.template_images import IMAGE_PART, text_part, with_images_shown
from ostinato.runtime.text.offline_prompts import ImagesPrompt, Prompt
from ostinato.runtime.types.engine_info import ServedModel
from ostinato.runtime.types.images import PromptImage
from ostinato.runtime.types.params import SamplingParams

if TYPE_CHECKING:
    from ostinato.runtime.text.tokenizer import Tokenizer

__all__ = ("EncodedPrompt", "PromptInputs", "check_sampling_with_images")

Message = Mapping[str, Any]
# The keys of the parts that are images, besides `type` and the image itself.
_PART_KEYS = {
    "image_url": {"uuid"},
    "input_image": {"uuid", "detail"},
    "image_pil": {"uuid", "detail"},
}
_URL_KEYS = {"url", "detail"}
_DETAILS = ("auto", "low", "high")


class EncodedPrompt(msgspec.Struct, frozen=True, kw_only=True):
    """A prompt that is ready for `make_requests`."""

    token_ids: list[int]  # with a placeholder token for each embedding of an image
    images: list[PromptImage] = []
    text: str | None = None  # the prompt, if it is a text


class PromptInputs:
    """Encodes prompts.

    Args:
        model: the model.
        tokenizer: its tokenizer; None = prompts are token ids.
        images: the limits of images, and from where they are fetched.
    """

    def __init__(
        self, model: ServedModel, tokenizer: Tokenizer | None, images: ImagesConfig
    ) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._images = images

    def tokenizer(self) -> Tokenizer:
        """The tokenizer; raises InvalidRequestError if there is none."""
        if self._tokenizer is None:
            raise InvalidRequestError(
                f"{self._model.name} was loaded without a tokenizer: send token ids, or set "
                "model.tokenizer",
                param="prompt",
            )
        return self._tokenizer

    def token_ids(self, prompt: Prompt | ImagesPrompt) -> list[int]:
        """The token ids of a prompt that must have no images.

        Raises:
            InvalidRequestError: it has images, or there is no tokenizer for its text.
        """
        encoded = self.encode(prompt)
        if encoded.images:
            raise InvalidRequestError(
                "multi_modal_data: images are for generated text; send text only",
                param="multi_modal_data",
            )
        return encoded.token_ids

    def encode(self, prompt: Prompt | ImagesPrompt) -> EncodedPrompt:
        """A prompt as token ids, with its images.

        Raises:
            InvalidRequestError: there is no tokenizer for a text, or the images are refused.
        """
        sources: list[ImageSource] = []
        if isinstance(prompt, ImagesPrompt):
            sources = [ImageSource(pil=image) for image in prompt.images]
            prompt = prompt.prompt
        is_text = isinstance(prompt, str)
        token_ids = self.tokenizer().encode(prompt) if isinstance(prompt, str) else list(prompt)
        text = cast("str", prompt) if is_text else None
        if not sources:
            return EncodedPrompt(token_ids=token_ids, text=text)
        check_images(sources, self._model, self._images, param="multi_modal_data")
        return self._with_images(token_ids, sources, text, param="multi_modal_data")

    def render(self, messages: Sequence[Message]) -> EncodedPrompt:
        """A conversation as token ids, with its images.

        The content of a message is a text, or a list of parts. A part is a text, or an image as
        `image_url`, `input_image` or `image_pil`.

        Raises:
            InvalidRequestError: there is no tokenizer or no template, the template refuses the
                messages, or a part is refused.
        """
        tokenizer = self.tokenizer()
        sources: list[ImageSource] = []
        shown = [self._message(message, index, sources) for index, message in enumerate(messages)]
        check_images(sources, self._model, self._images, param="messages")
        if self._model.images is not None and tokenizer.chat_template is not None:
            template = tokenizer.chat_template.source
            shown = with_images_shown(shown, template, self._model.images)
        text = tokenizer.apply_chat_template(shown)
        token_ids = tokenizer.encode(text, add_special_tokens=False)
        return self._with_images(token_ids, sources, None, param="messages")

    def _with_images(
        self, token_ids: list[int], sources: list[ImageSource], text: str | None, *, param: str
    ) -> EncodedPrompt:
        """The prompt with its images, which `check_images` has checked."""
        if self._model.images is None:
            return EncodedPrompt(token_ids=token_ids, text=text)
        urls = urls_to_fetch(sources, self._images, param=param)
        fetched = _fetch(urls, self._images) if urls else {}
        images = prepare_images(sources, self._model, self._images, param=param, fetched=fetched)
        token_ids, images = expand_placeholders(token_ids, images, self._model.images, param=param)
        return EncodedPrompt(token_ids=token_ids, images=images, text=text)

    def _message(self, message: Message, index: int, sources: list[ImageSource]) -> dict[str, Any]:
        """A message with `IMAGE_PART` for each image; its images are added to `sources`."""
        content = message.get("content")
        if not isinstance(content, list | tuple):
            return dict(message)
        parts: list[Any] = []
        for position, part in enumerate(cast("Sequence[Any]", content)):
            place = f"messages[{index}].content[{position}]"
            kind = part.get("type") if isinstance(part, Mapping) else None
            if kind in _PART_KEYS:
                sources.append(_source(cast("Mapping[str, Any]", part), place))
                parts.append(dict(IMAGE_PART))
            elif kind == "text" and isinstance(part.get("text"), str):
                # Without images in the model, the template gets the parts as they are.
                parts.append(part if self._model.images is None else text_part(part["text"]))
            else:
                raise InvalidRequestError(
                    f"{place}: a part is {{'type': 'text', 'text': ...}} or has one of the types"
                    f" {', '.join(_PART_KEYS)}, got {reprlib.repr(part)}; video and audio"
                    " are not supported",
                    param=place,
                    code="invalid_value",
                )
        return {**message, "content": parts}


def check_sampling_with_images(sampling: SamplingParams, images: Sequence[PromptImage]) -> None:
    """Raises InvalidRequestError if a parameter cannot be combined with images."""
    for name in ("truncate_prompt_tokens", "prompt_logprobs"):
        if images and getattr(sampling, name) is not None:
            raise InvalidRequestError(
                f"{name} cannot be combined with images; leave it out", param=name
            )


def _source(part: Mapping[str, Any], place: str) -> ImageSource:
    """The image of a part."""
    kind = part["type"]
    value = part.get("image_pil" if kind == "image_pil" else "image_url")
    main = "image_pil" if kind == "image_pil" else "image_url"
    _check_keys(part, {"type", main, *_PART_KEYS[kind]}, place)
    detail = part.get("detail")
    if kind != "image_pil" and isinstance(value, Mapping):
        fields = cast("Mapping[str, Any]", value)
        _check_keys(fields, _URL_KEYS, f"{place}.image_url")
        detail = fields.get("detail", detail)
        value = fields.get("url")
    if detail is not None and detail not in _DETAILS:
        raise InvalidRequestError(
            f"{place}: detail must be one of {', '.join(_DETAILS)}, got {detail!r:.60}",
            param=place,
            code="invalid_value",
        )
    is_small = detail == "low"
    if kind == "image_pil" and hasattr(value, "convert"):
        return ImageSource(pil=cast("Any", value), is_small=is_small)
    if kind != "image_pil" and isinstance(value, str):
        return ImageSource(url=value, is_small=is_small)
    needed = "an image of Pillow" if kind == "image_pil" else "a URL as text"
    raise InvalidRequestError(
        f"{place}.{main} must be {needed}, got {type(value).__name__}",
        param=place,
        code="invalid_value",
    )


def _check_keys(fields: Mapping[str, Any], known: set[str], place: str) -> None:
    unknown = [key for key in fields if key not in known]
    if unknown:
        raise InvalidRequestError(
            f"{place} has the key {unknown[0]!r:.60}, which is not supported; keys:"
            f" {', '.join(sorted(known))}",
            param=place,
            code="unknown_parameter",
        )


def _fetch(urls: Mapping[str, str], config: ImagesConfig) -> dict[str, bytes]:
    from ostinato.runtime.images.fetch_images import ImageFetcher

    async def work() -> dict[str, bytes]:
        return await ImageFetcher(config).fetch(urls)

    # On a thread of its own, because the caller's thread can have an event loop (a notebook).
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(asyncio.run, work()).result()
