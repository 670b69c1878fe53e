"""The types of prompts that `LLM` takes: text, token ids, and the dictionaries of vLLM."""

from __future__ import annotations

import reprlib
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NotRequired, TypedDict, cast

import msgspec

from ostinato.runtime.audio.given_sounds import SoundInput, is_number_list
from ostinato.runtime.errors import InvalidRequestError
from ostinato.runtime.video.offline_videos import VideoInput, video_list
from ostinato.runtime.video.video_sources import VideoSource

if TYPE_CHECKING:
    import PIL.Image

__all__ = (
    "DictPrompt",
    "EncoderDecoderPrompt",
    "MediaData",
    "MediaPrompt",
    "Prompt",
    "Prompts",
    "TextPrompt",
    "TokensPrompt",
    "prompt_list",
    "prompt_text",
)

_MEDIA = ("image", "video", "audio")


class MediaData(TypedDict, total=False):
    """The images and videos or the sounds of a prompt, in the order of their placeholders.

    A prompt of a model that transcribes has one sound, which has no placeholder.
    """

    image: PIL.Image.Image | Sequence[PIL.Image.Image]
    video: VideoInput | list[VideoInput]
    audio: SoundInput | list[SoundInput]


class TextPrompt(TypedDict):
    """A prompt as text."""

    prompt: str  # has the text of the model's placeholder once for each image, video or sound
    multi_modal_data: NotRequired[MediaData]


class TokensPrompt(TypedDict):
    """A prompt as token ids."""

    prompt_token_ids: list[int]  # has the placeholder token once for each image, video or sound
    multi_modal_data: NotRequired[MediaData]


class EncoderPrompt(TypedDict):
    """What the encoder of an encoder-decoder model reads."""

    prompt: NotRequired[str]  # empty
    multi_modal_data: MediaData


class EncoderDecoderPrompt(TypedDict):
    """A prompt for an encoder-decoder model: audio, and the text after which the decoder writes."""

    encoder_prompt: EncoderPrompt
    decoder_prompt: str | Sequence[int] | TextPrompt | TokensPrompt


class MediaPrompt(msgspec.Struct, frozen=True, kw_only=True):
    """A prompt with images of Pillow and videos, or with sounds."""

    prompt: str | Sequence[int]
    images: Sequence[Any] = ()
    videos: Sequence[VideoSource] = ()
    audio: Sequence[object] = ()  # each a `SoundInput`, not checked


Prompt = str | Sequence[int]
DictPrompt = TextPrompt | TokensPrompt | EncoderDecoderPrompt
Prompts = Prompt | DictPrompt | Sequence[Prompt | DictPrompt]


def prompt_list(prompts: Prompts) -> list[Prompt | MediaPrompt]:
    """The prompts as a list of texts or token ids; a single prompt becomes a list of one.

    Raises:
        InvalidRequestError: a prompt has another type, or a dictionary is neither
            `{"prompt": ...}` nor `{"prompt_token_ids": ...}` nor an encoder's and a decoder's
            prompt. Or `multi_modal_data` has another medium than images, videos and audio, or
            one of another type.
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


def _one(item: object) -> Prompt | MediaPrompt:
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


def _unwrap(prompt: Mapping[str, object]) -> Prompt | MediaPrompt:
    if "encoder_prompt" in prompt or "decoder_prompt" in prompt:
        prompt = _joined(prompt)
    media = prompt.get("multi_modal_data")
    bare = _bare({key: value for key, value in prompt.items() if key != "multi_modal_data"})
    if media is None:
        return bare
    fields = _fields(media)
    images, audio = _images(fields.get("image", ())), _audio(fields.get("audio", []))
    videos = video_list(fields.get("video", []), "multi_modal_data.video")
    if not images and not videos and not audio:
        return bare
    return MediaPrompt(prompt=bare, images=images, videos=videos, audio=audio)


def _joined(prompt: Mapping[str, object]) -> dict[str, object]:
    """The decoder's prompt with the audio of the encoder's."""
    encoder, decoder = prompt.get("encoder_prompt"), prompt.get("decoder_prompt")
    others = [key for key in prompt if key not in ("encoder_prompt", "decoder_prompt")]
    media = encoder.get("multi_modal_data") if isinstance(encoder, Mapping) else None
    if others or not isinstance(media, Mapping) or set(media) != {"audio"}:
        raise InvalidRequestError(
            'a prompt with encoder_prompt and decoder_prompt is {"encoder_prompt": {"prompt": "", '
            '"multi_modal_data": {"audio": (samples, sampling_rate)}}, "decoder_prompt": text}, '
            f"got {reprlib.repr(dict(prompt))}",
            param="encoder_prompt",
        )
    for key, value in cast("Mapping[str, object]", encoder).items():
        if key != "multi_modal_data" and (
            key not in ("prompt", "prompt_token_ids") or value not in ("", None, [], ())
        ):
            raise InvalidRequestError(
                f"encoder_prompt.{key} must be left out: the encoder reads the audio alone; got"
                f" {reprlib.repr(value)}",
                param="encoder_prompt",
            )
    if isinstance(decoder, str):
        decoder = {"prompt": decoder}
    elif isinstance(decoder, list | tuple):
        decoder = {"prompt_token_ids": decoder}
    if not isinstance(decoder, Mapping) or "multi_modal_data" in decoder:
        raise InvalidRequestError(
            'decoder_prompt must be a text, token ids, {"prompt": text} or {"prompt_token_ids": '
            f"ids}}, got {reprlib.repr(decoder)}",
            param="decoder_prompt",
        )
    return {**cast("Mapping[str, object]", decoder), "multi_modal_data": media}


def _fields(media: object) -> Mapping[str, object]:
    """The fields of `multi_modal_data`."""
    fields = cast("Mapping[str, object]", media) if isinstance(media, Mapping) else None
    others = [] if fields is None else [key for key in fields if key not in _MEDIA]
    if fields is None or others:
        found = f"the key {others[0]!r}" if others else reprlib.repr(media)
        raise InvalidRequestError(
            'multi_modal_data must be {"image": ..., "video": ...} or {"audio": ...}, got '
            f"{found}",
            param="multi_modal_data",
        )
    return fields


def _images(value: object) -> Sequence[object]:
    """The images of `multi_modal_data`."""
    images = cast("Sequence[object]", value) if isinstance(value, list | tuple) else [value]
    for image in images:
        if not hasattr(image, "convert"):
            raise InvalidRequestError(
                "multi_modal_data.image must be an image of Pillow or a list of them, got"
                f" {type(image).__name__}; use PIL.Image.open(FILE)",
                param="multi_modal_data",
            )
    return images


def _audio(value: object) -> Sequence[object]:
    """The sounds of `multi_modal_data`. A tuple and a list of numbers are one sound."""
    if isinstance(value, list):
        return [value] if is_number_list(value) else cast("list[object]", value)
    is_nothing = value is None or (isinstance(value, tuple) and not value)
    return [] if is_nothing else [value]


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
