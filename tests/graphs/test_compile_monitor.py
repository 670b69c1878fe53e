"""The monitor of late compiles counts real compilations, by the shape of their step.

Events come from real compilations and started processes. No test makes one up.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from ostinato.graphs.compile_monitor import CompileMonitor, LateCompile
from ostinato.ops.native import build as native

pytestmark = pytest.mark.compiles_late

SHAPE = "tokens=17,seqs=3"


@pytest.fixture
def monitor() -> Iterator[CompileMonitor]:
    """A monitor of an engine that is ready."""
    monitor = CompileMonitor()
    monitor.mark_ready()
    with torch._dynamo.config.patch(enable_aot_compile=True):  # not the default of torch 2.11
        yield monitor
    monitor.close()


def in_a_step(monitor: CompileMonitor, work: object) -> list[LateCompile]:
    """The late compilations of `work` in a step of SHAPE, sorted."""
    monitor.begin_step(17, 3)
    work()  # type: ignore[operator]
    monitor.end_step()
    return sorted(monitor.late_compiles, key=lambda late: late.what)


def compile_file(compiler: str, folder: Path) -> list[str]:
    source = folder / "one.cpp"
    source.write_text("int one() { return 1; }\n")
    return [compiler, "-c", str(source), "-o", str(folder / "one.o")]


def test_dynamo(monitor: CompileMonitor) -> None:
    late = in_a_step(
        monitor,
        lambda: torch.compile(lambda x: x * 2 + 1, fullgraph=True, backend="eager")(torch.ones(5)),
    )
    assert late == [LateCompile("dynamo", SHAPE, 1)]


def test_a_recompile_for_another_shape(monitor: CompileMonitor) -> None:
    compiled = torch.compile(lambda x: x.sin() * 2, dynamic=False, backend="eager")
    compiled(torch.ones(5))
    before = monitor.late_compiles
    monitor.begin_step(2, 2)
    compiled(torch.ones(5))
    monitor.end_step()
    assert monitor.late_compiles == before
    monitor.begin_step(6, 1)
    compiled(torch.ones(6))
    monitor.end_step()
    assert monitor.late_compiles == [*before, LateCompile("dynamo", "tokens=6,seqs=1", 1)]


def test_dynamo_through_aot_compile(monitor: CompileMonitor) -> None:
    """Dynamo's own callbacks are not called for `aot_compile`."""
    compiled = torch.compile(lambda x: x * 3 + 1, fullgraph=True, backend="eager")
    late = in_a_step(monitor, lambda: compiled.aot_compile(((torch.ones(5),), {})))
    assert late == [LateCompile("dynamo", SHAPE, 1)]


def test_a_trace_that_never_becomes_a_program(monitor: CompileMonitor) -> None:
    """A trace counts, too, if the backend takes the graph and raises."""

    class Enough(Exception):
        pass

    def backend(*arguments: object) -> None:
        raise Enough

    compiled = torch.compile(lambda x: x - 4, fullgraph=True, backend=backend)

    def trace() -> None:
        with pytest.raises(Enough):
            compiled.aot_compile(((torch.ones(5),), {}))

    assert in_a_step(monitor, trace) == [LateCompile("dynamo", SHAPE, 1)]


def test_inductor_and_its_compiler(monitor: CompileMonitor) -> None:
    """With an empty Inductor cache the C++ is compiled anew, on another thread."""
    from torch._inductor.utils import fresh_cache

    compiled = torch.compile(
        lambda x: (x * 5 + 1).relu(), fullgraph=True, options={"cpp.vec_isa_ok": True}
    )
    with fresh_cache():
        late = in_a_step(monitor, lambda: compiled.aot_compile(((torch.ones(5),), {})))
    assert late == [
        LateCompile("c++", SHAPE, 1),
        LateCompile("dynamo", SHAPE, 1),
        LateCompile("inductor", SHAPE, 1),
    ]


def test_inductors_cpp_builder(monitor: CompileMonitor, tmp_path: Path) -> None:
    from torch._inductor.cpp_builder import CppBuilder, CppOptions

    source = tmp_path / "one.cpp"
    source.write_text("int one() { return 1; }\n")
    builder = CppBuilder("one", str(source), CppOptions(), str(tmp_path))
    assert in_a_step(monitor, builder.build) == [LateCompile("c++", SHAPE, 1)]
    assert Path(builder.get_target_file_path()).stat().st_size > 0


