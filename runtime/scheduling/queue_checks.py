"""Checks of a scheduler's queues against each other, for idle moments and tests."""

from __future__ import annotations

from collections.abc import Collection

from ostinato.runtime.scheduling.sequence import Sequence

__all__ = ("check", "check_queues")


def check_queues(
    running: list[Sequence],
    waiting: list[Sequence],
    draining: Collection[Sequence],
    free_rows: list[int],
    *,
    num_rows: int,
) -> None:
    """Raises AssertionError when rows are lost, a queue is out of order or a waiting sequence holds
    blocks.
    """
    rows = sorted([*free_rows, *(sequence.row for sequence in (*running, *draining))])
    check(rows == list(range(num_rows)), f"rows are lost or doubled: {rows}")
    for queue in (running, waiting):
        orders = [sequence.order for sequence in queue]
        check(orders == sorted(orders), f"a queue is out of order: {queue}")
    for sequence in waiting:
        check(not sequence.block_table.block_ids, f"{sequence!r} waits and holds blocks")


def check(ok: bool, message: str) -> None:
    """Raises AssertionError unless `ok`."""
    if not ok:
        raise AssertionError(f"scheduler: {message}")
