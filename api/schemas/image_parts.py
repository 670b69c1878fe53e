"""The parts of a message that are images."""

from __future__ import annotations

from typing import Literal

import msgspec

from ostinato.api.schemas.client_fields import CacheControl, PromptCacheBreakpoint

__all__ = ("ImageDetail", "ImageUrl", "ImageUrlPart", "InputImagePart")

# `auto` and `high` are the size that the model's checkpoint states. docs/images.md defines `low`.
ImageDetail = Literal["auto", "low", "high"]


class ImageUrl(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    url: str  # data:image/png;base64,DATA, or a URL whose host is in `images.domains`
    detail: ImageDetail | None = None


class _ImagePart(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    image_url: str | ImageUrl
    # A name that the client gives to the image. It has no effect, because caches compare pixels.
    uuid: str | None = None
    cache_control: CacheControl | None = None
    prompt_cache_breakpoint: PromptCacheBreakpoint | None = None

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
