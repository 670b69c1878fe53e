"""`Preparation`: the model, its tokenizer and the server's settings, for preparing requests.

Preparing a request has these parts: decode its body, render its template, tokenise its prompts and
check its parameters. Each endpoint has a function for this, which takes a `Preparation` and the
bytes of the body. The function never waits. It runs on the event loop for a small body, and in a
fork for a large body (`preparer.py`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from enum import IntEnum
from typing import TypeVar

import msgspec

from ostinato.api.base.unsupported_fields import UNSUPPORTED, Unsupported
from ostinato.api.preparation.generation import check_model
from ostinato.api.preparation.prompt_encoder import PromptEncoder, TextSource
from ostinato.api.schemas.body_decoding import decode
from ostinato.api.schemas.generation_fields import GenerationFields
from ostinato.conf.sections.audio_schema import AudioConfig
from ostinato.conf.sections.images_schema import ImagesConfig
from ostinato.conf.sections.server_schema import ReasoningParserName, ToolParserName
from ostinato.conf.sections.video_schema import VideoConfig
from ostinato.runtime.audio.sound_inputs import max_sound_seconds
from ostinato.runtime.client.pooling import require_task
from ostinato.runtime.client.requests import bad_words_token_ids
from ostinato.runtime.errors import InvalidRequestError
from ostinato.runtime.forks.fork_frames import BeginPart
from ostinato.runtime.media.prompt_media import FetchWanted, MediaLimits
from ostinato.runtime.types.engine_info import ServedModel, ServedTask

__all__ = (
    "Arrival",
    "FetchNeededError",
    "ForkNeededError",
    "Grant",
    "Preparation",
    "PreparationSettings",
    "renamed",
)

T = TypeVar("T", bound=msgspec.Struct)
# Limits of processor time for the parts of a preparation. The largest valid body stays below them.
_BODY_S = 10.0
_PROMPT_S = 30.0
_TEMPLATE_S = 2.0  # for a template that the client sends
_IMAGE_S = 20.0  # for decoding and resizing one image
# For decoding and resizing one video: this, and a part for each frame that the model sees. Up to a
# few hundred other frames are decoded for each.
_VIDEO_S = 60.0
_VIDEO_S_PER_FRAME = 1.0
# For decoding one file of audio and computing its spectrograms: this, and a part for each second. A
# slow processor takes a tenth of the part.
_AUDIO_S = 20.0
_AUDIO_S_PER_SECOND = 0.05


class Grant(IntEnum):
    """What a process may do for a request. Each grant also allows what smaller ones allow."""

    text = 0  # all that is safe in a process that prepares other requests too
    # The others are for a fork that prepares one request and then ends.
    template = 1  # render the client's template
    audio = 2  # decode audio: that of a form, or sounds
    images = 3
    videos = 4


class ForkNeededError(Exception):
    """The request needs a fork of its own, because this process lacks a grant.

    Args:
        needed: the smallest grant that is enough for the request, as far as is known.
    """

    def __init__(self, needed: Grant) -> None:
        super().__init__(f"the request needs a fork with the grant {needed.name!r}")
        self.needed = needed


class FetchNeededError(Exception):
    """Media of the request must be fetched before it can be prepared.

    Args:
        wanted: by URL.
    """

    def __init__(self, wanted: Mapping[str, FetchWanted]) -> None:
        super().__init__(f"{len(wanted)} media must be fetched")
        self.wanted = dict(wanted)


class PreparationSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of the server that prompts and parameters depend on."""

    tool_parser: ToolParserName = ToolParserName.auto
    reasoning_parser: ReasoningParserName = ReasoningParserName.auto
    default_max_tokens: int | None = None  # `sampling.max_tokens`
    images: ImagesConfig = msgspec.field(default_factory=ImagesConfig)
    video: VideoConfig = msgspec.field(default_factory=VideoConfig)
    audio: AudioConfig = msgspec.field(default_factory=AudioConfig)

    @property
    def media(self) -> MediaLimits:
        """The limits of images, videos and sounds."""
        return MediaLimits(self.images, self.video, self.audio)


class Arrival(msgspec.Struct, frozen=True, kw_only=True):
    """Facts about a request that are not in its body."""

    request_id: str = ""  # from the client's header, or made for the reply
    # The conversation that `previous_response_id` names, as JSON; None = it is not stored.
    stored_messages: msgspec.Raw | None = None
    adapters: tuple[str, ...] = ()  # names of the adapters that were loaded when it arrived
    fetched: dict[str, bytes] = {}  # URL of a medium -> the bytes that were fetched
    content_type: str = ""  # the header, for a body that is a form; empty = the body is JSON


