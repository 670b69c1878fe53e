"""The stages of a pipeline compute the same bits as the whole model with the same weights."""

from __future__ import annotations

from itertools import combinations, pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ostinato.conf.schema import GraphForm, ModelSection
from ostinato.graphs.buffers import StaticBuffers
from ostinato.graphs.compiler.compile import compile_model
from ostinato.models.base import CausalLM, LanguageModel
from ostinato.models.checkpoints.checkpoint import CheckpointError, open_checkpoint
from ostinato.models.checkpoints.weights import init_dummy_weights, load_weights
from ostinato.models.choose_weights import PLAIN, WeightsByRole
from ostinato.models.config.model_config import ModelConfig
from ostinato.models.decoder import Decoder
from ostinato.models.kv_cache import KVCache
from ostinato.models.registry import build_model, read_model_config
from ostinato.models.sharding import Shard, Span, Stage, deal_layers, shard_of_rank
from ostinato.models.stage_layers import with_layers
from ostinato.models.step_tensors import ForwardBatch
from ostinato.models.weight_methods.int4 import Int4
from ostinato.models.weight_methods.packed import Packed
from ostinato.models.weight_methods.plain import Plain
from ostinato.ops.parallel.handoff import (
    HiddenReceiver,
    HiddenSender,
    HiddenShape,
)
from ostinato.ops.parallel.handoff_ends import create_handoff
from tests.models.driver import Driver, Forward, Sequence
from tests.models.parity import PROMPT
from tests.models.random_checkpoints import VARIANTS, reference_model, save

CPU = torch.device("cpu")
INT4 = WeightsByRole(layers=Int4(8), router=Int4(8), head=Int4(8), embedding=Plain())
PACKED = WeightsByRole(layers=Packed(), router=Packed(), head=Packed(), embedding=Plain())


@given(
    sizes=st.lists(st.integers(0, 9), min_size=1, max_size=7),
    ends=st.tuples(st.integers(0, 20), st.integers(0, 20)),
    data=st.data(),
)
def test_the_largest_stage_is_as_small_as_possible(
    sizes: list[int], ends: tuple[int, int], data: st.DataObject
) -> None:
    count = data.draw(st.integers(1, len(sizes)))

    def largest(begins: tuple[int, ...]) -> int:
        stages = [sum(sizes[a:b]) for a, b in pairwise((0, *begins, len(sizes)))]
        stages[0] += ends[0]
        stages[-1] += ends[1]
        return max(stages)

    dealt = deal_layers(sizes, *ends, count)
    assert len(dealt) == count
    assert [layer for span in dealt for layer in range(span.start, span.start + span.size)] == list(
        range(len(sizes))
    )
    assert all(span.size >= 1 and span.total == len(sizes) for span in dealt)
    found = largest(tuple(span.start for span in dealt[1:]))
    assert found == min(map(largest, combinations(range(1, len(sizes)), count - 1)))


def test_equal_layers_are_dealt_evenly_and_an_embedding_counts() -> None:
    assert [span.size for span in deal_layers([5] * 8, 0, 0, 4)] == [2, 2, 2, 2]
    assert [span.size for span in deal_layers([5] * 8, 10, 10, 4)] == [1, 3, 3, 1]


def test_rank_0_is_in_the_last_stage() -> None:
    shards = [shard_of_rank(rank, 2, 3) for rank in range(6)]
    assert [(shard.stage.number, shard.rank) for shard in shards] == [
        *((2, 0), (2, 1), (0, 0), (0, 1), (1, 0), (1, 1))
    ]
    assert [shard.is_leader for shard in shards] == [True, *[False] * 5]
    assert [shard.number for shard in shards] == list(range(6))
    assert shard_of_rank(0, 1, 1) == Shard()


