"""A server of the bundled model that several modules share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.e2e.server_process import ServerProcess


@pytest.fixture(scope="session")
def server() -> Iterator[ServerProcess]:
    """A server with default settings, one for all modules of a test process.

    Tests may kill its engine, which starts again. A module with other settings, or one that ends
    its server, defines a fixture of this name.
    """
    with ServerProcess("server.max_body_mib=4") as process:
        yield process
