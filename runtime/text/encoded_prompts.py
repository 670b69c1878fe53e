"""Turns the prompts and conversations of `LLM` and `AsyncEngine` into token ids and media."""

from __future__ import annotations

import asyncio
import reprlib
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, cast, get_args

import msgspec

from ostinato.runtime.audio.given_sounds import SOUND_KINDS, sound_list, sound_of_part
from ostinato.runtime.audio.offline_audio import prepare_one_window
from ostinato.runtime.audio.transcript_prompt import rules_after
from ostinato.runtime.errors import InvalidRequestError
from ostinato.runtime.images.image_sources import ImageSource
from ostinato.runtime.media.placeholders import place_media
from ostinato.runtime.media.prompt_media import (
    FetchWanted,
    MediaLimits,
    MediaSource,
    check_media,
    prepare_media,
    urls_to_fetch,
)
from ostinato.runtime.media.template_media import MEDIA_PARTS, text_part, with_media_shown
from ostinato.runtime.media_files.media_kinds import MediaKind
from ostinato.runtime.media_files.part_keys import check_keys
from ostinato.runtime.text.offline_prompts import MediaPrompt, Prompt
from ostinato.runtime.types.audio import PromptAudio, PromptSound
from ostinato.runtime.types.engine_info import ServedModel
from ostinato.runtime.types.images import ImageDetail, PromptImage
from ostinato.runtime.types.params import SamplingParams
from ostinato.runtime.types.transcript_rules import TranscriptRules
from ostinato.runtime.video.offline_videos import VIDEO_KINDS, video_of_part

if TYPE_CHECKING:
    from ostinato.runtime.text.tokenizer import Tokenizer

__all__ = ("EncodedPrompt", "PromptInputs", "check_sampling_with_media")

Message = Mapping[str, Any]
# The keys of the parts that are images, besides `type` and the image itself.
_PART_KEYS = {
    "image_url": {"uuid"},
    "input_image": {"uuid", "detail"},
    "image_pil": {"uuid", "detail"},
}
_URL_KEYS = {"url", "detail"}
_DETAILS = get_args(ImageDetail)


class EncodedPrompt(msgspec.Struct, frozen=True, kw_only=True):
    """A prompt that is ready for `make_requests`."""

    token_ids: list[int]  # with a placeholder token for each embedding of a medium
    images: list[PromptImage] = []  # and the pairs of frames of videos
    sounds: list[PromptSound] = []
    audio: PromptAudio | None = None
    rules: TranscriptRules | None = None  # of the output, unless the parameters have some
    text: str | None = None  # the prompt, if it is a text

    def adjusted(self, sampling: SamplingParams) -> SamplingParams:
        """The parameters with the rules that belong to the prompt.

        Raises:
            InvalidRequestError: a parameter cannot be combined with the prompt's media.
        """
        check_sampling_with_media(sampling, [*self.images, *self.sounds])
        if self.audio is not None and sampling.truncate_prompt_tokens is not None:
            raise InvalidRequestError(
                "truncate_prompt_tokens cannot be combined with audio; leave it out",
                param="truncate_prompt_tokens",
            )
        if self.rules is None or sampling.transcript is not None:
            return sampling
        return msgspec.structs.replace(sampling, transcript=self.rules)


