"""Compares memory plans with sizes computed by hand; reads free memory from fake cgroup files."""

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ostinato.conf.schema import DeviceConfig
from ostinato.conf.sections.cache_schema import CacheConfig
from ostinato.models.kv_groups import REPEATED_TOKENS, WHOLE_CACHE, KVGroup
from ostinato.runtime.costs.step_limits import StepLimits
from ostinato.runtime.errors import StartupError
from ostinato.runtime.host_resources import FreeMemory, free_host_memory
from ostinato.runtime.memory.footprint import GraphFootprint, MeasuredMemory, ModelFootprint
from ostinato.runtime.memory.memory_plan import MemoryPlan, plan_memory

TWO_GROUPS = [
    (KVGroup(0, units=6, pieces=1), KVGroup(40, units=1, pieces=6)),
    (KVGroup(0, units=1, pieces=3), KVGroup(40, units=3, pieces=1)),
]
GIB = 1 << 30
MIB = 1 << 20
# Qwen3-0.6B in bfloat16: 28 layers x 2 x 8 heads x 128 x 2 bytes = 114688 bytes a token.
QWEN = ModelFootprint(
    weights_bytes=1_192_099_840,
    kv_bytes_per_token=114_688,
    hidden_size=1024,
    intermediate_size=3072,
    qkv_size=4096,
    dtype_bytes=2,
    max_model_len=40_960,
)
SMALL = ModelFootprint(
    weights_bytes=100 * MIB,
    kv_bytes_per_token=1024,
    hidden_size=64,
    intermediate_size=128,
    qkv_size=128,
    sampling_bytes=700_000,
    workspace_bytes=68_000,
    dtype_bytes=4,
    max_model_len=512,
)
# 2048 tokens x (3*64 + max(2*128, 3*128)) x 4 bytes + sampling + workspace
SMALL_ACTIVATIONS = 2048 * 576 * 4 + 768_000


def plan(
    model: ModelFootprint = SMALL,
    free: int = 16 * GIB,
    *,
    is_cpu: bool = True,
    fraction: float = 0.5,
    max_model_len: int | None = None,
    graphs: GraphFootprint | None = None,
    **cache: object,
) -> MemoryPlan:
    return plan_memory(
        model,
        free_bytes=free,
        is_cpu=is_cpu,
        device=DeviceConfig(memory_fraction=fraction),
        cache=CacheConfig(**cache),
        scheduler=StepLimits(64, 2048),
        max_model_len=max_model_len,
        graphs=graphs,
    )


def test_cpu_takes_no_more_than_every_sequence_needs():
    ledger = plan()
    assert ledger.budget_bytes == 8 * GIB
    assert ledger.activation_bytes == SMALL_ACTIVATIONS
    assert ledger.graph_bytes == 0
    assert ledger.bytes_per_block == 16 * 1024
    assert ledger.num_blocks == 64 * 32 + 1  # 64 sequences of 512 tokens, and the null block
    assert ledger.kv_bytes == 2049 * 16 * 1024
    assert ledger.num_tokens == 64 * 512
    assert ledger.num_full_sequences == 64.0
    assert ledger.max_model_len == 512


@given(
    groups=st.sampled_from([WHOLE_CACHE, (KVGroup(40),), *TWO_GROUPS]),
    block_size=st.sampled_from([8, 16, 32]),
    num_tokens=st.integers(1, 400),
)
def test_a_sequence_that_decodes_holds_the_blocks_that_are_counted(
    groups: tuple[KVGroup, ...], block_size: int, num_tokens: int
):
    """The twin frees, when a sequence reaches a new unit, what is out of every layer's sight.

    A position may be computed again as long as fewer than 8 tokens follow it.
    """
    ledger = plan(replace(SMALL, groups=groups), block_size=block_size)
    most = 0
    for position in range(num_tokens):
        seen_from = position - position % block_size - REPEATED_TOKENS
        held = 0
        for window, units, _ in groups:
            size = units * block_size
            first = max(0, seen_from - window + 1) // size if window else 0
            held += position // size + 1 - first
        most = max(most, held)
    counted = ledger.decoding_blocks(num_tokens)
    assert most <= counted <= most + len(groups)
    assert counted <= ledger.sequence_blocks(num_tokens)


