"""The executor of an engine whose model is divided among several processes (ranks).

Rank 0 runs in the engine's process, on the engine's thread, and has the sampler. Each step is sent
to the other ranks first. The result comes from rank 0 alone.

Without a pipeline, all ranks compute a step at the same time and wait for each other in the
collectives of the model. `launch` runs rank 0's part.

In a pipeline, rank 0 belongs to the last stage. `read` runs rank 0's part of a step, which waits
for the hidden states of the stage before. A pipeline of N stages has N steps in flight. Each stage
works on a different step.
"""

from __future__ import annotations

import weakref
from collections import deque

import msgspec

from ostinato.runtime.errors import InvalidRequestError
from ostinato.runtime.execution.executor import AdvanceEncodings, ExecutorStats, Pending, RankCall
from ostinato.runtime.execution.inline_executor import InlineExecutor
from ostinato.runtime.execution.model_runner import ModelRunner
from ostinato.runtime.grammar.store import GrammarBuilt
from ostinato.runtime.ranks.messages import Call, Idle, Step, for_other_ranks
from ostinato.runtime.ranks.rank_links import RankLinks
from ostinato.runtime.ranks.rank_processes import RankProcesses
from ostinato.runtime.types.step import SchedulerOutput, StepResult

__all__ = ("ProcessesExecutor",)


class ProcessesExecutor:
    """Runs each step on all ranks.

    `launch`, `read`, `idle` and `call` raise `RankFailedError` if a rank has ended or hangs.
    """

    def __init__(
        self,
        first: InlineExecutor,
        runner: ModelRunner,
        ranks: RankProcesses,
        links: RankLinks,
        num_stages: int,
    ) -> None:
        """
        Args:
            first: rank 0's executor, without overlap; closed with this executor.
            runner: rank 0's runner.
            ranks: the processes of the other ranks, which wait for steps; ended with this object.
            links: rank 0's links to the other ranks; closed after the processes have ended.
            num_stages: stages of the pipeline; 1 = no pipeline.
        """
        self._first = first
        self._runner = runner
        self._ranks = ranks
        self._num_stages = num_stages
        self._end = weakref.finalize(self, _end, ranks, links)
        self._is_working = False
        self._num_launched = 0
        # Steps of a pipeline that rank 0 has not run yet. Each has the ids of requests that ended
        # after its launch.
        self._waiting: deque[tuple[SchedulerOutput, list[str]]] = deque()
        # Numbers and results of steps of a pipeline that rank 0 has run, and that were not read.
        self._unread: deque[tuple[int, StepResult]] = deque()

    @property
    def max_in_flight(self) -> int:
        return self._num_stages  # a further step would need tokens that are not sampled yet

    @property
    def has_lanes(self) -> bool:
        return self._num_stages > 1

    def launch(self, output: SchedulerOutput) -> Pending:
        self._is_working = True
        rows = [entry.row for entry in output.scheduled if not entry.token_ids]
        step = Step(for_other_ranks(output), self._runner.last_tokens(rows))
        if self._num_stages == 1:
            with self._ranks.step():
                self._ranks.send(step)
                return self._first.launch(output)
        self._ranks.send(step)
        self._num_launched += 1
        self._waiting.append((output, []))
        run = self._runner.foresee(output)
        return Pending(self._num_launched, run.kind.value, run.num_tokens)

    def read(self, pending: Pending) -> StepResult:
        if self._num_stages == 1:
            # On a GPU the step runs until here. A step that was aborted has wrong results.
            with self._ranks.step(is_new=False):
                result = self._first.read(pending)
            self._ranks.check()
            return result
        if not self._unread:
            self._run_next()
        number, result = self._unread.popleft()
        assert number == pending.number, f"{number} before {pending.number}"
        return result

    def _run_next(self) -> None:
        """Run rank 0's part of the oldest step of a pipeline that waits for it."""
        output, ended = self._waiting[0]
        with self._ranks.step():
            launched = self._first.launch(output)
            self._unread.append((launched.number, self._first.read(launched)))
        self._waiting.popleft()
        for request_id in ended:
            self._first.release_grammar(request_id)

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
        if self._waiting:  # one of these steps can admit the request
            self._waiting[-1][1].append(request_id)
        else:
            self._first.release_grammar(request_id)

    def call(self, call: RankCall) -> list[str]:
        # The other ranks of the last stage answer when they have run the steps before, and these
        # need rank 0.
        while self._waiting:
            self._run_next()
        if isinstance(call, AdvanceEncodings):  # is never refused, and takes long: at the same time
            self._ranks.send(Call(call))
            answers = self._first.call(call)
        else:
            answers = self._first.call(call)  # raises if it refuses; then nothing is sent
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
        self._waiting.clear()
        self._unread.clear()
        self._first.close()  # captured graphs use the groups of the links
        self._end()


def _end(ranks: RankProcesses, links: RankLinks) -> None:
    ranks.close()
    links.close()
