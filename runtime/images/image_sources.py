"""Where an image of a prompt comes from."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import PIL.Image

__all__ = ("ImageSource",)


class ImageSource(NamedTuple):
    """One image of a prompt. It has either a URL or an image of Pillow."""

    url: str = ""  # data:, http: or https:
    pil: PIL.Image.Image | None = None
    is_small: bool = False  # resized to at most `SMALL_PIXELS`
