"""Puts as many placeholder tokens into a prompt as its images and videos have embeddings."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import msgspec

from ostinato.models.vision.image_spec import ImageSpec
from ostinato.models.vision.video_spec import VideoSpec
from ostinato.runtime.errors import InvalidRequestError
from ostinato.runtime.media.prompt_media import PreparedMedium
from ostinato.runtime.types.images import PromptImage

__all__ = ("expand_placeholders",)


def expand_placeholders(
    token_ids: list[int],
    media: Sequence[PreparedMedium],
    spec: ImageSpec,
    encode: Callable[[str], list[int]],
    *,
    param: str,
) -> tuple[list[int], list[PromptImage]]:
    """Replace each placeholder token by as many as the image or video in its place has embeddings.

    The first placeholder of an image stands for the first image, and so on; likewise for videos.

    Args:
        token_ids: the prompt, with one placeholder token for each image and video.
        media: the images and videos, those of each kind in the order of their placeholders.
        spec: how the model takes images and videos.
        encode: the tokens of a text, without tokens that begin or end a prompt. Called for the
            times of videos if `VideoSpec.states_times`.
        param: the part of the request that has the prompt, for errors.

    Returns:
        The longer prompt, and the images and the pairs of frames in their order, with the indices
        of their first tokens in it.

    Raises:
        InvalidRequestError: the number of placeholder tokens is not the number of images, or that
            of videos.
    """
    images = [medium for medium in media if not medium.is_video]
    videos = [medium for medium in media if medium.is_video]
    _check_count(token_ids, spec, len(images), "image", param)
    kinds: dict[int, Iterator[PreparedMedium]] = {spec.placeholder_id: iter(images)}
    if spec.video is not None:
        _check_count(token_ids, spec.video, len(videos), "video", param)
        kinds[spec.video.placeholder_id] = iter(videos)
    expanded: list[int] = []
    placed: list[PromptImage] = []
    begin = 0
    for end, token_id in enumerate(token_ids):
        if token_id not in kinds:
            continue
        medium = next(kinds[token_id])
        after = end + 1
        if medium.is_video and spec.video is not None and spec.video.states_times:
            # Each pair has such tokens of its own.
            marks = (spec.video.start_id, token_id, spec.video.end_id)
            if end > begin and tuple(token_ids[end - 1 : end + 2]) == marks:
                end, after = end - 1, end + 2
            expanded += token_ids[begin:end]
            _add_timed_pairs(medium, spec.video, encode, expanded, placed)
        else:
            expanded += token_ids[begin:end]
            for image in medium.images:
                placed.append(msgspec.structs.replace(image, begin=len(expanded)))
                expanded += [token_id] * image.num_tokens
        begin = after
    expanded += token_ids[begin:]
    return expanded, placed


def _add_timed_pairs(
    medium: PreparedMedium,
    spec: VideoSpec,
    encode: Callable[[str], list[int]],
    expanded: list[int],
    placed: list[PromptImage],
) -> None:
    """Append the pairs of a video, each after the text of its time."""
    for time, pair in zip(medium.times, medium.images, strict=True):
        expanded += [*encode(time), spec.start_id]
        placed.append(msgspec.structs.replace(pair, begin=len(expanded)))
        expanded += [spec.placeholder_id] * pair.num_tokens
        expanded.append(spec.end_id)


def _check_count(
    token_ids: list[int], spec: ImageSpec | VideoSpec, num_media: int, noun: str, param: str
) -> None:
    """Raises InvalidRequestError unless there is one placeholder for each image or video."""
    count = token_ids.count(spec.placeholder_id)
    if count == num_media:
        return
    remedy = (
        f"leave {spec.placeholder!r} out of the text, and send each {noun} as its own part"
        if count > num_media
        else f"use a chat template that writes the placeholder for each {noun}"
    )
    raise InvalidRequestError(
        f"{param}: the prompt has the {noun} placeholder {spec.placeholder!r} {count} times, "
        f"but {num_media} {noun}s; the numbers must be equal; {remedy}",
        param=param,
        code=f"invalid_{noun}",
    )
