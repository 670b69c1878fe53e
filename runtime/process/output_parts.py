"""Splits outputs with many log-probabilities, so that no message takes long to write or to read.

The log-probabilities of a long prompt, or of all beams of a search, can be a million entries. One
message with all entries would delay the engine's next step, and then all requests of the API
process.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

import msgspec

from ostinato.runtime.types.outputs import BeamOutput, SequenceOutput, TokenLogprobs

__all__ = ("OutputParts",)

_AT_ONCE = 2000  # entries of a part; the API process reads them in about 10 ms


class OutputParts:
    """Passes outputs on, a few thousand log-probabilities of prompts and beams at a time.

    A large output becomes several parts (`is_part`), then the output with the rest. A part has up
    to 2000 log-probabilities of a prompt, or one beam. The outputs of one request keep their order.
    """

    def __init__(self) -> None:
        self._waiting: dict[str, deque[SequenceOutput]] = {}  # by request id; none is empty

    def __len__(self) -> int:
        """Requests whose outputs wait for a further call of `pass_on`."""
        return len(self._waiting)

    def pass_on(self, outputs: Sequence[SequenceOutput]) -> list[SequenceOutput]:
        """Take new outputs; returns the outputs and parts to send now, earlier ones included."""
        if not self._waiting and not any(map(_is_large, outputs)):
            return list(outputs)
        sent: list[SequenceOutput] = []
        for output in outputs:
            is_large = _is_large(output)
            if output.request_id not in self._waiting and not is_large:
                sent.append(output)
            else:
                waiting = self._waiting.setdefault(output.request_id, deque())
                waiting.extend(_parts(output) if is_large else (output,))
        room = _AT_ONCE
        for request_id, waiting in list(self._waiting.items()):
            while waiting and room > 0:
                room -= _num_entries(waiting[0])
                sent.append(waiting.popleft())
            if not waiting:
                del self._waiting[request_id]
        return sent


def _is_large(output: SequenceOutput) -> bool:
    has_entries = output.prompt_logprobs is not None or output.beams is not None
    return has_entries and _num_entries(output) > _AT_ONCE


def _num_entries(output: SequenceOutput) -> int:
    count = len(output.prompt_logprobs or ())
    return count + sum(len(beam.logprobs or ()) for beam in output.beams or ())


def _parts(output: SequenceOutput) -> Iterator[SequenceOutput]:
    """The parts of a large output, then the output without the entries of the parts."""
    scores: list[TokenLogprobs] = output.prompt_logprobs or []
    beams: list[BeamOutput] = output.beams or []
    for begin in range(0, len(scores), _AT_ONCE):
        some = scores[begin : begin + _AT_ONCE]
        yield SequenceOutput(
            output.request_id, [], prompt_logprobs=some, is_part=True, num_before=begin
        )
    for index, beam in enumerate(beams):
        yield SequenceOutput(output.request_id, [], beams=[beam], is_part=True, num_before=index)
    yield msgspec.structs.replace(
        output,
        prompt_logprobs=None if output.prompt_logprobs is None else [],
        beams=None if output.beams is None else [],
    )
