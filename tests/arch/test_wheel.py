"""The wheel holds what the tree holds: every module, every option file, every native source."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.arch.tree import FOLDERS, ROOT

DATA = {
    "api/server": ("static/*",),
    "conf": ("*.yaml",),
    "benchmarks/report": ("schema.json",),
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
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy / name)
    built = copy / "built"
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation"),
            *("--quiet", "--wheel-dir", str(built), str(copy)),
        ],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    [file] = built.glob("ostinato-*.whl")
    return zipfile.ZipFile(file)


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
    packed = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert packed == modules | data


def test_the_wheel_has_the_command_and_the_licence(wheel: zipfile.ZipFile):
    [entry_points] = [name for name in wheel.namelist() if name.endswith("entry_points.txt")]
    assert b"run = ostinato.commands:main" in wheel.read(entry_points)
    assert [name for name in wheel.namelist() if name.endswith("licenses/LICENSE")]


def test_the_wheel_is_small(wheel: zipfile.ZipFile):
    total = sum(entry.compress_size for entry in wheel.infolist())
    assert total <= 16 << 20
