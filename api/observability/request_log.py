"""The log line of a request, as text or as JSON."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from ostinato.runtime.process.log_format import FIELDS

__all__ = ("log_request",)

_LOG = logging.getLogger("ostinato.requests")


def log_request(reply_id: str, outcome: str, fields: Mapping[str, object]) -> None:
    """Write the log line of a request that has ended, without text of the prompt or the answer.

    As text it is `ID OUTCOME prompt=5 cached=0 output=3 ttft=12ms e2e=40ms …`, without the values
    that are not known. In JSON these values are null.
    """
    if not _LOG.isEnabledFor(logging.INFO):
        return
    words = [reply_id, outcome, *(_word(*item) for item in fields.items() if item[1] is not None)]
    extra = {FIELDS: {"message": "request", "request_id": reply_id, "outcome": outcome, **fields}}
    _LOG.info("%s", " ".join(words), extra=extra)


def _word(name: str, value: object) -> str:
    if name.endswith("_ms") and isinstance(value, float):
        return f"{name.removesuffix('_ms')}={value:.{0 if value >= 10 else 1}f}ms"
    return f"{name}={value}".replace(" ", "")
