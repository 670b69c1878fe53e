"""The instruction set of a process's kernels: the chosen one, else the best that can be built."""

from __future__ import annotations

from pathlib import Path

import pytest

from ostinato.conf.schema import InstructionSetName
from ostinato.ops.native import instruction_sets, library
from ostinato.ops.native.instruction_sets import ISA_LEVELS, instruction_set, runnable_levels
from tests.ops.test_native_build import LOAD, SMALL, start

USE = f"""
import logging
logging.basicConfig(format="%(message)s")
{LOAD}
print(library.loaded_isa())
library.load("small")
"""


@pytest.fixture
def nothing_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the process look as if it had loaded no kernels."""
    monkeypatch.setattr(library, "_loaded", {})
    monkeypatch.setattr(library, "_chosen", {})


def test_the_setting_names_every_level() -> None:
    assert [each.value for each in InstructionSetName] == ["auto", *ISA_LEVELS]


@pytest.mark.usefixtures("nothing_loaded")
def test_a_processor_without_tiles_refuses_them(monkeypatch: pytest.MonkeyPatch) -> None:
    features = ISA_LEVELS["avx2"].features
    monkeypatch.setattr(instruction_sets, "_cpu_features", lambda: features)
    for level in ("amx", "avx512"):
        missing = ", ".join(sorted(ISA_LEVELS[level].features - features))
        with pytest.raises(
            ValueError,
            match=rf"^{level} does not run here \(the processor reports no {missing}\); "
            r"this machine runs avx2, portable$",
        ):
            library.use_isa(level)
    library.use_isa("avx2")
    with pytest.raises(ValueError, match=r"^this process uses avx2 already; "):
        library.use_isa("portable")


@pytest.mark.usefixtures("nothing_loaded")
def test_features_that_a_hypervisor_masks_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    features = ISA_LEVELS["amx"].features - {"avx512vbmi", "gfni"}
    monkeypatch.setattr(instruction_sets, "_cpu_features", lambda: features)
    with pytest.raises(
        ValueError, match=r"^amx does not run here \(the processor reports no avx512vbmi, gfni\); "
    ):
        library.use_isa("amx")


@pytest.mark.usefixtures("nothing_loaded")
def test_tiles_that_the_kernel_refuses_are_refused_with_its_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    features = ISA_LEVELS["amx"].features
    monkeypatch.setattr(instruction_sets, "_cpu_features", lambda: features)
    monkeypatch.setattr(
        instruction_sets, "_request_permission", lambda process: "arch_prctl failed: EINVAL"
    )
    with pytest.raises(ValueError, match=r"^amx does not run here \(arch_prctl failed: EINVAL\)"):
        library.use_isa("amx")


@pytest.mark.skipif(runnable_levels() == ["portable"], reason="there is no level below")
def test_a_level_that_does_not_compile_gives_way_to_the_next_and_one_line_says_so(
    tmp_path: Path,
) -> None:
    best, following = runnable_levels()[:2]
    compiler = tmp_path / "old-compiler"
    flag = next(
        each
        for each in reversed(instruction_set(best).flags)
        if each not in instruction_set(following).flags
    )
    compiler.write_text(
        f'#!/bin/sh\nfor each; do [ "$each" = {flag} ] && echo "error: {flag}?" >&2 && exit 1; '
        'done\nexec c++ "$@"\n'
    )
    compiler.chmod(0o755)
    process = start(USE, cache=tmp_path / "cache", compiler=str(compiler))
    out, err = process.communicate(timeout=250)
    assert process.returncode == 0, err
    path, isa = out.split()
    assert isa == following
    assert f"small-{following}-" in path
    [line] = [line for line in err.splitlines() if "CPU kernels run on" in line]
    assert line.startswith(
        f"the CPU kernels run on {following}, because those for {best} failed: the C++ compiler "
    )
    # A level that use_isa has chosen is not replaced: the build error ends the process.
    chosen = f"from ostinato.ops.native.library import use_isa\nuse_isa({best!r})\n"
    process = start(SMALL + chosen + LOAD, cache=tmp_path / "other", compiler=str(compiler))
    _, err = process.communicate(timeout=250)
    assert process.returncode != 0
    assert f"error: {flag}?" in err