def test_groups_hold_more_sequences():
    """Of 6 layers, 5 have a window of 64 tokens. A block has 16 tokens of each, or 80 of one."""
    groups = (KVGroup(0, units=5, pieces=1), KVGroup(64, units=1, pieces=5))
    model = replace(SMALL, kv_bytes_per_token=6 * 200, kv_bytes_per_unit=5 * 200, groups=groups)
    ledger = plan(model)
    assert ledger.bytes_per_block == 80 * 200
    # All 512 tokens need 7 blocks of the layer without a window, and 32 of the others. 64 + 1 + 8
    # tokens in sight need 6 blocks at most.
    assert (ledger.sequence_blocks(512), ledger.decoding_blocks(512)) == (39, 13)
    assert ledger.num_blocks == 39 + 63 * 13 + 1
    assert ledger.num_full_sequences == 64.0
    assert ledger.num_tokens == 64 * 512
    whole = plan(replace(SMALL, kv_bytes_per_token=6 * 200))
    assert ledger.num_full_sequences == whole.num_full_sequences
    assert 2.7 < whole.kv_bytes / ledger.kv_bytes < 2.9
    small = plan(model, memory_gib=30 * 16_000 / GIB)
    assert small.max_model_len == small.longest_sequence == 384  # 5 + 24 blocks
    assert small.sequence_blocks(385) == 5 + 25 == small.num_blocks


def test_cpu_default_stays_at_four_gib():
    ledger = plan(QWEN, 64 * GIB, max_model_len=4096)
    assert ledger.num_blocks == 4 * GIB // (114_688 * 16)
    assert ledger.kv_bytes <= 4 * GIB
    assert any("set cache.memory_gib for more" in reason for reason in ledger.reasons)


def test_cpu_exceeds_four_gib_for_one_full_sequence_within_half_of_the_room():
    ledger = plan(QWEN, 64 * GIB)
    assert ledger.max_model_len == 40_960
    assert ledger.num_tokens == 40_960  # 4.4 GiB
    tight = plan(QWEN, 16 * GIB)  # half of the room is less than 4.4 GiB
    assert tight.max_model_len == tight.num_tokens < 40_960
    assert "shortened from 40960" in tight.reasons[-1]


def test_cuda_takes_what_is_left():
    graphs = GraphFootprint(num_graphs=10, max_tokens=512)
    ledger = plan(is_cpu=False, graphs=graphs)
    pool = 512 * 576 * 4 + 768_000
    assert ledger.graph_bytes == pool + 10 * 4 * MIB
    room = 8 * GIB - 100 * MIB - SMALL_ACTIVATIONS - ledger.graph_bytes
    assert ledger.num_blocks == room // 16384
    assert ledger.unplanned_bytes >= 8 * GIB


def test_what_was_measured_takes_the_place_of_estimates():
    graphs = GraphFootprint(num_graphs=10, max_tokens=512)
    measured = MeasuredMemory(used_bytes=300 * MIB, step_bytes=50 * MIB)
    ledger = plan(replace(SMALL, measured=measured), is_cpu=False, graphs=graphs)
    assert (ledger.weights_bytes, ledger.activation_bytes) == (300 * MIB, 50 * MIB)
    assert ledger.graph_bytes == plan(is_cpu=False, graphs=graphs).graph_bytes
    assert ledger.num_blocks == (8 * GIB - 350 * MIB - ledger.graph_bytes) // 16384


