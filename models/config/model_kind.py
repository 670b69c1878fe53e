"""The properties of generating and encoder models that the runtime needs.

Callers read these properties, such as `needs_kv_cache`. Only the code that chooses the kernel
libraries to load (runtime/startup/loading.py) compares a model's kind with `DECODER`.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ("DECODER", "ENCODER", "ModelKind")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelKind:
    """Properties of a kind of model, besides its sizes."""

    name: str
    generates: bool  # tokens are sampled from its logits, one step after the other
    needs_kv_cache: bool  # later steps read the keys and values of earlier steps
    takes_whole_prompts: bool  # one step computes all tokens of a sequence
    default_pooling: str  # for embeddings, if neither user nor checkpoint names one


DECODER = ModelKind(
    name="decoder",
    generates=True,
    needs_kv_cache=True,
    takes_whole_prompts=False,
    default_pooling="last",
)
ENCODER = ModelKind(
    name="encoder",
    generates=False,
    needs_kv_cache=False,
    takes_whole_prompts=True,
    default_pooling="cls",
)
