"""Renders a chat template that came with a request, in a process with limits of time and memory.

Jinja's sandbox denies a template access to the machine, but it does not stop an endless loop or a
text of gigabytes. So `render_apart` starts `python -m ostinato.runtime.text.chat_template_process`
for each such request. Only that request fails.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from ostinato.runtime.errors import InvalidRequestError, StartupError
from ostinato.runtime.sandbox import Limits, SandboxError, SandboxProcess, call, serve
from ostinato.runtime.text.chat_template import ChatTemplate

__all__ = ("TemplateJob", "main", "render_apart")

LIMITS = Limits(cpu_s=2, wall_s=20.0, memory_bytes=512 << 20, answer_bytes=16 << 20)


class TemplateJob(msgspec.Struct, frozen=True, kw_only=True):
    """The arguments of `ChatTemplate` and its `render`."""

    source: str
    special_tokens: dict[str, str]
    messages: list[dict[str, Any]]
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    variables: dict[str, Any] = {}
    tools: list[dict[str, Any]] = []


class _Answer(msgspec.Struct, frozen=True, kw_only=True):
    text: str | None = None
    error: str = ""
    param: str | None = None


async def render_apart(
    source: str,
    special_tokens: Mapping[str, str],
    messages: Sequence[Mapping[str, Any]],
    *,
    add_generation_prompt: bool,
    continue_final_message: bool,
    variables: Mapping[str, Any] | None,
    tools: Sequence[Mapping[str, Any]] | None = None,
) -> str:
    """The text to continue; see `ChatTemplate.render`.

    Raises:
        InvalidRequestError: the template is not valid, refuses the messages, or takes more time or
            memory than it may.
    """
    job = TemplateJob(
        source=source,
        special_tokens=dict(special_tokens),
        messages=[dict(message) for message in messages],
        add_generation_prompt=add_generation_prompt,
        continue_final_message=continue_final_message,
        variables=dict(variables or {}),
        tools=[dict(tool) for tool in tools or ()],
    )
    process = SandboxProcess("ostinato.runtime.text.chat_template_process", LIMITS)
    try:
        out = await call(process, msgspec.json.encode(job))
    except SandboxError as error:
        raise InvalidRequestError(
            f"chat_template takes {error.reason.text}; make it simpler",
            param="chat_template",
            code="invalid_value",
        ) from error
    finally:
        process.close()
    answer = msgspec.json.decode(out, type=_Answer)
    if answer.text is None:
        raise InvalidRequestError(answer.error, param=answer.param, code="invalid_value")
    return answer.text


def _render(job: TemplateJob) -> _Answer:
    try:
        text = ChatTemplate(job.source, job.special_tokens).render(
            job.messages,
            add_generation_prompt=job.add_generation_prompt,
            continue_final_message=job.continue_final_message,
            variables=job.variables,
            tools=job.tools,
        )
    except StartupError as error:  # its remedy is meant for the operator of the server
        return _Answer(error=str(error).partition(";")[0], param="chat_template")
    except InvalidRequestError as error:
        message = str(error).replace("the model's chat template", "chat_template")
        return _Answer(error=message, param=error.param)
    return _Answer(text=text)


def _answer(job: bytes) -> bytes:
    return msgspec.json.encode(_render(msgspec.json.decode(job, type=TemplateJob)))


def main() -> int:
    """Answer jobs from standard input."""
    return serve(sys.argv[1:], lambda first: _answer)


if __name__ == "__main__":
    sys.exit(main())
