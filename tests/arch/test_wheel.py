"""The wheel holds what the tree holds, and compiled CPU kernels that run without a compiler."""

import os
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
    "ops": ("*.cpp", "*.h"),
    "models/demo": ("*.json", "*.safetensors", "*.jinja", "*.md"),
}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    # Built from a copy: a build leaves folders behind, whose stale files a later build would pack.
    copy = tmp_path_factory.mktemp("tree") / "copy"
    copy.mkdir()
    for name in ("ostinato", *FOLDERS):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / "wheel_build", copy / "wheel_build")
    for name in ("pyproject.toml", "README.md", "LICENSE", "MANIFEST.in"):
        shutil.copy(ROOT / name, copy / name)
    built = copy / "built"
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation"),
            # This machine's level alone, which the cache holds after the first test of the kernels.
            f"--config-settings=isa={detect_isa()}",
            *("--quiet", "--wheel-dir", str(built), str(copy)),
        ],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert not (copy / "ops" / "native" / "prebuilt").exists()
    [file] = built.glob("ostinato-*.whl")
    return zipfile.ZipFile(file)


# What would lead an installed wheel back to the tree, or to a compiler.
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
    """With the libraries of all levels, which are of similar size; the demo model takes 9 MiB."""
    total = sum(entry.compress_size for entry in wheel.infolist())
    libraries = sum(e.compress_size for e in wheel.infolist() if e.filename.endswith(".so"))
    assert total + libraries * (len(ISA_LEVELS) - 1) <= 16 << 20


def test_the_wheel_is_for_this_platform_and_any_python(wheel: zipfile.ZipFile):
    platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
    assert str(wheel.filename).endswith(f"-py3-none-{platform}.whl")


def test_a_wheel_is_for_every_level_unless_one_is_chosen():
    assert isa_levels() in (list(ISA_LEVELS), ["portable"])


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
        timeout=120,
    )
    # The dependencies are those of the tests. Lines of a .pth file are folders: no editable install
    # of the project is found through them.
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
