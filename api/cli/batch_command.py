"""`run batch INPUT OUTPUT`: answers a file of requests, without a server.

Each line is a request to the application of `run serve`, so it is checked and answered in the same
way. Lines that have an answer are skipped. So the same command continues after an interruption.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)

from ostinato.api.cli.batch_file import (
    BatchInput,
    BatchLine,
    BatchOutput,
    answered_line,
    refused_line,
)
from ostinato.conf.sections.server_schema import ServerConfig
from ostinato.runtime.client.client import EngineClient
from ostinato.runtime.errors import EngineDeadError

if TYPE_CHECKING:
    from litestar import Litestar

    from ostinato.api.service.service import Service
    from ostinato.conf.root import RunConfig

__all__ = ("batch",)

_MAX_BODY_MIB = 1024
# Beginnings of the paths that a batch may use. The paths for operators are not among them.
_PREFIXES = ("/v1/", "/v2/", "/score", "/rerank")
_FOR_OPERATORS = ("/v1/load_lora_adapter", "/v1/unload_lora_adapter")
_FORMS = "/v1/audio/"  # a line has a body of JSON, and these endpoints take forms


def batch(config: RunConfig, source: str, target: str) -> int:
    """Answer every request of `source` without an answer in `target`; returns the exit code.

    Raises:
        InvalidRequestError: a file cannot be read or written, two lines of `source` have the same
            custom_id, or `target` has lines that are not answers of a batch.
        StartupError: the engine cannot start.
        EngineDeadError: the engine ended, or a request got a 503 for another reason. The same
            command continues the batch.
    """
    client = EngineClient(config)
    app, service = _application(client, config)
    requests = BatchInput(Path(source), _urls(app))
    with BatchOutput(Path(target)) as output:
        todo = [line for line in requests.lines if not output.has(line)]
        run = _Run(client, app, service, output, num_skipped=len(requests.lines) - len(todo))
        if any(line.problem is None for line in todo):
            with asyncio.Runner() as runner:
                runner.run(run.answer(todo, config.batch.concurrency))
        else:
            for line in todo:
                run.refuse(line)
    sys.stderr.write(f"{run.summary}: {target}\n")
    return 0


class _Run:
    """One pass over a file."""

    def __init__(
        self,
        client: EngineClient,
        app: Litestar,
        service: Service,
        output: BatchOutput,
        *,
        num_skipped: int,
    ) -> None:
        self._client = client
        self._app = app
        self._service = service
        self._output = output
        self._num_skipped = num_skipped
        self._num_answered = 0
        self._num_failed = 0
        self._console = Console(stderr=True)

    @property
    def summary(self) -> str:
        """The numbers of lines that this run answered, and of those answered before, as a sentence.

        Every line that the run wrote is an answer. The answer of a line that could not be sent, and
        an answer with a status of 400 or more, is an error.
        """
        return (
            f"{self._num_answered} answered, {self._num_failed} of them with an error, "
            f"{self._num_skipped} were answered before"
        )

    def refuse(self, line: BatchLine) -> None:
        """Write an error answer for a line that cannot be sent."""
        self._write(refused_line(line), is_error=True)

    async def answer(self, todo: list[BatchLine], concurrency: int | None) -> None:
        """Start the engine and answer the lines, `concurrency` at a time."""
        try:
            with self._console.status("starting the engine") as status:
                await self._client.start(
                    lambda phase, seconds: status.update(
                        f"starting the engine: {phase} took {seconds:.1f} s"
                    )
                )
            self._service.admission.phase = None
            # Send twice the number of requests that can run, so that the engine never waits.
            at_once = concurrency or 2 * self._client.stats.max_num_seqs
            with self._progress() as progress:
                total = self._num_skipped + len(todo)
                task = progress.add_task("answering", total=total, failed=0)
                progress.advance(task, self._num_skipped)
                lines = iter(todo)
                workers = [
                    asyncio.create_task(self._work(lines, progress, task))
                    for _ in range(min(at_once, len(todo)))
                ]
                try:
                    await asyncio.gather(*workers)
                finally:
                    for worker in workers:
                        worker.cancel()
                    await asyncio.gather(*workers, return_exceptions=True)
        finally:
            await self._client.close()

    async def _work(self, lines: Iterator[BatchLine], progress: Progress, task: TaskID) -> None:
        for line in lines:
            if line.problem is None:
                await self._send(line)
            else:
                self.refuse(line)
            progress.update(task, advance=1, failed=self._num_failed)

    async def _send(self, line: BatchLine) -> None:
        from ostinato.api.cli.asgi_client import post_json

        answer = await post_json(self._app, line.url, line.body)
        if answer.status == 503:
            # The line is not the cause. It gets no answer, and the next run sends it again.
            raise EngineDeadError(f"the batch is not finished: {_message(answer.body)}")
        row = answered_line(line, answer.status, line.id, answer.body)
        self._write(row, is_error=answer.status >= 400)

    def _write(self, row: bytes, *, is_error: bool) -> None:
        """Write an answer and count it."""
        self._output.write(row)
        self._num_answered += 1
        self._num_failed += is_error

    def _progress(self) -> Progress:
        return Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[failed]} failed"),
            TimeRemainingColumn(),
            console=self._console,
        )


def _application(client: EngineClient, config: RunConfig) -> tuple[Litestar, Service]:
    from ostinato.api.server.app import create_app, make_service

    # A batch file needs no API keys, no limits and no store of replies.
    server = ServerConfig(max_body_mib=_MAX_BODY_MIB, response_store_mib=0)
    service = make_service(client, replace(config, server=server))
    return create_app(service), service


def _urls(app: Litestar) -> frozenset[str]:
    return frozenset(
        route.path
        for route in app.routes
        if "POST" in getattr(route, "methods", ())
        and "{" not in route.path
        and route.path.startswith(_PREFIXES)
        and route.path not in _FOR_OPERATORS
        and not route.path.startswith(_FORMS)
    )


def _message(body: bytes) -> str:
    try:
        return str(msgspec.json.decode(body)["error"]["message"])
    except (msgspec.MsgspecError, KeyError, TypeError):
        return body[:200].decode(errors="replace")
