"""A chat template that came with a request, rendered in a process of its own.

The sandbox keeps a template from the machine, but not from a loop without end or a text of
gigabytes. So `render_apart` starts `python -m ostinato.runtime.template_process`, which gives
itself limits of time and memory, and kills it when it takes too long: what fails is that request
alone.
"""

from __future__ import annotations

import asyncio
import resource
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from ostinato.runtime.chat_template import ChatTemplate
from ostinato.runtime.errors import InvalidRequestError, StartupError

__all__ = ("TemplateJob", "main", "render_apart")

CPU_SECONDS = 2
WALL_SECONDS = 20.0  # a busy machine gives a process its two seconds late
MEMORY_BYTES = 512 << 20
MAX_TEXT_BYTES = 16 << 20


class TemplateJob(msgspec.Struct, frozen=True, kw_only=True):
    """What `ChatTemplate` and its `render` take."""

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
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "ostinato.runtime.template_process"),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
        start_new_session=True,  # a Ctrl-C in the terminal is not for it
    )
    try:
        out, _ = await asyncio.wait_for(
            process.communicate(msgspec.json.encode(job)), timeout=WALL_SECONDS
        )
    except TimeoutError:
        out = b""
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode != 0 or not out:
        raise InvalidRequestError(
            f"chat_template takes more than {CPU_SECONDS} s, {MEMORY_BYTES >> 20} MiB or "
            f"{MAX_TEXT_BYTES >> 20} MiB of text; make it simpler",
            param="chat_template",
            code="invalid_value",
        )
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
    except StartupError as error:  # its remedy is for whoever starts a server
        return _Answer(error=str(error).partition(";")[0], param="chat_template")
    except InvalidRequestError as error:
        message = str(error).replace("the model's chat template", "chat_template")
        return _Answer(error=message, param=error.param)
    return _Answer(text=text)


def main() -> int:
    """Read one job from standard input, write its answer to standard output."""
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    out = msgspec.json.encode(
        _render(msgspec.json.decode(sys.stdin.buffer.read(), type=TemplateJob))
    )
    if len(out) > MAX_TEXT_BYTES:
        return 1
    sys.stdout.buffer.write(out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
