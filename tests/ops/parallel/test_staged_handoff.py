"""Hidden states between devices, on a device that works as late as the rules of streams allow."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from ostinato.ops.parallel.handoff import HiddenReceiver, HiddenSender, HiddenShape
from ostinato.ops.parallel.handoff_ends import create_handoff
from ostinato.ops.parallel.staged_handoff import StagedReceiver, StagedSender
from tests.runtime import late_streams
from tests.runtime.late_device import DeviceRaceError, LateDevice, Timing

SHAPE = HiddenShape(8, 5, torch.float32, 2)
CUDA = torch.device("cuda")
SIZES = [8, 3, 1, 8, 5, 2]


@torch.inference_mode()
def run_steps() -> list[Tensor]:
    """What a second stage gets from a first one: two states, tripled, in one captured graph."""
    ends = create_handoff(SHAPE.slot_bytes, 2)
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
        receiver.arrive(size)
        second.replay()
        found.append(result[:, :size].clone())
    host = [each.cpu() for each in found]
    sender.close()
    receiver.close()
    return host


@pytest.mark.parametrize("timing", list(Timing))
def test_captured_stages_get_the_values_of_their_own_step(
    timing: Timing, monkeypatch: pytest.MonkeyPatch
) -> None:
    with LateDevice(timing).installed(monkeypatch):
        found = run_steps()
    for index, (size, states) in enumerate(zip(SIZES, found, strict=True), 1):
        assert torch.equal(states[0], torch.full((size, 5), 3.0 * index))
        assert torch.equal(states[1], torch.full((size, 5), 30.0 * index))


class Hasty(late_streams.Event):
    """An event that the host does not wait for."""

    def synchronize(self) -> None:
        pass


@pytest.mark.parametrize("end", ["StagedSender", "StagedReceiver"])
def test_an_end_that_does_not_wait_for_its_copy_is_found(
    end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = LateDevice(Timing.late)
    planted: dict[str, Any] = {"StagedSender": StagedSender, "StagedReceiver": StagedReceiver}
    chosen = planted[end]
    make = chosen.__init__

    def without_wait(self: Any, *arguments: Any) -> None:
        make(self, *arguments)
        self._copied = Hasty(device)

    monkeypatch.setattr(chosen, "__init__", without_wait)
    with device.installed(monkeypatch):
        if chosen is StagedSender:
            assert any(states.isnan().any() for states in run_steps())
        else:
            monkeypatch.setattr(StagedSender, "leave", leave_without_device)
            with pytest.raises(DeviceRaceError, match="pinned memory"):
                run_steps()


def leave_without_device(self: Any, num_tokens: int) -> None:
    """Send other values in each step without a wait, as a stage in another process does."""
    self.step = getattr(self, "step", 0) + 1
    self._link.send([torch.full((num_tokens, 5), float(self.step))] * 2)
