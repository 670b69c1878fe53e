"""The parts of a rank, and the arguments that describe its surroundings (rank.py)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ostinato.graphs.buffers import StaticBuffers
from ostinato.graphs.bundle import Bundle
from ostinato.graphs.compile_monitor import CompileMonitor
from ostinato.graphs.recorder import CudaRecorder
from ostinato.models.base import LanguageModel
from ostinato.runtime.costs.cost_table import CostTable
from ostinato.runtime.execution.inline_executor import InlineExecutor
from ostinato.runtime.execution.model_runner import ModelRunner
from ostinato.runtime.ranks.rank_links import RankLinks
from ostinato.runtime.startup.calibrate import CostStore
from ostinato.runtime.startup.plan.engine_plan import EnginePlan
from ostinato.runtime.types.engine_info import ServedModel

__all__ = ("DraftSetup", "Meet", "Peers", "RankParts")

Meet = Callable[[str, list[int]], list[list[int]]]
"""Exchanges numbers between the ranks.

Takes the name of a point in the start, and this rank's numbers. Waits until all ranks have reached
that point. Returns the numbers of every rank.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Peers:
    """The other ranks of an engine, as one rank sees them.

    The ranks with turn 0 make their compiled programs first, those with turn 1 make theirs next.
    A rank with the turn `num_turns` makes no programs. It loads those of the other ranks.
    """

    links: RankLinks | None
    meet: Meet
    turn: int
    num_turns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftSetup:
    """What the model of a drafter needs from the rank that it drafts for.

    The plan of the drafter has the measured memory of that rank, so it is not measured again.
    """

    recorder: CudaRecorder | None  # the drafter's graphs share its memory; None = on a CPU
    attach: Callable[[LanguageModel], None]  # called with the loaded model, before its first step
    num_host_copies: int  # steps of the drafter that are queued at once


@dataclass(frozen=True, slots=True, kw_only=True)
class RankParts:
    """A rank that is ready to run steps."""

    plan: EnginePlan  # on CUDA, the memory plan of a model that generates is measured
    network: LanguageModel
    executor: InlineExecutor
    runner: ModelRunner
    buffers: StaticBuffers
    recorder: CudaRecorder | None  # of CUDA graphs; None = on a CPU, or for an encoder
    monitor: CompileMonitor
    model: ServedModel
    bundle: Bundle | None  # the compiled programs, not saved yet; None = they are not saved
    cost_store: CostStore
    costs: CostTable | None  # step costs that an earlier start measured; None = not measured
