"""The OpenAPI document: its references resolve; it describes bodies, errors and streams."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

import pytest

from ostinato.api.server import schema_page
from ostinato.runtime.types.engine_info import ServedTask


@pytest.fixture
def document(app):
    return app.http.get("/schema/openapi.json").json()


def references(value):
    if isinstance(value, dict):
        for key, one in value.items():
            if key == "$ref" and isinstance(one, str):
                yield one
            else:
                yield from references(one)
    elif isinstance(value, list):
        for one in value:
            yield from references(one)


def resolve(document, reference: str):
    place = document
    for part in reference.removeprefix("#/").split("/"):
        place = place[part.replace("~1", "/").replace("~0", "~")]
    return place


def operations(document):
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            yield f"{method} {path}", operation


def test_every_reference_leads_somewhere(document):
    found = list(references(document))
    assert len(found) > 100
    for reference in found:
        assert isinstance(resolve(document, reference), dict), reference


def test_every_operation_says_what_it_takes_and_answers(document):
    names = [operation["operationId"] for _, operation in operations(document)]
    assert len(set(names)) == len(names)
    for name, operation in operations(document):
        assert {"200", "500"} <= operation["responses"].keys(), name
        for status, response in operation["responses"].items():
            assert response["content"], (name, status)
        if name.startswith("post /v1/") and not name.endswith("/cancel"):
            (content,) = operation["requestBody"]["content"].values()
            body = content["schema"]
            assert body["additionalProperties"] is False, name
            assert {"400", "404", "413", "415", "429", "503"} <= operation["responses"].keys()


def test_errors_are_described_as_they_are(document, app):
    error = app.http.post("/v1/embeddings", json={}).json()["error"]
    described = document["paths"]["/v1/embeddings"]["post"]["responses"]["400"]
    schema = described["content"]["application/json"]["schema"]
    detail = resolve(document, schema["properties"]["error"]["$ref"])
    assert error.keys() == detail["properties"].keys()
    assert set(detail["required"]) <= error.keys()


def test_streams_are_described(document):
    for path in ("/v1/chat/completions", "/v1/completions", "/v1/messages"):
        content = document["paths"][path]["post"]["responses"]["200"]["content"]
        assert content.keys() == {"application/json", "text/event-stream"}


def test_every_type_of_event_is_described(document):
    content = document["paths"]["/v1/responses"]["post"]["responses"]["200"]["content"]
    event = content["text/event-stream"]["schema"]
    kinds = event["properties"]["data"]["contentSchema"]["anyOf"]
    types = [resolve(document, kind["$ref"])["properties"]["type"]["enum"] for kind in kinds]
    assert ["response.output_text.delta"] in types
    assert len({name for (name,) in types}) == len(kinds) >= 16


def test_it_is_there_whatever_is_served(make_app):
    app = make_app((), tasks=(ServedTask.embed,), embedding_size=2)
    assert app.http.get("/schema/openapi.json").status_code == 200


def test_the_document_is_made_once_and_not_on_the_event_loop(app, monkeypatch):
    on_a_loop = []
    make = schema_page._make

    def noting(application):
        on_a_loop.append(asyncio._get_running_loop() is not None)
        return make(application)

    monkeypatch.setattr(schema_page, "_make", noting)
    with ThreadPoolExecutor(4) as clients:
        replies = list(clients.map(app.http.get, ["/schema", "/schema/openapi.json"] * 2))
    assert [reply.status_code for reply in replies] == [200] * 4
    assert on_a_loop == [False]
    assert replies[0].content == replies[2].content
    assert replies[1].headers["content-type"] == "application/vnd.oai.openapi+json"


def test_other_paths_of_the_document_are_unknown(app):
    for name in ("openapi.yaml", "openapi.yml", "swagger"):
        assert app.http.get(f"/schema/{name}").status_code == 404
