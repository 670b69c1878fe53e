"""Sections are frozen, and every out-of-range value is refused by key, range and value."""

import dataclasses

import msgspec
import pytest

from ostinato.conf.describe import describe_keys, describe_sections, nearest
from ostinato.conf.engine_config import EngineConfig, draft_config
from ostinato.conf.root import RunConfig
from ostinato.conf.schema import (
    DeviceConfig,
    GraphConfig,
    ModelSection,
    SamplingSection,
    SchedulerConfig,
)
from ostinato.conf.sections.bench_schema import BenchSection
from ostinato.conf.sections.cache_schema import CacheConfig, StorePolicy
from ostinato.conf.sections.command_schema import GenerateSection, PlanSection
from ostinato.conf.sections.server_schema import ParallelConfig, ServerConfig


@pytest.mark.parametrize(
    ("section", "values", "message"),
    [
        (
            CacheConfig,
            {"block_size": 17},
            "cache.block_size must be one of 8, 16, 32, 64, 128, got 17",
        ),
        (CacheConfig, {"memory_gib": 0}, "cache.memory_gib must be null or above 0, got 0"),
        (
            CacheConfig,
            {"memory_gib": float("nan")},
            "cache.memory_gib must be null or above 0, got nan",
        ),
        (
            ParallelConfig,
            {"nodes": 2},
            "parallel.nodes must be 1 with parallel.data=1, got 2",
        ),
        (
            ParallelConfig,
            {"nodes": 2, "data": 3},
            "parallel.nodes must be 1 or 3 with parallel.data=3, got 2",
        ),
        (
            ParallelConfig,
            {"nodes": 3, "data": 2, "tensor": 2, "pipeline": 2},
            "parallel.nodes must be 1 or 2 or 4 or 8 with parallel.data=2 engines of 4 ranks, "
            "got 3",
        ),
        (DeviceConfig, {"threads": 0}, "device.threads must be null or in [1, 1024], got 0"),
        (
            DeviceConfig,
            {"memory_fraction": 0.0},
            "device.memory_fraction must be in (0, 1], got 0.0",
        ),
        (
            DeviceConfig,
            {"memory_fraction": 1.1},
            "device.memory_fraction must be in (0, 1], got 1.1",
        ),
        (
            ModelSection,
            {"max_model_len": 0},
            "model.max_model_len must be null or at least 1, got 0",
        ),
        (
            SchedulerConfig,
            {"max_num_seqs": 0},
            "scheduler.max_num_seqs must be null or in [1, 4096], got 0",
        ),
        (
            SchedulerConfig,
            {"max_num_seqs": 64, "max_num_batched_tokens": 63},
            "scheduler.max_num_batched_tokens must be null or in [scheduler.max_num_seqs=64, 1048576], got 63",
        ),
        (
            SchedulerConfig,
            {"itl_target_ms": 0.0},
            "scheduler.itl_target_ms must be null or above 0, got 0.0",
        ),
        (
            GraphConfig,
            {"cost_table_budget_s": -1.0},
            "graphs.cost_table_budget_s must be null or in [0, 600], got -1.0",
        ),
        (
            GraphConfig,
            {"capture_sizes": [1, 0]},
            "graphs.capture_sizes must be in [1, 8192], got [1, 0]",
        ),
        (
            SamplingSection,
            {"max_tokens": 0},
            "sampling.max_tokens must be null or at least 1, got 0",
        ),
        (ServerConfig, {"port": 65536}, "server.port must be in [0, 65535], got 65536"),
        (ServerConfig, {"max_body_mib": 0.0}, "server.max_body_mib must be above 0, got 0.0"),
        (
            ServerConfig,
            {"log_level": "loud"},
            "server.log_level must be one of debug, info, warning, error, got 'loud'",
        ),
        (
            GenerateSection,
            {"temperature": 2.5},
            "generate.temperature must be null or in [0, 2], got 2.5",
        ),
        (PlanSection, {"free_gib": -1.0}, "plan.free_gib must be null or above 0, got -1.0"),
        (
            BenchSection,
            {"parts": ["single", "all"]},
            "bench.parts must be one of single, ttft, offline, prefix, got ['single', 'all']",
        ),
    ],
)
def test_out_of_range_names_key_range_and_value(
    section: type, values: dict[str, object], message: str
):
    with pytest.raises(ValueError) as caught:
        section(**values)
    assert str(caught.value) == message


@pytest.mark.parametrize("value", [1, 4096])
def test_bounds_are_inclusive(value: int):
    assert SchedulerConfig(max_num_seqs=value, max_num_batched_tokens=8192).max_num_seqs == value


def test_sections_are_frozen():
    config = RunConfig()
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.cache.block_size = 32  # type: ignore[misc]
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.cache = CacheConfig()  # type: ignore[misc]


def test_list_defaults_are_not_shared():
    first, second = BenchSection(), BenchSection()
    first.parts.append("single")
    assert second.parts == ["single", "ttft", "offline", "prefix"]


def test_the_engines_sections_cross_the_process_border_alone_and_unchanged():
    config = RunConfig(
        model=ModelSection(path="/x", config={"rope_scaling": {"factor": 2.0}}),
        cache=CacheConfig(block_size=32, memory_gib=0.5),
        server=ServerConfig(api_keys=["secret"]),
    )
    wire = msgspec.json.encode(config.engine)
    received = msgspec.json.decode(wire, type=EngineConfig)
    assert received == config.engine
    assert (received.model, received.cache) == (config.model, config.cache)
    assert b"secret" not in wire
    assert set(msgspec.json.decode(wire)) == {
        *("model", "device", "cache", "scheduler", "speculation", "lora", "images", "graphs"),
        *("video", "audio", "runtime", "sampling", "parallel"),
    }


def test_a_draft_model_has_no_tiers_whatever_the_model_stores():
    cache = CacheConfig(disk_dir="/x", store=StorePolicy.all, store_salted=True, block_size=32)
    config = EngineConfig(cache=cache)
    assert draft_config(config).cache == CacheConfig(block_size=32)


def test_every_setting_has_a_meaning_and_its_sections_name():
    for name, (section, keys) in describe_sections().items():
        assert section.key == name
        assert section.__doc__
        for entry in keys:
            assert entry.meaning, f"{entry.key} has no meaning"


def test_a_key_that_may_be_null_takes_it():
    for section, keys in describe_sections().values():
        for entry in keys:
            if entry.nullable:
                name = entry.key.partition(".")[2]
                assert getattr(section(**{name: None}), name) is None


def test_keys_are_described_as_they_are_typed():
    keys = describe_keys()
    block_size = keys["cache.block_size"]
    assert (block_size.default, block_size.allowed) == ("16", "one of 8, 16, 32, 64, 128")
    assert keys["device.threads"].allowed == "an integer in [1, 1024]"
    assert keys["device.threads"].nullable
    assert keys["server.drain_timeout_s"].allowed == "a number, at least 0"
    assert keys["graphs.mode"].choices == ("eager", "compiled", "captured")
    assert keys["graphs.capture_sizes"].default == "[]"
    assert keys["model.path"].default == "''"
    assert keys["model.config"].free_form


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("cache.blocksize", "cache.block_size"),
        ("block_size", "cache.block_size"),
        ("servr.port", "server.port"),
        ("xyzzy", None),
    ],
)
def test_nearest_key(typed: str, meant: str | None):
    assert nearest(typed, describe_keys()) == meant
