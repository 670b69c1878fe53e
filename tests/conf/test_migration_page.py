"""docs/migrating-from-vllm.md names all arguments in `ARGUMENTS`, and the keys that they set."""

from __future__ import annotations

import re

from ostinato.conf.arguments.engine_arguments import ARGUMENTS
from tests.arch.tree import ROOT

PAGE = (ROOT / "docs/migrating-from-vllm.md").read_text(encoding="utf-8")


def flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def test_every_argument_with_a_key_has_a_row_with_that_key() -> None:
    rows = dict(re.findall(r"^\| `(--[a-z-]+)` \| `([a-z_.]+)` \|", PAGE, re.MULTILINE))
    assert rows == {flag(name): each.setting for name, each in ARGUMENTS.items() if each.setting}


def test_every_argument_that_is_refused_is_named() -> None:
    refused = [flag(name) for name, each in ARGUMENTS.items() if not each.setting]
    assert [name for name in refused if f"`{name}`" not in PAGE] == []


def test_the_page_names_no_other_flag() -> None:
    section = PAGE[PAGE.index("## Arguments and flags") : PAGE.index("## Python")]
    known = {flag(name) for name in ARGUMENTS} | {"--help", "--config-dir"}
    assert set(re.findall(r"`(--[a-z-]+)`", section)) - known == set()
