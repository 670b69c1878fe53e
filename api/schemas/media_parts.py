"""The parts of a message that are images, videos or audio, and the frames of videos."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

import msgspec

from ostinato.api.schemas.client_fields import CacheControl, PromptCacheBreakpoint
from ostinato.runtime.media_files.media_kinds import MediaKind
from ostinato.runtime.types.images import ImageDetail

__all__ = (
    "AudioUrl",
    "AudioUrlPart",
    "ImageUrl",
    "ImageUrlPart",
    "InputAudio",
    "InputAudioPart",
    "InputImagePart",
    "MediaSettings",
    "VideoFrames",
    "VideoUrl",
    "VideoUrlPart",
)

# Names of the formats in docs/audio.md. They have no effect, because the bytes show the format.
AudioFormat = Literal[
    "aac", "flac", "m4a", "mp3", "mp4", "mpeg", "mpga", "oga", "ogg", "opus", "wav", "webm"
]


class ImageUrl(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    url: str  # data:image/png;base64,DATA, or a URL whose host is in `images.domains`
    detail: ImageDetail | None = None


class VideoUrl(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    # A data: URL of a file or of JPEG frames, or a URL whose host is in `images.domains`.
    url: str


class _MediaPart(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    # A name that the client gives to the medium. It has no effect, because caches compare pixels
    # and features.
    uuid: str | None = None
    cache_control: CacheControl | None = None
    prompt_cache_breakpoint: PromptCacheBreakpoint | None = None


class _ImagePart(_MediaPart, frozen=True, kw_only=True):
    kind: ClassVar[MediaKind] = MediaKind.image
    image_url: str | ImageUrl

    @property
    def url(self) -> str:
        return self.image_url if isinstance(self.image_url, str) else self.image_url.url


class ImageUrlPart(_ImagePart, frozen=True, kw_only=True, tag_field="type", tag="image_url"):
    """An image, as in OpenAI's chat completions."""

    @property
    def is_small(self) -> bool:
        """Whether the request asks for a small image."""
        return isinstance(self.image_url, ImageUrl) and self.image_url.detail == "low"


class InputImagePart(_ImagePart, frozen=True, kw_only=True, tag_field="type", tag="input_image"):
    """An image, as in OpenAI's Responses API."""

    detail: ImageDetail | None = None

    @property
    def is_small(self) -> bool:
        """Whether the request asks for a small image."""
        within = self.image_url.detail if isinstance(self.image_url, ImageUrl) else None
        return "low" in (self.detail, within)


class VideoUrlPart(_MediaPart, frozen=True, kw_only=True, tag_field="type", tag="video_url"):
    """A video, as in vLLM's chat completions."""

    kind: ClassVar[MediaKind] = MediaKind.video
    video_url: str | VideoUrl

    @property
    def url(self) -> str:
        return self.video_url if isinstance(self.video_url, str) else self.video_url.url


class AudioUrl(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    url: str  # data:audio/wav;base64,DATA, or a URL whose host is in `images.domains`


class AudioUrlPart(_MediaPart, frozen=True, kw_only=True, tag_field="type", tag="audio_url"):
    """Audio, as in vLLM's chat completions."""

    kind: ClassVar[MediaKind] = MediaKind.sound
    audio_url: str | AudioUrl

    @property
    def url(self) -> str:
        return self.audio_url if isinstance(self.audio_url, str) else self.audio_url.url


class InputAudio(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    data: str  # a file in base64
    format: AudioFormat | None = None


class InputAudioPart(_MediaPart, frozen=True, kw_only=True, tag_field="type", tag="input_audio"):
    """Audio, as in OpenAI's chat completions."""

    kind: ClassVar[MediaKind] = MediaKind.sound
    input_audio: InputAudio


class VideoFrames(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which frames of its videos a request asks for; `check_sampling` checks the values."""

    num_frames: Annotated[int, msgspec.Meta(ge=1, lt=1 << 31)] | None = None
    fps: Annotated[float, msgspec.Meta(gt=0)] | None = None  # frames of a second of video


class MediaSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the media of a request are read."""

    video: VideoFrames | None = None