@contextmanager
def renamed(names: Mapping[str, str]) -> Iterator[None]:
    """Rename the parameter in every InvalidRequestError that the block raises.

    Args:
        names: field of the chat endpoint -> field of the other API.
    """
    try:
        yield
    except InvalidRequestError as error:
        name = error.param or ""
        if name not in names:
            raise
        message = re.sub(rf"\b{re.escape(name)}\b(?! string)", names[name], str(error))
        raise InvalidRequestError(
            message, param=names[name], code=error.code, status=error.status
        ) from error


class Preparation:
    """The model, its tokenizer and the server's settings.

    Args:
        source: the model and its tokenizer, read at each call.
        settings: the settings of the server.
        begin_part: called before each part of the work that can take long, with the part's name and
            its limit of processor time in seconds.
        granted: what this process may do.
    """

    def __init__(
        self,
        source: TextSource,
        settings: PreparationSettings,
        begin_part: BeginPart = lambda name, cpu_s: None,
        *,
        granted: Grant = Grant.text,
    ) -> None:
        self._source = source
        self._begin_part = begin_part
        self._granted = granted
        self.settings = settings
        self.encoder = PromptEncoder(source)

    @property
    def model(self) -> ServedModel:
        return self._source.model

    @property
    def default_max_tokens(self) -> int | None:
        """`sampling.max_tokens`; None = up to the end of the context."""
        return self.settings.default_max_tokens

    def decode(
        self,
        data: bytes,
        arrival: Arrival,
        schema: type[T],
        unsupported: Mapping[str, Unsupported] = UNSUPPORTED,
    ) -> T:
        """Decode a body, and check that it names the served model or an adapter.

        Args:
            data: the body.
            arrival: has the names of the adapters.
            schema: the type of the body.
            unsupported: fields of the API that this server does not support.

        Raises:
            InvalidRequestError: the body is not JSON of this schema, or names an unknown model. Or
                it asks for text, and the model does not generate.
        """
        self.begin_body()
        body = decode(data, schema, unsupported)
        check_model(getattr(body, "model", None), self.model, arrival.adapters)
        if isinstance(body, GenerationFields):
            require_task(self.model, ServedTask.generate)
        return body

    def begin_body(self) -> None:
        """Note that decoding the body begins."""
        self._begin_part("the body", _BODY_S)

    def begin_prompt(self, param: str) -> None:
        """Note that tokenising the texts of a field begins."""
        self._begin_part(param, _PROMPT_S)

    def encode_bad_words(self, words: tuple[str, ...]) -> list[list[int]]:
        """Token ids of `bad_words`.

        Raises:
            InvalidRequestError: a word has too many tokens, or the model has no tokenizer.
        """
        self._begin_part("bad_words", _PROMPT_S)
        return bad_words_token_ids(words, self.encoder.tokenizer("bad_words"))

    def require(self, needed: Grant) -> None:
        """Raises ForkNeededError if this process lacks a grant."""
        if self._granted < needed:
            raise ForkNeededError(needed)

    def begin_template(self) -> None:
        """Note that rendering the client's template begins.

        Raises:
            ForkNeededError: this process lacks the grant.
        """
        self.require(Grant.template)
        self._begin_part("chat_template", _TEMPLATE_S)

    def begin_image(self, name: str) -> None:
        """Note that decoding an image begins."""
        self._begin_part(name, _IMAGE_S)

    def begin_video(self, name: str) -> None:
        """Note that decoding a video begins."""
        most = _VIDEO_S + _VIDEO_S_PER_FRAME * self.settings.video.max_frames
        self._begin_part(name, most)

    def begin_audio(self, name: str) -> None:
        """Note that decoding audio that is transcribed begins."""
        most = _AUDIO_S + _AUDIO_S_PER_SECOND * self.settings.audio.max_seconds
        self._begin_part(name, most)

    def begin_sound(self, name: str) -> None:
        """Note that decoding a sound begins."""
        spec = self.model.sounds
        assert spec is not None, "the model takes sounds"
        seconds = max_sound_seconds(spec, self.settings.audio)
        self._begin_part(name, _AUDIO_S + _AUDIO_S_PER_SECOND * seconds)
