"""Ranks of a tensor-parallel group compute what one process computes.

The ranks are threads here, with a shard of the model each. They meet in the real collectives.
tests/ops/parallel tests the collectives between processes.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import pytest
import torch
from torch import Tensor

from ostinato.conf.schema import ExpertKernels, GraphForm, ModelSection
from ostinato.graphs.buffers import StaticBuffers
from ostinato.graphs.compiler.compile import compile_model
from ostinato.graphs.compiler.programs import LayeredProgram, LayerProgram
from ostinato.models.base import CausalLM
from ostinato.models.checkpoints.checkpoint import open_checkpoint
from ostinato.models.checkpoints.weights import load_weights
from ostinato.models.choose_weights import PLAIN, WeightsByRole
from ostinato.models.config.model_config import ModelConfig
from ostinato.models.layers import linear_layers, norm_layers, vocabulary_layers
from ostinato.models.layers.linear_layers import LinearBase, join_group
from ostinato.models.registry import build_model, read_model_config
from ostinato.models.sharding import Shard
from ostinato.models.weight_methods.int4 import Int4
from ostinato.models.weight_methods.packed import Packed
from ostinato.models.weight_methods.plain import Plain
from ostinato.ops.native.library import load
from ostinato.ops.parallel.exchange import Exchange
from ostinato.ops.parallel.group import ParallelGroup
from ostinato.ops.parallel.segment import create_segment
from tests.models.driver import Driver, Forward, Sequence
from tests.models.parity import PROMPT, check_batched, check_chunked, check_whole, expect
from tests.models.random_checkpoints import VARIANTS, Variant, reference_model, save

T = TypeVar("T")
CPU = torch.device("cpu")
PACKED = WeightsByRole(layers=Packed(), router=Packed(), head=Packed(), embedding=Plain())
INT4 = WeightsByRole(layers=Int4(8, True), router=Packed(), head=Int4(8, True), embedding=Plain())


def variant(name: str, **settings: object) -> Variant:
    """A variant with a vocabulary that two and four ranks can divide."""
    found = VARIANTS[name]
    return replace(found, settings={**found.settings, "vocab_size": 200, **settings})


class Together:
    """Loaded shards of one checkpoint. `run` calls a function for every rank, each on a thread."""

    def __init__(
        self,
        directory: Path,
        world: int,
        *,
        weights: WeightsByRole = PLAIN,
        dtype: torch.dtype = torch.float32,
        backend: str = "cpu",
        experts: ExpertKernels = ExpertKernels.auto,
    ) -> None:
        load("core")
        checkpoint = open_checkpoint(ModelSection(path=str(directory)))
        self.world = world
        self.config: ModelConfig = read_model_config(checkpoint)
        self.models: list[CausalLM] = []
        for rank in range(world):
            model = build_model(
                self.config,
                dtype=dtype,
                device=CPU,
                attention_backend=backend,
                weights=weights,
                shard=Shard(rank, world),
                experts=experts,
            )
            load_weights(model, checkpoint)
            assert isinstance(model, CausalLM)
            self.models.append(model)
        segment = create_segment(world)
        self.groups = [
            ParallelGroup(segment, rank, world, spin_us=0, timeout_s=120) for rank in range(world)
        ]
        os.close(segment)
        for model, group in zip(self.models, self.groups, strict=True):
            join_group(model, group)

    def close(self) -> None:
        for group in self.groups:
            group.close()

    def driver(self, rank: int, forward: Forward | None = None) -> Driver:
        model, shard = self.models[rank], Shard(rank, self.world)
        dtype = next(m.spec.dtype for m in model.modules() if isinstance(m, LinearBase))
        return Driver(model, self.config, forward=forward, dtype=dtype, shard=shard)

    def run(self, function: Callable[[int], T]) -> list[T]:
        """The results by rank. If a rank fails, the others end, and its error is raised."""

        def guarded(rank: int) -> T:
            try:
                return function(rank)
            except BaseException:
                self.groups[rank].abort()
                raise

        with ThreadPoolExecutor(self.world) as pool:
            futures = [pool.submit(guarded, rank) for rank in range(self.world)]
            for future in futures:
                future.exception()
            failed = [error for future in futures if (error := future.exception()) is not None]
            for error in sorted(failed, key=lambda each: "group of ranks" in str(each)):
                raise error
            return [future.result() for future in futures]


@contextmanager
def folded(ranks: Together, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Replace the collectives by plain torch: sums in rank order, and concatenation."""
    barrier = threading.Barrier(ranks.world, timeout=240)
    shown: list[Tensor] = [torch.empty(0)] * ranks.world

    def of_all(part: Tensor, group: Tensor) -> list[Tensor]:
        shown[int(group)] = part
        barrier.wait()
        parts = list(shown)
        barrier.wait()
        return parts

    def all_reduce(
        partial: Tensor,
        residual: Tensor | None,
        group: Tensor,
        dtype: torch.dtype,
        exchange: Exchange,
    ) -> Tensor:
        assert exchange is Exchange.shared_memory
        first, *others = of_all(partial, group)
        total = first.float()
        for other in others:
            total = total + other.float()
        return (total if residual is None else total + residual.float()).to(dtype)

    def gather_vocab(part: Tensor, group: Tensor, world: int, exchange: Exchange) -> Tensor:
        assert exchange is Exchange.shared_memory
        return torch.cat(of_all(part, group), 1)

    with monkeypatch.context() as patch:
        for module in (norm_layers, linear_layers):
            patch.setattr(module, "all_reduce", all_reduce)
        patch.setattr(vocabulary_layers, "gather_vocab", gather_vocab)
        for rank, model in enumerate(ranks.models):
            for module in model.modules():
                if isinstance(module, LinearBase) and module.group is not None:
                    module.group.fill_(rank)
        yield
    for model, group in zip(ranks.models, ranks.groups, strict=True):
        join_group(model, group)


