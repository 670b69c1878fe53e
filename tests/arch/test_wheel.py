"""The wheel has the package's modules and data, and compiled CPU kernels that need no compiler."""

import errno
import importlib
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from ostinato.ops.native import build
from ostinato.ops.native.instruction_sets import ISA_LEVELS, detect_isa, isa_levels
from tests.arch.tree import FOLDERS, ROOT

DATA = {
    "api/server": ("static/*",),
    "conf": ("*.yaml",),
    "benchmarks/report": ("schema.json", "report.css", "report.html.jinja"),
    "benchmarks/gate": ("ratios.json",),
    "benchmarks/machine": ("*.cpp", "gpus/*.yaml"),
    "benchmarks/peers": ("*.cpp",),
    "benchmarks/soak/libraries": ("*.mjs",),
    "ops": ("*.cpp", "*.h"),
    "models/demo": ("*.json", "*.safetensors", "*.jinja", "*.md"),
}


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the tree to build in: a build leaves folders that a later build would pack."""
    copy = tmp_path_factory.mktemp("tree") / "copy"
    copy.mkdir()
    for name in ("ostinato", *FOLDERS):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / "wheel_build", copy / "wheel_build")
    for name in ("pyproject.toml", "README.md", "LICENSE", "MANIFEST.in"):
        shutil.copy(ROOT / name, copy / name)
    return copy


def build_wheel(
    copy: Path, isa: str | None, **environment: str
) -> subprocess.CompletedProcess[str]:
    """`pip wheel` of the copy, into its folder `built`."""
    settings = [] if isa is None else [f"--config-settings=isa={isa}"]
    return subprocess.run(
        [
            *(sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation"),
            *(*settings, "--quiet", "--wheel-dir", str(copy / "built"), str(copy)),
        ],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
        env={**os.environ, **environment},
    )


@pytest.fixture(scope="module")
def wheel(copy: Path) -> zipfile.ZipFile:
    # Kernels for this machine's level only. They are in the cache as soon as a test has used them.
    done = build_wheel(copy, detect_isa())
    assert done.returncode == 0, done.stderr
    assert not (copy / "ops" / "native" / "prebuilt").exists()
    [file] = (copy / "built").glob("ostinato-*.whl")
    return zipfile.ZipFile(file.rename(copy / file.name))


# With these variables an installed wheel could use the tree, or a compiler.
_UNSEEN = {"PYTHONPATH", "CXX", "CC"}


def packaged_as(file: Path) -> str:
    path = file.relative_to(ROOT).as_posix()
    return path if path.startswith("ostinato/") else f"ostinato/{path}"


def test_the_wheel_is_the_tree(wheel: zipfile.ZipFile):
    modules = {
        packaged_as(file)
        for folder in ("ostinato", *FOLDERS)
        for file in (ROOT / folder).rglob("*.py")
    }
    data = {
        packaged_as(file)
        for folder, patterns in DATA.items()
        for pattern in patterns
        for file in (ROOT / folder).rglob(pattern)
    }
    libraries = {build.prebuilt_path(name, detect_isa()) for name in build.LIBRARIES}
    packed = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert packed == modules | data | {packaged_as(file) for file in libraries}


def test_the_wheel_has_the_command_and_the_licence(wheel: zipfile.ZipFile):
    [entry_points] = [name for name in wheel.namelist() if name.endswith("entry_points.txt")]
    assert b"run = ostinato.commands:main" in wheel.read(entry_points)
    assert [name for name in wheel.namelist() if name.endswith("licenses/LICENSE")]


def test_the_wheel_is_small(wheel: zipfile.ZipFile):
    """A released wheel has libraries of all levels, of similar sizes. This wheel has one level."""
    total = sum(entry.compress_size for entry in wheel.infolist())
    libraries = sum(e.compress_size for e in wheel.infolist() if e.filename.endswith(".so"))
    assert total + libraries * (len(ISA_LEVELS) - 1) <= 16 << 20


def test_the_wheel_is_for_this_platform_and_any_python(wheel: zipfile.ZipFile):
    """Its libraries lie where an installer puts compiled packages."""
    [metadata] = [name for name in wheel.namelist() if name.endswith(".dist-info/WHEEL")]
    lines = wheel.read(metadata).decode().splitlines()
    assert "Root-Is-Purelib: false" in lines
    [tag] = [line.removeprefix("Tag: ") for line in lines if line.startswith("Tag: ")]
    assert str(wheel.filename).endswith(f"-{tag}.whl")
    machine = sysconfig.get_platform().removeprefix("linux-")
    major, minor = os.confstr("CS_GNU_LIBC_VERSION").split()[1].split(".")
    expected = re.fullmatch(rf"py3-none-manylinux_{major}_(\d+)_{machine}", tag)
    assert expected is not None, tag
    assert 28 <= int(expected[1]) <= int(minor)


def test_the_tag_names_the_glibc_that_the_symbol_versions_need(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    """The policies of PEP 600: GLIBCXX_3.4.29 came with GCC 11, whose systems have glibc 2.34."""
    monkeypatch.syspath_prepend(ROOT / "wheel_build")
    platform_tag = importlib.import_module("platform_wheel").platform_tag
    machine = sysconfig.get_platform().removeprefix("linux-")
    this = os.confstr("CS_GNU_LIBC_VERSION").split()[1].replace(".", "_")

    def tag(*versions: str) -> str:
        library = tmp_path / "library.so"
        library.write_bytes(b"\x7fELF\0" + b"".join(name.encode() + b"\0" for name in versions))
        return platform_tag([library])

    assert tag("GLIBC_2.2.5", "GLIBC_2.14") == f"manylinux_2_28_{machine}"
    assert tag("GLIBC_2.14", "GLIBC_2.29") == f"manylinux_2_29_{machine}"
    assert tag("GLIBC_2.14", "GLIBCXX_3.4.29") == f"manylinux_2_34_{machine}"
    assert tag("GLIBC_2.14", "GLIBCXX_3.4.21", "CXXABI_1.3.13") == f"manylinux_2_34_{machine}"
    assert tag("GLIBC_2.38", "GLIBCXX_3.4.29") == f"manylinux_2_38_{machine}"
    assert tag("GLIBCXX_3.4.99") == f"manylinux_{this}_{machine}"


@pytest.mark.parametrize("answer", [OSError(errno.EINVAL, "Invalid argument"), ValueError(), None])
def test_without_glibc_the_tag_is_the_platform_of_the_machine(
    answer: Exception | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    """With musl, `confstr` knows the name of glibc's version and fails, or has no answer."""
    monkeypatch.syspath_prepend(ROOT / "wheel_build")
    platform_tag = importlib.import_module("platform_wheel").platform_tag

    def confstr(name: str) -> None:
        if answer is not None:
            raise answer

    monkeypatch.setattr(os, "confstr", confstr)
    (tmp_path / "library.so").write_bytes(b"\x7fELF\0GLIBC_2.14\0")
    assert platform_tag([tmp_path / "library.so"]) == sysconfig.get_platform().replace("-", "_")


