"""The images, videos and sounds of a chat request: finds, checks and decodes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ostinato.api.preparation.preparation import FetchNeededError, Grant, Preparation
from ostinato.api.schemas.chat_completions import ChatCompletionRequest
from ostinato.api.schemas.conversation import MediaPart, Message
from ostinato.api.schemas.media_parts import (
    AudioUrlPart,
    ImageUrlPart,
    InputAudioPart,
    InputImagePart,
    MediaSettings,
    VideoUrlPart,
)
from ostinato.runtime.audio.sound_sources import SoundSource
from ostinato.runtime.errors import InvalidRequestError
from ostinato.runtime.images.image_sources import ImageSource
from ostinato.runtime.media.placeholders import PlacedMedia, place_media
from ostinato.runtime.media.prompt_media import (
    MediaSource,
    check_media,
    prepare_media,
    urls_to_fetch,
)
from ostinato.runtime.media.template_media import with_media_shown
from ostinato.runtime.media_files.media_kinds import MediaKind
from ostinato.runtime.video.video_inputs import check_sampling
from ostinato.runtime.video.video_sources import FrameSampling, VideoSource

__all__ = ("RequestMedia", "refuse_fields_with_media")

_PARAM = "messages"
_SAMPLING_PARAM = "media_io_kwargs.video"
_GRANTS = {
    MediaKind.image: Grant.images,
    MediaKind.video: Grant.videos,
    MediaKind.sound: Grant.audio,
}
# Fields that count the prompt's tokens or text -> why they cannot be combined with media.
_REFUSED = {
    "truncate_prompt_tokens": "such a prompt is not truncated",
    "prompt_logprobs": "their tokens have no log-probabilities",
    "return_token_offsets": "their tokens have no characters",
    "echo": "such a prompt is not repeated",
}


class RequestMedia:
    """The media of a conversation, in the order of the messages and their parts.

    Args:
        preparation: the model and the settings.
        messages: the conversation.
        settings: which frames of the videos the request asks for; None = as the server's settings
            say.
        fetched: URL -> the bytes that were fetched.

    Raises:
        InvalidRequestError: the settings are out of range, also without videos; the model takes
            none, there are too many, a video cannot have the frames that the request asks for, or a
            URL is refused.
        FetchNeededError: some must be fetched first.
        ForkNeededError: this process lacks the grant for them.
    """

    def __init__(
        self,
        preparation: Preparation,
        messages: Sequence[Message],
        settings: MediaSettings | None,
        fetched: Mapping[str, bytes],
    ) -> None:
        self._preparation = preparation
        self._fetched = fetched
        self._limits = preparation.settings.media
        sampling, spec = _sampling(settings), preparation.model.images
        videos = None if spec is None else spec.video
        check_sampling(sampling, videos, self._limits.video, _SAMPLING_PARAM)
        self._sources = [_source(part, sampling) for message in messages for part in message.media]
        if not self._sources:
            return
        check_media(
            self._sources,
            preparation.model,
            self._limits,
            param=_PARAM,
            sampling_param=_SAMPLING_PARAM,
        )
        wanted = urls_to_fetch(self._sources, self._limits, param=_PARAM)
        missing = {url: one for url, one in wanted.items() if url not in fetched}
        if missing:
            raise FetchNeededError(missing)
        kinds = {part.kind for message in messages for part in message.media}
        preparation.require(max(_GRANTS[kind] for kind in kinds))

    def shown(self, conversation: list[dict[str, Any]], template: str) -> list[dict[str, Any]]:
        """The messages in the form that a template reads; see `with_media_shown`."""
        spec = self._preparation.model.media_spec
        return conversation if spec is None else with_media_shown(conversation, template, spec)

    def placed(self, token_ids: list[int]) -> PlacedMedia:
        """Decode the media. Returns them, and the prompt with the tokens that stand for them.

        Args:
            token_ids: the prompt with one placeholder token for each of them.

        Raises:
            InvalidRequestError: one of them is refused, or the prompt has another number of
                placeholder tokens.
        """
        model = self._preparation.model
        media = prepare_media(
            self._sources,
            model,
            self._limits,
            param=_PARAM,
            fetched=self._fetched,
            begin=self._begin,
        )
        return place_media(token_ids, media, model, self._encode, param=_PARAM)

    def _begin(self, name: str, kind: MediaKind) -> None:
        preparation = self._preparation
        begin = {
            MediaKind.image: preparation.begin_image,
            MediaKind.video: preparation.begin_video,
            MediaKind.sound: preparation.begin_sound,
        }
        begin[kind](name)

    def _encode(self, text: str) -> list[int]:
        return self._preparation.encoder.tokenizer(_PARAM).encode(text, add_special_tokens=False)


def refuse_fields_with_media(body: ChatCompletionRequest) -> None:
    """Raises InvalidRequestError if a request with media has a field that needs text only."""
    if not any(message.media for message in body.messages):
        return
    for name, reason in _REFUSED.items():
        value = getattr(body, name)
        if value is not None and value is not False:
            raise InvalidRequestError(
                f"{name} cannot be combined with images, videos and audio: {reason}; leave it out",
                param=name,
                code="unsupported_parameter",
            )


def _sampling(settings: MediaSettings | None) -> FrameSampling:
    if settings is None or settings.video is None:
        return FrameSampling()
    return FrameSampling(num_frames=settings.video.num_frames, fps=settings.video.fps)


def _source(part: MediaPart, sampling: FrameSampling) -> MediaSource:
    match part:
        case VideoUrlPart():
            return VideoSource(url=part.url, sampling=sampling)
        case AudioUrlPart():
            return SoundSource(url=part.url)
        case InputAudioPart():
            return SoundSource(base64=part.input_audio.data)
        case ImageUrlPart() | InputImagePart():
            return ImageSource(url=part.url, is_small=part.is_small)
