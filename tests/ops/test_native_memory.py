"""Huge pages are asked for where they help, and only there."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ostinato.ops.native.memory import advise_huge_pages


def flags_of(address: int) -> list[str]:
    """The kernel's flags of the mapping that holds an address."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        head = line.split()[0]
        if "-" in head and not head.endswith(":"):
            begin, end = (int(part, 16) for part in head.split("-"))
            inside = begin <= address < end
        elif inside and head == "VmFlags:":
            return line.split()[1:]
    raise AssertionError(f"no mapping holds {address:#x}")


@pytest.mark.skipif(
    not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="needs transparent huge pages"
)
def test_a_large_tensor_is_marked() -> None:
    tensor = torch.empty(16 << 20, dtype=torch.uint8)
    assert advise_huge_pages(tensor)
    assert "hg" in flags_of(tensor.data_ptr() + (8 << 20))
    tensor.fill_(7)
    assert int(tensor.sum(dtype=torch.int64)) == 7 * (16 << 20)


def test_a_small_tensor_is_left_alone() -> None:
    assert not advise_huge_pages(torch.empty(1000))


def test_other_devices_are_left_alone() -> None:
    assert not advise_huge_pages(torch.empty(16 << 20, device="meta"))