@pytest.mark.parametrize("is_cpu", [True, False])
def test_buffers_of_tiers_leave_less_room(is_cpu: bool):
    free = 256 * MIB  # without the buffers, the KV cache takes all that is left
    alone = plan(free=free, is_cpu=is_cpu, fraction=0.5)
    ledger = plan(replace(SMALL, tier_bytes=7 * MIB), free, is_cpu=is_cpu, fraction=0.5)
    assert ledger.tier_bytes == 7 * MIB
    assert ledger.num_blocks == alone.num_blocks - 7 * MIB // 16384
    assert ledger.unplanned_bytes == alone.unplanned_bytes
    measured = MeasuredMemory(used_bytes=90 * MIB, step_bytes=5 * MIB)
    known = replace(SMALL, tier_bytes=7 * MIB, measured=measured)
    assert plan(known, free, is_cpu=False).tier_bytes == 7 * MIB
    with pytest.raises(StartupError, match=r"buffers of KV tiers 64.0 MiB, two KV blocks"):
        plan(replace(SMALL, tier_bytes=64 * MIB), free, is_cpu=is_cpu, fraction=0.5)


def test_chosen_cache_size_is_obeyed_exactly():
    assert plan(memory_gib=0.5).num_blocks == GIB // 2 // 16384
    assert plan(is_cpu=False, memory_gib=0.5).num_blocks == GIB // 2 // 16384


def test_chosen_cache_size_that_does_not_fit_is_refused():
    with pytest.raises(StartupError, match=r"cache.memory_gib=9, but 7.\d+ GiB are left"):
        plan(memory_gib=9)


def test_null_length_is_shortened_with_a_note():
    ledger = plan(QWEN, memory_gib=1)
    assert ledger.max_model_len == (GIB // 1_835_008 - 1) * 16 == 9344
    assert ledger.reasons[-1] == (
        "context: shortened from 40960 to 9344 tokens, because the KV cache holds no "
        "more; raise cache.memory_gib for longer sequences"
    )


def test_asked_length_that_does_not_fit_is_refused_with_numbers_and_remedies():
    with pytest.raises(StartupError) as caught:
        plan(QWEN, memory_gib=1, max_model_len=20_000)
    assert str(caught.value) == (
        "not enough memory for one sequence of 20000 tokens: its KV blocks need 2.14 GiB, and "
        "1.00 GiB are planned; lower model.max_model_len to at most 9344, or set "
        "cache.memory_gib=2.138, or use a smaller model or a higher device.memory_fraction"
    )
    assert plan(QWEN, memory_gib=2.138, max_model_len=20_000).max_model_len == 20_000


def test_longer_than_the_model_is_refused():
    with pytest.raises(StartupError, match="max_model_len=513, but the model is made for 512"):
        plan(max_model_len=513)


def test_weights_that_do_not_fit_are_refused():
    with pytest.raises(StartupError, match=r"weights need 1.11 GiB.*use a smaller model"):
        plan(QWEN, GIB)


@pytest.mark.parametrize(
    ("tower", "setting"),
    [("image_bytes", "images.cache_tokens"), ("sound_bytes", "audio.cache_tokens")],
)
def test_a_table_that_takes_the_memory_is_named(tower: str, setting: str):
    """It is named if it is most of the weights, or if the rest has room without it."""

    def refusal(rest: int, table: int, free: int, length: int | None = None) -> str:
        sizes = {tower: table + MIB, "media_table_bytes": table, "weights_bytes": rest + table}
        with pytest.raises(StartupError) as caught:
            plan(replace(SMALL, **sizes), free, fraction=1, max_model_len=length)
        return str(caught.value)

    named = f"; lower {setting}, whose table is 9.00 GiB of the weights, or use a smaller model"
    assert named in refusal(100 * MIB, 9 * GIB, 2 * GIB)
    assert named in refusal(3 * GIB, 9 * GIB, 2 * GIB)
    assert named in refusal(10 * GIB, 9 * GIB, 11 * GIB)
    assert setting not in refusal(10 * GIB, 9 * GIB, 8 * GIB)
    assert setting not in refusal(3 * GIB, 0, 2 * GIB)
    # There is room for a few blocks, but not for one sequence.
    free = 9 * GIB + 100 * MIB + SMALL_ACTIVATIONS + 128 * 1024
    text = refusal(100 * MIB, 9 * GIB, free, 512)
    assert text.startswith("not enough memory for one sequence of 512 tokens")
    assert f"or lower {setting}, whose table is 9.00 GiB of the weights, or use" in text


def test_less_than_one_block_is_refused():
    with pytest.raises(StartupError, match="one sequence of 16 tokens"):
        plan(memory_gib=1e-6)


@given(
    free=st.integers(200 * MIB, 64 * GIB),
    fraction=st.floats(0.05, 1.0),
    block_size=st.sampled_from([8, 16, 32, 64, 128]),
    is_cpu=st.booleans(),
    memory_gib=st.none() | st.floats(0.001, 32.0),
    length=st.none() | st.integers(1, 512),
    tier_bytes=st.sampled_from([0, 64 * MIB]),
    groups=st.sampled_from([WHOLE_CACHE, (KVGroup(40),), *TWO_GROUPS]),
)
def test_a_plan_never_promises_what_is_not_there(
    free: int,
    fraction: float,
    block_size: int,
    is_cpu: bool,
    memory_gib: float | None,
    length: int | None,
    tier_bytes: int,
    groups: tuple[KVGroup, ...],
):
    try:
        ledger = plan(
            replace(
                SMALL,
                tier_bytes=tier_bytes,
                groups=groups,
            ),
            free=free,
            fraction=fraction,
            is_cpu=is_cpu,
            max_model_len=length,
            block_size=block_size,
            memory_gib=memory_gib,
        )
    except StartupError:
        return
    used = ledger.weights_bytes + ledger.activation_bytes + ledger.graph_bytes + ledger.kv_bytes
    used += tier_bytes
    assert used <= ledger.budget_bytes <= free
    assert ledger.num_blocks >= 2
    assert ledger.sequence_blocks(ledger.max_model_len) <= ledger.num_blocks - 1
    assert length is None or ledger.max_model_len == length
    assert ledger.num_full_sequences >= 1
    whole_sequences = int(ledger.num_full_sequences + 1e-9)
    assert ledger.blocks_of_sequences(whole_sequences) <= ledger.num_blocks - 1


def write_group(directory: Path, limit: str, usage: int, inactive: int) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "memory.max").write_text(limit)
    (directory / "memory.current").write_text(str(usage))
    (directory / "memory.stat").write_text(f"anon 5\ninactive_file {inactive}\n")


