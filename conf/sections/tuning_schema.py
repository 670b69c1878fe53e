"""The sections of `run simulate` and `run tune`.

The traffic and its goals are those of `run bench`: `workload`, `load` and `slo`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from ostinato.conf.schema import Section, setting
from ostinato.conf.sections.server_schema import RouterName

__all__ = ("LinkName", "SimulateSection", "TuneObjective", "TuneSection")


class TuneObjective(StrEnum):
    throughput = "throughput"
    latency = "latency"


class LinkName(StrEnum):
    """The connection between devices (docs/simulate.md)."""

    nvlink = "nvlink"
    pcie = "pcie"
    infiniband = "infiniband"
    ethernet = "ethernet"


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulateSection(Section):
    """Runs the real scheduler and block pool with predicted step times instead of a device."""

    key = "simulate"
    device: str = setting(
        "",
        "the device of the step costs; empty = this machine, measured; a name such as h100 = "
        "computed from its data sheet (names: docs/simulate.md)",
    )
    link: LinkName = setting(
        LinkName.nvlink,
        "what connects the devices of parallel.tensor and parallel.pipeline; needs simulate.device",
    )
    stage_link: LinkName | None = setting(
        None, "what connects the stages of parallel.pipeline; null = simulate.link"
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
        1,
        "times that the workload is sent, each time with other ids",
        at_least=1,
        at_most=1_000_000,
    )
    processes: int | None = setting(
        None,
        "with round_robin: processes that simulate the replicas in parallel; null = one a core",
        at_least=1,
        at_most=256,
    )
    validate: bool = setting(
        False,
        "predict three workloads, run them on a real server, compare; exit code 1 = one differs",
    )
    tolerance: float = setting(
        0.1, "validate: largest relative error of a prediction", above=0, at_most=1
    )
    validate_s: float = setting(
        56.0, "validate: seconds of traffic of each workload", above=0, at_most=600
    )
    acceptance: float = setting(
        0.6,
        "speculation: assumed probability that a draft token is right if those before it are",
        at_least=0,
        at_most=1,
    )
    output: str = setting("", "JSON file to write; empty = outputs/bench/simulate-<time>.json")


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneSection(Section):
    """The search for the configuration that meets `slo` under the configured traffic."""

    key = "tune"
    name: str = setting("tuned", "name of the result: run serve tuned=<name>")
    objective: TuneObjective = setting(
        TuneObjective.throughput,
        "what to optimise among configurations that meet the goals: tokens/s or latency",
    )
    percentile: float = setting(
        95.0,
        "percentile of requests (ttft, tpot, e2e) and of gaps (itl) that must meet slo",
        above=0,
        at_most=99.9,
    )
    keys: list[str] = setting(
        [],
        "keys to search; empty = step sizes, ITL target, block size and threads",
        one_of=(
            "scheduler.max_num_seqs",
            "scheduler.max_num_batched_tokens",
            "scheduler.itl_target_ms",
            "cache.block_size",
            "cache.memory_gib",
            "cache.enable_prefix_caching",
            "device.threads",
            "speculation.method",
            "speculation.max_tokens",
        ),
    )
    trials: int = setting(150, "simulated configurations", at_least=1, at_most=100_000)
    verify: int = setting(3, "configurations to run for real", at_least=1, at_most=100)
    budget_s: float = setting(
        240.0, "seconds after which no further trial is started", at_least=10, at_most=86_400
    )
    seed: int = setting(0, "seed of the search", at_least=0)
    storage: str = setting(
        "", "study file to keep and to resume from; empty = outputs/tune/<name>.journal"
    )
    config_dir: str = setting("conf", "directory to write tuned/<name>.yaml and its plot into")
