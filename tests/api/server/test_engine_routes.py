"""The endpoints that drain engines and reload weights, with a scripted engine."""

from __future__ import annotations

import pytest

from ostinato.conf.sections.server_schema import ServerConfig
from tests.api.answers import error_of

PATHS = ("/engines/0/drain", "/engines/0/resume", "/reload_weights")


@pytest.mark.parametrize("path", PATHS)
def test_they_are_refused_unless_they_are_switched_on(app, path: str) -> None:
    response = app.http.post(path)
    assert response.status_code == 403
    assert "server.admin=true" in error_of(response)["message"]


def test_they_reach_the_engine(make_app) -> None:
    app = make_app(server=ServerConfig(admin=True))
    assert app.http.post("/engines/0/resume").json() == {"success": True}
    assert app.http.post("/reload_weights").json()["seconds"] >= 0
    refused = app.http.post("/engines/0/drain")
    assert (refused.status_code, "no other engine" in refused.text) == (409, True)


@pytest.mark.parametrize(
    "path",
    [
        "/engines/0/drain?timeout_s=-1",
        "/engines/0/drain?timeout_s=nan",
        "/reload_weights?timeout_s=1e9",
        "/reload_weights?timeout_s=soon",
    ],
)
def test_a_wrong_timeout_is_refused(make_app, path: str) -> None:
    response = make_app(server=ServerConfig(admin=True)).http.post(path)
    assert response.status_code == 400
    assert error_of(response)["message"]


def test_they_wait_for_the_start(make_app) -> None:
    app = make_app(server=ServerConfig(admin=True))
    app.service.admission.phase = "loading"
    for path in PATHS:
        assert app.http.post(path).status_code == 503
