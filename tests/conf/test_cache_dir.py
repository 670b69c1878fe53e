"""A cache directory that cannot be written: each case in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ostinato.conf.environment import TemporaryDirectory, expand_user, require_writable
from ostinato.conf.errors import ConfigError
from tests.confinement import full, no_execution, read_only, unknown_user, without_privileges

ROOT = Path(__file__).resolve().parents[2]
PREPARE = """
import json, os
from pathlib import Path
from ostinato.conf.environment import cache_dir, prepare_cache
wanted, line = cache_dir(), prepare_cache()
again = prepare_cache()
(cache_dir() / "probe").write_text("")
libraries = {name: os.environ[name] for name in
             ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "FLASHINFER_WORKSPACE_BASE")}
bundles = cache_dir() / "bundles"
print(json.dumps({"wanted": str(wanted), "line": line, "again": again, "cache": str(cache_dir()),
                  "bundles": sorted(map(str, bundles.glob("*/*"))) if bundles.is_dir() else [],
                  "libraries": libraries}))
"""


def prepare(prefix: list[str], **environment: str | None) -> dict:
    """The result of `prepare_cache` in an environment."""
    changed = {**os.environ, "XDG_CACHE_HOME": None, "OSTINATO_CACHE_DIR": None, **environment}
    for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "FLASHINFER_WORKSPACE_BASE"):
        changed[name] = None
    done = subprocess.run(
        [*prefix, sys.executable, "-c", PREPARE],
        cwd=ROOT,
        env={name: value for name, value in changed.items() if value is not None},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_directory_that_can_be_written_is_used(tmp_path):
    found = prepare([], OSTINATO_CACHE_DIR=str(tmp_path / "new" / "cache"))
    assert (found["line"], found["cache"]) == (None, str(tmp_path / "new" / "cache"))
    assert found["libraries"]["TORCHINDUCTOR_CACHE_DIR"] == f"{tmp_path}/new/cache/inductor"


def cases(tmp_path: Path, name: str) -> tuple[list[str], dict[str, str | None], str]:
    """The beginning of a command, its environment, and the reason that the warning states."""
    directory = tmp_path / "directory"
    directory.mkdir()
    match name:
        case "a file":
            (tmp_path / "file").touch()
            return [], {"OSTINATO_CACHE_DIR": str(tmp_path / "file")}, "it is a file"
        case "below a file":
            (tmp_path / "file").touch()
            return [], {"OSTINATO_CACHE_DIR": str(tmp_path / "file" / "x")}, "Not a directory"
        case "read-only":
            prefix = read_only(directory)
            return prefix, {"XDG_CACHE_HOME": str(directory)}, "Read-only file system"
        case "full":
            reason = "less than 16 MiB are free"
            return full(directory, 500), {"OSTINATO_CACHE_DIR": str(directory)}, reason
        case "without permission":
            directory.chmod(0o500)
            return without_privileges(), {"HOME": str(directory)}, "Permission denied"
    raise AssertionError(name)


@pytest.mark.parametrize(
    "name", ["a file", "below a file", "read-only", "full", "without permission"]
)
def test_a_temporary_directory_is_used_and_removed(tmp_path, name):
    prefix, environment, reason = cases(tmp_path, name)
    (scratch := tmp_path / "scratch").mkdir()
    found = prepare(prefix, TMPDIR=str(scratch), **environment)
    assert Path(found["cache"]).parent == scratch
    assert f"the cache directory {found['wanted']} cannot be used ({reason})" in found["line"]
    assert "set OSTINATO_CACHE_DIR to a directory that can be written" in found["line"]
    assert found["again"] is None
    for path in found["libraries"].values():
        assert path.startswith(found["cache"])
    assert list(scratch.iterdir()) == []


def test_a_directory_of_a_killed_process_is_removed_by_the_next_one(tmp_path):
    program = """
import sys, time
from pathlib import Path
from ostinato.conf.environment import TemporaryDirectory
directory = TemporaryDirectory("cache-", Path(sys.argv[1]))
(directory.path / "file").touch()
print(directory.path, flush=True)
time.sleep(1000)
"""
    command = [sys.executable, "-c", program, str(tmp_path)]
    killed, running = (
        subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) for _ in range(2)
    )
    try:
        abandoned, used = (
            Path(process.stdout.readline().rstrip()) for process in (killed, running)
        )
        (of_an_older_version := tmp_path / "ostinato-x").mkdir()
        killed.kill()
        killed.wait()
        assert abandoned.exists()
        mine = TemporaryDirectory(root=tmp_path)
        assert set(tmp_path.iterdir()) == {mine.path, used, of_an_older_version}
        mine.remove()
        assert list(used.iterdir()) == [used / "file"]
        assert set(tmp_path.iterdir()) == {used, of_an_older_version}
    finally:
        for process in (killed, running):
            process.kill()
            process.communicate()


def test_a_user_without_a_home_has_the_root_as_container_engines_say():
    code = "from ostinato.conf.environment import cache_dir; print(cache_dir())"
    environment = {name: value for name, value in os.environ.items() if name != "HOME"}
    for name in ("XDG_CACHE_HOME", "OSTINATO_CACHE_DIR"):
        environment.pop(name, None)
    command = [*unknown_user(), sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("/.cache/ostinato\n", "")


def test_bundles_of_a_directory_that_can_not_be_written_are_found(tmp_path):
    cache = tmp_path / "cache"
    (cache / "bundles" / "tiny-cpu").mkdir(parents=True)
    (cache / "bundles" / "tiny-cpu" / "manifest.json").touch()
    cache.chmod(0o500)
    found = prepare(without_privileges(), OSTINATO_CACHE_DIR=str(cache))
    assert found["line"] is not None
    assert found["bundles"] == [f"{found['cache']}/bundles/tiny-cpu/manifest.json"]
    assert (cache / "bundles" / "tiny-cpu" / "manifest.json").exists()


def test_the_temporary_directory_is_one_from_which_libraries_load(tmp_path):
    (tmp_path / "file").touch()
    (scratch := tmp_path / "scratch").mkdir()
    found = prepare(
        no_execution(scratch), OSTINATO_CACHE_DIR=str(tmp_path / "file"), TMPDIR=str(scratch)
    )
    assert Path(found["cache"]).parent in (Path("/var/tmp"), Path("/dev/shm"))
    assert not Path(found["cache"]).exists()


def test_a_home_that_is_not_known_stays(tmp_path):
    assert expand_user("~no-such-user/x") == Path("~no-such-user/x")
    assert expand_user("~") == Path.home()


def test_a_result_that_can_not_be_written_is_refused_at_once(tmp_path):
    require_writable(tmp_path / "new" / "file.json", "bench.output")
    assert list((tmp_path / "new").iterdir()) == []
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError) as raised:
        require_writable(tmp_path / "file" / "x.json", "bench.output")
    assert str(raised.value) == (
        f"bench.output: {tmp_path}/file/x.json cannot be written (File exists); name a file that "
        "can be written"
    )
