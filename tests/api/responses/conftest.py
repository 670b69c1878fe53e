"""An app whose engine gives a scripted answer, for the tests of `/v1/responses`."""

from __future__ import annotations

from typing import Any

import pytest

from ostinato.conf.sections.server_schema import ServerConfig
from ostinato.runtime.text.chat_template import ChatTemplate
from ostinato.runtime.text.tokenizer import Tokenizer
from tests.api.responses.scripted_answer import SCRIPT, TEMPLATE
from tests.runtime.text import tokenizer_builders


@pytest.fixture
def make(make_app):
    def make(script: Any = SCRIPT, **server: Any) -> Any:
        return make_app(
            script,
            tokenizer=Tokenizer(
                tokenizer_builders.byte_level_bpe(), {}, ChatTemplate(TEMPLATE, {})
            ),
            max_model_len=4000,
            server=ServerConfig(**server),
        )

    return make


@pytest.fixture
def app(make):
    return make()