CASES = [
    ("llama3", 2),  # two heads of keys and values for four heads
    ("llama3", 4),  # every head of keys and values on two ranks
    ("llama-tied", 2),
    ("gpt2", 2),
    ("gemma2", 2),
    ("falcon-11b", 2),
    ("qwen2-moe", 2),
    ("mixtral", 2),
    ("gpt-oss", 2),
    ("phi3", 2),
    ("cohere", 2),
    ("bloom", 3),  # slopes of ALiBi for each head; three ranks cannot divide the vocabulary
    ("llama-mqa", 4),
    ("olmo2", 2),
    ("olmo2", 4),  # the norm over all heads counts every head of keys twice
    ("olmoe", 2),
    ("bamba", 2),
    ("granite4-dense", 4),
    ("nemotron-h", 2),  # blocks of one part
    ("nemotron-h-moe", 2),  # experts without gates
    ("lfm2", 2),
    ("lfm2-moe", 2),
    ("qwen3-next", 2),  # two kinds of projections whose rows are stored by heads
    ("qwen3.5-moe", 2),
    ("qwen3-next-mixed", 2),  # with biases of queries and their gates
    ("lfm2-bias", 4),  # biases of convolutions, divided, and of projections, added once
]


@pytest.mark.parametrize(("name", "world"), CASES, ids=lambda value: str(value))
def test_ranks_give_the_logits_of_transformers(tmp_path: Path, name: str, world: int) -> None:
    expected = expect(variant(name), tmp_path)
    ranks = Together(tmp_path, world, weights=PACKED)

    def check(rank: int) -> list[int]:
        driver = ranks.driver(rank)
        tokens = check_whole(driver, expected).token_ids
        check_chunked(driver, expected)
        check_batched(driver, expected, tokens[-64:])
        return tokens

    tokens = ranks.run(check)
    assert tokens == tokens[:1] * world
    ranks.close()


@pytest.mark.parametrize("name", ["gpt-oss", "qwen2-moe"])
def test_ranks_add_what_flashinfer_computes(tmp_path: Path, name: str) -> None:
    """The op in plain torch gives a rank's part of the sum, with biases or with a shared expert."""
    expected = expect(variant(name), tmp_path)
    ranks = Together(tmp_path, 2, experts=ExpertKernels.flashinfer)
    tokens = ranks.run(lambda rank: check_whole(ranks.driver(rank), expected).token_ids)
    assert tokens[0] == tokens[1]
    ranks.close()


def logits_of(ranks: Together, forwards: list[Forward] | None = None) -> list[Tensor]:
    """The logits of two prompts, by rank. Each prompt is computed in two pieces; steps mix them."""

    def steps(rank: int) -> Tensor:
        driver = ranks.driver(rank, None if forwards is None else forwards[rank])
        one, two = Sequence(PROMPT), Sequence(PROMPT[:20])
        found = [*driver.step([(one, 30)]), *driver.step([(one, 13), (two, 19)])]
        found += driver.step([(two, 1)])
        return torch.cat(found)

    return ranks.run(steps)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("weights", [PACKED, INT4], ids=["packed", "int4"])
@pytest.mark.parametrize(("name", "world"), [("llama3", 4), ("llama-tied", 2), ("olmoe", 2)])
def test_ranks_give_the_bits_of_sums_in_rank_order(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    world: int,
    weights: WeightsByRole,
    dtype: torch.dtype,
) -> None:
    if weights is INT4:
        load("quantized")
    small = variant(name)
    save(reference_model(small), small, tmp_path)
    ranks = Together(tmp_path, world, weights=weights, dtype=dtype)
    found = logits_of(ranks)
    with folded(ranks, monkeypatch):
        expected = logits_of(ranks)
    for rank in range(world):
        assert torch.equal(found[rank], expected[0])
    ranks.close()


