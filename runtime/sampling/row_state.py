"""The protocol of components that keep state for each row, such as the sampler."""

from __future__ import annotations

from typing import Protocol

from ostinato.runtime.types.request import Request

__all__ = ("RowState",)


class RowState(Protocol):
    """State of running sequences by row. A row is an index into persistent buffers."""

    def admit(self, row: int, request: Request, output_token_ids: list[int]) -> None:
        """Note that a sequence takes a row. The state of the row's previous sequence is forgotten.

        Args:
            row: in [0, max_num_seqs).
            request: the sequence's request.
            output_token_ids: the sequence's output so far, for example before a preemption.
        """
        ...
