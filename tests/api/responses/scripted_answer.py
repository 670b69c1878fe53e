"""What tests of `/v1/responses` share: a chat template, an answer of the engine, a request."""

from __future__ import annotations

from typing import Any

from ostinato.runtime.types.outputs import FinishReason
from tests.api.fake_client import scripted

__all__ = ("SCRIPT", "TEMPLATE", "post", "prompt")

TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}[{{ m.role }}]{{ m.content }}"
    "{% for c in m.tool_calls %}{{ c.function.name }}{% endfor %}{% endfor %}</think><tool_call>"
)
SCRIPT = [
    scripted("<think>hm", [5], num_cached_tokens=2),
    scripted("</think>So: ", [6], num_cached_tokens=2),
    scripted(
        '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>', [7], num_cached_tokens=2
    ),
    scripted("", [8], finish_reason=FinishReason.stop, num_cached_tokens=2),
]


def post(app: Any, **fields: object) -> Any:
    return app.http.post("/v1/responses", json={"input": "Hi", **fields})


def prompt(app: Any) -> str:
    return app.engine.tokenizer.decode(app.engine.requests[-1][0], skip_special_tokens=False)