def test_the_bits_of_a_token_do_not_depend_on_its_batch(tmp_path: Path) -> None:
    small = variant("llama3")
    save(reference_model(small), small, tmp_path)
    ranks = Together(tmp_path, 2, weights=PACKED, dtype=torch.bfloat16)

    def alone(rank: int) -> Tensor:
        driver = ranks.driver(rank)
        one, two = Sequence(PROMPT), Sequence(PROMPT[:20])
        found = [driver.step([(one, 1)])[0] for _ in range(30)]
        found.append(driver.prefill(one, [13]))
        return torch.cat([*found, driver.prefill(two, [19, 1])])

    for apart, together in zip(ranks.run(alone), logits_of(ranks), strict=True):
        assert torch.equal(apart, together)
    ranks.close()


class Store:
    """Compiled programs in memory."""

    def __init__(self) -> None:
        self.programs: dict[str, bytes] = {}

    def get(self, name: str) -> bytes | None:
        return self.programs.get(name)

    def put(self, name: str, data: bytes) -> None:
        self.programs[name] = data

    def reject(self, reason: str) -> None:
        raise AssertionError(reason)


def test_all_ranks_run_the_programs_of_the_first_one_captured(tmp_path: Path) -> None:
    small = variant("olmo2")  # its layers have all the collectives of layers
    save(reference_model(small), small, tmp_path)
    ranks = Together(tmp_path, 2, weights=PACKED)
    expected = logits_of(ranks)
    store, programs = Store(), []
    for rank in range(2):
        driver = ranks.driver(rank)
        buffers = StaticBuffers(
            max_num_tokens=64,
            max_num_seqs=driver.max_seqs,
            max_blocks_per_seq=-(-driver.max_len // driver.block_size),
            block_size=driver.block_size,
            device=CPU,
        )
        model, example = ranks.models[rank], buffers.batch(16, 2, 2)
        before = dict(store.programs)
        program = compile_model(model, GraphForm.layer, example, driver.cache, store)(model)
        assert isinstance(program, LayeredProgram)
        assert rank == 0 or store.programs == before
        programs.append(program)
    assert b"all_reduce" in b"".join(store.programs.values())
    first = logits_of(ranks, programs)

    def captured(rank: int) -> Tensor:
        driver = ranks.driver(rank, programs[rank])
        one, two = Sequence(PROMPT), Sequence(PROMPT[:20])
        with programs[rank].recording():
            found = driver.step([(one, 30)])
        found += driver.step([(one, 13), (two, 19)])
        return torch.cat([*found, *driver.step([(two, 1)])])

    again = ranks.run(captured)
    assert all(program.layers_by_program == {LayerProgram.captured: 3} for program in programs)
    for rank in range(2):
        assert torch.equal(first[rank], expected[0])
        assert torch.equal(again[rank], expected[0])
    ranks.close()


@pytest.mark.parametrize(
    ("name", "world", "words"),
    [
        ("llama3", 3, "num_attention_heads=4 .* 3 tensor.* set parallel.tensor to 1 or 2 or 4"),
        ("lfm2", 3, "num_attention_heads=4 .* 3 tensor.* set parallel.tensor to 1 or 2 or 4"),
        ("qwen3-next", 4, "linear_num_key_heads=2 .* 4 tensor.* set parallel.tensor to 1 or 2$"),
        ("granite4", 2, "mamba_n_groups=1 cannot be divided .* set parallel.tensor to 1"),
        ("qwen2-moe", 8, "num_attention_heads=4 .* 8 .* set parallel.tensor to 1 or 2 or 4"),
    ],
)
def test_models_that_can_not_be_divided_are_refused(
    tmp_path: Path, name: str, world: int, words: str
) -> None:
    small = VARIANTS[name]
    save(reference_model(small), small, tmp_path)
    with pytest.raises(ValueError, match=words):
        Together(tmp_path, world)


def test_groups_of_quantised_weights_are_not_cut(tmp_path: Path) -> None:
    small = variant("llama3")
    save(reference_model(small), small, tmp_path)
    wide = WeightsByRole(
        layers=Int4(32, True), router=PLAIN.router, head=PLAIN.head, embedding=PLAIN.embedding
    )
    with pytest.raises(
        ValueError, match=r"64 columns in groups of 32 .* 4 .* parallel.tensor to 1 or 2$"
    ):
        Together(tmp_path, 4, weights=wide)
