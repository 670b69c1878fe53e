"""Fixtures that several modules share: a server of the bundled model, and two clients of it.

The clients are the packages `openai` and `anthropic`.
"""

from __future__ import annotations

from collections.abc import Iterator

import anthropic
import openai
import pytest

from tests.e2e.server_process import ServerProcess
from tests.waiting import PATIENCE_S


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server with small settings and a body limit of 4 MiB, shared by all modules of a process.

    Its limits for slow clients are `PATIENCE_S`, the longest time that a test waits.

    Tests may kill its engine, which starts again. A module that needs other settings, or that ends
    its server, defines its own fixture `server`.
    """
    with ServerProcess(
        "server.max_body_mib=4",
        f"server.header_timeout_s={PATIENCE_S}",
        f"server.body_timeout_s={PATIENCE_S}",
        f"server.profile_dir={tmp_path_factory.mktemp('traces')}",
    ) as process:
        yield process


@pytest.fixture(scope="session")
def client(server: ServerProcess) -> Iterator[openai.OpenAI]:
    """OpenAI's client of the shared server. A module with its own server defines its own client."""
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=200) as one:
        yield one


@pytest.fixture(scope="session")
def claude(server: ServerProcess) -> Iterator[anthropic.Anthropic]:
    """Anthropic's client of the shared server. A module with its own server has its own client."""
    with anthropic.Anthropic(base_url=server.url, api_key="none", timeout=200) as one:
        yield one