class PromptInputs:
    """Encodes prompts.

    Args:
        model: the model.
        tokenizer: its tokenizer; None = prompts are token ids.
        media: the limits of media, and from where they are fetched.
    """

    def __init__(self, model: ServedModel, tokenizer: Tokenizer | None, media: MediaLimits) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._media = media

    def tokenizer(self) -> Tokenizer:
        """The tokenizer; raises InvalidRequestError if there is none."""
        if self._tokenizer is None:
            raise InvalidRequestError(
                f"{self._model.name} was loaded without a tokenizer: send token ids, or set "
                "model.tokenizer",
                param="prompt",
            )
        return self._tokenizer

    def token_ids(self, prompt: Prompt | MediaPrompt) -> list[int]:
        """The token ids of a prompt that must have neither images nor audio.

        Raises:
            InvalidRequestError: it has some, or there is no tokenizer for its text.
        """
        if isinstance(prompt, MediaPrompt):
            raise InvalidRequestError(
                "multi_modal_data: images, videos and audio are for generated text; send text only",
                param="multi_modal_data",
            )
        return self._ids(prompt)

    def encode(self, prompt: Prompt | MediaPrompt) -> EncodedPrompt:
        """A prompt as token ids, with its media.

        Raises:
            InvalidRequestError: there is no tokenizer for a text, a medium is refused, or a model
                that transcribes gets no audio.
        """
        sources: list[MediaSource] = []
        audio: Sequence[object] = ()
        if isinstance(prompt, MediaPrompt):
            sources = [*(ImageSource(pil=image) for image in prompt.images), *prompt.videos]
            audio, prompt = prompt.audio, prompt.prompt
        param = "multi_modal_data"
        if self._model.audio is not None:
            check_media(sources, self._model, self._media, param=param)
            return self._with_audio(prompt, audio)
        most = None if self._model.sounds is None else self._media.audio.max_per_request
        sources += sound_list(audio, f"{param}.audio", most)
        token_ids = self._ids(prompt, has_media=bool(sources))
        text = prompt if isinstance(prompt, str) else None
        if not sources:
            return EncodedPrompt(token_ids=token_ids, text=text)
        check_media(sources, self._model, self._media, param=param)
        return self._with_media(token_ids, sources, text, param=param)

    def render(self, messages: Sequence[Message]) -> EncodedPrompt:
        """A conversation as token ids, with its media.

        The content of a message is a text, or a list of parts. A part is a text, an image as
        `image_url`, `input_image` or `image_pil`, a video as `video_url` or `video`, or a sound as
        `input_audio`, `audio_url` or `audio`.

        Raises:
            InvalidRequestError: there is no tokenizer or no template, the template refuses the
                messages, or a part is refused.
        """
        if self._model.audio is not None:
            raise InvalidRequestError(
                f"messages: {self._model.name} transcribes audio and takes no conversations; use "
                "LLM.transcribe, or a prompt with multi_modal_data={'audio': (samples, rate)}",
                param="messages",
                code="unsupported_task",
            )
        tokenizer = self.tokenizer()
        sources: list[MediaSource] = []
        shown = [self._message(message, index, sources) for index, message in enumerate(messages)]
        check_media(sources, self._model, self._media, param="messages")
        spec = self._model.media_spec
        if spec is not None and tokenizer.chat_template is not None:
            shown = with_media_shown(shown, tokenizer.chat_template.source, spec)
        text = self._model.text_to_encode(tokenizer.apply_chat_template(shown))
        token_ids = tokenizer.encode(text, add_special_tokens=False)
        return self._with_media(token_ids, sources, None, param="messages")

    def _ids(self, prompt: Prompt, *, has_media: bool = False) -> list[int]:
        if not isinstance(prompt, str):
            return list(prompt)
        return self.tokenizer().encode(self._model.text_to_encode(prompt) if has_media else prompt)

    def _with_audio(self, prompt: Prompt, audio: Sequence[object]) -> EncodedPrompt:
        """The decoder's prompt with its audio. A text has the special tokens in it."""
        param, spec, name = "multi_modal_data", self._model.audio, self._model.name
        code = "unsupported_parameter"
        assert spec is not None, "the model transcribes"
        if len(audio) > 1:
            raise InvalidRequestError(
                f"{param}.audio has {len(audio)} items, and a prompt takes one; give each audio a"
                " prompt of its own, and (samples, sampling_rate) as a tuple",
                param=param,
                code=code,
            )
        if not audio:
            raise InvalidRequestError(
                f"prompt has no audio, and {name} transcribes audio; use LLM.transcribe, or "
                "{'prompt': text, 'multi_modal_data': {'audio': (samples, sampling_rate)}}",
                param="prompt",
                code=code,
            )
        is_text = isinstance(prompt, str)
        token_ids = (
            self.tokenizer().encode(prompt, add_special_tokens=False)
            if isinstance(prompt, str)
            else list(prompt)
        )
        if spec.start_id not in token_ids:
            raise InvalidRequestError(
                "prompt has no <|startoftranscript|>; write a prompt such as"
                " '<|startoftranscript|><|en|><|transcribe|><|notimestamps|>' (English models:"
                " '<|startoftranscript|><|notimestamps|>'), or use LLM.transcribe",
                param="prompt",
                code="invalid_value",
            )
        return EncodedPrompt(
            token_ids=token_ids,
            audio=prepare_one_window(audio[0], spec, self._media.audio, param=f"{param}.audio"),
            rules=rules_after(spec, token_ids),
            text=cast("str", prompt) if is_text else None,
        )

    def _with_media(
        self, token_ids: list[int], sources: list[MediaSource], text: str | None, *, param: str
    ) -> EncodedPrompt:
        """The prompt with its media, which `check_media` has checked."""
        model = self._model
        urls = urls_to_fetch(sources, self._media, param=param)
        fetched = _fetch(urls, self._media) if urls else {}
        media = prepare_media(sources, model, self._media, param=param, fetched=fetched)
        placed = place_media(token_ids, media, model, self._bare_ids, param=param)
        return EncodedPrompt(
            token_ids=placed.token_ids, images=placed.images, sounds=placed.sounds, text=text
        )

    def _bare_ids(self, text: str) -> list[int]:
        """The tokens of a text, without those around a prompt."""
        return self.tokenizer().encode(text, add_special_tokens=False)

    def _message(self, message: Message, index: int, sources: list[MediaSource]) -> dict[str, Any]:
        """A message with `MEDIA_PARTS`; its media are added to `sources`.

        Texts without media are joined by newlines, as in `/v1/chat/completions`.
        """
        content = message.get("content")
        if not isinstance(content, list | tuple):
            return dict(message)
        parts: list[Any] = []
        for position, part in enumerate(cast("Sequence[Any]", content)):
            place = f"messages[{index}].content[{position}]"
            kind = part.get("type") if isinstance(part, Mapping) else None
            if kind in _PART_KEYS:
                sources.append(_source(cast("Mapping[str, Any]", part), place))
                parts.append(dict(MEDIA_PARTS[MediaKind.image]))
            elif kind in VIDEO_KINDS:
                sources.append(video_of_part(cast("Mapping[str, Any]", part), place))
                parts.append(dict(MEDIA_PARTS[MediaKind.video]))
            elif kind in SOUND_KINDS:
                sources.append(sound_of_part(cast("Mapping[str, Any]", part), place))
                parts.append(dict(MEDIA_PARTS[MediaKind.sound]))
            elif kind == "text" and isinstance(part.get("text"), str):
                parts.append(text_part(part["text"]))
            else:
                raise InvalidRequestError(
                    f"{place}: a part is {{'type': 'text', 'text': ...}} or has one of the types"
                    f" {', '.join((*_PART_KEYS, *VIDEO_KINDS, *SOUND_KINDS))}, got"
                    f" {reprlib.repr(part)}",
                    param=place,
                    code="invalid_value",
                )
        if all(part["type"] == "text" for part in parts):
            return {**message, "content": "\n".join(part["text"] for part in parts)}
        return {**message, "content": parts}


