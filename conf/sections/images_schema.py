"""The section `images`: limits of the images in prompts, and the cache of their embeddings."""

from __future__ import annotations

from dataclasses import dataclass

from ostinato.conf.schema import Section, setting

__all__ = ("ImagesConfig",)


@dataclass(frozen=True, slots=True, kw_only=True)
class ImagesConfig(Section):
    """Images in prompts, for models that take them."""

    key = "images"
    max_per_request: int = setting(
        16,
        "images of one request; 0 = requests with images or videos are refused, and the vision "
        "tower is not loaded",
        at_least=0,
        at_most=1024,
    )
    max_mib: float = setting(25.0, "MiB of one encoded image", above=0, at_most=1024)
    max_pixels: int = setting(
        64_000_000, "pixels of one image as it is sent", at_least=1, at_most=178_956_970
    )
    max_resized_pixels: int | None = setting(
        None,
        "pixels of one image after it is resized, for models that take images of different sizes "
        "or cut them into tiles; null = as the model states",
        at_least=1,
    )
    cache_tokens: int | None = setting(
        None,
        "embeddings of images that are kept; null = those of the two largest images, or 32768",
        at_least=1,
        at_most=10_000_000,
    )
    domains: list[str] = setting(
        [], "host names from which images, videos and audio are fetched; [] = none"
    )
    fetch_timeout_s: float = setting(
        10.0, "most seconds for fetching one image, video or sound", above=0, at_most=600
    )
