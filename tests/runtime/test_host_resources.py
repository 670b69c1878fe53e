"""Cores that a process may use, under the quotas of control groups of both versions."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ostinato.runtime.host_resources import available_cores


@pytest.fixture(autouse=True)
def sixteen_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(16)))


def cores(directory: Path, membership: str, files: dict[str, str]) -> int:
    """The cores of a process with these groups and these files below the groups' root."""
    (directory / "cgroup").write_text(membership)
    for name, text in files.items():
        file = directory / "fs" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return available_cores(cgroup_root=directory / "fs", membership=directory / "cgroup")


@pytest.mark.parametrize(
    ("own", "parent", "root", "expected"),
    [
        ("max 100000", "max 100000", None, 16),
        ("300000 100000", "max 100000", None, 3),
        ("max 100000", "500000 100000", None, 5),
        ("700000 100000", "500000 100000", "max 100000", 5),
        ("700000 100000", "900000 100000", "200000 100000", 2),
        ("3200000 100000", "max 100000", None, 16),
        ("50000 100000", "max 100000", None, 1),
        ("250000 100000", None, None, 2),
    ],
)
def test_the_least_quota_of_the_path_counts(
    tmp_path: Path, own: str, parent: str | None, root: str | None, expected: int
) -> None:
    files = {"service/engine/cpu.max": own, "service/cpu.max": parent, "cpu.max": root}
    given = {name: text for name, text in files.items() if text is not None}
    assert cores(tmp_path, "0::/service/engine\n", given) == expected


def test_groups_of_version_one(tmp_path: Path) -> None:
    files = {
        "cpu/service/engine/cpu.cfs_quota_us": "-1\n",
        "cpu/service/engine/cpu.cfs_period_us": "100000\n",
        "cpu/service/cpu.cfs_quota_us": "200000\n",
        "cpu/service/cpu.cfs_period_us": "50000\n",
        "memory/cpu.cfs_quota_us": "50000\n",
        "memory/cpu.cfs_period_us": "50000\n",
    }
    membership = "4:memory:/\n3:cpu,cpuacct:/service/engine\n0::/\n"
    assert cores(tmp_path, membership, files) == 4


def test_a_path_outside_the_container_means_its_own_group(tmp_path: Path) -> None:
    assert cores(tmp_path, "0::/../other\n", {"cpu.max": "400000 100000\n"}) == 4


def test_without_groups_the_affinity_mask_counts(tmp_path: Path) -> None:
    found = available_cores(cgroup_root=tmp_path, membership=tmp_path / "absent")
    assert found == 16