def libraries_of(levels: list[str]) -> set[str]:
    return {
        packaged_as(build.prebuilt_path(name, level))
        for name in build.LIBRARIES
        for level in levels
    }


@pytest.mark.slow
def test_a_wheel_is_for_every_level_unless_one_is_chosen(copy: Path):
    done = build_wheel(copy, None)
    assert done.returncode == 0, done.stderr
    [file] = (copy / "built").glob("ostinato-*.whl")
    packed = {name for name in zipfile.ZipFile(file).namelist() if name.endswith(".so")}
    file.unlink()
    assert packed == libraries_of(isa_levels())


@pytest.mark.parametrize("reason", ["no compiler", "unknown level"])
def test_a_wheel_without_its_kernels_is_not_built(copy: Path, tmp_path: Path, reason: str):
    if reason == "no compiler":
        done = build_wheel(copy, None, CXX="no-such-compiler", OSTINATO_CACHE_DIR=str(tmp_path))
        assert "none was found (tried no-such-compiler)" in done.stderr
        assert "Install g++" in done.stderr
        assert "--config-settings=isa=none: it compiles the kernels on first use" in done.stderr
    else:
        done = build_wheel(copy, "avx2,avx3")
        assert f"unknown: avx3; choose from {', '.join(isa_levels())}, or none" in done.stderr
    assert done.returncode != 0
    assert not list((copy / "built").glob("*.whl"))
    assert not (copy / "ops" / "native" / "prebuilt").exists()


def test_a_wheel_of_sources_is_for_any_platform(copy: Path):
    done = build_wheel(copy, "none", CXX="no-such-compiler")
    assert done.returncode == 0, done.stderr
    [file] = (copy / "built").glob("ostinato-*.whl")
    names = set(zipfile.ZipFile(file).namelist())
    file.unlink()
    assert file.name.endswith("-py3-none-any.whl")
    assert not [name for name in names if name.endswith(".so")]
    assert {packaged_as(source) for source in (ROOT / "ops" / "native").rglob("*.cpp")} <= names


def test_an_installed_wheel_generates_without_a_compiler(wheel: zipfile.ZipFile, tmp_path: Path):
    environment = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True)
    python = environment / "bin" / "python"
    [packages] = environment.glob("lib/python*/site-packages")
    subprocess.run(
        [
            *(sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet"),
            *("--no-deps", "--no-index", str(wheel.filename)),
        ],
        check=True,
        timeout=240,
    )
    # The dependencies are those of the tests. Python reads no .pth files in folders that a .pth
    # file names, so it does not find an editable install of the project there.
    dependencies = [path for path in sys.path if path.endswith("site-packages")]
    (packages / "dependencies.pth").write_text("\n".join(dependencies))
    (tmp_path / "empty").mkdir()
    code = (
        "from ostinato import LLM, SamplingParams; from ostinato.ops.native.library import load; "
        "llm = LLM(); params = SamplingParams(max_tokens=3, temperature=0.0); "
        "[answer] = llm.generate('Once upon a time', params, use_progress=False); "
        "print(len(answer.outputs[0].token_ids), load('core').path)"
    )
    done = subprocess.run(
        [str(python), "-c", code],
        cwd=tmp_path,
        env={
            **{name: value for name, value in os.environ.items() if name not in _UNSEEN},
            "PATH": str(tmp_path / "empty"),
            "OSTINATO_CACHE_DIR": str(tmp_path / "cache"),
        },
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    count, path = done.stdout.split()
    assert count == "3"
    assert Path(path).is_relative_to(packages)
    assert not list((tmp_path / "cache" / "native").rglob("*.so"))  # nothing was compiled
