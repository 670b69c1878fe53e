"""Requests that schemathesis makes up from an OpenAPI document, and checks of the answers."""

from __future__ import annotations

from typing import Any

import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis.specs.openapi import checks

from tests.waiting import PATIENCE_S

__all__ = ("ask_all",)

CHECKS = [
    schemathesis.checks.not_a_server_error,
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_schema_conformance,
]


def ask_all(url: str, max_examples: int) -> dict[str, set[int]]:
    """Send made-up requests to every operation; returns operation -> statuses of its answers.

    Raises:
        schemathesis.errors.FailureGroup: an answer has a status of 5xx, or the document does not
            describe it.
    """
    schema = schemathesis.openapi.from_url(f"{url}/schema/openapi.json")
    return {
        f"{operation.method.upper()} {operation.path}": _ask(operation, max_examples)
        for operation in (result.ok() for result in schema.get_all_operations())
    }


def _ask(operation: Any, max_examples: int) -> set[int]:
    statuses: set[int] = set()

    @settings(
        max_examples=max_examples,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy())
    def ask(case: Any) -> None:
        # A made-up model gives a 404, which tests little. Only small bodies keep it.
        if isinstance(case.body, dict) and len(case.body) > 2:
            case.body.pop("model", None)
        if isinstance(case.body, dict):
            case.body.pop("deadline_ms", None)  # a short deadline correctly gives a 504
        response = case.call(timeout=PATIENCE_S)
        statuses.add(response.status_code)
        case.validate_response(response, checks=CHECKS)

    ask()
    return statuses
