"""The documents list the fields of requests, refused fields, endpoints and metrics."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from ostinato.api.base.unsupported_fields import UNSUPPORTED
from ostinato.api.schemas.chat_completions import ChatCompletionRequest
from ostinato.api.schemas.conversation import Message
from ostinato.api.schemas.generation_fields import StreamOptions
from ostinato.api.schemas.text_completions import CompletionRequest
from ostinato.api.schemas.tokenize import DetokenizeRequest, TokenizeRequest

DOCS = Path(__file__).parents[2] / "docs"
TEXT = "".join(
    (DOCS / name).read_text(encoding="utf-8") for name in ("endpoints.md", "parameters.md")
)
METRICS = (DOCS / "metrics.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "schema",
    [
        ChatCompletionRequest,
        CompletionRequest,
        DetokenizeRequest,
        Message,
        StreamOptions,
        TokenizeRequest,
    ],
    ids=lambda schema: schema.__name__,
)
def test_every_field(schema):
    names = [field.name for field in msgspec.structs.fields(schema)]
    assert [name for name in names if f"`{name}`" not in TEXT] == []


def test_every_metric(app):
    families = text_string_to_metric_families(app.http.get("/metrics").text)
    names = {family.name + ("_total" if family.type == "counter" else "") for family in families}
    # The library adds a `_created` time to each counter and histogram.
    names = {name for name in names if not name.endswith("_created")}
    assert len(names) > 15
    assert [name for name in sorted(names) if f"`{name}" not in METRICS] == []


def test_every_endpoint(app):
    paths = app.http.get("/schema/openapi.json").json()["paths"]
    assert [path for path in paths if path.replace("{name}", "{id}") not in TEXT] == []


def test_every_field_that_is_refused_by_name():
    rows = TEXT[TEXT.index("## Refused by name") :]
    assert [name for name in UNSUPPORTED if f"`{name}`" not in rows] == []
    for name, field in UNSUPPORTED.items():
        (row,) = [row for row in rows.splitlines() if row.startswith("|") and f"`{name}`" in row]
        assert field.missing_feature in row
