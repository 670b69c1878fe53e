"""What a model needs of a device's memory: its sizes, and estimates of the memory of its steps."""

from __future__ import annotations

from dataclasses import dataclass

from ostinato.models.kv_groups import WHOLE_CACHE, KVGroup

__all__ = (
    "CUDA_GRAPH_BYTES",
    "GraphFootprint",
    "MeasuredMemory",
    "ModelFootprint",
    "graph_bytes",
    "step_bytes",
)

CUDA_GRAPH_BYTES = 4 << 20  # driver state of one captured graph, beside the shared pool


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredMemory:
    """Measured memory of a device in bytes, which replaces the plan's estimates."""

    used_bytes: int  # weights, static buffers, workspaces and libraries, without the KV cache
    step_bytes: int  # peak memory of the largest uncaptured step, in addition to `used_bytes`


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFootprint:
    """The sizes of a model that a plan needs."""

    weights_bytes: int  # all parameters and buffers, in the form that the device holds
    kv_bytes_per_token: int  # keys and values of all layers
    hidden_size: int
    intermediate_size: int  # the size of the widest MLP, see `ModelConfig.widest_mlp`
    qkv_size: int  # numbers in the queries, keys and values of one token
    dtype_bytes: int  # bytes of one activation
    max_model_len: int  # tokens; the model's own limit
    sampling_bytes: int = 0  # logits of the largest step and their sampling
    workspace_bytes: int = 0  # workspace of the attention backend in the largest step
    # Memory for encoding the largest input of a tower, between two steps; `workspace_bytes`
    # includes it.
    encoding_bytes: int = 0
    measured: MeasuredMemory | None = None  # replaces estimates; None = plan with estimates
    draft: ModelFootprint | None = None  # the draft model; its cache has as many blocks
    # Bytes of a draft head's weights that are copies of its model's embedding and output head. The
    # draft head needs copies because the model's part on this rank lacks rows of these tables.
    copied_bytes: int = 0
    adapter_bytes: int = 0  # slots of low-rank adapters; `weights_bytes` includes them
    # The vision tower and the tables for embeddings of images; `weights_bytes` includes them.
    image_bytes: int = 0
    # The audio tower and the caches of cross attention; `weights_bytes` includes them.
    audio_bytes: int = 0
    # The audio tower and the tables for embeddings of sounds; `weights_bytes` includes them.
    sound_bytes: int = 0
    # The tables for embeddings alone; `image_bytes` or `sound_bytes` includes them.
    media_table_bytes: int = 0
    # "images" or "sounds" if the model takes them, but the files that say how are missing. Then
    # nothing is counted for them.
    uncounted: str = ""
    tier_bytes: int = 0  # buffers for copies of KV blocks to slower tiers, in the device's memory
    groups: tuple[KVGroup, ...] = WHOLE_CACHE
    # Bytes of a block of the pool / `cache.block_size`. With one group, and so for 0, it is
    # `kv_bytes_per_token`.
    kv_bytes_per_unit: int = 0
    group_reason: str | None = None  # what the layers keep, see `describe_groups`
    has_states: bool = False  # whether any layer of the whole model is recurrent
    state_bytes: int = 0  # a slot's states of all recurrent layers on this rank
    mixer_bytes: int = 0  # one token between the projections of a recurrent layer
    # This rank has no layer with keys and values, because all of them are on other stages.
    keeps_no_keys: bool = False

    def block_bytes(self, block_size: int) -> int:
        """Bytes of a block of the pool, of `block_size` tokens a unit."""
        return (self.kv_bytes_per_unit or self.kv_bytes_per_token) * block_size

    @property
    def media_setting(self) -> str:
        """The setting of the size of the tables for embeddings."""
        return "audio.cache_tokens" if self.sound_bytes else "images.cache_tokens"


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphFootprint:
    """The graphs that will be captured."""

    num_graphs: int
    max_tokens: int  # tokens of the largest graph


def graph_bytes(model: ModelFootprint, graphs: GraphFootprint) -> int:
    """Bytes of the pool that all captured graphs share, and of the driver's state of each graph."""
    models = (model,) if model.draft is None else (model, model.draft)
    pool = max(_activation_bytes(one, graphs.max_tokens) for one in models)
    return pool + graphs.num_graphs * CUDA_GRAPH_BYTES


def step_bytes(model: ModelFootprint, num_tokens: int, *, is_cpu: bool) -> int:
    """Peak of the memory of the largest step, of the model or of its draft model.

    The two run one after the other, so they share the memory of intermediate tensors. On a GPU the
    draft model keeps its logits, its sampling state and its workspace beside those of the model.
    Its memory is not measured on a GPU, because it is loaded after the KV cache was allocated.
    """
    measured, draft = model.measured, model.draft
    # No tower ran while the step was measured. A tower and a step use the same memory in turn.
    own = (
        _activation_bytes(model, num_tokens)
        if measured is None
        else max(measured.step_bytes, model.encoding_bytes)
    )
    if draft is None:
        return own
    kept = 0 if is_cpu else draft.sampling_bytes + draft.workspace_bytes
    return max(own, _activation_bytes(draft, num_tokens) - kept) + kept


def _activation_bytes(model: ModelFootprint, num_tokens: int) -> int:
    """Peak estimate of a step's intermediate tensors.

    Per token, a layer holds three vectors of the hidden size: the residual, the normed input and a
    result. It also holds the largest of three things: queries, keys and values before and after
    rotation, the two halves of the gated MLP with their product, or what a recurrent mixer has
    between its projections. The memory of sampling and the attention workspace are added.
    """
    widest = max(2 * model.qkv_size, 3 * model.intermediate_size) * model.dtype_bytes
    layer = 3 * model.hidden_size * model.dtype_bytes + max(widest, model.mixer_bytes)
    return num_tokens * layer + model.sampling_bytes + model.workspace_bytes
