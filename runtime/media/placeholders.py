"""Puts as many placeholder tokens into a prompt as its media have embeddings.

In some models, other tokens end the rows of an image (`ImageSpec.row_ends`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, TypeVar

import msgspec

from ostinato.models.audio.sound_spec import SoundSpec
from ostinato.models.vision.image_spec import ImageSpec
from ostinato.models.vision.video_spec import VideoSpec
from ostinato.runtime.errors import InvalidRequestError
from ostinato.runtime.media.prompt_media import PreparedMedium
from ostinato.runtime.media_files.media_kinds import MediaKind
from ostinato.runtime.types.audio import PromptSound
from ostinato.runtime.types.engine_info import ServedModel
from ostinato.runtime.types.images import PromptImage

__all__ = ("PlacedMedia", "expand_placeholders", "expand_sounds", "place_media")

Part = TypeVar("Part", PromptImage, PromptSound)


class PlacedMedia(NamedTuple):
    """A prompt with a placeholder token for each embedding, and its media."""

    token_ids: list[int]
    images: list[PromptImage]  # tiles, and pairs of frames of videos; in the order of the prompt
    sounds: list[PromptSound]  # windows, in the order of the prompt


def place_media(
    token_ids: list[int],
    media: Sequence[PreparedMedium],
    model: ServedModel,
    encode: Callable[[str], list[int]],
    *,
    param: str,
) -> PlacedMedia:
    """Expand the placeholders of a prompt by `expand_placeholders` or `expand_sounds`.

    Without media, the placeholder of a model that takes some is refused.

    Args:
        token_ids: the prompt, with one placeholder token for each medium.
        media: of the kinds that the model takes.
        model: the model.
        encode: see `expand_placeholders`.
        param: the part of the request that has the prompt, for errors: `messages`, or another.

    Raises:
        InvalidRequestError: see those functions.
    """
    if model.images is not None:
        expanded, images = expand_placeholders(token_ids, media, model.images, encode, param=param)
        return PlacedMedia(expanded, images, [])
    if model.sounds is not None:
        expanded, sounds = expand_sounds(token_ids, media, model.sounds, param=param)
        return PlacedMedia(expanded, [], sounds)
    return PlacedMedia(token_ids, [], [])


def expand_sounds(
    token_ids: list[int], media: Sequence[PreparedMedium], spec: SoundSpec, *, param: str
) -> tuple[list[int], list[PromptSound]]:
    """Replace each placeholder token by as many as the sound in its place has embeddings.

    Args:
        token_ids: the prompt, with one placeholder token for each sound.
        media: the sounds in the order of the prompt.
        spec: how the model takes sounds.
        param: the part of the request that has the prompt, for errors: `messages`, or another.

    Returns:
        The longer prompt, and the windows in their order, with the indices of their first tokens
        in it.

    Raises:
        InvalidRequestError: the number of placeholder tokens is not the number of sounds.
    """
    _check_count(token_ids, spec, len(media), MediaKind.sound, param)
    sounds = iter(media)
    expanded: list[int] = []
    placed: list[PromptSound] = []
    for token_id in token_ids:
        if token_id != spec.placeholder_id:
            expanded.append(token_id)
            continue
        for window in next(sounds).parts:
            assert isinstance(window, PromptSound), "a model that takes sounds takes nothing else"
            _add(window, token_id, expanded, placed)
    return expanded, placed


def _add(part: Part, token_id: int, expanded: list[int], placed: list[Part]) -> None:
    """Append the tokens of a part, and the part with the index of the first of them."""
    placed.append(msgspec.structs.replace(part, begin=len(expanded)))
    expanded += [token_id] * part.num_tokens


def _end_rows(image: PromptImage, row_ends: tuple[int, int], expanded: list[int]) -> None:
    """Replace the last placeholder of each row of an image, which ends the prompt so far."""
    after_row, after_image = row_ends
    last_of_rows = range(len(expanded) - 1, len(expanded) - 1 - image.num_tokens, -image.row_tokens)
    for index in last_of_rows:
        expanded[index] = after_row
    expanded[-1] = after_image


def expand_placeholders(
    token_ids: list[int],
    media: Sequence[PreparedMedium],
    spec: ImageSpec,
    encode: Callable[[str], list[int]],
    *,
    param: str,
) -> tuple[list[int], list[PromptImage]]:
    """Replace each placeholder token by as many as the image or video in its place has embeddings.

    With `ImageSpec.row_ends`, such a token follows each row of an image. If the image or video has
    a text of its own, the text takes the place of the placeholder, and the placeholders in it are
    replaced. The first placeholder of an image stands for the first image, and so on; likewise for
    videos.

    Args:
        token_ids: the prompt, with one placeholder token for each image and video.
        media: the images and videos, those of each kind in the order of their placeholders.
        spec: how the model takes images and videos.
        encode: the tokens of a text, without tokens that begin or end a prompt. Called for
            `PreparedMedium.text`.
        param: the part of the request that has the prompt, for errors: `messages`, or another.

    Returns:
        The longer prompt, and the images, tiles and pairs of frames in their order, with the
        indices of their first tokens in it.

    Raises:
        InvalidRequestError: the number of placeholder tokens is not the number of images, or that
            of videos.
        ValueError: the tokenizer does not make a placeholder token of the placeholder's text.
    """
    images = [medium for medium in media if medium.kind is MediaKind.image]
    videos = [medium for medium in media if medium.kind is MediaKind.video]
    _check_count(token_ids, spec, len(images), MediaKind.image, param)
    kinds: dict[int, Iterator[PreparedMedium]] = {spec.placeholder_id: iter(images)}
    if spec.video is not None:
        _check_count(token_ids, spec.video, len(videos), MediaKind.video, param)
        kinds[spec.video.placeholder_id] = iter(videos)
    expanded: list[int] = []
    placed: list[PromptImage] = []
    begin = 0
    for end, token_id in enumerate(token_ids):
        if token_id not in kinds:
            continue
        medium = next(kinds[token_id])
        after = end + 1
        if medium.text and medium.kind is MediaKind.video and spec.video is not None:
            # The text has such tokens for each pair.
            marks = (spec.video.start_id, token_id, spec.video.end_id)
            if end > begin and tuple(token_ids[end - 1 : end + 2]) == marks:
                end, after = end - 1, end + 2
        expanded += token_ids[begin:end]
        ends = spec.row_ends if medium.kind is MediaKind.image else None
        _add_images(medium, token_id, encode, expanded, placed, ends)
        begin = after
    expanded += token_ids[begin:]
    return expanded, placed


def _add_images(
    medium: PreparedMedium,
    token_id: int,
    encode: Callable[[str], list[int]],
    expanded: list[int],
    placed: list[PromptImage],
    row_ends: tuple[int, int] | None,
) -> None:
    """Append the text of an image or video, with its parts in the places of the placeholders."""
    tokens = encode(medium.text) if medium.text else [token_id] * len(medium.parts)
    if tokens.count(token_id) != len(medium.parts):
        raise ValueError(
            f"the tokenizer makes {tokens.count(token_id)} tokens {token_id} of a text with "
            f"{len(medium.parts)} placeholders; copy the tokenizer's files of this checkpoint again"
        )
    parts = iter(medium.parts)
    for token in tokens:
        if token != token_id:
            expanded.append(token)
            continue
        part = next(parts)
        assert isinstance(part, PromptImage), "a model that takes images takes no sounds"
        _add(part, token_id, expanded, placed)
        if row_ends is not None:
            _end_rows(part, row_ends, expanded)


def _check_count(
    token_ids: list[int],
    spec: ImageSpec | VideoSpec | SoundSpec,
    num_media: int,
    kind: MediaKind,
    param: str,
) -> None:
    """Raises InvalidRequestError unless there is one placeholder for each medium of a kind."""
    noun = kind.value
    count = token_ids.count(spec.placeholder_id)
    if count == num_media:
        return
    times = "once" if count == 1 else f"{count} times"
    if isinstance(spec, ImageSpec) and spec.encoded_as:
        raise _other_count(times, spec, num_media, param)
    if param != "messages":  # the text of the prompt is the caller's, not a template's
        remedy = f"write {spec.placeholder!r} in the prompt once for each {noun}"
    elif count > num_media:
        remedy = f"leave {spec.placeholder!r} out of the text, and send each {noun} as its own part"
    else:
        remedy = f"use a chat template that writes the placeholder for each {noun}"
        if num_media > 1:
            remedy = f"send each {noun} in a message of its own, or {remedy}"
    raise InvalidRequestError(
        f"{param}: the prompt has the {noun} placeholder {spec.placeholder!r} {times}, "
        f"but {kind.counted(num_media)}; the numbers must be equal; {remedy}",
        param=param,
        code=kind.invalid_code,
    )


def _other_count(times: str, spec: ImageSpec, num_images: int, param: str) -> InvalidRequestError:
    """The error of `_check_count` for a placeholder that is encoded as a longer text."""
    if param == "messages":
        remedy = (
            f"leave {spec.placeholder!r} and its tokens out of the text, and send each image as its"
            " own part"
        )
    else:
        remedy = (
            f"write {spec.placeholder!r} in a text, or the tokens of {spec.encoded_as!r} in token"
            " ids, once for each image"
        )
    return InvalidRequestError(
        f"{param}: the prompt has the token that stands for an image {times}, but "
        f"{MediaKind.image.counted(num_images)}; the numbers must be equal; {remedy}",
        param=param,
        code=MediaKind.image.invalid_code,
    )
