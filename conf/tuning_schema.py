"""The sections of `run simulate` and `run tune`.

The traffic and its goals are those of `run bench`: `workload`, `load` and `slo`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from ostinato.conf.schema import Section, setting

__all__ = ("RouterName", "SimulateSection", "TuneObjective", "TuneSection")


class RouterName(StrEnum):
    round_robin = "round_robin"
    least_load = "least_load"
    prefix_aware = "prefix_aware"


class TuneObjective(StrEnum):
    throughput = "throughput"
    latency = "latency"


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulateSection(Section):
    """The real scheduler and block pool on a clock of step costs instead of a device."""

    key = "simulate"
    device: str = setting(
        "",
        "whose step costs; empty = measured on this machine, a name such as h100 = computed from "
        "its data sheet (names: docs/simulate.md)",
    )
    costs: str = setting(
        "", "a step-cost table that save_costs wrote; empty = measured or computed"
    )
    save_costs: str = setting("", "file to write the step-cost table to; empty = none")
    replicas: int = setting(1, "engines behind the router", at_least=1, at_most=100_000)
    router: RouterName = setting(
        RouterName.round_robin,
        "round_robin, least_load = the fewest requests, prefix_aware = the longest known prefix",
    )
    rounds: int = setting(
        1, "the workload is sent so often, each time with other ids", at_least=1, at_most=1_000_000
    )
    processes: int | None = setting(
        None, "that share the replicas of round_robin; null = one a core", at_least=1, at_most=256
    )
    validate: bool = setting(
        False, "predict three workloads, run them on a real server, compare; 1 when one is missed"
    )
    tolerance: float = setting(
        0.1, "validate: share by which a prediction may miss", above=0, at_most=1
    )
    validate_s: float = setting(
        56.0, "validate: seconds of traffic of each workload", above=0, at_most=600
    )
    output: str = setting("", "JSON file to write; empty = outputs/bench/simulate-<time>.json")


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneSection(Section):
    """The search for the configuration that meets `slo` under the configured traffic."""

    key = "tune"
    name: str = setting("tuned", "of the result: run serve tuned=<name>")
    objective: TuneObjective = setting(
        TuneObjective.throughput, "of those that meet the goals: the most tokens/s or least latency"
    )
    percentile: float = setting(
        95.0,
        "of requests (ttft, tpot, e2e) and of gaps (itl) that must meet slo",
        above=0,
        at_most=99.9,
    )
    keys: list[str] = setting(
        [],
        "what may be changed; empty = steps, target, block size and threads",
        one_of=(
            "scheduler.max_num_seqs",
            "scheduler.max_num_batched_tokens",
            "scheduler.itl_target_ms",
            "cache.block_size",
            "cache.memory_gib",
            "cache.enable_prefix_caching",
            "device.threads",
        ),
    )
    trials: int = setting(150, "simulated configurations", at_least=1, at_most=100_000)
    verify: int = setting(3, "configurations to run for real", at_least=1, at_most=100)
    budget_s: float = setting(
        240.0, "seconds after which nothing new is begun", at_least=10, at_most=86_400
    )
    seed: int = setting(0, "of the search", at_least=0)
    storage: str = setting(
        "", "study file to keep and to resume from; empty = outputs/tune/<name>.journal"
    )
    config_dir: str = setting("conf", "directory to write tuned/<name>.yaml and its plot into")