def test_free_memory_obeys_every_enclosing_group(tmp_path: Path):
    membership = tmp_path / "cgroup"
    membership.write_text("0::/service/engine\n")
    root = tmp_path / "fs"
    write_group(root / "service" / "engine", "max\n", 100, 0)
    write_group(root / "service", str(10 * MIB), 4 * MIB, 1 * MIB)
    found = free_host_memory(cgroup_root=root, membership=membership)
    assert found == FreeMemory(
        total_bytes=10 * MIB,
        free_bytes=7 * MIB,  # 10 - (4 in use - 1 of file cache)
        source="left under the control group's limit",
    )


def test_free_memory_reads_version_one_groups(tmp_path: Path):
    membership = tmp_path / "cgroup"
    membership.write_text("4:cpu:/x\n3:memory:/engine\n0::/\n")
    group = tmp_path / "fs" / "memory" / "engine"
    group.mkdir(parents=True)
    (group / "memory.limit_in_bytes").write_text(str(8 * MIB))
    (group / "memory.usage_in_bytes").write_text(str(9 * MIB))
    (group / "memory.stat").write_text("total_inactive_file 0\n")
    found = free_host_memory(cgroup_root=tmp_path / "fs", membership=membership)
    assert found.free_bytes == 0  # 9 MiB of 8 are in use: 0, not negative


def test_free_memory_without_groups_is_the_systems(tmp_path: Path):
    found = free_host_memory(cgroup_root=tmp_path, membership=tmp_path / "absent")
    assert 0 < found.free_bytes <= found.total_bytes
    assert found.source == "available to the system"
