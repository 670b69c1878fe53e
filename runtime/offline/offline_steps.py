"""`OfflineSteps`: runs the engine of an `LLM` for its calls, which can run at the same time.

A stream stays open between two of its outputs. Steps that another call runs meanwhile advance the
stream's requests too, so each output is kept for the call that it belongs to.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from ostinato.runtime.engine.interrupts import interrupts_later
from ostinato.runtime.types.outputs import SequenceOutput
from ostinato.runtime.types.request import Request

if TYPE_CHECKING:
    from ostinato.runtime.engine.engine import Engine

__all__ = ("OfflineSteps",)


class OfflineSteps:
    """The steps of an engine, whose outputs go to the calls that added the requests.

    Args:
        engine: runs the steps. Nothing else calls its `step`.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        # By request id: the outputs that the request's call has not taken yet.
        self._outputs: dict[str, deque[SequenceOutput]] = {}

    def run(self) -> None:
        """Run a step. A Ctrl-C waits for its end, because no step can follow one that is cut.

        Raises:
            RankFailedError: a rank of the engine has ended or hangs.
        """
        with interrupts_later():
            for output in self._engine.step():
                outputs = self._outputs.get(output.request_id)
                if outputs is not None:
                    outputs.append(output)

    @contextmanager
    def running(self, requests: Sequence[Request]) -> Generator[Callable[[], list[SequenceOutput]]]:
        """A context in which the engine has the requests of a call.

        The requests that have not ended with the context are aborted.

        Args:
            requests: requests with ids that the engine has not had.

        Yields:
            A function that returns the next outputs of the requests. It runs a step if other calls
            have run none since. The list can be empty.
        """
        outputs: deque[SequenceOutput] = deque()

        def take() -> list[SequenceOutput]:
            if not outputs:
                self.run()
            taken = list(outputs)
            outputs.clear()
            return taken

        self._outputs |= {request.request_id: outputs for request in requests}
        try:
            for request in requests:
                self._engine.add_request(request)
            yield take
        finally:
            for request in requests:
                del self._outputs[request.request_id]
                self._engine.abort(request.request_id)  # does nothing if the request has ended
