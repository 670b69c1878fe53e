"""The import contracts of pyproject.toml, and what an import of the package loads and changes."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.arch.tree import FOLDERS, ROOT, name_of, package_files, parse


def printed(code: str) -> tuple[str, str]:
    """What a new Python process writes to its standard output and to its standard error."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    return done.stdout, done.stderr


def test_import_contracts_are_kept():
    # The links in .types put all folders under one package directory, which the linter walks.
    linter = Path(sys.executable).parent / "lint-imports"
    done = subprocess.run(
        [linter, "--no-cache", "--config", ROOT / "pyproject.toml"],
        cwd=ROOT / ".types",
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    report = done.stdout[done.stdout.find("Contracts") :]
    assert done.returncode == 0, report + done.stderr
    assert re.search(r"Contracts: 7 kept, 0 broken", report), report


def test_links_for_type_checkers_are_complete_and_relative():
    links = {link.name: link.readlink().as_posix() for link in (ROOT / ".types/ostinato").iterdir()}
    assert links == {
        **{folder: f"../../{folder}" for folder in FOLDERS},
        "__init__.py": "../../ostinato/__init__.py",
        "__main__.py": "../../ostinato/__main__.py",
        "commands.py": "../../ostinato/commands.py",
    }


@pytest.mark.parametrize(
    "module",
    [
        "ostinato",
        "ostinato.conf.compose",
        "ostinato.commands",
        "ostinato.api.cli.help",
        "ostinato.api.cli.generate_command",
        "ostinato.api.cli.chat_command",
        "ostinato.api.cli.plan_command",
        "ostinato.api.server.app",
        "ostinato.api.server.server",
        "ostinato.runtime.client.client",
        "ostinato.runtime.scheduling.scheduler",
        "ostinato.runtime.memory.memory_plan",
    ],
)
def test_a_light_module_imports_neither_torch_nor_transformers(module: str):
    code = (
        f"import sys, {module}; "
        "print([name for name in ('torch', 'transformers', 'triton') if name in sys.modules])"
    )
    assert printed(code) == ("[]\n", "")


def test_the_server_imports_no_numpy_for_a_model_that_is_no_gguf_file():
    code = (
        "import sys, ostinato.api.server.server, ostinato.api.server.app;"
        "from ostinato.runtime.text.tokenizer import Tokenizer;"
        "Tokenizer.from_path('models/demo');"
        "print([name for name in ('numpy', 'hydra') if name in sys.modules])"
    )
    assert printed(code) == ("[]\n", "")


def test_an_engine_process_reads_torchs_library_before_it_imports_anything_heavy():
    code = (
        "import sys, ostinato.runtime.process.engine_main;"
        "print([name for name in ('numpy', 'zmq', 'msgspec', 'asyncio') if name in sys.modules])"
    )
    assert printed(code) == ("[]\n", "")


def test_light_modules_are_enough_to_say_what_is_wrong():
    code = (
        "import sys; from ostinato.commands import run; code = run(['serve', 'modle=x']); "
        "print(code, 'torch' in sys.modules)"
    )
    assert printed(code)[0] == "2 False\n"


def test_root_folders_are_imported_under_the_packages_name():
    """`import ops` works in a checkout too. It would load a second copy of each module of `ops`."""
    bare = [
        f"{name_of(file)}: {name}"
        for file in package_files()
        for name in imported(file)
        if name.split(".")[0] in FOLDERS or name.startswith(".")
    ]
    assert bare == []


def imported(file: Path) -> list[str]:
    """Every module that a file imports, a relative one with its dots."""
    names: list[str] = []
    for node in ast.walk(parse(file)):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names.append("." * node.level + (node.module or ""))
    return names


def test_importing_the_package_changes_no_environment_and_starts_no_thread():
    code = (
        "import os, threading; before = dict(os.environ); "
        "import ostinato.conf.compose, ostinato.commands, ostinato.runtime.scheduling.scheduler; "
        "print(dict(os.environ) == before, threading.active_count())"
    )
    out, errors = printed(code)
    assert out == "True 1\n", errors
