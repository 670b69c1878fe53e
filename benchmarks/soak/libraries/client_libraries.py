"""The client libraries that send requests in the soak test: their installation and commands."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

__all__ = ("LIBRARIES", "command", "install")

_HERE = Path(__file__).parent


class _Library(NamedTuple):
    """A client library.

    Attributes:
        argument: its name for the script.
        packages: names of packages on PyPI or npm.
        module: the module to import from a Python library; empty = the library is one of npm.
    """

    argument: str
    packages: tuple[str, ...]
    module: str = ""


LIBRARIES: Mapping[str, _Library] = {
    "openai": _Library("openai", ("openai",), "openai"),
    "anthropic": _Library("anthropic", ("anthropic",), "anthropic"),
    "langchain": _Library("langchain-openai", ("langchain-openai",), "langchain_openai"),
    "litellm": _Library("litellm", ("litellm",), "litellm"),
    "openai for Node": _Library("openai", ("openai",)),
    "AI SDK": _Library("ai-sdk", ("ai", "@ai-sdk/openai-compatible")),
}


def install(directory: Path) -> None:
    """Install every library below a directory: Python libraries, and npm's `node_modules`.

    Each Python library has a virtual environment of its own, because litellm pins an older `openai`
    than langchain-openai needs. Libraries that are already installed are kept. Without npm, its
    libraries are left out.

    Raises:
        subprocess.CalledProcessError: pip or npm failed.
    """
    directory.mkdir(parents=True, exist_ok=True)
    for name, library in LIBRARIES.items():
        python = _python(directory, name)
        if library.module and not python.exists():
            subprocess.run([sys.executable, "-m", "venv", str(python.parents[1])], check=True)
            pip = (str(python), "-m", "pip", "install", "-q")
            subprocess.run([*pip, *library.packages], check=True)
    npm = shutil.which("npm")
    if npm is not None and not (directory / "node_modules").exists():
        (directory / "package.json").write_text(json.dumps({"private": True}), encoding="utf-8")
        wanted = [
            one for library in LIBRARIES.values() if not library.module for one in library.packages
        ]
        subprocess.run(
            [npm, "install", "--silent", "--no-fund", *wanted], cwd=directory, check=True
        )


def command(name: str, url: str, seconds: float, directory: Path | None) -> list[str] | str:
    """The command that makes a library's traffic, or why it cannot run.

    Args:
        name: one of LIBRARIES.
        url: the URL of the server.
        seconds: how long it runs.
        directory: the directory of `install`, which is also the working directory of the command;
            None = only libraries that this interpreter can import.
    """
    library = LIBRARIES[name]
    arguments = [library.argument, url, str(seconds)]
    if library.module:
        script = str(_HERE / "calls.py")
        if directory is not None:
            return [str(_python(directory, name)), script, *arguments]
        if importlib.util.find_spec(library.module) is None:
            return f"{library.packages[0]} is not installed for {sys.executable}"
        return [sys.executable, script, *arguments]
    node = shutil.which("node")
    if node is None:
        return "there is no node on the PATH"
    if directory is None or not (directory / "node_modules").exists():
        return "there is no directory with npm's packages (--libraries DIR, and npm on the PATH)"
    return [node, str(_HERE / "calls.mjs"), *arguments]


def _python(directory: Path, name: str) -> Path:
    """The interpreter of a Python library's virtual environment."""
    return directory / f"venv-{name}" / "bin" / "python"
