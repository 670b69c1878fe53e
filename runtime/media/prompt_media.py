"""Checks and prepares the images, videos and sounds of a prompt, in the order of the prompt."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from ostinato.conf.sections.audio_schema import AudioConfig
from ostinato.conf.sections.images_schema import ImagesConfig
from ostinato.conf.sections.video_schema import VideoConfig
from ostinato.models.audio.sound_spec import SoundSpec
from ostinato.models.vision.image_spec import ImageSpec
from ostinato.models.vision.video_spec import EXTRA_POSITIONS
from ostinato.runtime.audio.sound_inputs import SoundContent, prepare_sound
from ostinato.runtime.audio.sound_sources import SoundSource
from ostinato.runtime.errors import InvalidRequestError
from ostinato.runtime.images.image_inputs import check_detail, prepare_image_source
from ostinato.runtime.images.image_sources import ImageSource
from ostinato.runtime.media_files.media_kinds import MediaKind, most_bytes
from ostinato.runtime.media_files.media_urls import (
    data_url_bytes,
    data_url_frames,
    fetch_target,
    input_audio_bytes,
    is_data_url,
    is_frames_url,
)
from ostinato.runtime.types.audio import PromptSound
from ostinato.runtime.types.engine_info import ServedModel
from ostinato.runtime.types.images import (
    PreparedImages,
    PromptImage,
    count_extra_positions,
)
from ostinato.runtime.video.video_inputs import (
    VideoContent,
    check_sampling,
    prepare_video,
)
from ostinato.runtime.video.video_sources import VideoSource

__all__ = (
    "FetchWanted",
    "MediaLimits",
    "MediaSource",
    "PreparedMedium",
    "check_media",
    "prepare_media",
    "urls_to_fetch",
)

MediaSource = ImageSource | VideoSource | SoundSource


class MediaLimits(NamedTuple):
    """The sections of the configuration that limit images, videos and sounds."""

    images: ImagesConfig
    video: VideoConfig
    audio: AudioConfig


class FetchWanted(NamedTuple):
    """A URL whose content is needed."""

    name: str  # of its first medium, for errors
    kind: MediaKind  # which limits apply: those of a video, if one of several has this URL


class PreparedMedium(NamedTuple):
    """An image or its tiles, the pairs of frames of a video, or the windows of a sound."""

    parts: tuple[PromptImage, ...] | tuple[PromptSound, ...]  # with `begin` 0
    kind: MediaKind = MediaKind.image
    # The text that stands for it in the prompt, with the placeholder once for each part. Empty =
    # the placeholders alone.
    text: str = ""


def check_media(
    sources: Sequence[MediaSource],
    model: ServedModel,
    limits: MediaLimits,
    *,
    param: str,
    sampling_param: str = "",
) -> None:
    """Check that a request may have these media. Nothing is decoded.

    Args:
        sources: the images, videos and sounds.
        model: the model.
        limits: the limits.
        param: the field that has them, for errors.
        sampling_param: the field that says which frames of all videos are used, for errors; empty =
            each video says it.

    Raises:
        InvalidRequestError: the model takes none, there are too many, or one cannot have the size
            or the number of frames that the request asks for.
    """
    if not sources:
        return
    kinds = [_kind(source) for source in sources]
    _check_kinds(kinds, model, limits, param)
    _check_number(kinds, MediaKind.image, "images", limits.images.max_per_request, param)
    _check_number(kinds, MediaKind.video, "video", limits.video.max_per_request, param)
    _check_number(kinds, MediaKind.sound, "audio", limits.audio.max_per_request, param)
    spec = model.images
    if MediaKind.video in kinds and spec is not None and spec.video is None:
        raise _takes_none(model, "videos", "text and images", param)
    for source, name in _named(sources, param):
        if isinstance(source, SoundSource):
            continue
        assert spec is not None, "checked above"
        if isinstance(source, ImageSource):
            check_detail(source, spec, name)
        else:
            assert spec.video is not None, "checked above"
            check_sampling(source.sampling, spec.video, limits.video, sampling_param or name)
            _check_frames_url(source, name, sampling_param or param)


def urls_to_fetch(
    sources: Sequence[MediaSource], limits: MediaLimits, *, param: str
) -> dict[str, FetchWanted]:
    """The URLs whose content must be fetched.

    Raises:
        InvalidRequestError: a URL is not valid, or its host is not in `images.domains`.
    """
    found: dict[str, FetchWanted] = {}
    for source, name in _named(sources, param):
        kind = _kind(source)
        if _has_content(source) or is_data_url(source.url):
            continue
        fetch_target(source.url, limits.images.domains, name, kind)
        first = found.get(source.url, FetchWanted(name, kind))
        is_video = MediaKind.video in (first.kind, kind)
        found[source.url] = FetchWanted(first.name, MediaKind.video if is_video else first.kind)
    return found


def prepare_media(
    sources: Sequence[MediaSource],
    model: ServedModel,
    limits: MediaLimits,
    *,
    param: str,
    fetched: Mapping[str, bytes],
    begin: Callable[[str, MediaKind], None] = lambda name, kind: None,
) -> list[PreparedMedium]:
    """Decode and resize the media of one prompt. Pillow is imported with the first image.

    Args:
        sources: what `check_media` has checked.
        model: the model.
        limits: the limits.
        param: the field that has them, for errors.
        fetched: URL -> the bytes that were fetched, for all URLs of `urls_to_fetch`.
        begin: called before each of them with its name in errors, and what it is.

    Raises:
        InvalidRequestError: one is not valid or too large, all together have more embeddings than a
            request can have, or the package that decodes videos and sounds is missing.
    """
    media: list[PreparedMedium] = []
    num_embeddings = 0
    for source, name in _named(sources, param):
        kind = _kind(source)
        begin(name, kind)
        most = model.media_cache_tokens - num_embeddings
        try:
            medium = _prepared(source, model, limits, name, fetched, most)
        except InvalidRequestError as error:
            code = error.code or kind.invalid_code
            raise InvalidRequestError(str(error), param=param, code=code) from error
        num_embeddings += sum(part.num_rows for part in medium.parts)
        if num_embeddings > model.media_cache_tokens:
            raise _too_many_tokens(media, medium, num_embeddings, model, param)
        media.append(medium)
    _check_times(media, param)
    return media


def _prepared(
    source: MediaSource,
    model: ServedModel,
    limits: MediaLimits,
    name: str,
    fetched: Mapping[str, bytes],
    max_tokens: int,
) -> PreparedMedium:
    """One medium. A video with more than `max_tokens` embeddings is refused."""
    if isinstance(source, SoundSource):
        assert model.sounds is not None, "checked by check_media"
        return PreparedMedium(_sound(source, model.sounds, limits, name, fetched), MediaKind.sound)
    assert model.images is not None, "checked by check_media"
    if isinstance(source, VideoSource):
        video = _video(source, model.images, limits, name, fetched, max_tokens)
        return PreparedMedium(video.parts, MediaKind.video, video.text)
    image = prepare_image_source(source, model.images, limits.images, name, fetched)
    return PreparedMedium(image.parts, MediaKind.image, image.text)


def _too_many_tokens(
    media: Sequence[PreparedMedium],
    last: PreparedMedium,
    num_embeddings: int,
    model: ServedModel,
    param: str,
) -> InvalidRequestError:
    """The error for media that have more embeddings than a request can have.

    Args:
        media: those before the last one.
        last: with it, there are too many.
        num_embeddings: embeddings of all of them.
        model: the model.
        param: the field that has them.
    """
    noun, setting, remedy = "images", "images.cache_tokens", "send fewer or smaller ones"
    if last.kind is MediaKind.sound:
        noun, setting, remedy = "sounds", "audio.cache_tokens", "send fewer or shorter ones"
    elif any(one.kind is MediaKind.video for one in media):
        noun = "images and videos"
    return InvalidRequestError(
        f"{param}: the first {len(media) + 1} {noun} have {num_embeddings} embeddings, and a "
        f"request can have {model.media_cache_tokens} ({setting}); {remedy}",
        param=param,
        code="too_many_embeddings",
    )


def _check_times(media: Sequence[PreparedMedium], param: str) -> None:
    """Refuse videos with more positions in time than a model has."""
    pairs = [part for one in media for part in one.parts if isinstance(part, PromptImage)]
    extra = count_extra_positions(pairs)
    if extra > EXTRA_POSITIONS:
        raise InvalidRequestError(
            f"{param}: the videos last so long that they take {extra} more positions than they "
            f"have embeddings, and at most {EXTRA_POSITIONS} are possible; send shorter videos",
            param=param,
            code="video_too_long",
        )


def _video(
    source: VideoSource,
    spec: ImageSpec,
    limits: MediaLimits,
    name: str,
    fetched: Mapping[str, bytes],
    max_tokens: int,
) -> PreparedImages:
    """The pairs of a video."""
    max_bytes = most_bytes(limits.video)
    content: VideoContent
    if source.frames is not None:
        content = source.frames
    elif source.file is not None:
        content = source.file
    elif is_frames_url(source.url):
        content = data_url_frames(source.url, max_bytes, limits.video.max_frames, name)
    elif is_data_url(source.url):
        content = data_url_bytes(source.url, max_bytes, name, MediaKind.video)
    else:
        content = fetched[source.url]
    return prepare_video(
        content, source.sampling, spec, limits.images, limits.video, name, max_tokens=max_tokens
    )


def _sound(
    source: SoundSource,
    spec: SoundSpec,
    limits: MediaLimits,
    name: str,
    fetched: Mapping[str, bytes],
) -> tuple[PromptSound, ...]:
    """The windows of a sound."""
    content: SoundContent
    if source.samples is not None:
        content = source.samples
    elif source.file is not None:
        content = source.file
    elif source.base64 is not None:
        content = input_audio_bytes(source.base64, most_bytes(limits.audio), name)
    elif is_data_url(source.url):
        max_bytes = most_bytes(limits.audio)
        content = data_url_bytes(source.url, max_bytes, name, MediaKind.sound)
    else:
        content = fetched[source.url]
    return prepare_sound(content, spec, limits.audio, name)


def _kind(source: MediaSource) -> MediaKind:
    if isinstance(source, SoundSource):
        return MediaKind.sound
    return MediaKind.video if isinstance(source, VideoSource) else MediaKind.image


def _has_content(source: MediaSource) -> bool:
    """Whether a source has something else than a URL."""
    if isinstance(source, ImageSource):
        return source.pil is not None
    if isinstance(source, VideoSource):
        return source.file is not None or source.frames is not None
    return any(given is not None for given in (source.base64, source.file, source.samples))


def _named(sources: Sequence[MediaSource], param: str) -> Iterator[tuple[MediaSource, str]]:
    """Each medium with its name in errors, such as `messages: image 1`."""
    counts = dict.fromkeys(MediaKind, 0)
    for source in sources:
        kind = _kind(source)
        counts[kind] += 1
        yield source, f"{param}: {kind.value} {counts[kind]}"


def _check_frames_url(source: VideoSource, name: str, param: str) -> None:
    """Refuse `num_frames` for frames that the client has chosen."""
    number = source.sampling.num_frames
    if number is not None and is_frames_url(source.url):
        raise InvalidRequestError(
            f"{name} has its frames as JPEG files, which are all used, so num_frames={number} "
            "cannot choose among them; leave num_frames out, or send a video file",
            param=param,
            code="invalid_value",
        )


def _check_kinds(
    kinds: Sequence[MediaKind], model: ServedModel, limits: MediaLimits, param: str
) -> None:
    """Refuse media that the model does not take; whether it takes videos is not checked."""
    others = "text and images" if model.images is not None else "text"
    if MediaKind.sound in kinds and model.sounds is None:
        hint = "" if limits.audio.max_per_request else " (audio.max_per_request is 0)"
        raise _takes_none(model, f"sounds{hint}", others, param)
    if model.images is None and any(kind is not MediaKind.sound for kind in kinds):
        noun = "images" if MediaKind.image in kinds else "videos"
        hint = "" if limits.images.max_per_request else " (images.max_per_request is 0)"
        others = "text" if model.sounds is None else "text and sounds"
        raise _takes_none(model, f"{noun}{hint}", others, param)


def _takes_none(model: ServedModel, noun: str, others: str, param: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"{param}: {model.name} takes no {noun}; send {others} only",
        param=param,
        code="unsupported_parameter",
    )


def _check_number(
    kinds: Sequence[MediaKind], kind: MediaKind, section: str, most: int, param: str
) -> None:
    number = kinds.count(kind)
    if number > most:
        raise InvalidRequestError(
            f"{param} has {kind.counted(number)}, and {section}.max_per_request allows {most};"
            " send fewer",
            param=param,
            code=f"too_many_{kind.value}s",
        )
