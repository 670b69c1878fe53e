"""Requests made up from the OpenAPI document against a real server: no 5xx, no answer that the
document does not describe.
"""

from __future__ import annotations

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis.checks import CheckFunction
from schemathesis.specs.openapi import checks

from tests.e2e.server_process import ServerProcess
from tests.models.minilm import minilm_directory

CHECKS: list[CheckFunction] = [
    schemathesis.checks.not_a_server_error,
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_schema_conformance,
]
# A made-up request rarely asks for little; a long answer would show nothing more.
LIMITS = ("sampling.max_tokens=4", "model.max_model_len=64", "scheduler.max_num_seqs=8")


@pytest.fixture(scope="module", params=["generates", "embeds"])
def server(request):
    overrides = list(LIMITS)
    if request.param == "embeds":
        overrides += [f"model.path={minilm_directory()}", "graphs.bundle=false"]
    with ServerProcess(*overrides) as server:
        yield server


def run(server: ServerProcess, max_examples: int) -> dict[str, set[int]]:
    """Statuses that each operation gave."""
    schema = schemathesis.openapi.from_url(f"{server.url}/schema/openapi.json")
    seen: dict[str, set[int]] = {}
    for result in schema.get_all_operations():
        operation = result.ok()
        statuses = seen.setdefault(f"{operation.method.upper()} {operation.path}", set())

        @settings(
            max_examples=max_examples,
            deadline=None,
            derandomize=True,
            database=None,
            suppress_health_check=list(HealthCheck),
        )
        @given(case=operation.as_strategy())
        def check(case, statuses=statuses):
            response = case.call(timeout=120)
            statuses.add(response.status_code)
            case.validate_response(response, checks=CHECKS)

        check()
    return seen


def covers(server: ServerProcess, seen: dict[str, set[int]]) -> None:
    """What the document lists was asked, and most of it could be answered."""
    assert len(seen) >= 20
    assert {"POST /v1/embeddings", "POST /v1/chat/completions", "GET /health"} <= seen.keys()
    assert not any(status >= 500 for statuses in seen.values() for status in statuses)
    assert {
        operation for operation in seen if operation.startswith("GET") and 200 in seen[operation]
    }
    assert httpx.get(f"{server.url}/health", timeout=60).status_code == 200


def test_made_up_requests(server):
    covers(server, run(server, 8))


@pytest.mark.slow
def test_many_made_up_requests(server):
    seen = run(server, 200)
    covers(server, seen)
    answered = {operation for operation in seen if 200 in seen[operation]}
    assert {"POST /tokenize", "POST /v1/embeddings", "POST /v1/rerank"} <= answered