class Pipeline:
    """The whole model, and its stages joined by real handoffs in this process."""

    def __init__(
        self,
        directory: Path,
        count: int,
        weights: WeightsByRole = PLAIN,
        *,
        dtype: torch.dtype = torch.float32,
        backend: str = "reference",
        seed: int | None = None,
        most_tokens: int = len(PROMPT),
    ) -> None:
        checkpoint = open_checkpoint(ModelSection(path=str(directory)))
        self.config: ModelConfig = read_model_config(checkpoint)

        def build(shard: Shard, device: torch.device = CPU) -> LanguageModel:
            return build_model(
                self.config,
                dtype=dtype,
                device=device,
                attention_backend=backend,
                weights=weights,
                shard=shard,
            )

        def fill(model: LanguageModel, whole: LanguageModel | None) -> CausalLM:
            if seed is None:
                load_weights(model, checkpoint, whole=whole)
            else:
                init_dummy_weights(model, seed, whole=whole)
            assert isinstance(model, CausalLM)
            return model

        skeleton = build(Shard(), torch.device("meta"))
        self.dtype = dtype
        self.whole = fill(build(Shard()), None)
        self.shards = [
            with_layers(Shard(stage=Stage(number, count)), skeleton) for number in range(count)
        ]
        self.stages = [fill(build(shard), skeleton) for shard in self.shards]
        self.forwards: list[Forward] = list(self.stages)
        shape = HiddenShape(most_tokens, self.config.hidden_size, dtype)
        ends = [create_handoff(shape.slot_bytes, 1) for _ in range(count - 1)]
        self._senders = [HiddenSender(sender, shape) for sender, _ in ends]
        self._receivers = [HiddenReceiver(receiver, shape) for _, receiver in ends]
        for stage, before, after in zip(
            self.stages, [None, *self._receivers], [*self._senders, None], strict=True
        ):
            assert isinstance(stage, Decoder)
            stage.join_stages(before, after)

    def close(self) -> None:
        for end in (*self._senders, *self._receivers):
            end.close()

    def spans(self) -> list[Span]:
        return [shard.layers(self.config.num_layers) for shard in self.shards]

    def forward(self, batch: ForwardBatch, cache: KVCache) -> Tensor:
        hidden = torch.empty(0)
        for forward, (first, size, _) in zip(self.forwards, self.spans(), strict=True):
            hidden = forward(batch, cache[first : first + size])
        return hidden

    def logits(self) -> tuple[list[Tensor], list[Tensor]]:
        """Logits of the whole model and of the stages, for two prompts and decodes."""
        found: list[list[Tensor]] = []
        for model, forward in ((self.whole, self.whole), (self.stages[-1], self.forward)):
            driver = Driver(model, self.config, forward=forward, dtype=self.dtype)
            first, second = Sequence(PROMPT), Sequence(PROMPT[:9])
            steps = [driver.step([(first, 30)])[0]]
            steps += driver.step([(first, 12), (second, 9)])
            for token in (5, 6):
                first.token_ids.append(token)
                second.token_ids.append(token)
                steps += driver.step([(first, 1), (second, 1)])
            found.append(steps)
        return found[0], found[1]


@pytest.mark.parametrize(
    "name",
    [
        *("llama3", "llama-tied", "gpt2", "gemma3", "bloom", "qwen2-moe", "opt"),
        *("lfm2", "qwen3.5", "nemotron-h", "nemotron-h-attention", "nemotron-h-bias"),
    ],
)
def test_stages_compute_the_logits_of_the_whole_model(tmp_path: Path, name: str) -> None:
    pipeline = Pipeline(save(reference_model(VARIANTS[name]), VARIANTS[name], tmp_path), 3)
    whole, staged = pipeline.logits()
    assert all(torch.equal(one, other) for one, other in zip(whole, staged, strict=True))
    pipeline.close()


@pytest.mark.parametrize("weights", [PLAIN, PACKED, INT4])
@pytest.mark.parametrize("seed", [None, 3])
def test_stages_have_the_weights_of_the_whole_model(
    tmp_path: Path, weights: WeightsByRole, seed: int | None
) -> None:
    variant = VARIANTS["llama3"]
    directory = save(reference_model(variant), variant, tmp_path)
    pipeline = Pipeline(directory, 2, weights, seed=seed)
    expected = dict(pipeline.whole.named_parameters())
    for stage in pipeline.stages:
        for name, parameter in stage.named_parameters():
            assert torch.equal(parameter, expected[name]), name
    names = [name for stage in pipeline.stages for name, _ in stage.named_parameters()]
    assert sorted(names) == sorted(expected)
    pipeline.close()


def test_compiled_and_captured_stages_run_the_programs_of_the_whole_model(tmp_path: Path) -> None:
    variant = VARIANTS["llama3"]
    directory = save(reference_model(variant), variant, tmp_path)
    pipeline = Pipeline(directory, 2, PACKED, backend="cpu")
    buffers = StaticBuffers(
        max_num_tokens=64, max_num_seqs=3, max_blocks_per_seq=4, block_size=8, device=CPU
    )
    spec = pipeline.config.kv_cache_spec(8, torch.float32, shard=pipeline.shards[0])
    bind = compile_model(
        pipeline.whole, GraphForm.layer, buffers.batch(16, 2, 2), spec.allocate(2, CPU)
    )
    eager, _ = pipeline.logits()
    programs = [bind(stage) for stage in pipeline.stages]
    pipeline.forwards = list(programs)
    _, compiled = pipeline.logits()
    assert all(torch.equal(one, other) for one, other in zip(eager, compiled, strict=True))
    pipeline.close()


def test_a_tensor_that_no_stage_expects_is_named(tmp_path: Path) -> None:
    variant = VARIANTS["llama3"]
    directory = save(reference_model(variant), variant, tmp_path)
    config = directory / "config.json"
    text = config.read_text(encoding="utf-8")
    config.write_text(
        text.replace('"num_hidden_layers": 3', '"num_hidden_layers": 2'), encoding="utf-8"
    )
    with pytest.raises(CheckpointError, match=r"has unexpected .*layers\.2\."):
        Pipeline(directory, 2)
