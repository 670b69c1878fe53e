"""The load client: a process that sends a job's requests and times the answers.

    python -m ostinato.benchmarks.load.load_client < job.json

It reads one `LoadJob` from standard input and writes `LoadProgress` and one `LoadReport`, a line of
JSON each. A request's times count from the moment at which it should have been sent. So if the
server or the client falls behind, the waits of later requests are part of their latency (this
avoids "coordinated omission", a term of Gil Tene). A timer measures how late the client itself is.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import aiohttp
import msgspec

from ostinato.benchmarks.load.job import LoadJob, LoadProgress, LoadReport, RequestTimes
from ostinato.runtime.file_limit import raise_file_limit

__all__ = ("LoadClient", "run_job")

# Token ids, text, or the messages of a chat.
_Prompt = list[int] | str | list[dict[str, Any]]

_TICK_S = 0.01
_PROGRESS_S = 0.5
_MAX_ERROR = 300  # characters of an answer that are kept


class _TokenDetails(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _TokenDetails | None = None


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    token_ids: list[int] | None = None
    finish_reason: str | None = None


class _Chunk(msgspec.Struct):
    id: str = ""
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


_decode_chunk = msgspec.json.Decoder(_Chunk).decode
_encode = msgspec.json.Encoder().encode


class _AnswerError(Exception):
    """The answer is an error: (status word, the server's message)."""


class _Answer:
    """One streamed answer."""

    def __init__(self, times: RequestTimes, now: Callable[[], float]) -> None:
        self.times = times
        self.text: list[str] = []
        self.token_ids: list[int] = []
        self.ended = False
        self._now = now
        self._buffer = b""
        self._num_counted = 0

    def feed(self, data: bytes) -> None:
        """Process bytes that have just arrived. Raises _AnswerError if they are an error."""
        now = self._now()
        # Not `data` alone: "\r" can be the last byte of one part, and "\n" the first of the next.
        self._buffer = (self._buffer + data).replace(b"\r\n", b"\n")
        *events, self._buffer = self._buffer.split(b"\n\n")
        has_output = False
        for payload in _payloads(events):
            if payload == b"[DONE]":
                self.ended = True
                continue
            try:
                chunk = _decode_chunk(payload)
            except msgspec.DecodeError as error:
                raise _AnswerError("broken", f"{error}: {payload[:_MAX_ERROR]!r}") from error
            if chunk.error is not None:
                raise _AnswerError("error", str(chunk.error)[:_MAX_ERROR])
            has_output |= self._take(chunk)
        if has_output:
            self.times.chunk_s.append(now)

    def _take(self, chunk: _Chunk) -> bool:
        """Record a chunk; returns whether it has output."""
        times = self.times
        times.request_id = times.request_id or chunk.id
        if chunk.usage is not None:
            usage = chunk.usage
            times.num_prompt_tokens = usage.prompt_tokens or times.num_prompt_tokens
            times.num_output_tokens = usage.completion_tokens or times.num_output_tokens
            if usage.prompt_tokens_details is not None:
                times.num_cached_tokens = usage.prompt_tokens_details.cached_tokens or 0
        has_output = False
        for choice in chunk.choices:
            delta = choice.delta or _Delta()
            text = choice.text or delta.content or delta.reasoning_content
            has_output |= bool(text or choice.token_ids)
            self.text.append(text or "")
            self.token_ids += choice.token_ids or []
            times.finish_reason = choice.finish_reason or times.finish_reason
        self._num_counted += has_output
        return has_output

    def close(self) -> None:
        """Set the number of tokens of the complete answer.

        Raises _AnswerError if the answer is incomplete or empty.
        """
        times = self.times
        # Without usage and token ids, each piece of output counts as one token.
        times.num_output_tokens = (
            times.num_output_tokens or len(self.token_ids) or self._num_counted
        )
        if not self.ended and times.finish_reason is None:
            raise _AnswerError("broken", "the stream ended before the answer was complete")
        if not times.chunk_s:
            raise _AnswerError("broken", "the answer has no output")


def _payloads(events: list[bytes]) -> Iterator[bytes]:
    for event in events:
        for line in event.split(b"\n"):
            if line.startswith(b"data:"):
                yield line[5:].strip()


class LoadClient:
    """Sends one job's requests and times the answers.

    Args:
        job: what to send, where and when.
        report: called repeatedly with the progress.
    """

    def __init__(
        self, job: LoadJob, report: Callable[[LoadProgress], None] = lambda progress: None
    ) -> None:
        self._job = job
        self._report = report
        path = "/v1/chat/completions" if job.chat else "/v1/completions"
        self._endpoint = job.url.rstrip("/") + path
        self._times = [RequestTimes(status="not sent") for _ in job.requests]
        self._next: dict[int, list[int]] = {}
        for place, request in enumerate(job.requests):
            if request.after is not None:
                self._next.setdefault(request.after, []).append(place)
        self._heads = [place for place, one in enumerate(job.requests) if one.after is None]
        self._num_ok = self._num_failed = 0
        self._begin = 0.0
        self._given_up = asyncio.Event()
        self._send_lags: list[float] = []
        self._loop_lags: list[float] = []

    async def run(self) -> LoadReport:
        """Send all requests; returns when each has ended, with or without success."""
        job = self._job
        timeout = aiohttp.ClientTimeout(
            total=None, sock_connect=job.stall_timeout_s, sock_read=job.stall_timeout_s
        )
        connector = aiohttp.TCPConnector(limit=0, force_close=False)
        headers = {"Content-Type": "application/json", **job.headers}
        async with aiohttp.ClientSession(
            timeout=timeout, connector=connector, headers=headers, trust_env=False
        ) as session:
            self._session = session
            await self._warm_up()
            gc.collect()
            gc.freeze()
            cpu = time.process_time()
            began_at, self._begin = time.time(), time.perf_counter()
            watch = [asyncio.create_task(self._watch_lag()), asyncio.create_task(self._tell())]
            try:
                await (self._closed_loop() if job.concurrency else self._open_loop())
            finally:
                for task in watch:
                    task.cancel()
                await asyncio.gather(*watch, return_exceptions=True)
            duration = max((one.end_s for one in self._times), default=0.0)
            used = time.process_time() - cpu
        times = self._times
        if job.stop_after_s is not None and not self._given_up.is_set():
            # Requests that were not sent in time do not count.
            times = [one for one in times if one.status != "not sent"]
        return LoadReport(
            requests=times,
            began_at=began_at,
            duration_s=duration,
            loop_lag_ms=_lag_figures(self._loop_lags),
            send_lag_ms=_lag_figures(self._send_lags),
            cpu_share=used / max(self._now(), 1e-9),
        )

    def _now(self) -> float:
        return time.perf_counter() - self._begin

    async def _warm_up(self) -> None:
        """Send requests before the measurement, with at most 8 output tokens.

        Their prompts are the first prompts of the job, reversed. So the measured prompts are not in
        the prefix cache.
        """
        for request in self._job.requests[: self._job.num_warmups]:
            times = RequestTimes(status="")
            short = min(8, request.max_tokens)
            await self._send(
                self._prompt(None, request.prompt[::-1]), short, _Answer(times, self._now)
            )

    async def _open_loop(self) -> None:
        limit = self._job.max_concurrency
        places = None if limit is None else asyncio.Semaphore(limit)
        async with asyncio.TaskGroup() as group:
            for place in self._heads:
                at = self._job.requests[place].at_s or 0.0
                if not await self._sleep_until(at):
                    break
                group.create_task(self._conversation(place, at, places))

    async def _closed_loop(self) -> None:
        waiting = iter(self._heads)
        limit = self._job.stop_after_s
        stop_after = math.inf if limit is None else limit

        async def work() -> None:
            for place in waiting:
                if self._given_up.is_set() or self._now() > stop_after:
                    return
                await self._conversation(place, self._now(), None)

        async with asyncio.TaskGroup() as group:
            for _ in range(self._job.concurrency or 1):
                group.create_task(work())

    async def _sleep_until(self, at: float) -> bool:
        """Sleep until `at`. Returns False if the job was stopped meanwhile."""
        # Even if the time has passed, yield to the event loop, so that a burst of sends does not
        # delay reading.
        await asyncio.sleep(0)
        while (rest := at - self._now()) > 0:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._given_up.wait(), rest)
                return False
        return not self._given_up.is_set()

    async def _conversation(
        self, place: int, intended: float, places: asyncio.Semaphore | None
    ) -> None:
        """Send a request and the turns that follow it, each with the history before it."""
        history: _Prompt | None = None
        while True:
            prompt = self._prompt(history, self._job.requests[place].prompt)
            self._send_lags.append(self._now() - intended)
            async with places or contextlib.nullcontext():
                answer = await self._measure(place, prompt, intended)
            following = self._next.get(place)
            if answer is None or not following:
                return
            history = self._with_reply(prompt, answer)
            (place,) = following
            intended = self._now() + self._job.requests[place].think_s
            if not await self._sleep_until(intended):
                return

    def _prompt(self, history: _Prompt | None, new: list[int] | str) -> _Prompt:
        """The prompt to send: ids, text, or for chat the messages so far."""
        if self._job.chat:
            return [*(history or []), {"role": "user", "content": new}]  # type: ignore[list-item]
        return new if history is None else history + new  # type: ignore[operator]

    def _with_reply(self, prompt: _Prompt, answer: _Answer) -> _Prompt:
        text = "".join(answer.text)
        if self._job.chat:
            return [*prompt, {"role": "assistant", "content": text}]  # type: ignore[list-item]
        if isinstance(prompt, str):
            return prompt + text
        # If the server sends no token ids, ids of the prompt are repeated to get the right length.
        count = answer.times.num_output_tokens
        return prompt + (answer.token_ids or [prompt[k % len(prompt)] for k in range(count)])  # type: ignore[operator]

    async def _measure(self, place: int, prompt: _Prompt, intended: float) -> _Answer | None:
        """Send one request and record its outcome; returns the answer, or None for a failure."""
        times = self._times[place]
        times.intended_s, times.sent_s = intended, self._now()
        answer = _Answer(times, self._now)
        max_tokens = self._job.requests[place].max_tokens
        times.status, times.error = await self._send(prompt, max_tokens, answer)
        times.end_s = self._now()
        if not times.num_prompt_tokens and prompt and isinstance(prompt[0], int):
            times.num_prompt_tokens = len(prompt)  # the server has not reported it
        if times.status == "ok":
            self._num_ok += 1
            return answer
        self._num_failed += 1
        if not self._num_ok and self._num_failed >= self._job.give_up_after:
            self._given_up.set()
        return None

    async def _send(
        self, prompt: _Prompt, max_tokens: int, answer: _Answer
    ) -> tuple[str, str | None]:
        """Send one request; returns (status, the error or None)."""
        body = self._body(prompt, max_tokens)
        try:
            async with self._session.post(
                self._endpoint, data=body, allow_redirects=False
            ) as reply:
                if 300 <= reply.status < 400:
                    return "redirected", f"{reply.status} to {reply.headers.get('Location', '?')}"
                if reply.status != 200:
                    text = (await reply.content.read(_MAX_ERROR)).decode(errors="replace")
                    return f"http {reply.status}", text
                async for data in reply.content.iter_any():
                    answer.feed(data)
                answer.close()
        except _AnswerError as error:
            status, text = error.args
            return status, text
        except TimeoutError:
            return "stalled", f"no byte for {self._job.stall_timeout_s:g} s"
        except aiohttp.ClientConnectorError as error:
            return "refused", str(error)[:_MAX_ERROR]
        except (aiohttp.ClientError, OSError, ValueError) as error:
            return "broken", f"{type(error).__name__}: {error}"[:_MAX_ERROR]
        return "ok", None

    def _body(self, prompt: _Prompt, max_tokens: int) -> bytes:
        job = self._job
        fields: dict[str, Any] = {
            "model": job.model,
            "max_tokens": max_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        fields["messages" if job.chat else "prompt"] = prompt
        if job.return_token_ids:
            fields["return_token_ids"] = True
        return _encode(fields | job.body)

    async def _watch_lag(self) -> None:
        while True:
            before = time.perf_counter()
            await asyncio.sleep(_TICK_S)
            self._loop_lags.append(time.perf_counter() - before - _TICK_S)

    async def _tell(self) -> None:
        while True:
            await asyncio.sleep(_PROGRESS_S)
            tokens = sum(len(one.chunk_s) for one in self._times)
            self._report(LoadProgress(self._num_ok + self._num_failed, self._num_failed, tokens))


def _lag_figures(lags: list[float]) -> dict[str, float]:
    values = sorted(1000 * max(0.0, lag) for lag in lags) or [0.0]
    return {
        "p50": round(_percentile(values, 50), 3),
        "p99": round(_percentile(values, 99), 3),
        "max": round(values[-1], 3),
    }


def _percentile(ascending: list[float], q: float) -> float:
    """The percentile of `report.statistics` without numpy, which this client does not import."""
    place = (len(ascending) - 1) * q / 100
    low = math.floor(place)
    high = min(low + 1, len(ascending) - 1)
    return ascending[low] + (ascending[high] - ascending[low]) * (place - low)


def run_job(job: LoadJob, report: Callable[[LoadProgress], None]) -> LoadReport:
    """Run a job in this process, on uvloop where there is one."""
    try:
        import uvloop

        factory = uvloop.new_event_loop
    except ImportError:
        factory = None
    with asyncio.Runner(loop_factory=factory) as runner:

        async def run() -> LoadReport:
            return await LoadClient(job, report).run()

        return runner.run(run())


def main() -> None:
    """Read a job, run it, write the report."""
    raise_file_limit()
    job = msgspec.json.decode(sys.stdin.buffer.read(), type=LoadJob)

    def say(message: LoadProgress | LoadReport) -> None:
        try:
            sys.stdout.buffer.write(_encode(message) + b"\n")
            sys.stdout.buffer.flush()
        except BrokenPipeError:
            os._exit(1)  # the measuring process has ended, so stop the load

    say(run_job(job, say))


if __name__ == "__main__":
    main()
