"""The links of a rank: to its tensor-parallel group, to the stage before and to the stage after.

Rank 0 makes the memory and the sockets of all links (`create_links`). It passes each rank the
descriptors of that rank's links.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence

from ostinato.models.base import LanguageModel
from ostinato.models.decoder import Decoder
from ostinato.models.linear_layers import join_group
from ostinato.models.sharding import Shard, shard_of_rank
from ostinato.ops.parallel.group import ParallelGroup, create_segment
from ostinato.ops.parallel.handoff import (
    HandoffEnd,
    HiddenReceiver,
    HiddenSender,
    HiddenShape,
    create_handoff,
)
from ostinato.runtime.errors import StartupError
from ostinato.runtime.host_resources import available_cores

__all__ = ("RankLinks", "close_all", "create_links")

# The processes are watched, so a wait hardly needs a limit. This limit is for a stop that the watch
# does not notice. It is longer than any step.
_LONGEST_WAIT_S = 1800.0


def create_links(tensor: int, pipeline: int, shape: HiddenShape) -> list[list[int]]:
    """Make the links of an engine's ranks.

    Args:
        tensor: ranks of each stage.
        pipeline: number of stages. At most this many steps are in flight.
        shape: the shape of the hidden states that stages hand on.

    Returns:
        The descriptors of each rank, in rank order, for `RankLinks`.

    Raises:
        OSError: the system has no memory or no descriptors for the links.
    """
    held: dict[tuple[int, int], list[int]] = {}  # by stage, and rank within the stage
    try:
        for stage in range(pipeline):
            for rank in range(tensor):
                held.setdefault((stage, rank), [])
            if tensor > 1:
                segment = create_segment(tensor)
                held[stage, 0].append(segment)
                for rank in range(1, tensor):
                    held[stage, rank].append(os.dup(segment))
        for stage in range(pipeline - 1):  # a stage's receiver is made before its sender
            for rank in range(tensor):
                sender, receiver = create_handoff(shape, pipeline)
                held[stage, rank] += sender
                held[stage + 1, rank] += receiver
    except OSError:
        close_all(list(held.values()))
        raise
    shards = [shard_of_rank(rank, tensor, pipeline) for rank in range(tensor * pipeline)]
    return [held[shard.stage.number, shard.rank] for shard in shards]


def close_all(descriptors: Sequence[Sequence[int]]) -> None:
    """Close descriptors that were passed to other processes, or are not needed."""
    for each in descriptors:
        for descriptor in each:
            with contextlib.suppress(OSError):
                os.close(descriptor)


class RankLinks:
    """The links of one rank. One thread uses them, except `abort`."""

    def __init__(
        self, shard: Shard, shape: HiddenShape, threads: int, descriptors: Sequence[int]
    ) -> None:
        """Open the links, and close the descriptors.

        Args:
            shard: the shard of the rank.
            shape: the shape of the hidden states that stages hand on.
            threads: the model's threads in each rank.
            descriptors: from `create_links`.

        Raises:
            StartupError: a link cannot be opened.
        """
        self._group: ParallelGroup | None = None
        self._previous: HiddenReceiver | None = None
        self._next: HiddenSender | None = None
        left = list(descriptors)
        try:
            if shard.size > 1:
                # A waiting rank must not take the processor of a rank that it waits for.
                spin_us = 50 if shard.num_ranks * threads <= available_cores() else 0
                self._group = ParallelGroup(
                    left[0], shard.rank, shard.size, spin_us=spin_us, timeout_s=_LONGEST_WAIT_S
                )
                os.close(left.pop(0))
            if not shard.stage.is_first:
                self._previous = HiddenReceiver(HandoffEnd(left.pop(0), left.pop(0)), shape)
            if not shard.stage.is_last:
                self._next = HiddenSender(HandoffEnd(left.pop(0), left.pop(0)), shape)
        except (RuntimeError, ValueError, OSError) as error:
            close_all([left])
            self.close()
            raise StartupError(f"a rank cannot join the others: {error}") from error

    def join(self, model: LanguageModel) -> None:
        """Let the model of this rank exchange values with the other ranks.

        Raises:
            StartupError: a model of this class is not divided into stages.
        """
        if self._group is not None:
            join_group(model, self._group)
        if self._previous is None and self._next is None:
            return
        if not isinstance(model, Decoder):
            raise StartupError(
                f"{type(model).__name__} is not divided into stages; set parallel.pipeline=1"
            )
        model.join_stages(self._previous, self._next)

    def abort(self) -> None:
        """End all waits of this rank with an error. Any thread can call it."""
        if self._group is not None:
            self._group.abort()
        for end in (self._previous, self._next):
            if end is not None:
                end.abort()

    def close(self) -> None:
        """Close the links. No step may follow."""
        if self._group is not None:
            self._group.close()
        for end in (self._previous, self._next):
            if end is not None:
                end.close()
