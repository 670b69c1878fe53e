"""The plan of models with recurrent layers: slots for states beside KV blocks, and refusals."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ostinato.commands import run
from ostinato.conf.schema import DeviceConfig
from ostinato.conf.sections.cache_schema import CacheConfig
from ostinato.models.sharding import shard_of_rank
from ostinato.runtime.costs.step_limits import StepLimits
from ostinato.runtime.errors import StartupError
from ostinato.runtime.memory.footprint import ModelFootprint
from ostinato.runtime.memory.memory_plan import MemoryPlan, plan_memory
from ostinato.runtime.startup.plan.engine_plan import EnginePlan, make_plan
from ostinato.runtime.startup.rank_group import agree
from tests.runtime.hybrid import SLOT_BYTES, hybrid_config
from tests.runtime.tiny import tiny_config

GIB, MIB, KIB = 1 << 30, 1 << 20, 1 << 10
HYBRID = ModelFootprint(
    weights_bytes=100 * MIB,
    kv_bytes_per_token=1 * KIB,
    hidden_size=64,
    intermediate_size=128,
    qkv_size=128,
    dtype_bytes=2,
    max_model_len=4096,
    has_states=True,
    state_bytes=1 * MIB,
)


def plan(
    model: ModelFootprint = HYBRID,
    free: int = 16 * GIB,
    *,
    is_cpu: bool = False,
    seqs: int = 64,
    is_set: bool = True,
    max_model_len: int | None = None,
    **cache: object,
) -> MemoryPlan:
    return plan_memory(
        model,
        free_bytes=free,
        is_cpu=is_cpu,
        device=DeviceConfig(memory_fraction=0.9),
        cache=CacheConfig(**cache),
        scheduler=StepLimits(seqs, 2048, chooses_seqs=not is_set),
        max_model_len=max_model_len,
    )


def states_line(plan: MemoryPlan) -> str:
    [line] = [text for text in plan.reasons if text.startswith("states")]
    return line


@given(
    free=st.integers(200 * MIB, 64 * GIB),
    state_bytes=st.integers(0, 80 * MIB),
    kv_bytes=st.integers(0, 64 * KIB),
    seqs=st.integers(1, 300),
    is_set=st.booleans(),
    is_cpu=st.booleans(),
    state_slots=st.none() | st.integers(2, 700),
    memory_gib=st.none() | st.floats(0.01, 60),
    max_model_len=st.none() | st.integers(1, 4096),
)
def test_slots_and_blocks_never_exceed_the_memory(
    *, state_bytes: int, kv_bytes: int, seqs: int, is_set: bool, **settings: object
):
    """Each running sequence has a slot, and one more is left."""
    model = replace(
        HYBRID,
        state_bytes=state_bytes,
        kv_bytes_per_token=kv_bytes,
        keeps_no_keys=not kv_bytes,
    )
    try:
        found = plan(model, seqs=seqs, is_set=is_set, **settings)  # type: ignore[arg-type]
    except StartupError:
        return
    assert found.kv_bytes == found.num_blocks * found.bytes_per_block
    assert found.state_bytes == found.num_states * state_bytes
    assert found.kv_bytes + found.state_bytes + found.fixed_bytes <= found.budget_bytes
    assert found.unplanned_bytes >= 0
    running = found.running_seqs(seqs)
    assert 1 <= running <= min(seqs, found.num_states - 2)
    assert running == seqs or not is_set
    assert found.num_blocks >= 2
    assert found.sequence_blocks(found.max_model_len) <= found.num_blocks - 1
    if settings["state_slots"] is not None:
        assert found.num_states == settings["state_slots"] + 1
    if settings["memory_gib"] is not None:
        assert found.kv_bytes + found.state_bytes <= settings["memory_gib"] * GIB


def test_two_slots_for_each_sequence_if_they_take_a_quarter():
    found = plan(free=2 * GIB)
    assert found.num_states == 2 * 64 + 1
    assert states_line(found) == "states: 128 slots of 1,024.0 KiB, two for each of 64 sequences"
    assert found.num_blocks == (found.budget_bytes - found.fixed_bytes - 129 * MIB) // (16 * KIB)


def test_two_slots_for_each_sequence_if_all_blocks_fit_beside_them():
    """States are most of the memory, and nothing else needs it."""
    found = plan(replace(HYBRID, state_bytes=80 * MIB, kv_bytes_per_token=64), seqs=64)
    assert found.num_states == 129
    assert found.state_bytes > 0.7 * (found.kv_bytes + found.state_bytes)
    assert found.num_full_sequences >= 64


def test_fewer_slots_but_one_for_each_sequence_and_one_more():
    model = replace(HYBRID, state_bytes=20 * MIB, kv_bytes_per_token=64 * KIB)
    found = plan(model, free=8 * GIB, seqs=64)
    assert 66 <= found.num_states < 129
    assert found.running_seqs(64) == 64
    least = plan(replace(model, state_bytes=30 * MIB), free=4 * GIB, seqs=64)
    assert least.num_states == 66
    assert states_line(least) == (
        "states: 65 slots of 30,720.0 KiB for 64 sequences and a checkpoint; raise "
        "cache.memory_gib or cache.state_slots for more"
    )


def test_states_lower_a_number_of_sequences_that_is_not_set():
    """Then they take at most half of the memory."""
    found = plan(replace(HYBRID, state_bytes=30 * MIB), free=2 * GIB, seqs=256, is_set=False)
    room = found.budget_bytes - found.fixed_bytes
    assert found.num_states == room // 2 // (30 * MIB)
    assert found.running_seqs(256) == found.num_states - 2
    assert states_line(found).endswith(
        f"so at most {found.num_states - 2} sequences run at once; raise cache.memory_gib or "
        "cache.state_slots for more"
    )


def test_a_set_length_has_blocks_before_checkpoints_have_states():
    tight = replace(HYBRID, kv_bytes_per_token=64 * KIB)  # 256 MiB for 4,096 tokens
    # The quarter would be 112 slots, and leave 336 blocks of 1 MiB each.
    room = 450 * MIB / GIB
    assert plan(tight, memory_gib=room, seqs=32).num_states == 65
    long = plan(tight, memory_gib=300 * MIB / GIB, seqs=16, max_model_len=4096)
    assert (long.max_model_len, long.num_states) == (4096, 33)
    longest = plan(tight, memory_gib=285 * MIB / GIB, seqs=16, max_model_len=4096)
    assert (longest.max_model_len, longest.num_states) == (4096, 28)


def test_a_cpu_has_states_beside_four_gib_of_blocks():
    model = replace(
        HYBRID, state_bytes=50 * MIB, kv_bytes_per_token=32 * KIB, max_model_len=262_144
    )
    found = plan(model, 64 * GIB, is_cpu=True, is_set=False)
    assert found.max_model_len == 262_144  # 8 GiB
    assert found.kv_bytes + found.state_bytes <= 11 * GIB
    assert 0.2 < found.state_bytes / (found.kv_bytes + found.state_bytes) <= 0.26
    asked = plan(model, 64 * GIB, is_cpu=True, seqs=256)
    assert asked.num_states >= 258  # 12.6 GiB
    assert asked.kv_bytes >= 4 * GIB


@pytest.mark.parametrize(
    ("model", "words", "settings"),
    [
        (
            HYBRID,
            "cache.state_slots=64 is too small for scheduler.max_num_seqs=64: each running sequence "
            "has a slot, and one more is needed; raise the first to at least 65 or lower the second",
            {"state_slots": 64},
        ),
        (
            replace(HYBRID, has_states=False, state_bytes=0),
            "cache.state_slots=64 is for models with recurrent layers, and this model has none; "
            "leave it out",
            {"state_slots": 64},
        ),
        (
            replace(HYBRID, state_bytes=GIB),
            "states for 65 slots 66.00 GiB, two KV blocks 0.0 MiB; lower scheduler.max_num_seqs",
            {},
        ),
        (
            replace(HYBRID, state_bytes=200 * MIB),
            "lower cache.state_slots, or use a smaller model",
            {"state_slots": 80},
        ),
        (
            HYBRID,
            "not enough memory for the cache: 51.2 MiB are planned, states for 65 slots need 66.0 MiB,"
            " and two KV blocks 0.0 MiB; raise cache.memory_gib, or lower scheduler.max_num_seqs",
            {"memory_gib": 0.05},
        ),
        (
            HYBRID,
            "lower scheduler.max_num_seqs, as 66.0 MiB are for states",
            {"memory_gib": 0.066, "max_model_len": 4096},
        ),
    ],
)
def test_errors_name_the_remedies(model: ModelFootprint, words: str, settings: dict[str, object]):
    with pytest.raises(StartupError) as error:
        plan(model, **settings)  # type: ignore[arg-type]
    assert words in str(error.value)


def plan_of(*words: str, rank: int = 0, attention: tuple[int, ...] = (1,)) -> EnginePlan:
    config = hybrid_config(*words, attention=attention).engine
    parallel = config.parallel
    return make_plan(config, 1, shard=shard_of_rank(rank, parallel.tensor, parallel.pipeline))


def test_the_cache_has_the_planned_size():
    found = plan_of("scheduler.max_num_seqs=3", "cache.memory_gib=0.001")
    memory = found.memory
    assert (memory.num_states, memory.bytes_per_state) == (10, 3 * SLOT_BYTES)
    cache = found.kv_cache_spec.allocate(memory.num_blocks, torch.device("cpu"), memory.num_states)
    assert sum(page.nbytes for page in cache.pages) == memory.kv_bytes
    sides = [side for layer in (0, 2, 3) for side in cache[layer]]
    assert sum(side.nbytes for side in sides) == memory.state_bytes
    assert found.limits.max_num_seqs == 3
    assert found.attention_spec.sliding_window == 0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_inputs_of_convolutions_have_the_dtype_of_the_model_in_any_cache(dtype: str):
    found = plan_of(f"model.dtype={dtype}", "cache.dtype=int8", "device.name=cpu")
    recurrent = found.kv_cache_spec.recurrent
    assert recurrent is not None
    assert (found.kv_cache_spec.dtype, recurrent.conv_dtype) == (torch.int8, found.source.dtype)
    itemsize = found.source.dtype.itemsize
    assert found.memory.bytes_per_state == 3 * SLOT_BYTES // 4 * itemsize


def test_fewer_sequences_run_than_buffers_are_sized_for():
    words = ("scheduler.max_num_seqs=null", "cache.state_slots=6")
    found = plan_of(*words)
    assert found.memory.num_states == 7
    assert (found.source.limits.max_num_seqs, found.limits.max_num_seqs) == (64, 5)


def agreed(attention: tuple[int, ...]) -> list[EnginePlan]:
    """The plans of two stages, after they have agreed."""
    words = ("parallel.pipeline=2", "parallel.executor=processes", "speculation.method=none")
    plans = [plan_of(*words, rank=rank, attention=attention) for rank in range(2)]
    rows: list[list[int]] = []
    for one in plans:
        agree(one, lambda name, numbers: [*rows, rows.append(list(numbers)) or list(numbers)])
    return [agree(one, lambda name, numbers: rows)[0] for one in plans]


@pytest.mark.parametrize("attention", [(0,), (3,)])
def test_a_stage_without_attention_leaves_the_number_of_blocks_to_the_others(
    attention: tuple[int, ...],
):
    plans = agreed(attention)
    without, with_blocks = sorted((each.memory for each in plans), key=lambda one: one.kv_bytes)
    assert (without.bytes_per_block, without.kv_bytes, without.bytes_per_token) == (0, 0, 0)
    assert without.num_blocks == with_blocks.num_blocks < 1 << 20
    assert without.num_states == with_blocks.num_states == 17
    assert (without.bytes_per_state, with_blocks.bytes_per_state) == (2 * SLOT_BYTES, SLOT_BYTES)
    assert with_blocks.kv_bytes + with_blocks.state_bytes <= 0.01 * GIB
    assert without.max_model_len == with_blocks.max_model_len == 256
    assert "KV blocks: none on this stage, whose layers have no attention" in without.reasons
    for each in plans:
        spec = each.kv_cache_spec
        cache = spec.allocate(each.memory.num_blocks, torch.device("cpu"), 2)
        assert len(cache) == 2


def test_a_stage_of_mlps_alone_keeps_nothing():
    """Its model has blocks of one part, and none of them is recurrent."""
    model = replace(HYBRID, has_states=False, state_bytes=0, kv_bytes_per_token=0)
    stage = plan(replace(model, keeps_no_keys=True))
    assert (stage.num_blocks, stage.num_states, stage.kv_bytes) == (1 << 30, 0, 0)
    assert "KV blocks: none on this stage, whose layers have no attention" in stage.reasons


def test_a_stage_without_recurrent_layers_has_slots_of_no_bytes():
    plans = agreed((0, 1))
    attending, recurrent = sorted((each.memory for each in plans), key=lambda one: -one.kv_bytes)
    assert (attending.bytes_per_state, attending.num_states) == (0, 17)
    assert "states: 16 slots, which take no memory on this stage" in attending.reasons
    assert recurrent.bytes_per_state == 2 * SLOT_BYTES


def test_run_plan_shows_the_states(capsys: pytest.CaptureFixture[str]):
    config = hybrid_config().engine.model.config
    words = [
        "plan", "model.load_format=dummy", f"model.config={json.dumps(config)}".replace('"', ""),
        "plan.free_gib=2", "scheduler.max_num_seqs=3", "device.name=cpu",
    ]  # fmt: skip
    assert run(words) == 0
    assert "9 slots of 1.5 KiB, three for each of 3 sequences" in capsys.readouterr().out
    words.append("speculation.method=none")
    assert run(words) == 0
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 80
    assert "states" in text
    assert "7 slots, for recurrent layers" in text
    assert "one state     1.5 KiB, of one sequence" in text
    assert run([*words, "plan.json=true", "parallel.pipeline=2"]) == 0
    ledger = json.loads(capsys.readouterr().out)
    assert (ledger["num_states"], ledger["state_bytes"]) == (7, 7 * ledger["bytes_per_state"])
    assert sum(each["bytes_per_state"] for each in ledger["memory_by_rank"]) == 3 * SLOT_BYTES
    assert len({each["num_blocks"] for each in ledger["memory_by_rank"]}) == 1
    assert run([*words, "parallel.pipeline=2"]) == 0
    assert ", states 0.000; layers 0-" in " ".join(capsys.readouterr().out.split())


def test_a_model_without_recurrent_layers_has_no_states():
    memory = make_plan(tiny_config().engine, 1).memory
    assert (memory.num_states, memory.state_bytes, memory.bytes_per_state) == (0, 0, 0)
    assert not any(text.startswith("states") for text in memory.reasons)
    assert memory.running_seqs(8) == 8
    assert dataclasses.replace(memory, num_states=5).running_seqs(8) == 3


def test_fewer_sequences_are_no_remedy_for_large_weights():
    for is_set in (False, True):
        with pytest.raises(StartupError) as error:
            plan(free=100 * MIB, is_set=is_set)
        assert "states for" in str(error.value)
        assert "lower scheduler.max_num_seqs" not in str(error.value)
