"""`device.isa`: when an engine refuses it, and that each instruction set has its own bundles."""

from __future__ import annotations

from pathlib import Path

import pytest

from ostinato import LLM
from ostinato.ops.native import instruction_sets
from ostinato.ops.native.instruction_sets import ISA_LEVELS, detect_isa, runnable_levels
from ostinato.ops.native.library import loaded_isa
from ostinato.runtime.errors import StartupError
from ostinato.runtime.startup.bundles import prepare_kernels
from ostinato.runtime.startup.loading import open_bundle
from ostinato.runtime.startup.plan.engine_plan import make_plan
from tests.runtime.tiny import tiny_config


def test_an_engine_says_what_its_kernels_run_on(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    LLM(config=tiny_config()).close()
    used = loaded_isa()
    assert used in runnable_levels()
    assert f"CPU kernels: {used}" in [each.getMessage() for each in caplog.records]
    LLM(config=tiny_config(f"device.isa={used}")).close()


def test_another_one_in_the_same_process_is_refused() -> None:
    LLM(config=tiny_config()).close()
    used = loaded_isa()
    others = [each for each in runnable_levels() if each != used]
    for other in others:
        with pytest.raises(StartupError) as refused:
            LLM(config=tiny_config(f"device.isa={other}"))
        assert str(refused.value) == (
            f"device.isa={other}: this process uses {used} already; choose {other} in another "
            "process; device.isa=auto works here"
        )


def test_one_that_the_machine_does_not_run_ends_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    features = ISA_LEVELS["avx2"].features
    monkeypatch.setattr(instruction_sets, "_cpu_features", lambda: features)
    config = tiny_config("device.isa=amx")
    with pytest.raises(StartupError) as refused:
        prepare_kernels(config.engine)
    missing = ", ".join(sorted(ISA_LEVELS["amx"].features - features))
    assert str(refused.value) == (
        f"device.isa=amx: amx does not run here (the processor reports no {missing}); this machine "
        "runs avx2, portable; choose one of these or auto"
    )


def test_a_bundle_of_another_instruction_set_is_not_opened(tmp_path: Path) -> None:
    directories: list[Path] = []
    for isa in ("auto", *runnable_levels()):
        config = tiny_config(
            "graphs.mode=captured",
            "graphs.bundle=true",
            f"device.isa={isa}",
            graphs__bundle_dir=str(tmp_path),
        )
        bundle = open_bundle(make_plan(config.engine, threads=1))
        assert bundle is not None
        bundle.put("program", isa.encode())
        bundle.save()
        directories.append(bundle.directory)
    assert directories[0] == directories[1 + runnable_levels().index(detect_isa())]
    assert len(set(directories)) == len(runnable_levels())
