"""Hidden states between devices that work as late, or as early, as the rules of streams allow."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor

from ostinato.ops.parallel import staged_handoff
from ostinato.ops.parallel.exchange import Exchange
from ostinato.ops.parallel.handoff import (
    HandoffEndedError,
    HiddenReceiver,
    HiddenSender,
    HiddenShape,
)
from ostinato.ops.parallel.handoff_ends import HandoffEnd, create_handoff
from ostinato.ops.parallel.staged_handoff import NUM_SENDING, StagedReceiver, StagedSender
from ostinato.runtime.ranks.bridge_messages import Hidden, Piece
from ostinato.runtime.ranks.link_ends import RankLayout, create_links
from ostinato.runtime.ranks.relay import Events, Relay
from tests.runtime.late_device import DeviceRaceError, LateDevice, Timing

SHAPE = HiddenShape(8, 5, torch.float32, 2)
CUDA = torch.device("cuda")
SIZES = [8, 3, 1, 8, 5, 2]


class Bridges:
    """The relays of two machines with one stage each. A function call is their connection."""

    def __init__(self) -> None:
        layout = RankLayout(tensor=1, pipeline=2, machines=2)
        made = [create_links(layout, one, SHAPE.slot_bytes, Exchange.nccl) for one in range(2)]
        self.ends = HandoffEnd(*made[1].ranks[0]), HandoffEnd(*made[0].ranks[0])
        self.events = Events()
        self.num_crossed = 0
        self._last = Relay(made[0].relay, self.events, self._cross)
        self._first = Relay(made[1].relay, self.events, self._cross)

    def _cross(self, message: Piece | Hidden, values: bytes) -> None:
        assert isinstance(message, Hidden)
        assert message.machines == [0]
        self.num_crossed += 1
        self._last.put_hidden(message, values)

    def pass_on(self) -> None:
        """Carry the hidden states that were sent to the other machine."""
        before = self.num_crossed
        while self.num_crossed == before:
            self.events.wait(60)


@torch.inference_mode()
def run_steps(bridges: Bridges | None = None) -> list[Tensor]:
    """Three times the two states that a second stage gets from a first one.

    Each stage is a captured graph.
    """
    ends = create_handoff(SHAPE.slot_bytes, 2) if bridges is None else bridges.ends
    sender = StagedSender(HiddenSender(ends[0], SHAPE), SHAPE, CUDA)
    receiver = StagedReceiver(HiddenReceiver(ends[1], SHAPE), SHAPE, CUDA)
    sender.num_states = receiver.num_states = 2
    number = torch.zeros(1, device=CUDA)
    states = receiver.receive(SHAPE.num_tokens, 2)
    result = torch.zeros(states.shape, device=CUDA)
    first, second = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(first):
        number.add_(1)
        sender.send([number.expand(8, 5) * 1.0, number.expand(8, 5) * 10.0])
        receiver.release()
    with torch.cuda.graph(second):
        result.copy_(states * 3)
    found: list[Tensor] = []
    for size in SIZES:
        first.replay()
        sender.leave(size)
        if bridges is not None:
            bridges.pass_on()
        receiver.arrive(size)
        second.replay()
        found.append(result[:, :size].clone())
    host = [each.cpu() for each in found]
    sender.close()
    receiver.close()
    return host


@pytest.mark.parametrize("crosses", [False, True], ids=["one machine", "two machines"])
@pytest.mark.parametrize("timing", list(Timing))
def test_captured_stages_get_the_values_of_their_own_step(
    timing: Timing, crosses: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    bridges = Bridges() if crosses else None
    with LateDevice(timing).installed(monkeypatch):
        found = run_steps(bridges)
    for index, (size, states) in enumerate(zip(SIZES, found, strict=True), 1):
        assert torch.equal(states[0], torch.full((size, 5), 3.0 * index))
        assert torch.equal(states[1], torch.full((size, 5), 30.0 * index))


class Held:
    """Holds the sending thread until `release` is set. Then the thread waits for the device."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.release = threading.Event()
        wait = staged_handoff._HostBuffer.wait

        def held(buffer: Any) -> None:
            if is_sending_thread():
                assert self.release.wait(60)
            wait(buffer)

        monkeypatch.setattr(staged_handoff._HostBuffer, "wait", held)


def is_sending_thread() -> bool:
    return threading.current_thread() is not threading.main_thread()


@torch.inference_mode()
def test_a_stage_launches_its_next_step_before_the_last_one_is_computed_and_sent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    held, device = Held(monkeypatch), LateDevice(Timing.late)
    ends = create_handoff(SHAPE.slot_bytes, 2)
    with device.installed(monkeypatch):
        sender = StagedSender(HiddenSender(ends[0], SHAPE), SHAPE, CUDA)
        number = torch.zeros(1, device=CUDA)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            number.add_(1)
            sender.send([number.expand(8, 5) * 1.0])
        for size in (8, 3):
            graph.replay()
            sender.leave(size)
        assert device.current.num_run < device.current.num_added - 4, "the steps ran too early"
        held.release.set()
        receiver = HiddenReceiver(ends[1], SHAPE)
        for index, size in enumerate((8, 3), 1):
            assert torch.equal(receiver.receive(size, 1)[0], torch.full((size, 5), 1.0 * index))
            receiver.release()
        sender.close()
        receiver.close()


def test_the_end_of_the_next_stage_ends_a_stage_that_goes_on_sending() -> None:
    ends = create_handoff(SHAPE.slot_bytes, 2)
    sender = StagedSender(HiddenSender(ends[0], SHAPE), SHAPE, torch.device("cpu"))
    HiddenReceiver(ends[1], SHAPE).close()

    def leave_until_a_buffer_is_used_again() -> None:
        for _ in range(NUM_SENDING + 1):  # the error of the first step is known then
            sender.leave(2)

    with pytest.raises(HandoffEndedError, match="the rank of the stage beside this one has ended"):
        leave_until_a_buffer_is_used_again()
    sender.close()


@pytest.mark.parametrize("end", ["sender", "receiver"])
def test_an_end_that_does_not_wait_for_its_copy_is_found(
    end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = LateDevice(Timing.late)
    wait = staged_handoff._HostBuffer.wait

    def hasty(buffer: Any) -> None:
        if is_sending_thread() != (end == "sender"):
            wait(buffer)

    monkeypatch.setattr(staged_handoff._HostBuffer, "wait", hasty)
    with device.installed(monkeypatch):
        if end == "sender":
            assert any(states.isnan().any() for states in run_steps())
        else:
            monkeypatch.setattr(StagedSender, "leave", leave_without_device)
            with pytest.raises(DeviceRaceError, match="pinned memory"):
                run_steps()


def leave_without_device(self: Any, num_tokens: int) -> None:
    """Send other values in each step without a wait, as a stage in another process does."""
    self.step = getattr(self, "step", 0) + 1
    self._link.send([torch.full((num_tokens, 5), float(self.step))] * 2)
