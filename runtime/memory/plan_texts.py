"""Texts of the memory plan: sizes, what the weights include, and remedies."""

from __future__ import annotations

from ostinato.conf.schema import DeviceConfig
from ostinato.runtime.memory.footprint import ModelFootprint

__all__ = ("first_reasons", "size_text", "table_remedies")

_GIB = 1 << 30


def size_text(num_bytes: float) -> str:
    """A number of bytes in GiB or MiB."""
    return (
        f"{num_bytes / _GIB:.2f} GiB"
        if num_bytes >= _GIB / 10
        else f"{num_bytes / (1 << 20):.1f} MiB"
    )


def _weights_beside_layers(model: ModelFootprint) -> list[str]:
    """Texts about what the weights include besides the model's layers."""
    parts = (
        ("adapters", model.adapter_bytes, "their slots"),
        (
            "images",
            model.image_bytes,
            "the vision tower and the tables of embeddings (images.cache_tokens)",
        ),
        (
            "audio",
            model.audio_bytes,
            "the encoder and the caches of cross attention (audio.cache_windows)",
        ),
        (
            "sounds",
            model.sound_bytes,
            "the audio encoder and the table of embeddings (audio.cache_tokens)",
        ),
    )
    texts = [
        f"{name}: {size_text(size)} of the weights are {what}" for name, size, what in parts if size
    ]
    if model.uncounted:
        texts.append(
            f"{model.uncounted}: not counted and not taken, because the files of the processor are "
            "missing; set model.path to a directory that has them"
        )
    return texts


def table_remedies(model: ModelFootprint, missing_bytes: int) -> list[str]:
    """To lower the size of the table, if that frees enough or the table is most of the weights.

    Args:
        model: has the size of the table.
        missing_bytes: what the plan lacks.
    """
    table = model.media_table_bytes
    if not table or table < min(missing_bytes, model.weights_bytes / 2):
        return []
    return [f"lower {model.media_setting}, whose table is {size_text(table)} of the weights"]


def first_reasons(model: ModelFootprint, free_bytes: int, device: DeviceConfig) -> tuple[str, ...]:
    """What is known before the cache is planned, one sentence each."""
    draft = model.draft
    reasons = [f"budget: {device.memory_fraction:g} of {size_text(free_bytes)} of free memory"]
    if draft is not None:
        reason = (
            f"draft model: {size_text(draft.weights_bytes)} of the weights and "
            f"{draft.kv_bytes_per_token / 1024:,.1f} KiB of the KV cache of each token"
        )
        if draft.copied_bytes:
            reason += (
                f"; {size_text(draft.copied_bytes)} are copies of the model's embedding or head"
            )
        reasons.append(reason)
    reasons += _weights_beside_layers(model)
    if model.group_reason is not None:
        reasons.append(model.group_reason)
    return tuple(reasons)
