"""The plan of a tensor-parallel rank: its part of weights and cache, one bundle for all ranks."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from ostinato.conf.compose import load_config
from ostinato.conf.sections.server_schema import ParallelConfig
from ostinato.graphs.sampling_graph import num_sampling_graphs
from ostinato.models.sharding import WHOLE, Shard, Stage, shard_of_rank
from ostinato.ops.parallel.exchange import Exchange
from ostinato.ops.parallel.staged_handoff import NUM_SENDING
from ostinato.runtime.errors import StartupError
from ostinato.runtime.memory.footprint import CUDA_GRAPH_BYTES
from ostinato.runtime.sampling.sampler import sampling_bytes
from ostinato.runtime.startup.loading import open_bundle
from ostinato.runtime.startup.plan.device import gpu_of_rank
from ostinato.runtime.startup.plan.engine_plan import make_plan
from ostinato.runtime.startup.plan.model_source import open_model
from ostinato.runtime.startup.plan.planning import plan_engine
from tests.runtime.tiny import tiny_config


def test_a_rank_plans_for_its_part() -> None:
    config = load_config(["model=llama-45m", "cache.memory_gib=0.1"]).engine
    whole, *ranks = (
        make_plan(config, 1, shard=shard) for shard in (WHOLE, Shard(0, 2), Shard(1, 2))
    )
    # Free memory is measured for each plan.
    first, second = (
        replace(rank.memory, free_bytes=0, budget_bytes=0, reasons=rank.memory.reasons[1:])
        for rank in ranks
    )
    assert first == second
    for rank in ranks:
        assert 0.5 <= rank.memory.weights_bytes / whole.memory.weights_bytes < 0.8
        assert 2 * rank.kv_cache_spec.bytes_per_block == whole.kv_cache_spec.bytes_per_block
        assert 2 * rank.attention_spec.num_heads == whole.attention_spec.num_heads


def test_ranks_share_a_bundle() -> None:
    config = tiny_config("graphs.mode=compiled", "graphs.bundle=true").engine
    directories = []
    for shard in (WHOLE, Shard(0, 2), Shard(1, 2)):
        bundle = open_bundle(make_plan(config, 1, shard=shard))
        assert bundle is not None
        directories.append(bundle.directory)
    assert directories[0] != directories[1] == directories[2]


def test_ranks_that_exchange_values_otherwise_have_another_bundle() -> None:
    directories = []
    for exchange in ("auto", "gloo"):
        words = ("graphs.mode=compiled", "graphs.bundle=true", f"parallel.exchange={exchange}")
        bundle = open_bundle(make_plan(tiny_config(*words).engine, 1, shard=Shard(0, 2)))
        assert bundle is not None
        directories.append(bundle.directory)
    assert directories[0] != directories[1]


@pytest.mark.parametrize(
    ("settings", "shard", "message"),
    [
        (["parallel.exchange=gloo"], Shard(0, 2), "parallel.exchange=gloo is for CPUs"),
    ],
)
def test_what_gpus_do_not_divide_is_refused(
    settings: list[str], shard: Shard, message: str
) -> None:
    config = load_config(["model=llama-45m", "model.load_format=dummy", *settings]).engine
    with pytest.raises(StartupError, match=message):
        open_model(config, torch.device("cuda"), shard=shard)


@pytest.mark.parametrize("nodes", [1, 2])
def test_ranks_on_gpus_are_planned_and_exchange_values_by_nccl(nodes: int) -> None:
    settings = ["model=llama-45m", "model.load_format=dummy", "parallel.tensor=2"]
    settings += [f"parallel.nodes={nodes}"]
    config = load_config(settings).engine
    source = open_model(config, torch.device("cuda"), shard=Shard(1, 2))
    assert source.exchange is Exchange.nccl
    assert plan_engine(config, source, free_bytes=1 << 32).num_blocks > 0


@pytest.mark.parametrize(
    ("device", "number", "num_slots"),
    [("cuda", 0, 1), ("cuda", 1, 1), ("cpu", 0, 1 + NUM_SENDING), ("cpu", 1, 1)],
)
def test_a_stage_by_torch_distributed_is_planned_with_its_tensors_for_hidden_states(
    device: str, number: int, num_slots: int
) -> None:
    """With GPUs, tensors that wait to be sent are in host memory, which the plan does not count."""
    settings = ["model=llama-45m", "model.load_format=dummy", "parallel.pipeline=2"]
    settings += ["parallel.exchange=gloo"] * (device == "cpu")
    config = load_config(settings).engine
    source = open_model(config, torch.device(device), shard=Shard(0, 1, Stage(number, 2)))
    assert source.exchange is (Exchange.nccl if device == "cuda" else Exchange.gloo)
    without = replace(source, exchange=Exchange.shared_memory)
    bytes_of = [
        plan_engine(config, one, free_bytes=1 << 32).activation_bytes for one in (source, without)
    ]
    assert bytes_of[0] - bytes_of[1] == num_slots * source.handoff_shape.slot_bytes


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_only_the_last_stage_plans_memory_for_logits_and_only_rank_0_graphs_of_the_sampler(
    device: str,
) -> None:
    words = ["model.load_format=dummy", "parallel.tensor=2", "parallel.pipeline=2"]
    config = load_config(["model=llama-45m", "graphs.mode=captured", *words]).engine
    shards = [shard_of_rank(rank, 2, 2) for rank in range(4)]
    sources = [open_model(config, torch.device(device), shard=shard) for shard in shards]
    leader, second, *first_stage = (plan_engine(config, one, free_bytes=1 << 32) for one in sources)
    limits, model = sources[0].limits, sources[0].config
    logits = sampling_bytes(limits.max_num_rows, limits.max_num_seqs, model.vocab_size)
    # On a CPU only the last stage has the memory of the handoff. On GPUs each of the two stages has
    # a tensor of the same size.
    handoff = 2 * sources[0].handoff_shape.slot_bytes if device == "cpu" else 0
    for plan in first_stage:
        assert second.activation_bytes - plan.activation_bytes == logits + handoff
        if device == "cuda":
            assert second.graph_bytes - plan.graph_bytes == logits
    graphs = num_sampling_graphs(limits.max_num_rows) * CUDA_GRAPH_BYTES
    assert leader.graph_bytes - second.graph_bytes == (graphs if device == "cuda" else 0)
    assert leader.activation_bytes == second.activation_bytes


def test_no_two_ranks_have_the_same_gpu() -> None:
    parallel = ParallelConfig(tensor=3)
    assert [gpu_of_rank(parallel, rank, 4) for rank in range(3)] == [0, 1, 2]
    with pytest.raises(StartupError) as raised:
        gpu_of_rank(parallel, 0, 2)
    assert str(raised.value) == (
        "an engine of 3 ranks needs 3 GPUs, one for each rank, and this process sees 2; set "
        "parallel.tensor x parallel.pipeline to 2 or less, or device.name=cpu"
    )


def test_a_machine_with_too_few_gpus_names_the_ranks_of_all_machines_and_sizes_that_work() -> None:
    parallel = ParallelConfig(tensor=4, pipeline=2, data=2, nodes=4)
    assert [gpu_of_rank(parallel, rank, 4) for rank in range(8)] == [0, 1, 2, 3] * 2
    with pytest.raises(StartupError) as raised:
        gpu_of_rank(parallel, 5, 3)
    assert str(raised.value) == (
        "an engine of 8 ranks needs 4 GPUs on each of its 2 machines, one for each rank (machine "
        "0: ranks 0 to 3; machine 1: ranks 4 to 7), and on machine 1 this process sees 3; set "
        "parallel.nodes to 8, parallel.tensor x parallel.pipeline to 6 or less, or device.name=cpu"
    )
    named = ParallelConfig(tensor=4, pipeline=2, data=2, nodes=8)
    assert [gpu_of_rank(named, rank, 3) for rank in range(8)] == [0, 1] * 4


def test_sizes_that_can_not_be_divided_end_the_start() -> None:
    config = load_config(["model=llama-45m"]).engine
    with pytest.raises(StartupError, match=r"parallel.tensor=5: num_attention_heads=8 cannot"):
        make_plan(config, 1, shard=Shard(0, 5))
    config = load_config(
        ["model=llama-45m", "model.quantization=int4", "model.quantization_group_size=256"]
    ).engine
    with pytest.raises(StartupError, match=r"parallel.tensor=4: weights as int4 .* groups of 256"):
        make_plan(config, 1, shard=Shard(0, 4))
