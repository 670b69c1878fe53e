"""The files in docker/ fit the tree: paths, commands, extras, ports, users, and each other."""

from __future__ import annotations

import fnmatch
import json
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml

from ostinato.commands import COMMANDS
from ostinato.conf.compose import load_config
from ostinato.conf.sections.server_schema import ServerConfig
from tests.arch.tree import FOLDERS, ROOT

DOCKER = ROOT / "docker"
IMAGES = ("Dockerfile", "cuda.Dockerfile")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
# The files in the root that a build of the wheel reads. tests/arch/test_wheel.py builds a wheel
# from these files and the folders alone.
SOURCES = ("pyproject.toml", "README.md", "LICENSE", "MANIFEST.in")


class Instruction(NamedTuple):
    """A line of a Dockerfile, with its continuations."""

    word: str
    text: str


def instructions(name: str) -> list[Instruction]:
    lines = (DOCKER / name).read_text().splitlines()
    text = "\n".join(line for line in lines if not line.startswith("#")).replace("\\\n", " ")
    pairs = [line.partition(" ") for line in text.splitlines() if line.strip()]
    return [Instruction(word, " ".join(rest.split())) for word, _, rest in pairs]


def final_stage(name: str) -> dict[str, str]:
    """The last instruction of each kind, such as USER, in the stage that becomes the image."""
    lines = instructions(name)
    begin = max(number for number, line in enumerate(lines) if line.word == "FROM")
    return {line.word: line.text for line in lines[begin:]}


def environment(name: str) -> dict[str, str]:
    pairs = [word.partition("=") for word in shlex.split(final_stage(name)["ENV"])]
    return {key: value for key, _, value in pairs}


def is_ignored(path: str) -> bool:
    """Whether .dockerignore keeps a path, relative to the root, out of the build."""
    parents = path.split("/")
    heads = ["/".join(parents[:count]) for count in range(1, len(parents) + 1)]
    for line in (ROOT / ".dockerignore").read_text().splitlines():
        if not line or line.startswith("#"):
            continue
        anywhere = line.startswith("**/")
        pattern = line.removeprefix("**/")
        for head in heads:
            candidate = head.rpartition("/")[2] if anywhere else head
            is_as_deep = anywhere or head.count("/") == pattern.count("/")
            if is_as_deep and fnmatch.fnmatchcase(candidate, pattern):
                return True
    return False


@pytest.fixture(scope="module")
def compose() -> dict:
    return yaml.safe_load((DOCKER / "compose.yaml").read_text())


def mounts(service: dict) -> dict[str, str]:
    """Place in the container -> source."""
    return {parts[1]: parts[0] for parts in (each.split(":") for each in service["volumes"])}


def test_nothing_that_the_wheel_needs_is_left_out():
    needed = [ROOT / name for name in SOURCES]
    for folder in ("ostinato", "wheel_build", *FOLDERS):
        files = (ROOT / folder).rglob("*")
        needed += [file for file in files if file.is_file() and "__pycache__" not in file.parts]
    names = [file.relative_to(ROOT).as_posix() for file in needed]
    prebuilt = "ops/native/prebuilt/"  # left by a wheel that was built in this checkout
    assert [one for one in names if is_ignored(one) and not one.startswith(prebuilt)] == []
    assert is_ignored("tests/docker/test_docker_files.py")
    assert is_ignored(".git/config")


@pytest.mark.parametrize("image", IMAGES)
def test_the_requirements_are_those_of_the_project(image: str):
    """Runs the line of the Dockerfile that writes requirements.txt, unchanged."""
    (line,) = [one.text for one in instructions(image) if "tomllib" in one.text]
    command, _, file = line.rpartition(" > ")
    words = shlex.split(command)
    assert words[0] == "python"
    done = subprocess.run([sys.executable, *words[1:]], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, file) == (0, "requirements.txt"), done.stderr
    extras = PROJECT["optional-dependencies"]
    assert done.stdout.splitlines() == [
        *PROJECT["dependencies"],
        *extras["otel"],
        "setuptools>=77",
    ]


