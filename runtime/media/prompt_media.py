"""Checks and prepares the images and videos of a prompt, in the order of the prompt."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from ostinato.conf.images.images_schema import ImagesConfig
from ostinato.conf.video.video_schema import VideoConfig
from ostinato.models.vision.image_spec import ImageSpec
from ostinato.models.vision.video_spec import EXTRA_POSITIONS
from ostinato.runtime.errors import InvalidRequestError
from ostinato.runtime.images.image_inputs import check_detail, prepare_image_source
from ostinato.runtime.images.image_sources import ImageSource
from ostinato.runtime.media_files.media_urls import (
    data_url_bytes,
    data_url_frames,
    fetch_target,
    is_data_url,
    is_frames_url,
)
from ostinato.runtime.types.engine_info import ServedModel
from ostinato.runtime.types.images import PromptImage, count_extra_positions
from ostinato.runtime.video.video_inputs import (
    VideoContent,
    check_sampling,
    max_video_bytes,
    prepare_video,
)
from ostinato.runtime.video.video_sources import PreparedVideo, VideoSource

__all__ = (
    "FetchWanted",
    "MediaLimits",
    "MediaSource",
    "PreparedMedium",
    "check_media",
    "prepare_media",
    "urls_to_fetch",
)

MediaSource = ImageSource | VideoSource


class MediaLimits(NamedTuple):
    """The sections of the configuration that limit images and videos."""

    images: ImagesConfig
    video: VideoConfig


class FetchWanted(NamedTuple):
    """A URL whose content is needed."""

    name: str  # of its first image or video, for errors
    is_video: bool  # which limits apply: those of a video, if one of several has this URL


class PreparedMedium(NamedTuple):
    """An image, or the pairs of frames of a video."""

    images: tuple[PromptImage, ...]  # with `begin` 0
    is_video: bool = False
    times: tuple[str, ...] = ()  # the text before each pair, if `VideoSpec.states_times`


def check_media(
    sources: Sequence[MediaSource],
    model: ServedModel,
    limits: MediaLimits,
    *,
    param: str,
    sampling_param: str = "",
) -> None:
    """Check that a request may have these images and videos. Nothing is decoded.

    Args:
        sources: the images and videos.
        model: the model.
        limits: the limits.
        param: the field that has the images and videos, for errors.
        sampling_param: the field that says which frames of all videos are used, for errors; empty =
            each video says it.

    Raises:
        InvalidRequestError: the model takes none, there are too many, or one cannot have the size
            or the number of frames that the request asks for.
    """
    if not sources:
        return
    num_videos = sum(isinstance(source, VideoSource) for source in sources)
    num_images = len(sources) - num_videos
    spec = model.images
    if spec is None:
        noun = "images" if num_images else "videos"
        if not limits.images.max_per_request:
            noun += " (images.max_per_request is 0)"
        raise _takes_none(model, noun, "text", param)
    _check_number(num_images, "image", "images", limits.images.max_per_request, param)
    _check_number(num_videos, "video", "video", limits.video.max_per_request, param)
    if num_videos and spec.video is None:
        raise _takes_none(model, "videos", "text and images", param)
    for source, name in _named(sources, param):
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
        is_video = isinstance(source, VideoSource)
        has_content = (source.file, source.frames) if is_video else (source.pil,)
        if any(one is not None for one in has_content) or is_data_url(source.url):
            continue
        fetch_target(source.url, limits.images.domains, name, is_video=is_video)
        first = found.get(source.url, FetchWanted(name, is_video))
        found[source.url] = FetchWanted(first.name, first.is_video or is_video)
    return found


def prepare_media(
    sources: Sequence[MediaSource],
    model: ServedModel,
    limits: MediaLimits,
    *,
    param: str,
    fetched: Mapping[str, bytes],
    begin: Callable[[str, bool], None] = lambda name, is_video: None,
) -> list[PreparedMedium]:
    """Decode and resize the images and videos of one prompt. Pillow is imported with the first.

    Args:
        sources: what `check_media` has checked.
        model: the model.
        limits: the limits.
        param: the field that has the images and videos, for errors.
        fetched: URL -> the bytes that were fetched, for all URLs of `urls_to_fetch`.
        begin: called before each of them with its name in errors, and whether it is a video.

    Raises:
        InvalidRequestError: one is not valid or too large, all together have more embeddings than a
            request can have, or the package that decodes videos is missing.
    """
    if not sources:
        return []
    spec = model.images
    assert spec is not None, "checked by check_media"
    media: list[PreparedMedium] = []
    num_tokens = 0
    for index, (source, name) in enumerate(_named(sources, param)):
        is_video = isinstance(source, VideoSource)
        begin(name, is_video)
        most = model.image_cache_tokens - num_tokens
        try:
            if isinstance(source, VideoSource):
                video = _video(source, spec, limits, name, fetched, most)
                medium = PreparedMedium(video.pairs, is_video=True, times=video.times)
            else:
                image = prepare_image_source(source, spec, limits.images, name, fetched)
                medium = PreparedMedium((image,))
        except InvalidRequestError as error:
            code = error.code or ("invalid_video" if is_video else "invalid_image")
            raise InvalidRequestError(str(error), param=param, code=code) from error
        num_tokens += sum(image.num_tokens for image in medium.images)
        if num_tokens > model.image_cache_tokens:
            noun = "images" if not any(one.is_video for one in media) else "images and videos"
            raise InvalidRequestError(
                f"{param}: the first {index + 1} {noun} have {num_tokens} embeddings, and a"
                f" request can have {model.image_cache_tokens} (images.cache_tokens); send fewer"
                " or smaller ones",
                param=param,
                code="too_many_embeddings",
            )
        media.append(medium)
    _check_times([image for medium in media for image in medium.images], param)
    return media


def _check_times(images: Sequence[PromptImage], param: str) -> None:
    """Refuse videos with more positions in time than a model has."""
    extra = count_extra_positions(images)
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
) -> PreparedVideo:
    """The pairs of a video."""
    max_bytes = max_video_bytes(limits.video)
    content: VideoContent
    if source.frames is not None:
        content = source.frames
    elif source.file is not None:
        content = source.file
    elif is_frames_url(source.url):
        content = data_url_frames(source.url, max_bytes, limits.video.max_frames, name)
    elif is_data_url(source.url):
        content = data_url_bytes(source.url, max_bytes, name, is_video=True)
    else:
        content = fetched[source.url]
    return prepare_video(
        content, source.sampling, spec, limits.images, limits.video, name, max_tokens=max_tokens
    )


def _named(sources: Sequence[MediaSource], param: str) -> Iterator[tuple[MediaSource, str]]:
    """Each image and video with its name in errors."""
    num_images = num_videos = 0
    for source in sources:
        if isinstance(source, VideoSource):
            num_videos += 1
            yield source, f"{param}: video {num_videos}"
        else:
            num_images += 1
            yield source, f"{param}: image {num_images}"


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


def _takes_none(model: ServedModel, noun: str, others: str, param: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"{param}: {model.name} takes no {noun}; send {others} only",
        param=param,
        code="unsupported_parameter",
    )


def _check_number(number: int, noun: str, section: str, most: int, param: str) -> None:
    if number > most:
        raise InvalidRequestError(
            f"{param} has {number} {noun}s, and {section}.max_per_request allows {most}; send"
            " fewer",
            param=param,
            code=f"too_many_{noun}s",
        )
