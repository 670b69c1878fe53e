"""Comparison of two versions: the lower confidence bound of a ratio, and a real comparison."""

from __future__ import annotations

import random
import subprocess
from pathlib import Path
from statistics import median

import pytest

from ostinato.benchmarks.gate import __main__ as gate
from ostinato.benchmarks.gate.versions import Comparison, extract, lower_bound
from ostinato.runtime.errors import EngineError

ROOT = Path(__file__).resolve().parents[3]


def test_the_bound_is_below_the_median_99_times_of_100():
    numbers = random.Random(1)
    wrong = 0
    for _ in range(2000):
        ratios = [numbers.lognormvariate(0.0, 0.2) for _ in range(25)]
        bound = lower_bound(ratios)
        assert bound <= median(ratios)
        wrong += bound > 1.0
    assert wrong < 40  # at most 20 are expected


def test_more_pairs_say_more():
    numbers = random.Random(2)
    ratios = [numbers.lognormvariate(0.07, 0.1) for _ in range(120)]
    assert lower_bound(ratios[:15]) < lower_bound(ratios)
    assert lower_bound(ratios) > 1.03  # a loss of seven percent is noticed
    assert lower_bound([1.5] * 6) == float("-inf")  # too few pairs for a bound
    assert lower_bound([1.5] * 7) == 1.5


def test_a_version_is_slower_when_that_is_sure():
    values = {"name": "work", "ours_ms": 1.0, "num_pairs": 30}
    assert not Comparison(ratio=1.2, at_least=0.99, **values).is_slower
    assert Comparison(ratio=1.07, at_least=1.05, **values).is_slower


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A repository with one commit."""
    root = tmp_path / "root"
    root.mkdir()
    (root / "file").write_text("old")
    name = ("-c", "user.name=test", "-c", "user.email=test@example.org")
    for command in (["init", "-q"], ["add", "."], [*name, "commit", "-q", "-m", "one"]):
        subprocess.run(["git", "-C", str(root), *command], check=True)
    (root / "file").write_text("new")
    return root


def test_a_commit_is_taken_without_what_is_not_committed(checkout: Path, tmp_path: Path):
    name = extract("HEAD", checkout, tmp_path / "tree")
    assert len(name) >= 7
    assert (tmp_path / "tree" / "file").read_text() == "old"
    assert (checkout / "file").read_text() == "new"


@pytest.mark.parametrize("revision", ["no-such-commit", "HEAD~3"])
def test_an_unknown_commit_is_named(revision: str, checkout: Path, tmp_path: Path):
    with pytest.raises(EngineError, match=f"--against {revision}: .*; name a commit of the"):
        extract(revision, checkout, tmp_path / "tree")


def test_no_checkout(tmp_path: Path):
    with pytest.raises(EngineError, match="not a git repository"):
        extract("HEAD", tmp_path, tmp_path / "tree")


@pytest.mark.slow
def test_two_real_versions_are_compared(capsys: pytest.CaptureFixture[str]):
    """Names a commit that does not exist, then compares the working tree with its own commit."""
    if not (ROOT / ".git").exists():
        pytest.skip("this tree is no git checkout")
    assert gate.main(["--against", "no-such-commit"]) == 2
    assert "name a commit" in capsys.readouterr().err
    # Other programs may disturb the timings, so this checks only that the command answers.
    assert gate.main(["--against", "HEAD", "--only", "host work, 1"]) in (0, 1)
    assert "ours / theirs" in capsys.readouterr().out
