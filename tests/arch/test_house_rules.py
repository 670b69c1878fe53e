"""Rules of the code that a test can check: sizes, global state, names, packages."""

import ast
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

import ostinato
from tests.arch.tree import FOLDERS, ROOT, name_of, package_files, parse

MAX_FILE_LINES = 450
MAX_FAMILY_LINES = 100  # of a file in models/families: names, reading of the config, heads
WRITTEN_KINDS = {".py", ".cpp", ".h", ".md", ".html", ".css", ".js"}
MAX_FUNCTION_LINES = 80
SOFT_FUNCTION_LINES = 60
LONG_FUNCTIONS = {
    "ops/backends/triton_kernels.py:_attend_item": "the inner loop of one kernel, read top-down",
    "ops/fused/triton_fused_linear.py:fused_linear_kernel": "24 arguments, each with its shape",
    "ops/fused/triton_output_router.py:output_router_kernel": "38 arguments, each with its shape",
}
# Sentences and word lists that the demo model learns from: data in the form of functions.
DATA_FOLDER = "models/demo/"
# Files that may read or change the process's environment.
ENVIRONMENT_FILES = {"conf/environment.py"}
# Names that `global` statements may have: none.
GLOBALS: set[str] = set()


def written_files() -> Iterator[Path]:
    """Sources, tests, documents and the page: the files that people write and read."""
    for folder in (*FOLDERS, "ostinato", "tests", "docs"):
        for file in (ROOT / folder).rglob("*"):
            if file.suffix in WRITTEN_KINDS and "__pycache__" not in file.parts:
                yield file
    yield from ROOT.glob("*.md")


def functions(file: Path) -> Iterator[tuple[str, int]]:
    """(name, lines from `def` to the end, without decorators and docstring) of every function."""
    for node in ast.walk(parse(file)):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        lines = (node.end_lineno or node.lineno) - node.lineno + 1
        if ast.get_docstring(node, clean=False) is not None:
            text = node.body[0]
            lines -= (text.end_lineno or text.lineno) - text.lineno + 1
        yield f"{name_of(file)}:{node.name}", lines


def test_files_are_short():
    sizes = {name_of(file): len(file.read_text().splitlines()) for file in written_files()}
    assert {Path(name).suffix for name in sizes} == WRITTEN_KINDS
    assert {name for name, size in sizes.items() if size > MAX_FILE_LINES} == set()


def test_model_families_are_short():
    sizes = {
        name: len(file.read_text().splitlines())
        for file in package_files()
        if (name := name_of(file)).startswith("models/families/")
    }
    assert len(sizes) > 30
    assert {name: size for name, size in sizes.items() if size > MAX_FAMILY_LINES} == {}


def test_functions_are_short():
    sizes = {name: lines for file in package_files() for name, lines in functions(file)}
    for name, lines in sizes.items():
        if lines > SOFT_FUNCTION_LINES:
            print(f"{lines} lines: {name}")  # noqa: T201 - the report, seen with pytest -s
    too_long = {
        name
        for name, lines in sizes.items()
        if lines > MAX_FUNCTION_LINES and not name.startswith(DATA_FOLDER)
    }
    assert too_long - LONG_FUNCTIONS.keys() == set()


def test_no_global_statements():
    found = {
        f"{name_of(file)}:{name}"
        for file in package_files()
        for node in ast.walk(parse(file))
        if isinstance(node, ast.Global)
        for name in node.names
    }
    assert found == GLOBALS


def test_environment_is_read_in_one_place():
    readers = {
        name_of(file)
        for file in package_files()
        for node in ast.walk(parse(file))
        if isinstance(node, ast.Attribute)
        and node.attr in {"environ", "getenv", "putenv"}
        and isinstance(node.value, ast.Name)
        and node.value.id == "os"
    }
    assert readers <= ENVIRONMENT_FILES


def test_assertions_have_a_message():
    """`assert` is for bugs. Its message is the statement that should be true."""
    bare = [
        f"{name_of(file)}:{node.lineno}"
        for file in package_files()
        for node in ast.walk(parse(file))
        if isinstance(node, ast.Assert) and node.msg is None
    ]
    assert bare == []


def test_init_files_are_empty():
    full = [
        name_of(file)
        for file in package_files()
        if file.name == "__init__.py" and file.read_text() != ""
    ]
    assert full == ["ostinato/__init__.py"]


def test_a_module_says_what_it_is_and_what_it_offers():
    modules = {name_of(file): parse(file) for file in package_files()}
    without_docstring = [
        name
        for name, module in modules.items()
        if not name.endswith("__init__.py") and ast.get_docstring(module) is None
    ]
    without_names = [
        name
        for name, module in modules.items()
        if not name.endswith(("__init__.py", "__main__.py")) and "__all__" not in assigned(module)
    ]
    assert (without_docstring, without_names) == ([], [])


def test_a_module_offers_the_names_that_other_modules_import():
    modules = {module_of(file): parse(file) for file in package_files()}
    missing = {
        f"{node.module}.{alias.name}"
        for importer in modules.values()
        for node in ast.walk(importer)
        if isinstance(node, ast.ImportFrom) and (module := modules.get(node.module or ""))
        for alias in node.names
        if "__all__" in assigned(module) and alias.name not in offered(module)
    }
    assert sorted(missing) == []


def module_of(file: Path) -> str:
    parts = file.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts if parts[0] == "ostinato" else ("ostinato", *parts))


def offered(module: ast.Module) -> tuple[str, ...]:
    """The names in `__all__`."""
    (value,) = (
        node.value
        for node in module.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    )
    return ast.literal_eval(value)


def assigned(module: ast.Module) -> set[str]:
    """Names that are assigned at the top level."""
    return {
        target.id
        for node in module.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }


def test_public_names():
    assert ostinato.__all__ == (
        "LLM",
        "AsyncEngine",
        "LoRARequest",
        "SamplingParams",
        "StructuredOutputsParams",
        "__version__",
    )
    assert ostinato.SamplingParams(max_tokens=3).max_tokens == 3
    with pytest.raises(AttributeError, match="no attribute 'Nothing'; it has LLM, AsyncEngine"):
        _ = ostinato.Nothing


def test_version_is_stated_once_more_in_pyproject():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["version"] == ostinato.__version__


def test_every_package_is_listed():
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    there = {
        f"ostinato.{file.parent.relative_to(ROOT).as_posix().replace('/', '.')}"
        for folder in FOLDERS
        for file in (ROOT / folder).rglob("__init__.py")
    }
    assert sorted(listed) == sorted({"ostinato", *there})


def test_every_folder_with_modules_is_a_package():
    folders = {file.parent for file in package_files()}
    assert [name_of(folder) for folder in folders if not (folder / "__init__.py").is_file()] == []
