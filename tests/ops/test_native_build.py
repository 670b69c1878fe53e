"""Building the native library: cold, by two processes at once, after damage, without a compiler.

Also the choice of libraries, their checks, and the threads of their kernels.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch

from ostinato.ops.native import abi, build
from ostinato.ops.native import library as native
from ostinato.ops.native.build import LIBRARIES, PARTS
from ostinato.ops.native.instruction_sets import ISA_LEVELS, detect_isa, runnable_levels
from ostinato.ops.native.library import load
from tests.confinement import no_execution
from tests.waiting import PATIENCE_S, wait_until

# A library of few sources, with two compiler processes as for `core`.
SMALL = """
from ostinato.ops.native import build
build.LIBRARIES["small"] = (("core/install", "core/call", "core/thread_pool"), ("rows/sampling",))
"""
BUILD = (  # imports no torch
    SMALL
    + "from ostinato.ops.native.instruction_sets import detect_isa\n"
    + "print(build.build('small', detect_isa()))"
)
LOAD = f"""
from ostinato.ops.sampling import sample_rows
from ostinato.ops.native import library
{SMALL}
print(library.load("small").path)
"""

# A loop of torch and then a kernel of this package, each large enough for every thread.
ATTEND = """
import os, sys, torch
from ostinato.ops.attention import AttentionMetadata, paged_attention
from ostinato.ops.native.library import load, set_pool_threads

