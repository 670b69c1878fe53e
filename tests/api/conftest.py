"""An application in this process with a scripted engine behind it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import pytest
from litestar.testing import TestClient

from ostinato.api.http.api_keys import with_keys
from ostinato.api.server.app import create_app
from ostinato.api.service.service import Service
from ostinato.conf.schema import SamplingSection
from ostinato.conf.sections.lora_schema import LoraConfig
from ostinato.conf.sections.server_schema import ServerConfig
from ostinato.runtime.text.tokenizer import Tokenizer
from tests.api.fake_client import HELLO, FakeClient
from tests.runtime.text import tokenizer_builders

TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'user' and m.content == 'refuse me' %}"
    "{{ raise_exception('no') }}{% endif %}"
    "<|begin|>{{ m.role }}{{ ' ' + m.name if m.name }}\n{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|begin|>assistant\n{{ prefix or '' }}{% endif %}"
)


@pytest.fixture(scope="session")
def tokenizer_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model's directory for the processes that prepare requests."""
    directory = tmp_path_factory.mktemp("model")
    tokenizer_builders.byte_level_bpe().save(str(directory / "tokenizer.json"))
    (directory / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    return directory


@pytest.fixture(scope="session")
def tokenizer(tokenizer_directory: Path) -> Tokenizer:
    return Tokenizer.from_path(tokenizer_directory)


class App:
    """A test client, the fake engine behind it, and the service between them."""

    def __init__(self, engine: FakeClient, service: Service, http: TestClient[Any]) -> None:
        self.engine = engine
        self.service = service
        self.http = http

    def chat(self, **fields: object) -> Any:
        body = {"messages": [{"role": "user", "content": "Hi"}], **fields}
        return self.http.post("/v1/chat/completions", json=body)

    def complete(self, **fields: object) -> Any:
        return self.http.post("/v1/completions", json={"prompt": "Hi", **fields})


@pytest.fixture
def make_app(tokenizer: Tokenizer, tokenizer_directory: Path) -> Iterator[Callable[..., App]]:
    """Makes an `App`. Keyword arguments without a meaning here go to `FakeClient`."""
    with ExitStack() as stack:

        def make(
            script: Any = HELLO,
            *,
            server: ServerConfig | None = None,
            sampling: SamplingSection | None = None,
            lora: LoraConfig | None = None,
            **fields: Any,
        ) -> App:
            engine = FakeClient(script, **({"tokenizer": tokenizer} | fields))
            if engine.tokenizer is tokenizer:
                path = str(tokenizer_directory)
                engine.model = msgspec.structs.replace(engine.model, tokenizer=path)
            server = with_keys(server or ServerConfig())
            service = Service(engine, server, sampling or SamplingSection(), lora)
            service.admission.phase = None
            stack.callback(service.close)
            client = TestClient(create_app(service), raise_server_exceptions=False)
            return App(engine, service, stack.enter_context(client))

        yield make


@pytest.fixture
def app(make_app: Callable[..., App]) -> App:
    return make_app()
