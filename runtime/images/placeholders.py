"""Puts as many placeholder tokens into a prompt as its images have embeddings."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from ostinato.models.vision.image_spec import ImageSpec
from ostinato.runtime.errors import InvalidRequestError
from ostinato.runtime.types.images import PromptImage

__all__ = ("expand_placeholders",)


def expand_placeholders(
    token_ids: list[int], images: Sequence[PromptImage], spec: ImageSpec, *, param: str
) -> tuple[list[int], list[PromptImage]]:
    """Replace each placeholder token by as many as the image in its place has embeddings.

    Args:
        token_ids: the prompt, with one placeholder token for each image.
        images: in the order of their placeholders.
        spec: how the model takes images.
        param: the part of the request that has the prompt, for errors.

    Returns:
        The longer prompt, and the images with the indices of their first tokens in it.

    Raises:
        InvalidRequestError: the number of placeholder tokens is not the number of images.
    """
    placeholder = spec.placeholder_id
    count = token_ids.count(placeholder)
    if count != len(images):
        remedy = (
            f"leave {spec.placeholder!r} out of the text, and send each image as its own part"
            if count > len(images)
            else "use a chat template that writes the placeholder for each image"
        )
        raise InvalidRequestError(
            f"{param}: the prompt has the image placeholder {spec.placeholder!r} {count} times, "
            f"but {len(images)} images; the numbers must be equal; {remedy}",
            param=param,
            code="invalid_image",
        )
    expanded: list[int] = []
    placed: list[PromptImage] = []
    begin = 0
    for image in images:
        end = token_ids.index(placeholder, begin)
        expanded += token_ids[begin:end]
        placed.append(msgspec.structs.replace(image, begin=len(expanded)))
        expanded += [placeholder] * image.num_tokens
        begin = end + 1
    expanded += token_ids[begin:]
    return expanded, placed