@pytest.mark.parametrize("image", IMAGES)
def test_what_is_copied_is_there(image: str):
    for line in instructions(image):
        if line.word == "COPY" and not line.text.startswith("--from="):
            for source in line.text.split()[:-1]:
                assert (ROOT / source).exists(), source


@pytest.mark.parametrize("image", IMAGES)
def test_the_entry_point_is_a_legal_command(image: str):
    stage = final_stage(image)
    command, name, *overrides = json.loads(stage["ENTRYPOINT"])
    assert command in PROJECT["scripts"]
    assert name in COMMANDS
    config = load_config(overrides)
    assert config.server.host == "0.0.0.0"
    assert config.server.port == int(stage["EXPOSE"])
    assert f"http://127.0.0.1:{config.server.port}/health" in stage["HEALTHCHECK"]


@pytest.mark.parametrize("image", IMAGES)
def test_it_runs_as_a_user_whose_files_are_on_the_volume(image: str):
    stage = final_stage(image)
    user = stage["USER"].partition(":")[0]
    assert int(user) > 0
    assert f"--owner={user} " in stage["RUN"]
    volume = Path(stage["VOLUME"])
    assert stage["RUN"].split()[-1] == str(volume)
    variables = environment(image)
    for name in ("HOME", "OSTINATO_CACHE_DIR", "HF_HOME"):
        assert Path(variables[name]).is_relative_to(volume), name


def test_the_images_differ_only_in_what_a_gpu_needs():
    cpu, cuda = (set(instructions(image)) for image in IMAGES)
    assert {one.word for one in cpu ^ cuda} == {"ARG", "ENV", "ENTRYPOINT"}


def test_the_server_of_compose(compose: dict):
    server = compose["services"]["ostinato"]
    context = (DOCKER / server["build"]["context"]).resolve()
    assert context == ROOT
    assert (context / server["build"]["dockerfile"]).is_file()
    assert server["read_only"] is True
    assert server["tmpfs"] == ["/tmp"]
    assert mounts(server) == {final_stage("Dockerfile")["VOLUME"]: "cache"}
    port = final_stage("Dockerfile")["EXPOSE"]
    assert [each.rpartition(":")[2] for each in server["ports"]] == [port]
    words = re.fullmatch(r"\$\{OSTINATO_ARGUMENTS:-(.*)\}", server["command"])
    assert words is not None
    load_config(words[1].split())
    grace = int(server["stop_grace_period"].removesuffix("s"))
    assert grace > ServerConfig().drain_timeout_s
    for service in compose["services"].values():
        for each in service["ports"]:
            assert each.startswith("127.0.0.1:"), each


def test_the_files_that_compose_mounts_are_there(compose: dict):
    volumes = compose["volumes"].keys()
    for service in compose["services"].values():
        for source in mounts(service).values():
            assert source in volumes or (DOCKER / source).is_file(), source


def test_prometheus_and_grafana_find_each_other(compose: dict):
    services = compose["services"]
    scrape = yaml.safe_load((DOCKER / "prometheus.yml").read_text())["scrape_configs"][0]
    ((target,),) = [each["targets"] for each in scrape["static_configs"]]
    name, _, port = target.partition(":")
    assert (name in services, port) == (True, final_stage("Dockerfile")["EXPOSE"])

    grafana = services["grafana"]
    (source,) = yaml.safe_load((DOCKER / "grafana" / "datasource.yml").read_text())["datasources"]
    host, _, port = source["url"].removeprefix("http://").partition(":")
    assert host in services
    assert services[host]["ports"][0].endswith(f":{port}")
    (provider,) = yaml.safe_load((DOCKER / "grafana" / "dashboards.yml").read_text())["providers"]
    home = grafana["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert Path(home).parent == Path(provider["options"]["path"])
    dashboard = json.loads((DOCKER / mounts(grafana)[home]).read_text())
    (variable,) = [one for one in dashboard["templating"]["list"] if one["type"] == "datasource"]
    assert variable["query"] == source["type"]


def test_the_gpu_is_laid_over_a_service_that_is_there(compose: dict):
    over = yaml.safe_load((DOCKER / "compose.cuda.yaml").read_text())["services"]
    assert over.keys() <= compose["services"].keys()
    assert (ROOT / over["ostinato"]["build"]["dockerfile"]).is_file()
