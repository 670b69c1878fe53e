"""A tiny random LFM2: convolutions in most layers, attention in the others."""

from __future__ import annotations

from ostinato.conf.root import RunConfig
from tests.runtime.tiny import MODEL, tiny_config

SLOT_BYTES = 2 * 64 * 4  # the last two inputs of a convolution of 64 channels, in float32


def lfm2(attention: tuple[int, ...] = (1,), num_layers: int = 4) -> dict[str, object]:
    """config.json of the model.

    Args:
        attention: the layers with attention; the others have convolutions.
        num_layers: layers of the model.
    """
    return {
        **MODEL,
        "architectures": ["Lfm2ForCausalLM"],
        "model_type": "lfm2",
        "num_hidden_layers": num_layers,
        "full_attn_idxs": list(attention),
        "block_auto_adjust_ff_dim": False,
    }


def hybrid_config(
    *overrides: str, attention: tuple[int, ...] = (1,), num_layers: int = 4, **values: object
) -> RunConfig:
    """See `tiny_config`."""
    model = lfm2(attention, num_layers)
    return tiny_config(*overrides, **{"model.config": model, **values})
