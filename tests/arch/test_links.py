"""The links, headings, paths, configuration keys and commands that documents name exist.

The numbers of files in CONTRIBUTING.md's table "Where to add what" are right.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ostinato.commands import COMMANDS
from ostinato.conf.describe import describe_keys, describe_sections
from tests.arch.tree import FOLDERS, ROOT

DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("models/demo/*.md")])
SOURCE_PATH = re.compile(rf"(?:{'|'.join((*FOLDERS, 'ostinato', 'tests', 'docs'))})/[\w.<>*/-]*")

PYTHON_M = re.compile(r"\bpython -m (ostinato(?:\.[\w<>]+)*)")


def name_of(document: Path) -> str:
    return str(document.relative_to(ROOT))


def anchors(document: Path) -> set[str]:
    """The anchors that GitHub makes of headings."""
    headings = re.findall(r"^#+ (.*)$", document.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}


def source_paths(text: str) -> list[str]:
    """Every `path` in backticks that begins with a folder of this repository."""
    quoted = re.findall(r"`([^`\n]+)`", text)
    return [path for path in quoted if SOURCE_PATH.fullmatch(path)]


def is_there(path: str) -> bool:
    """Whether a path exists. A path with `<name>` or `*` exists if any file fits it."""
    return any(ROOT.glob(re.sub(r"<\w+>", "*", path).rstrip("/")))


def is_program(module: str) -> bool:
    """Whether `python -m` of a module, or of any module that fits one with `<name>`, runs it."""
    path = re.sub(r"<\w+>", "*", "/".join(module.split(".")[1:] or ["ostinato"]))
    files = [*ROOT.glob(f"{path}.py"), *ROOT.glob(f"{path}/__main__.py")]
    return any('if __name__ == "__main__":' in file.read_text(encoding="utf-8") for file in files)


def quoted_keys(text: str) -> set[str]:
    """Every `section.key`, alone in backticks or before the `=` of a command."""
    sections = "|".join(describe_sections())
    key = rf"(?<![\w./-])(?:{sections})\.[a-z_]+"
    return set(re.findall(rf"`({key})`", text)) | set(re.findall(rf"({key})(?==)", text))


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_links_lead_somewhere(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    for link in re.findall(r"\]\((?!\w+:)([^)\s]+)\)", text):
        name, _, anchor = link.partition("#")
        target = (document.parent / name).resolve() if name else document
        assert target.exists(), f"{link}: no such file"
        if anchor:
            assert anchor in anchors(target), f"{link}: no such heading"


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_source_paths_exist(document: Path) -> None:
    if document.name == "CHANGELOG.md":
        return  # It also names files of earlier versions.
    paths = source_paths(document.read_text(encoding="utf-8"))
    missing = [path for path in paths if not is_there(path)]
    assert missing == [], f"{name_of(document)} names files that do not exist: correct the page"


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_keys_of_the_configuration_exist(document: Path) -> None:
    unknown = quoted_keys(document.read_text(encoding="utf-8")) - describe_keys().keys()
    assert unknown == set()


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_commands_exist(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    blocks = "\n".join(re.findall(r"```bash\n(.*?)```", text, re.DOTALL))
    named = set(re.findall(r"`run ([a-z]+)", text)) | set(
        re.findall(r"^run ([a-z]+)", blocks, re.MULTILINE)
    )
    assert named - COMMANDS.keys() == set()


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_commands_of_modules_run_something(document: Path) -> None:
    named = set(PYTHON_M.findall(document.read_text(encoding="utf-8")))
    assert [module for module in named if not is_program(module)] == []


def test_the_documents_name_keys_and_commands() -> None:
    text = "".join(document.read_text(encoding="utf-8") for document in DOCUMENTS)
    assert {"scheduler.itl_target_ms", "model.path"} <= quoted_keys(text)
    assert len(quoted_keys(text)) > 80
    assert len(set(PYTHON_M.findall(text))) > 20


def test_where_to_add_what_counts_its_files() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    section = text[text.index("## Where to add what") : text.index("## Commits")]
    rows = re.findall(r"^\| (an? .+?) \| (\d+) \| (.+) \|$", section, re.MULTILINE)
    assert len(rows) > 10
    # A row names each file that it counts. Optional files and other remarks follow a semicolon.
    files = {
        what: re.findall(r"`(?:[\w./<>-]+\.\w+)`", where.split(";")[0]) for what, _, where in rows
    }
    assert {what: len(files[what]) for what in files} == {
        what: int(count) for what, count, _ in rows
    }
