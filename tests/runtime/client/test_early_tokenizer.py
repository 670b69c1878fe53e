"""`EarlyTokenizer` gives the tokenizer that the engine names, even if another was begun."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path

import pytest

from ostinato.conf.compose import load_config
from ostinato.runtime.client.early_tokenizer import EarlyTokenizer
from ostinato.runtime.errors import StartupError
from ostinato.runtime.text.tokenizer import Tokenizer

DEMO = str(Path(__file__).parents[3] / "models" / "demo")
MODEL = load_config().model


def get(early: EarlyTokenizer, path: str, *, begins: bool) -> Tokenizer | None:
    async def run() -> Tokenizer | None:
        if begins:
            early.begin()
        return await early.get(path)

    return asyncio.run(run())


@pytest.mark.parametrize("begins", [True, False])
@pytest.mark.parametrize("path", ["", DEMO, "owner/name"])
def test_the_engines_path_decides(path: str, begins: bool) -> None:
    found = get(EarlyTokenizer(dataclasses.replace(MODEL, path=path)), DEMO, begins=begins)
    assert found is not None
    assert found.encode("a block") == Tokenizer.from_path(DEMO).encode("a block")


def test_a_model_without_a_tokenizer_has_none() -> None:
    assert get(EarlyTokenizer(MODEL), "", begins=True) is None


@pytest.mark.parametrize("begins", [True, False])
def test_an_error_is_raised_where_the_tokenizer_is_needed(begins: bool) -> None:
    early = EarlyTokenizer(dataclasses.replace(MODEL, chat_template="no/such/file"))
    with pytest.raises(StartupError, match="no/such/file"):
        get(early, DEMO, begins=begins)


def test_a_missing_template_is_found_before_a_model_is_loaded() -> None:
    early = EarlyTokenizer(dataclasses.replace(MODEL, chat_template="no/such/file"))
    with pytest.raises(StartupError, match=r"model\.chat_template: there is no file no/such/file"):
        early.check_template()
    EarlyTokenizer(dataclasses.replace(MODEL, chat_template=__file__)).check_template()
    EarlyTokenizer(MODEL).check_template()
