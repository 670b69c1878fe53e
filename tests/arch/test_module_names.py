"""Names of modules in strings, base names of modules, and the number of modules of a folder."""

import ast
import re
import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

from tests.arch.tree import FOLDERS, ROOT, name_of, package_files, parse

MAX_MODULES = 12
# Folders with more modules, each with its reason.
FULL_FOLDERS = {
    "api/cli": "one module for each command, and what they share",
    "models/families": "one module for each family of models",
    "models/quantized_checkpoints": "14: one module for each format, and what they share",
}
# Base names that several modules share, because they are implementations of one protocol.
PROTOCOLS = {
    "__main__": "what `python -m` of a package runs",
    "command": "the function of one `run` command: configuration in, exit code out",
    "convert": "a dialect of HTTP: its requests and conversations become those of chat",
    "errors": "the exceptions that a layer raises",
    "preparation": "a dialect of HTTP: the body of a request becomes requests of the engine",
    "reply": "a dialect of HTTP: outputs of the engine become its response",
    "routes": "the handlers of a group of endpoints",
    "schemas": "a dialect of HTTP: the bodies of its requests and responses",
}
_MODULE = re.compile(rf"\bostinato(?:\.(?:{'|'.join(FOLDERS)}|commands))(?:\.\w+)*(?::\w+)?")


def layers() -> list[str]:
    """The layers of the contract in pyproject.toml, highest first."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    [layered] = [each for each in contracts["contracts"] if each["type"] == "layers"]
    return layered["layers"]


def strings(file: Path) -> Iterator[tuple[int, str, bool]]:
    """(line, text, whether it is a docstring) of every string literal of a module."""
    module = parse(file)
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    docstrings = {
        id(node.body[0].value)
        for node in ast.walk(module)
        if isinstance(node, documented) and node.body and isinstance(node.body[0], ast.Expr)
    }
    for node in ast.walk(module):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, node.value, id(node) in docstrings


def named_modules() -> Iterator[tuple[str, str, str, bool]]:
    """(place of a string, its layer, the module that it names, whether it is a docstring)."""
    for file in package_files():
        inside = file.relative_to(ROOT)
        layer = inside.stem if inside.parts[0] == "ostinato" else inside.parts[0]
        for line, text, is_docstring in strings(file):
            for name in _MODULE.findall(text):
                yield f"{name_of(file)}:{line}", layer, name, is_docstring


def resolves(name: str) -> bool:
    """Whether "package.module", "package.module.NAME" or "package.module:NAME" is there."""
    dotted, _, attribute = name.removeprefix("ostinato.").partition(":")
    parts = dotted.split(".")
    if parts[0] == "commands":
        parts = ["ostinato", *parts]
    path = ROOT.joinpath(*parts)
    if path.is_dir():
        return not attribute
    if not path.with_suffix(".py").is_file():
        *parts, attribute = parts
        path = ROOT.joinpath(*parts)
    file = path.with_suffix(".py")
    return file.is_file() and (not attribute or attribute in defined(file))


def defined(file: Path) -> set[str]:
    """Functions, classes and names that are assigned at the top level of a module."""
    names: set[str] = set()
    for node in parse(file).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names.add(node.target.id)
    return names


def test_a_module_that_a_string_names_is_there():
    named = list(named_modules())
    assert len(named) > 20
    assert [f"{where}: {name}" for where, _, name, _ in named if not resolves(name)] == []


def test_no_string_names_a_module_of_a_higher_layer():
    """An import through a string is an import: import-linter cannot see it, this test can."""
    order = layers()
    assert set(order) == {"commands", *FOLDERS}
    upward = [
        f"{where}: {name}"
        for where, layer, name, is_docstring in named_modules()
        if not is_docstring
        and layer in order
        and order.index(name.split(".")[1].partition(":")[0]) < order.index(layer)
    ]
    assert upward == []


def test_no_folder_is_full():
    modules = Counter(
        name_of(file.parent) for file in package_files() if file.name != "__init__.py"
    )
    full = {folder: count for folder, count in modules.items() if count > MAX_MODULES}
    assert {folder: count for folder, count in full.items() if folder not in FULL_FOLDERS} == {}
    assert FULL_FOLDERS.keys() <= full.keys(), "remove the folders that are no longer full"


def test_modules_share_a_base_name_only_when_they_implement_one_protocol():
    modules: dict[str, list[str]] = defaultdict(list)
    for file in package_files():
        if file.stem != "__init__":
            modules[file.stem].append(name_of(file))
    shared = {stem: files for stem, files in modules.items() if len(files) > 1}
    assert {stem: files for stem, files in shared.items() if stem not in PROTOCOLS} == {}
    assert PROTOCOLS.keys() <= shared.keys(), "remove the base names that are unique now"
