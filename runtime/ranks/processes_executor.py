"""The executor of an engine whose model is divided among several processes (ranks).

Rank 0 runs in the engine's process, on its thread, and draws the tokens. Each step is sent to the
other ranks first and then run here, so all ranks compute it at the same time. They meet in the
collectives of the model. The result comes from rank 0 alone.
"""

from __future__ import annotations

import weakref

import msgspec

from ostinato.ops.parallel.group import ParallelGroup
from ostinato.runtime.errors import InvalidRequestError
from ostinato.runtime.execution.executor import ExecutorStats, Pending, RankCall
from ostinato.runtime.execution.inline_executor import InlineExecutor
from ostinato.runtime.execution.model_runner import ModelRunner
from ostinato.runtime.grammar.store import GrammarBuilt
from ostinato.runtime.ranks.messages import Call, Idle, Step, for_other_ranks
from ostinato.runtime.ranks.rank_processes import RankProcesses
from ostinato.runtime.types.step import SchedulerOutput, StepResult

__all__ = ("ProcessesExecutor",)


class ProcessesExecutor:
    """Runs each step on all ranks. Every method raises `RankFailedError` once a rank has ended."""

    def __init__(
        self,
        first: InlineExecutor,
        runner: ModelRunner,
        ranks: RankProcesses,
        group: ParallelGroup,
    ) -> None:
        """
        Args:
            first: rank 0's executor, closed with this one; it reads each step before the next.
            runner: rank 0's runner.
            ranks: the other ranks' processes, built and waiting for steps; ended with this object.
            group: rank 0's membership; closed after the processes have ended.
        """
        self._first = first
        self._runner = runner
        self._ranks = ranks
        self._end = weakref.finalize(self, _end, ranks, group)
        self._is_working = False

    @property
    def max_in_flight(self) -> int:
        return 1  # the tokens of a step travel with the next one

    def launch(self, output: SchedulerOutput) -> Pending:
        self._is_working = True
        rows = [entry.row for entry in output.scheduled if not entry.token_ids]
        last_tokens = self._runner.last_tokens(rows)
        with self._ranks.step():
            self._ranks.send(Step(for_other_ranks(output), last_tokens))
            return self._first.launch(output)

    def read(self, pending: Pending) -> StepResult:
        return self._first.read(pending)

    def idle(self) -> None:
        self._ranks.check()
        if self._is_working:
            self._is_working = False
            self._ranks.send(Idle())
            self._ranks.rest()
        self._first.idle()

    def prepare_grammar(self, request_id: str, grammar: str) -> None:
        self._first.prepare_grammar(request_id, grammar)

    def take_built_grammars(self, timeout_s: float) -> list[GrammarBuilt]:
        return self._first.take_built_grammars(timeout_s)

    def release_grammar(self, request_id: str) -> None:
        self._first.release_grammar(request_id)

    def call(self, call: RankCall) -> list[str]:
        answers = self._first.call(call)  # what it refuses is not sent
        self._ranks.send(Call(call))
        others = self._ranks.answers()
        refused = next((answer for answer in others if answer.is_refusal), None)
        if refused is not None:
            raise InvalidRequestError(refused.text)
        return [*answers, *(answer.text for answer in others)]

    def stats(self) -> ExecutorStats:
        stats = self._first.stats()
        if others := self._ranks.late_compiles:
            return msgspec.structs.replace(stats, late_compiles=[*stats.late_compiles, *others])
        return stats

    def close(self) -> None:
        self._end()
        self._first.close()


def _end(ranks: RankProcesses, group: ParallelGroup) -> None:
    ranks.close()
    group.close()
