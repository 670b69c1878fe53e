"""A Llama whose step tensors have a second KV cache group, as cross attention needs it."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Annotated, ClassVar, NamedTuple, TypeVar

import torch
from torch import Tensor

from ostinato.models.config.model_config import HFConfig, ModelConfig
from ostinato.models.families.llama import LlamaForCausalLM
from ostinato.models.step_tensors import (
    ForwardBatch,
    Size,
    StepInputs,
    StepTensors,
    TensorSpec,
    Upload,
)

Array = TypeVar("Array")
MAX_ENCODER_TOKENS = 40


@dataclass(frozen=True, kw_only=True)
class CrossTensors(StepTensors[Array]):
    cross_block_table: Annotated[
        Array,
        TensorSpec(
            sizes=(Size.seqs, Size.encoder_blocks),
            dtype=torch.int32,
            upload=Upload.used_rows,
            kv_group=1,
        ),
    ]
    cross_seq_lens: Annotated[Array, TensorSpec(sizes=(Size.seqs,), dtype=torch.int32, kv_group=1)]


class Seen(NamedTuple):
    """The second group's tensors in one step."""

    cross_block_table: list[list[int]]
    cross_seq_lens: list[int]


class CrossLlama(LlamaForCausalLM):
    """Keeps the tensors of the second group of every step in `seen`."""

    step_tensors = CrossTensors
    seen: ClassVar[list[Seen]] = []

    @classmethod
    def read_config(
        cls, hf_config: HFConfig, generation_config: HFConfig | None = None
    ) -> ModelConfig:
        config = super().read_config(hf_config, generation_config)
        return dataclasses.replace(config, max_encoder_tokens=MAX_ENCODER_TOKENS)

    def begin(self, batch: ForwardBatch) -> tuple[Tensor, StepInputs]:
        assert isinstance(batch, CrossTensors)
        table, lengths = batch.cross_block_table, batch.cross_seq_lens
        if type(table) is Tensor and table.device.type == "cpu":
            self.seen.append(Seen(table.tolist(), lengths.tolist()))
        return super().begin(batch)