def test_our_own_kernels(
    monitor: CompileMonitor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A library of one source, compiled on the builder's threads into an empty cache."""
    sources = tmp_path / "sources"
    sources.mkdir()
    (sources / "one.cpp").write_text("int one() { return 1; }\n")
    monkeypatch.setattr(native, "_SOURCE_DIR", sources)
    monkeypatch.setitem(native.LIBRARIES, "small", (("one",),))
    monkeypatch.setenv("OSTINATO_CACHE_DIR", str(tmp_path / "cache"))
    late = in_a_step(monitor, lambda: native.build("small", "portable"))
    assert late == [LateCompile("c++", SHAPE, 1)]
    again = in_a_step(monitor, lambda: native.build("small", "portable"))
    assert again == late, "a library in the cache is compiled again"


@pytest.mark.parametrize("how", ["shell", "system", "spawn", "wrapped"])
def test_a_compiler_however_it_is_started(
    monitor: CompileMonitor, tmp_path: Path, how: str
) -> None:
    words = compile_file(native.find_compiler(), tmp_path)

    def work() -> None:
        if how == "shell":
            subprocess.run(" ".join(words), shell=True, check=True)
        elif how == "system":
            assert os.system(" ".join(words)) == 0
        elif how == "spawn":
            process = os.posix_spawnp(words[0], words, os.environ)
            assert os.waitpid(process, 0)[1] == 0
        else:
            subprocess.run(["env", "LC_ALL=C", *words], check=True)

    assert in_a_step(monitor, work) == [LateCompile("c++", SHAPE, 1)]
    assert (tmp_path / "one.o").stat().st_size > 0


def test_other_programs_are_none_of_its_business(monitor: CompileMonitor) -> None:
    subprocess.run([sys.executable, "-c", "pass"], check=True)
    subprocess.run("true", shell=True, check=True)
    exec(compile("x = 1", "<a template>", "exec"), {})
    assert monitor.late_compiles == []


def test_triton(monitor: CompileMonitor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiling for sm_90 ahead of time needs no GPU. Some versions start ptxas, others link it."""
    triton = pytest.importorskip("triton")
    if triton.knobs.runtime.interpret:
        pytest.skip("kernels are interpreted in this process")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from tests.graphs.one_kernel import add_one

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))

    def work() -> None:
        source = ASTSource(add_one, {"pointer": "*fp32"}, {})
        triton.compile(source, target=GPUTarget("cuda", 90, 32))

    late = in_a_step(monitor, work)
    assert LateCompile("triton", SHAPE, 1) in late
    # A later run finds the kernel in the disk cache. This counts too: the cache may be empty on
    # another machine.
    again = in_a_step(monitor, work)
    assert again == [*late[:-1], LateCompile("triton", SHAPE, 2)]


def test_flashinfer_starts_ninja(
    monitor: CompileMonitor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FlashInfer's JIT runs ninja from its own modules.

    Neither needs to be installed: the test makes a module and a program with these names.
    """
    package = tmp_path / "flashinfer"
    package.mkdir()
    (package / "__init__.py").write_text(
        "import subprocess\ndef run_ninja(): subprocess.run(['ninja', '-v'], check=True)\n"
    )
    (tmp_path / "ninja").write_text("#!/bin/sh\n")
    (tmp_path / "ninja").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "flashinfer", raising=False)
    import flashinfer

    # Not through monkeypatch, which would bring the stand-in back at the end.
    del sys.modules["flashinfer"]
    assert in_a_step(monitor, flashinfer.run_ninja) == [LateCompile("flashinfer", SHAPE, 1)]
    subprocess.run(["ninja"], check=True)
    assert LateCompile("build", "idle", 1) in monitor.late_compiles


def test_counts_are_steps_and_logged_once(
    monitor: CompileMonitor, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    words = compile_file(native.find_compiler(), tmp_path)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            monitor.begin_step(4, 4)
            subprocess.run(words, check=True)
            subprocess.run(words, check=True)
            monitor.end_step()
        subprocess.run(words, check=True)
    assert monitor.late_compiles == [
        LateCompile("c++", "tokens=4,seqs=4", 2),
        LateCompile("c++", "idle", 1),
    ]
    lines = [record.getMessage() for record in caplog.records]
    assert [line.partition(": ")[2].partition(":")[0] for line in lines] == [
        "what=c++ shape=tokens=4,seqs=4",
        "what=c++ shape=idle",
    ]
    assert " ".join(words)[:100] in lines[0]


def test_before_the_seal_and_after_the_close(tmp_path: Path) -> None:
    words = compile_file(native.find_compiler(), tmp_path)
    monitor = CompileMonitor()
    subprocess.run(words, check=True)
    assert (monitor.compiles, monitor.late_compiles) == ({"c++": 1}, [])
    monitor.mark_ready()
    monitor.close()
    monitor.close()
    subprocess.run(words, check=True)
    assert (monitor.compiles, monitor.late_compiles) == ({"c++": 1}, [])


def test_the_start_of_another_engine_is_not_late(monitor: CompileMonitor, tmp_path: Path) -> None:
    words = compile_file(native.find_compiler(), tmp_path)
    starting = CompileMonitor()
    try:
        subprocess.run(words, check=True)
        assert starting.compiles == {"c++": 1}
        assert monitor.late_compiles == []
        # A compilation in a step of this thread belongs to the ready engine, not to the start.
        assert in_a_step(monitor, lambda: subprocess.run(words, check=True)) == [
            LateCompile("c++", SHAPE, 1)
        ]
        # A compilation of the start is not counted for a step on another thread.
        started, ended = threading.Event(), threading.Event()

        def step() -> None:
            monitor.begin_step(9, 9)
            started.set()
            ended.wait(60)
            monitor.end_step()

        thread = threading.Thread(target=step)
        thread.start()
        started.wait(60)
        subprocess.run(words, check=True)
        ended.set()
        thread.join(60)
        assert starting.compiles == {"c++": 2}
        assert monitor.late_compiles == [LateCompile("c++", SHAPE, 1)]
    finally:
        starting.close()


def test_a_program_that_does_not_start_says_so_itself(monitor: CompileMonitor) -> None:
    """The monitor's audit hook must not raise."""
    with pytest.raises(FileNotFoundError, match="no-such-directory"):
        subprocess.run(["/no-such-directory/g++"], check=True)
    with pytest.raises(TypeError):
        subprocess.run([3], check=True)  # type: ignore[list-item]
    assert monitor.late_compiles == [LateCompile("c++", "idle", 1)]
