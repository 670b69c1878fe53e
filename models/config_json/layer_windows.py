"""Reads which layers of a decoder have a sliding window, as transformers does for each family.

The window of a layer is the number of tokens that a token sees in it, itself included. 0 = all
tokens. -C = the tokens of its chunk of C tokens. `paged_attention` takes windows in this form.
"""

from __future__ import annotations

from collections.abc import Callable

from ostinato.models.config.hf_fields import (
    HFConfig,
    read_count,
    read_flag,
    read_integer,
    refuse_other_kinds,
)

__all__ = (
    "WindowRule",
    "layer_types_every",
    "layer_types_where",
    "listed_windows",
    "no_windows",
    "read_chunked_windows",
    "switched_windows",
)

WindowRule = Callable[[HFConfig, int], tuple[int, ...]]
"""(parsed config.json, number of layers) -> the window of each layer; raises ValueError."""

_WINDOW, _FULL, _CHUNK = "sliding_attention", "full_attention", "chunked_attention"


def no_windows(hf_config: HFConfig, num_layers: int) -> tuple[int, ...]:
    """The rule of families without windows. Their models ignore `sliding_window`, as in Llama."""
    return (0,) * num_layers


def listed_windows(hf_config: HFConfig, num_layers: int) -> tuple[int, ...]:
    """A window in the layers that `layer_types` names, or in all layers if it is not there.

    transformers ignores `layer_types` of a Mistral, and says so. Here it is honoured, as in vLLM.

    Raises:
        ValueError: `layer_types` has another length or an unknown entry, or the window is not an
            integer of at least 0.
    """
    window = read_integer(hf_config, "sliding_window", default=0, at_least=0)
    kinds = hf_config.get("layer_types")
    if kinds is None:
        return (window,) * num_layers
    refuse_other_kinds("layer_types", kinds, (_WINDOW, _FULL), num_layers)
    return tuple(window if kind == _WINDOW else 0 for kind in kinds)


def switched_windows(hf_config: HFConfig, num_layers: int) -> tuple[int, ...]:
    """The rule of Qwen: as `listed_windows`, but without windows unless `use_sliding_window` is
    true. Without `layer_types`, the layers from `max_window_layers` on have the window.

    Raises:
        ValueError: as `listed_windows`.
    """
    first = read_integer(hf_config, "max_window_layers", default=28, at_least=0)
    has_windows = read_flag(hf_config, "use_sliding_window", False)
    window = hf_config.get("sliding_window") if has_windows else None
    kinds = layer_types_where(hf_config, lambda layer: layer >= first)
    return listed_windows({**hf_config, "sliding_window": window, **kinds}, num_layers)


def layer_types_where(
    hf_config: HFConfig, has_window: Callable[[int], bool]
) -> dict[str, list[str]]:
    """`layer_types` for a config that has none; {} if the config has them.

    Args:
        hf_config: the parsed config.json.
        has_window: says for the index of a layer whether it has a window.
    """
    if hf_config.get("layer_types") is not None:
        return {}
    layers = range(read_count(hf_config, "num_hidden_layers"))
    return {"layer_types": [_WINDOW if has_window(layer) else _FULL for layer in layers]}


def layer_types_every(hf_config: HFConfig, interval: int) -> dict[str, list[str]]:
    """`layer_types_where` every `interval`-th layer sees all tokens, and the others a window."""
    return layer_types_where(hf_config, lambda layer: (layer + 1) % interval != 0)


def read_chunked_windows(
    hf_config: HFConfig, max_model_len: int, rope_kinds: tuple[str | None, ...]
) -> tuple[int, ...]:
    """The windows of a model with chunks: -C for chunks of C.

    The layers with chunks are those that `layer_types` names, or all layers that rotate.

    Args:
        hf_config: the parsed config.json.
        max_model_len: tokens of the longest context. Chunks of at least this length have no effect,
            so the result is then 0 for every layer.
        rope_kinds: for each layer its rotary table; None = the layer does not rotate.

    Raises:
        ValueError: `layer_types` has another length or an unknown entry, or the size of a chunk is
            not an integer of at least 1.
    """
    kinds = hf_config.get("layer_types") or [_CHUNK if kind else _FULL for kind in rope_kinds]
    refuse_other_kinds("layer_types", kinds, (_CHUNK, _FULL), len(rope_kinds))
    size = 0
    if hf_config.get("attention_chunk_size", 8192) is not None:
        size = read_integer(hf_config, "attention_chunk_size", default=8192)
    if size >= max_model_len:
        size = 0
    return tuple(-size if kind == _CHUNK else 0 for kind in kinds)
