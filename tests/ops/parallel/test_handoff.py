"""Handoffs of hidden states: order, slots that are used again, and ends that are closed."""

from __future__ import annotations

import os
import threading

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ostinato.ops.parallel.handoff import (
    HandoffEndedError,
    HiddenReceiver,
    HiddenSender,
    HiddenShape,
)
from ostinato.ops.parallel.handoff_ends import create_handoff

SHAPE = HiddenShape(40, 70, torch.bfloat16, 3)


def make(num_slots: int, shape: HiddenShape = SHAPE) -> tuple[HiddenSender, HiddenReceiver]:
    sender, receiver = create_handoff(shape.slot_bytes, num_slots)
    return HiddenSender(sender, shape), HiddenReceiver(receiver, shape)


@given(
    num_slots=st.integers(1, 4),
    sizes=st.lists(st.integers(0, SHAPE.num_tokens), max_size=12),
    num_states=st.integers(1, SHAPE.num_states),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_steps_arrive_in_order_though_the_sender_runs_ahead(
    num_slots: int, sizes: list[int], num_states: int, dtype: torch.dtype
) -> None:
    sender, receiver = make(num_slots, SHAPE._replace(dtype=dtype))
    steps = [torch.randn(num_states, size, SHAPE.size).to(dtype) for size in sizes]
    thread = threading.Thread(target=lambda: [sender.send(list(step)) for step in steps])
    thread.start()
    for step in steps:
        received = receiver.receive(step.shape[1], num_states)
        assert torch.equal(received, step)
        receiver.release()
    thread.join()
    sender.close()
    receiver.close()


def test_a_slot_is_not_written_before_it_is_released() -> None:
    sender, receiver = make(2)
    values = [torch.full((3, SHAPE.size), float(index), dtype=SHAPE.dtype) for index in range(3)]
    has_sent = threading.Event()

    def send() -> None:
        for value in values:
            sender.send([value])
        has_sent.set()

    thread = threading.Thread(target=send)
    thread.start()
    first = receiver.receive(3, 1)
    assert not has_sent.wait(0.05), "the sender must wait while both slots are taken"
    assert torch.equal(first[0], values[0])
    receiver.release()
    assert has_sent.wait(60)
    assert torch.equal(receiver.receive(3, 1)[0], values[1])
    thread.join()
    sender.close()
    receiver.close()


@pytest.mark.parametrize(("num_tokens", "num_states"), [(4, 1), (3, 2)])
def test_steps_of_different_sizes_are_an_error(num_tokens: int, num_states: int) -> None:
    sender, receiver = make(1)
    sender.send([torch.zeros(3, SHAPE.size, dtype=SHAPE.dtype)])
    with pytest.raises(RuntimeError, match=r"^the stage before sent 420 bytes of hidden"):
        receiver.receive(num_tokens, num_states)
    sender.close()
    receiver.close()


@pytest.mark.parametrize("how", ["close", "abort", "own abort"])
def test_a_wait_ends_with_the_other_end(how: str) -> None:
    sender, receiver = make(1)
    end = {"close": sender.close, "abort": sender.abort, "own abort": receiver.abort}[how]
    timer = threading.Timer(0.05, end)
    timer.start()
    with pytest.raises(HandoffEndedError, match="has ended"):
        receiver.receive(1, 1)
    timer.join()
    if how != "close":
        sender.close()
    receiver.close()


def test_a_sender_whose_receiver_has_ended_gets_an_error() -> None:
    sender, receiver = make(1)
    receiver.close()
    with pytest.raises(HandoffEndedError):
        sender.send([torch.zeros(1, SHAPE.size, dtype=SHAPE.dtype)])
    sender.close()


def test_ends_of_another_shape_are_refused_and_nothing_is_left_open() -> None:
    before = len(os.listdir("/proc/self/fd"))
    ends = create_handoff(SHAPE.slot_bytes, 3)
    with pytest.raises(ValueError, match="was not made for"):
        HiddenReceiver(ends[1], HiddenShape(1 << 20, 3, torch.float32))
    HiddenSender(ends[0], SHAPE).close()
    assert len(os.listdir("/proc/self/fd")) == before