def check_sampling_with_media(
    sampling: SamplingParams, media: Sequence[PromptImage | PromptSound]
) -> None:
    """Raises InvalidRequestError if a parameter cannot be combined with media in the prompt."""
    for name in ("truncate_prompt_tokens", "prompt_logprobs"):
        if media and getattr(sampling, name) is not None:
            raise InvalidRequestError(
                f"{name} cannot be combined with images, videos and audio; leave it out",
                param=name,
            )


def _source(part: Mapping[str, Any], place: str) -> ImageSource:
    """The image of a part."""
    kind = part["type"]
    value = part.get("image_pil" if kind == "image_pil" else "image_url")
    main = "image_pil" if kind == "image_pil" else "image_url"
    check_keys(part, {"type", main, *_PART_KEYS[kind]}, place)
    detail = part.get("detail")
    if kind != "image_pil" and isinstance(value, Mapping):
        fields = cast("Mapping[str, Any]", value)
        check_keys(fields, _URL_KEYS, f"{place}.image_url")
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


def _fetch(urls: Mapping[str, FetchWanted], limits: MediaLimits) -> dict[str, bytes]:
    from ostinato.runtime.media.fetch_media import MediaFetcher

    async def work() -> dict[str, bytes]:
        return await MediaFetcher(limits).fetch(urls)

    # On a thread of its own, because the caller's thread can have an event loop (a notebook).
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(asyncio.run, work()).result()
