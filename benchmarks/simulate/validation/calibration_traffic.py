"""Sends calibration traffic to a running server and records step times and client times.

Two kinds of traffic take turns: a closed loop, which sends as fast as the server answers, and
requests whose rate rises to almost the rate of the closed loop. So there are batches of all sizes,
with and without prompts, and requests of very different lengths. The traffic does not depend on the
workload that is to be predicted.
"""

from __future__ import annotations

import dataclasses
import random
import urllib.request
from itertools import cycle

import msgspec

from ostinato.benchmarks.load.job import JobRequest, LoadJob
from ostinato.benchmarks.load.run import Target, run_client
from ostinato.benchmarks.simulate.jobs import simulate_job
from ostinato.benchmarks.simulate.simulated_engine import EngineSpec
from ostinato.benchmarks.simulate.step_times.fit import EngineStep, Recording
from ostinato.conf.root import RunConfig
from ostinato.runtime.errors import EngineError

__all__ = ("Calibration", "read_steps", "recording_server")

_NUM_STEPS = 4096  # steps in the server's recorder: enough for one calibration
_CLOSED_S, _RISING_S = 2.0, 2.0
_BATCHES = (12, 6, 16, 4, 8)  # concurrency of the closed loops, in turns
_PROMPTS, _OUTPUTS = (16, 448), (4, 64)  # least and most tokens
_SHARES = (0.15, 0.9)  # shares of the closed loop's rate at the beginning and at the end
_LONGEST_S = 1.5  # seconds of the longest output: a slow server gets shorter outputs
_SAMPLE = 24
_TIMEOUT_S = 60.0


def recording_server(config: RunConfig) -> RunConfig:
    """The configuration with a long flight recorder that can be read over HTTP."""
    section = dataclasses.replace(config.server, flight_recorder_steps=_NUM_STEPS, page=True)
    return dataclasses.replace(config, server=section)


class Calibration:
    """Sends the calibration's requests.

    Args:
        target: a server of `recording_server`.
        vocab_size: token ids are below it.
        spec: the server's engine, for an estimate of the traffic that is needed.
    """

    def __init__(self, target: Target, vocab_size: int, spec: EngineSpec) -> None:
        self._target = target
        self._vocab_size = vocab_size
        self._random = random.Random(0)
        room = spec.max_model_len - 2
        step_s = spec.costs.decode_seconds(max(_BATCHES), 0)
        longest = max(_OUTPUTS[0], min(_OUTPUTS[1], round(_LONGEST_S / step_s)))
        self._prompts = (min(_PROMPTS[0], room // 4), min(_PROMPTS[1], room // 2))
        self._outputs = (min(_OUTPUTS[0], room // 4), min(longest, room // 2))
        self._batches = cycle([min(one, spec.limits.max_num_seqs) for one in _BATCHES])
        sample = self._closed(_SAMPLE, _SAMPLE)
        takes_s = max(simulate_job(spec, sample).last_s)
        self._rate: float | None = None  # requests a second of the last closed loop
        self._num_runs = 0
        # Twice the expected number of requests, because the closed loop ends after `_CLOSED_S`.
        self._num_closed = max(_BATCHES) + round(2 * _SAMPLE / takes_s * _CLOSED_S)

    def run(self) -> Recording:
        """Measure for some seconds. Calls alternate: a closed loop, then a rising rate, and so on.

        Raises:
            EngineError: the load client ended without a report, or the server does not answer.
        """
        is_closed = self._rate is None or self._num_runs % 2 == 0
        self._num_runs += 1
        if is_closed:
            job = self._closed(self._num_closed, next(self._batches))
        else:
            job = self._rising(self._rate or 0.0)
        report = run_client(job)
        if is_closed:
            done = sum(one.status == "ok" for one in report.requests)
            self._rate = done / max(report.duration_s, 1e-9)
        since_s = ((step, step.began_at - report.began_at) for step in read_steps(self._target.url))
        return Recording(job, report, [s for s, at in since_s if 0 <= at < report.duration_s])

    def _closed(self, count: int, batch: int) -> LoadJob:
        requests = [self._request() for _ in range(count)]
        return self._job(requests, concurrency=batch, stop_after_s=_CLOSED_S)

    def _rising(self, rate: float) -> LoadJob:
        requests: list[JobRequest] = []
        low, high = _SHARES
        at_s = 0.0
        while at_s < _RISING_S or not requests:
            requests.append(self._request(at_s))
            share = low + (high - low) * min(1.0, at_s / _RISING_S)
            at_s += self._random.expovariate(max(share * rate, 1 / _RISING_S))
        return self._job(requests)

    def _request(self, at_s: float | None = None) -> JobRequest:
        num_prompt, num_output = (
            round(low * (high / low) ** self._random.random())
            for low, high in (self._prompts, self._outputs)
        )
        prompt = [self._random.randrange(self._vocab_size) for _ in range(num_prompt)]
        return JobRequest(prompt=prompt, max_tokens=num_output, at_s=at_s)

    def _job(
        self,
        requests: list[JobRequest],
        concurrency: int | None = None,
        stop_after_s: float | None = None,
    ) -> LoadJob:
        return LoadJob(
            url=self._target.url,
            model=self._target.model,
            requests=requests,
            concurrency=concurrency,
            stop_after_s=stop_after_s,
            return_token_ids=True,
            body={"temperature": 0.0, "ignore_eos": True},
            num_warmups=1,
        )


def read_steps(url: str) -> list[EngineStep]:
    """The finished steps in a server's flight recorder, oldest first.

    Raises:
        EngineError: the server does not answer.
    """
    try:
        with urllib.request.urlopen(f"{url}/debug/flight", timeout=_TIMEOUT_S) as reply:
            found = msgspec.json.decode(reply.read())["steps"]
    except (OSError, ValueError, LookupError) as error:
        raise EngineError(f"{url}/debug/flight did not answer: {error}") from error
    return msgspec.convert([s for s in found if s["state"] == "done"], type=list[EngineStep])
