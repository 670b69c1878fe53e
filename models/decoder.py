"""The decoder that all decoder families share: embedding, blocks, final norm, output head.

A family has a `CheckpointLayout` and reads its config.json. The differences between the blocks of
families are data (`BlockSpec`). A stage of a pipeline has some of the blocks. It gets hidden states
from the previous stage, and sends them to the next stage, through handoffs
(ops/parallel/handoff.py).
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ostinato.models.audio.audio_tower import AudioTower
from ostinato.models.audio.sound_tower import SoundTower
from ostinato.models.base import AuxStates, CausalLM, DecoderLayer
from ostinato.models.config.block_spec import Residual
from ostinato.models.config.model_config import ModelConfig
from ostinato.models.config.vision_config import TowerKind
from ostinato.models.layers.block_parts import (
    PartBlock,
    build_attention,
    build_feed_forward,
    rows_of,
)
from ostinato.models.layers.few_rows import FewRowsBlock
from ostinato.models.layers.linear_layers import BuildOptions
from ostinato.models.layers.mixers.attention_layer import Attention
from ostinato.models.layers.mixers.cross_attention_layer import CrossAttention, CrossTable
from ostinato.models.layers.mixers.latent_attention import LatentAttention
from ostinato.models.layers.mixers.recurrent_mixers import RecurrentMixer, build_mixer
from ostinato.models.layers.norm_layers import LayerNorm, RMSNorm, build_norm, build_rms_norm
from ostinato.models.layers.position_tables import (
    GridRotaryEmbedding,
    RotaryEmbedding,
    TemperatureTable,
)
from ostinato.models.layers.vocabulary_layers import Embedding, OutputHead
from ostinato.models.step_tensors import (
    CROSS,
    DEFAULT_ROPE,
    LOCAL_ROPE,
    TEMPERATURE,
    AudioTensors,
    ForwardBatch,
    GridTensors,
    MediaTensors,
    StepInputs,
)
from ostinato.models.vision.towers.build_tower import build_tower
from ostinato.models.vision.video_spec import EXTRA_POSITIONS
from ostinato.ops.add_rows import add_table_rows
from ostinato.ops.parallel.handoff import HiddenSink, HiddenSource
from ostinato.ops.rope import Rope

__all__ = ("LLAMA_NAMES", "Decoder", "DecoderBlock", "StageLayers")

LLAMA_NAMES = (
    ("attention_norm.", "input_layernorm."),
    ("mlp_norm.", "post_attention_layernorm."),
    ("final_norm.", "norm."),
)
"""(our name, the name in checkpoints of Llama and most others)."""


class DecoderBlock(DecoderLayer):
    """Attention or a recurrent mixer, and an MLP, joined as `BlockSpec.residual` says.

    Args:
        config: the model's configuration.
        options: dtype, device, attention backend and shard.
        layer: the block's number.
    """

    def __init__(self, config: ModelConfig, options: BuildOptions, layer: int) -> None:
        super().__init__()
        residual = config.block.residual
        self.residual = residual
        if residual is not Residual.post_norm:
            self.attention_norm = build_norm(config, options)
        self.is_recurrent = config.recurrent is not None and config.recurrent.layers[layer]
        if self.is_recurrent:
            self.mixer = build_mixer(config, options)
        else:
            self.self_attn = build_attention(config, options, layer)
        if residual not in (Residual.post_norm, Residual.parallel_one_norm):
            self.mlp_norm = build_norm(config, options)
        self.mlp = build_feed_forward(config, options, layer)
        self.cross_norm = self.cross_attn = None
        if options.cross is not None:
            self.cross_norm = build_norm(config, options)
            self.cross_attn = CrossAttention(config, options, options.cross)
        if residual in (Residual.post_norm, Residual.sandwich):
            self.attention_out_norm = build_rms_norm(config, options, config.hidden_size)
            self.mlp_out_norm = build_rms_norm(config, options, config.hidden_size)
        num_deep = 0 if config.vision is None else config.vision.num_deep
        has_table = layer < num_deep and options.num_media_rows > 0
        table = _media_table(config.hidden_size, options) if has_table else None
        self.media_table: Tensor | None
        self.register_buffer("media_table", table, persistent=False)

    def forward(
        self,
        hidden: Tensor,
        step: StepInputs,
        k_cache: Tensor,
        v_cache: Tensor,
        rows: Tensor | None = None,
    ) -> Tensor:
        result = self._block(hidden, step, k_cache, v_cache, rows)
        if self.media_table is None:
            return result
        # The table's first row is zero, so other tokens stay as they are.
        media_rows = rows_of(_media_rows(step.tensors), rows)
        return add_table_rows(result, self.media_table, media_rows.view(-1))

    @property
    def token_mixer(self) -> Attention | LatentAttention | RecurrentMixer:
        """What computes a token from the earlier ones: attention, or a recurrent mixer."""
        return self.mixer if self.is_recurrent else self.self_attn

    def _block(
        self,
        hidden: Tensor,
        step: StepInputs,
        k_cache: Tensor,
        v_cache: Tensor,
        rows: Tensor | None,
    ) -> Tensor:
        slots = step.tensors.adapter_slots
        if slots is not None:
            slots = rows_of(slots, rows)
        if self.residual is Residual.sequential:
            normal = self.attention_norm(hidden)
            hidden = self.token_mixer(normal, step, k_cache, v_cache, hidden, rows)
            if self.cross_attn is not None and self.cross_norm is not None:
                hidden = self.cross_attn(self.cross_norm(hidden), step, hidden, rows)
            return self.mlp(self.mlp_norm(hidden), hidden, slots)
        if self.residual in (Residual.post_norm, Residual.sandwich):
            is_sandwich = self.residual is Residual.sandwich
            normal = self.attention_norm(hidden) if is_sandwich else hidden
            attended = self.token_mixer(normal, step, k_cache, v_cache, None, rows)
            hidden = self.attention_out_norm(attended, rows_of(hidden, rows))
            normal = self.mlp_norm(hidden) if is_sandwich else hidden
            return self.mlp_out_norm(self.mlp(normal, None, slots), hidden)
        normal = self.attention_norm(hidden)
        attended = self.token_mixer(normal, step, k_cache, v_cache, hidden, rows)
        if self.residual is Residual.parallel_one_norm:
            return self.mlp(rows_of(normal, rows), attended, slots)
        return self.mlp(self.mlp_norm(rows_of(hidden, rows)), attended, slots)

    def few_rows(self) -> FewRowsBlock | None:
        has_more = self.media_table is not None or self.cross_attn is not None
        if self.residual is not Residual.sequential or has_more or self.is_recurrent:
            return None
        return FewRowsBlock.of(self.attention_norm, self.self_attn, self.mlp_norm, self.mlp)

    def static_key(self) -> tuple[object, ...]:
        norms = (module for module in self.children() if isinstance(module, RMSNorm | LayerNorm))
        return (
            "decoder block",
            self.residual,
            self.media_table is not None,
            *(norm.static_key for norm in norms),
            *self.token_mixer.static_key(),
            *(() if self.cross_attn is None else self.cross_attn.static_key()),
            *self.mlp.static_key(),
        )


def _media_table(width: int, options: BuildOptions) -> Tensor:
    """[1 + num_media_rows, width] zeros. On a CPU, it takes memory when it is first written."""
    shape = 1 + options.num_media_rows, width
    return torch.zeros(shape, dtype=options.dtype, device=options.device)


def _media_rows(tensors: ForwardBatch) -> Tensor:
    assert isinstance(tensors, MediaTensors), "a model with media tables has these tensors"
    return tensors.media_rows


class StageLayers(nn.ModuleList):
    """The layers of a stage, to iterate over. The name of each is its number in the model."""

    def __init__(self, layers: Iterable[DecoderLayer], first: int) -> None:
        super().__init__()
        for number, layer in enumerate(layers, first):
            self.add_module(str(number), layer)


def _rotary(config: ModelConfig, rope: Rope, options: BuildOptions) -> RotaryEmbedding:
    if not config.rope_axes:
        return RotaryEmbedding(rope, options)
    # Only the videos of Qwen2.5-VL have positions in time that can exceed the number of tokens.
    has_times = config.vision is not None and config.vision.kind is TowerKind.qwen2_5
    num_extra = EXTRA_POSITIONS if has_times and options.num_media_rows else 0
    return GridRotaryEmbedding(rope, config.rope_axes, options, num_extra=num_extra)


class Decoder(CausalLM):
    """Token embedding, blocks, final norm, output head; in some families learned positions.

    A stage of a pipeline must be joined to its neighbours before it is run (`join_stages`). A shard
    without layers is not run: it holds an embedding, an output head or both, for a draft head.
    """

    def __init__(self, config: ModelConfig, options: BuildOptions) -> None:
        super().__init__()
        self.config = config
        self.stage = options.shard.stage
        self._previous: HiddenSource | None = None
        self._next: HiddenSink | None = None
        self._aux: AuxStates | None = None
        is_first, is_last = self.stage.is_first, self.stage.is_last
        size, tied = config.hidden_size, config.tie_word_embeddings
        self.embed_tokens = None
        if is_first or (is_last and tied):
            self.embed_tokens = Embedding(config.vocab_size, size, options, is_head=tied)
        has_norm = is_first and config.has_embedding_norm
        self.embed_norm = build_norm(config, options) if has_norm else None
        # On the model's device: a captured step cannot copy a number from the host.
        scale = None
        if is_first and config.rounds_embedding_scale:
            scale = torch.tensor(config.embedding_scale, dtype=options.dtype, device=options.device)
        self.rounded_scale: Tensor | None
        self.register_buffer("rounded_scale", scale, persistent=False)
        first, count, _ = options.shard.layers(config.num_layers)
        ropes = {DEFAULT_ROPE: config.rope, LOCAL_ROPE: config.local_rope} if count else {}
        self.rotary = nn.ModuleDict(
            {kind: _rotary(config, rope, options) for kind, rope in ropes.items() if rope}
        )
        if config.query_temperature is not None:
            self.rotary[TEMPERATURE] = TemperatureTable(config.query_temperature, options)
        self._rotary_by_kind = list(self.rotary.items())  # looked up in every step
        self.embed_positions = None
        has_learned = config.rope is None and not config.alibi_slopes and config.has_positions
        if is_first and has_learned:
            num_positions = config.max_model_len + config.position_offset
            self.embed_positions = Embedding(num_positions, size, options)
        self.vision = self.sound = None
        table = None
        if options.num_media_rows and (config.vision is not None or config.sound is not None):
            table = _media_table(size, options) if is_first else None
            if config.vision is not None and (is_first or first < config.vision.num_deep):
                self.vision = build_tower(config.vision, options)
            if config.sound is not None and is_first:
                self.sound = SoundTower(config.sound, options)
        if self.vision is None and self.sound is None:
            self.checkpoint_layout = self.checkpoint_layout.without(*self.checkpoint_layout.tower)
        self.media_table: Tensor | None
        self.register_buffer("media_table", table, persistent=False)
        self.audio = self.cross_table = None
        if config.audio is not None and options.cross is not None:
            self.audio = AudioTower(config.audio, options)
            self.cross_table = CrossTable(options.cross, options)
        block = PartBlock if config.mlp_layers else DecoderBlock
        self.layers = StageLayers(
            (block(config, options, layer) for layer in range(first, first + count)), first
        )
        self.final_norm = build_norm(config, options) if is_last else None
        self.lm_head = None
        if is_last and not tied:
            self.lm_head = OutputHead(size, config.vocab_size, options, bias=config.head_bias)

    def join_stages(
        self,
        previous: HiddenSource | None,
        following: HiddenSink | None,
        aux: AuxStates | None = None,
    ) -> None:
        """Connect this stage to its neighbours.

        Args:
            previous: receives hidden states from the previous stage; None = this is the first
                stage.
            following: sends hidden states to the next stage; None = this is the last stage.
            aux: keeps the hidden states that a draft head reads. In each step the states of earlier
                stages are added to `aux`, and all its states are sent to the next stage. None =
                only the result of this stage is sent.
        """
        self._previous, self._next, self._aux = previous, following, aux

    def media_tables(self) -> list[Tensor | None]:
        """The tables of this rank for the parts of a tower's result, in their order.

        None stands for a table of another stage.
        """
        vision = self.config.vision
        if vision is None:
            return [] if self.config.sound is None else [self.media_table]
        layers = dict(self.layers.named_children())
        deep = [layers.get(str(number)) for number in range(vision.num_deep)]
        return [self.media_table, *(getattr(layer, "media_table", None) for layer in deep)]

    def begin(self, batch: ForwardBatch) -> tuple[Tensor, StepInputs]:
        positions = batch.positions
        if self.config.rope_axes:
            assert isinstance(batch, GridTensors), "the family has declared these step tensors"
            positions = batch.rope_positions
        rope = {kind: rotary(positions) for kind, rotary in self._rotary_by_kind}
        if self.cross_table is not None:
            assert isinstance(batch, AudioTensors), "the family has declared these step tensors"
            rope[CROSS] = self.cross_table(batch.audio_windows)
        if self._previous is not None:
            return self._receive(self._previous, len(batch.token_ids)), StepInputs(rope, batch)
        embed = self.embed_tokens
        assert embed is not None, "a later stage must be joined to the previous one"
        hidden = embed(batch.token_ids)
        scale = self.config.embedding_scale
        if self.rounded_scale is not None:
            hidden = hidden * self.rounded_scale
        elif scale != 1.0:
            hidden = hidden * scale
        if self.embed_norm is not None:
            hidden = self.embed_norm(hidden)
        if self.media_table is not None:
            rows = _media_rows(batch)
            hidden = torch.where(rows > 0, F.embedding(rows[:, 0], self.media_table), hidden)
        if self.embed_positions is not None:
            hidden = hidden + self.embed_positions(batch.positions + self.config.position_offset)
        return hidden, StepInputs(rope, batch)

    def finish(self, hidden: Tensor) -> Tensor:
        if self._next is not None:
            self._next.send([hidden] if self._aux is None else [hidden, *self._aux.states])
        else:
            norm = self.final_norm
            assert norm is not None, "a stage before the last must be joined to the next one"
            hidden = norm(hidden)
        if self._previous is not None:
            self._previous.release()
        return hidden

    def _receive(self, previous: HiddenSource, num_tokens: int) -> Tensor:
        """[T, D] hidden states of the stage before. `aux` gets the states for the draft head."""
        aux = self._aux
        if aux is None or aux.has_final:  # no states between layers are read
            return previous.receive(num_tokens, 1)[0]
        states = previous.receive(num_tokens, 1 + aux.num_earlier)
        if self._next is None:  # the draft head reads the states after `finish` released them
            states = states.clone()
        hidden, *aux.states = states
        return hidden

    def compute_logits(self, hidden: Tensor) -> Tensor:
        return self._head.gather(self._own_logits(hidden))

    @property
    def logits_group(self) -> Tensor | None:
        if not self.stage.is_last or self._head.exchange.is_distributed:
            return None
        return self._head.group

    def step_logits(self, hidden: Tensor) -> Tensor:
        if self.logits_group is None:
            return self.compute_logits(hidden)
        return self._own_logits(hidden)

    @property
    def _head(self) -> OutputHead | Embedding:
        head = self.embed_tokens if self.lm_head is None else self.lm_head
        assert head is not None, "the last stage has the head"
        return head

    def _own_logits(self, hidden: Tensor) -> Tensor:
        logits = self._head.own_logits(hidden)
        scale, cap = self.config.logit_scale, self.config.logit_soft_cap
        if scale != 1.0:
            logits = logits * scale
        return torch.tanh(logits / cap) * cap if cap else logits