torch.set_num_threads(int(sys.argv[1]))
load("core")
set_pool_threads(int(sys.argv[2]))
before = len(os.listdir("/proc/self/task"))
cache = torch.zeros(65, 4, 16, 64)
torch.ones(1000000).mul_(2.0)
between = len(os.listdir("/proc/self/task"))
metadata = AttentionMetadata(
    torch.tensor([0, 1000], dtype=torch.int32),
    torch.tensor([1000], dtype=torch.int32),
    torch.arange(1, 64, dtype=torch.int32)[None],
    torch.arange(16, 1016),
    torch.zeros(1, dtype=torch.int64),
)
q, k, v = torch.ones(1000, 4, 64), torch.ones(1000, 4, 64), torch.ones(1000, 4, 64)
paged_attention(q, k, v, cache, cache.clone(), metadata, scale=1.0, backend="cpu")
after = len(os.listdir("/proc/self/task"))
files = {line.split()[-1] for line in open("/proc/self/maps") if ".so" in line}
runtimes = [file for file in files if any(name in file for name in ("gomp", "libomp", "iomp"))]
print(between - before, after - before, len(runtimes))
"""


def start(
    program: str, *arguments: str, cache: Path | None = None, compiler: str | None = None
) -> subprocess.Popen[str]:
    """Start the program in a process of its own; `cache` None = the user's own cache directory."""
    environment = dict(os.environ)
    if cache is not None:
        environment["OSTINATO_CACHE_DIR"] = str(cache)
    if compiler is not None:
        environment["CXX"] = compiler
    return subprocess.Popen(
        [sys.executable, "-c", program, *arguments],
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def finish(process: subprocess.Popen[str]) -> str:
    out, err = process.communicate(timeout=250)
    assert process.returncode == 0, err
    return out.strip()


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """A cache directory into which two processes built at once, and the text that each printed."""
    cache = tmp_path_factory.mktemp("cache")
    processes = [start(LOAD, cache=cache) for _ in range(2)]
    return cache, [finish(process) for process in processes]


def test_two_processes_build_at_once_from_nothing(built: tuple[Path, list[str]]) -> None:
    cache, (first, second) = built
    assert first == second
    assert list(cache.rglob("*.so")) == [Path(first)]
    assert [path.name for path in Path(first).parent.glob("build-*")] == []


CLANG = next(filter(shutil.which, ("clang++", *(f"clang++-{n}" for n in range(25, 13, -1)))), None)


@pytest.mark.slow  # half a minute
@pytest.mark.skipif(CLANG is None, reason="clang++ is not installed (Debian: apt install clang)")
@pytest.mark.parametrize("level", ["avx2", "portable"])
def test_clang_builds_the_kernels_too(tmp_path: Path, level: str) -> None:
    if level not in runnable_levels():
        pytest.skip(f"the processor has no {level}")
    code = f"from ostinato.ops.native import build\nprint(build.build('core', {level!r}))"
    path = finish(start(code, cache=tmp_path, compiler=str(CLANG)))
    assert b"clang version" in Path(path).read_bytes()


def test_a_warm_start_needs_no_compiler(built: tuple[Path, list[str]]) -> None:
    cache, (first, _) = built
    assert finish(start(LOAD, cache=cache, compiler="no-such-compiler")) == first


def test_a_truncated_library_is_rebuilt(built: tuple[Path, list[str]]) -> None:
    cache, (first, _) = built
    library = Path(first)
    whole = library.stat().st_size
    library.write_bytes(library.read_bytes()[: whole // 2])
    rebuilt = Path(finish(start(LOAD, cache=cache)))
    assert list(cache.rglob("*.so")) == [rebuilt]
    assert rebuilt.stat().st_size > whole // 2


def test_a_missing_compiler_is_named_with_the_remedy(tmp_path: Path) -> None:
    process = start(BUILD, cache=tmp_path, compiler="no-such-compiler")
    _, err = process.communicate(timeout=240)
    assert process.returncode != 0
    assert err.splitlines()[-1] == (
        "ostinato.ops.native.build.NativeBuildError: the CPU kernels need a C++ compiler and none "
        "was found (tried no-such-compiler): install g++ or set graphs.attention=reference "
        "graphs.pack_weights=false"
    )


def test_a_failing_compiler_is_quoted(tmp_path: Path) -> None:
    compiler = tmp_path / "broken-compiler"
    compiler.write_text(
        '#!/bin/sh\n[ "$1" = --version ] && exit 0\necho "out of cheese" >&2\nexit 3\n'
    )
    compiler.chmod(0o755)
    process = start(BUILD, cache=tmp_path / "cache", compiler=str(compiler))
    _, err = process.communicate(timeout=240)
    assert process.returncode != 0
    assert err.splitlines()[-1] == (
        f"ostinato.ops.native.build.NativeBuildError: the C++ compiler {compiler} failed with exit "
        "code 3: out of cheese; install g++ or set graphs.attention=reference "
        "graphs.pack_weights=false"
    )
    assert list((tmp_path / "cache").rglob("*.so")) == []


# Shells start background programs, such as a test run, with SIGINT ignored, and children inherit it.
INTERRUPTIBLE = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)
"""
# A compiler that starts a process of its own, as g++ does. It ends with the first of both.
ENDLESS = """#!/bin/sh
: > "$TMPDIR/part.s"
sleep 600 &
echo "$$ $!" >> "$STARTED"
wait
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_compilers_and_their_files_end_with_the_build(tmp_path: Path, number: int) -> None:
    compiler, started, cache = tmp_path / "endless", tmp_path / "started", tmp_path / "cache"
    compiler.write_text(ENDLESS)
    compiler.chmod(0o755)
    stale = cache / "native" / "another-library" / "build-stale"
    stale.mkdir(parents=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STARTED", str(started))
        process = start(INTERRUPTIBLE + BUILD, cache=cache, compiler=str(compiler))
    wait_until(lambda: started.exists() and len(started.read_text().split()) == 4)
    compilers = [psutil.Process(int(pid)) for pid in started.read_text().split()]
    assert len(list(cache.rglob("part.s"))) == 1
    process.send_signal(number)
    process.communicate(timeout=240)
    assert process.returncode != 0
    _, alive = psutil.wait_procs(compilers, timeout=PATIENCE_S)
    assert alive == []
    wait_until(lambda: not list(cache.rglob("build-*")))


def test_a_cache_that_can_not_be_written_is_named(tmp_path: Path) -> None:
    cache = tmp_path / "a-file"
    cache.write_text("")
    process = start(BUILD, cache=cache)
    _, err = process.communicate(timeout=240)
    assert process.returncode != 0
    assert f"NativeBuildError: the CPU kernels cannot be built in {cache}/native/" in err
    assert "set OSTINATO_CACHE_DIR to a writable directory" in err


def test_a_cache_without_execution_is_named_before_anything_is_compiled(tmp_path: Path) -> None:
    command = [*no_execution(tmp_path), sys.executable, "-c", LOAD]
    environment = {**os.environ, "OSTINATO_CACHE_DIR": str(tmp_path), "CXX": "no-such-compiler"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert f"the file system of {tmp_path}/native/small-" in done.stderr.splitlines()[-1]
    assert "is mounted noexec" in done.stderr.splitlines()[-1]


def test_loading_again_gives_the_same_library() -> None:
    assert load("core") is load("core")
    assert load("core").isa == detect_isa()
    assert load("core").namespace == "ostinato"


def test_every_source_is_in_a_library_and_every_library_has_its_entry_point() -> None:
    folder = Path(build.__file__).parent
    files = {str(path.relative_to(folder).with_suffix("")) for path in folder.rglob("*.cpp")}
    libraries = [*LIBRARIES.values(), *(part.units for part in PARTS.values())]
    named = [{name for unit in units for name in unit} for units in libraries]
    assert set.union(*named[: len(LIBRARIES)]) == files
    assert all({"core/install", "core/call", "core/thread_pool"} <= set(names) for names in named)


def test_numbers_that_differ_from_pythons_are_named_with_both_values(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    library = load("core")
    abi.check_abi(library.functions, str(library.path))
    monkeypatch.setitem(abi.DTYPE_CODES, torch.bfloat16, 14)
    monkeypatch.setattr(abi, "MAX_RANK", 6)
    with pytest.raises(RuntimeError) as refused:
        abi.check_abi(library.functions, "core.so")
    text = str(refused.value)
    assert text.startswith("core.so does not fit ops/native/abi.py: ")
    assert "dtype bfloat16 is 15 in the library and 14 in Python" in text
    assert "torch's dtype bfloat16 is 15 in the library and 14 in Python" in text
    assert "most dimensions is 5 in the library and 6 in Python" in text


def test_levels_are_ordered() -> None:
    assert list(ISA_LEVELS) == ["amx", "avx512bf16", "avx512", "avx2", "portable"]


@pytest.mark.parametrize("isa", ["sse9", "amx_on_sse9", "amx_on_amx"])
def test_levels_are_checked(isa: str) -> None:
    runnable = runnable_levels()
    known = ", ".join([*runnable, *(f"amx_on_{each}" for each in runnable if each != "amx")])
    words = f"isa must be one of {known} on this processor, got '{isa}'"
    with pytest.raises(ValueError, match=words):
        load("core", isa)


def test_a_name_that_is_neither_a_library_nor_a_part_is_refused() -> None:
    known = ", ".join((*LIBRARIES, *PARTS))
    with pytest.raises(ValueError, match=f"name must be one of {known}, got 'core-int8'"):
        load("core-int8")


def test_libraries_are_looked_up_while_a_thread_loads_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    core = load("core")

    class Namespace(str):
        """Each comparison adds a library, as another thread can do at this moment."""

        __slots__ = ()
        __hash__ = str.__hash__

        def __eq__(self, other: object) -> bool:
            loaded[f"other-{len(loaded)}", "elsewhere"] = core
            return str.__eq__(self, other)

    loaded: dict[tuple[str, str], native.NativeLibrary] = {
        ("other", Namespace("elsewhere")): core,
        ("core", "ostinato"): core,
    }
    monkeypatch.setattr(native, "_loaded", loaded)
    assert native.core_library() is core.functions
    assert native.kernel_address("rms_norm") is not None
    assert native.loaded_isa() == core.isa
    assert len(loaded) == 5


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs /proc to count threads")
@pytest.mark.parametrize(
    ("torch_threads", "kernel_threads", "most"),
    [(1, 0, 1), (3, 0, 3), (1, 3, 3), (3, 1, 3)],
)
def test_threads_are_torchs_own(torch_threads: int, kernel_threads: int, most: int) -> None:
    load("core")
    output = finish(start(ATTEND, str(torch_threads), str(kernel_threads)))
    by_torch, by_both, runtimes = output.split()
    assert int(by_torch) == torch_threads - 1
    assert int(by_both) == most - 1
    assert int(runtimes) == 1


def test_declarations_of_torchs_functions_are_torchs(tmp_path: Path) -> None:
    source = tmp_path / "both.cpp"
    source.write_text(
        '#include <torch/csrc/stable/c/shim.h>\n#include "core/torch_abi.h"\n'
        # a declaration that differs is refused
        "#ifdef WRONG\n"
        'extern "C" AOTITorchError torch_get_num_threads(int64_t* count);\n'
        "#endif\n"
    )
    include = Path(torch.__file__).parent / "include"
    command = [build.find_compiler(), *build._FLAGS, "-fsyntax-only", f"-I{include}"]
    command += [f"-I{Path(build.__file__).parent}", str(source)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    done = subprocess.run([*command, "-DWRONG"], capture_output=True, text=True, check=False)
    assert "conflicting declaration" in done.stderr


# A part is loaded, then the whole library: its kernels replace those of the part and give the same
# bits.
REPLACE = """
import sys
from pathlib import Path
import torch
from ostinato.ops.backends import cpu
from ostinato.ops import norm
from ostinato.ops.linear import packed_linear as linear
from ostinato.ops.sampling import sample_rows
from ostinato.ops.attention import AttentionMetadata, paged_attention
from ostinato.ops.moe import routing
from ostinato.ops.native import library
from ostinato.ops.native.build import adopt
from ostinato.ops.native.instruction_sets import detect_isa

def norm_of(dtype):
    return norm.rms_norm(torch.ones(2, 64, dtype=dtype), torch.ones(64, dtype=dtype), 0.0, None)

def results():
    generator = torch.Generator().manual_seed(1)
    def random(*shape):
        return torch.randn(shape, generator=generator).bfloat16()
    weight = linear.pack_linear_weight(random(70, 96))
    numbers = dict(dtype=torch.int32)
    metadata = AttentionMetadata(
        torch.tensor([0, 1, 41], **numbers),
        torch.tensor([300, 40], **numbers),
        torch.arange(1, 61, **numbers).view(2, 30),
        torch.cat((torch.tensor([16 + 299]), torch.arange(496, 536))),
        torch.zeros(1, dtype=torch.int64),
    )
    q, k, v = random(41, 4, 64), random(41, 2, 64), random(41, 2, 64)
    caches = random(61, 2, 16, 64), random(61, 2, 16, 64)
    attended = paged_attention(q, k, v, *caches, metadata, scale=0.125, backend="cpu")
    return linear.packed_linear(random(9, 96), weight, None, 70), attended, *caches

adopt("core-bfloat16", detect_isa(), Path(sys.argv[1]).read_bytes())
first = library.load_part("core-bfloat16")
assert library.load_part("core-bfloat16") is first
assert library.core_library() is first.functions
address = library.kernel_address("rms_norm")
assert library.kernel_address("route") is None
norm_of(torch.bfloat16)
try:
    norm_of(torch.float32)
except ValueError as error:
    print(error)
before = results()
assert library.kernel_address("rms_norm") == address, "packing needs no other kernels"
library.complete_core(torch.bfloat16)
assert library.kernel_address("rms_norm") == address, "the part has kernels of this dtype"
adopt("core", detect_isa(), Path(sys.argv[2]).read_bytes())
library.complete_core(torch.float32)
assert library.kernel_address("rms_norm") != address
whole = library.load_part("core-float32")
assert whole is library.load("core") is library.load_part("core-bfloat16")
assert library.kernel_address("rms_norm") != address
for dtype in (torch.bfloat16, torch.float32, torch.float16):
    assert torch.equal(norm_of(dtype), torch.ones(2, 64, dtype=dtype))
assert all(torch.equal(one, other) for one, other in zip(before, results(), strict=True))
print(library.kernel_address("route") is not None)
"""


def test_the_whole_library_replaces_the_kernels_of_a_part(tmp_path: Path) -> None:
    """The test runs in a new process with an empty cache.

    `load_part` loads the whole library instead of a part if the process or the cache has it.

    Both libraries come from the user's cache, because compiling them again takes half a minute.
    """
    files = [str(build.build(name, detect_isa())) for name in ("core-bfloat16", "core")]
    done = start(REPLACE, *files, cache=tmp_path)
    out, err = done.communicate(timeout=200)
    assert done.returncode == 0, err
    refused, has_experts = out.splitlines()
    assert refused == (
        "the loaded kernels were compiled for another element type; load the library core"
    )
    assert has_experts == "True"
