"""Runs the windows of a file in the engine: detects the language, gives outputs in their order."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import AsyncGenerator
from contextlib import aclosing

import msgspec

from ostinato.api.audio.preparation import PreparedTranscript
from ostinato.api.base.request_context import RequestContext
from ostinato.api.preparation.generation import Generation
from ostinato.api.service.concurrent_prompts import IndexedOutput
from ostinato.api.service.service import Service
from ostinato.models.audio.audio_spec import AudioSpec
from ostinato.runtime.audio.transcript_prompt import (
    detection_prompt,
    probe_sampling,
    transcript_prompt,
)
from ostinato.runtime.types.outputs import RequestOutput

__all__ = ("TranscriptRunner",)

# Windows of one request that are in the engines at once, for each window that an engine keeps.
# More than one, so that the engine need not wait for the next window.
_AHEAD = 2


class TranscriptRunner:
    """Runs one prepared request. `outputs` is called once.

    A probe is a prompt of one token, <|startoftranscript|>. The model's next token is a language or
    <|nospeech|>. A probe of the first window detects the language. `verbose_json` has the
    probability of <|nospeech|> of each window, which comes from a probe of the window.

    Args:
        service: runs prompts.
        prepared: the request.
        context: the context of the HTTP request.

    Attributes:
        language: code of the spoken language; None = a model for English only, or not detected yet.
        no_speech: for each window, the probability that it has no speech; 0 = not asked.
        num_prompt_tokens: tokens of the prompts of all windows, without probes.
    """

    def __init__(
        self, service: Service, prepared: PreparedTranscript, context: RequestContext
    ) -> None:
        spec = service.client.model.audio
        assert spec is not None, "a model that transcribes takes audio"
        self._service = service
        self._prepared = prepared
        self._context = context
        self._spec: AudioSpec = spec
        self.language = prepared.language
        self.no_speech = [0.0] * len(prepared.windows)
        self._probed: set[int] = set()  # windows of which `no_speech` is known
        self.num_prompt_tokens = 0

    async def outputs(self) -> AsyncGenerator[IndexedOutput, None]:
        """The outputs of the windows: all of the first window, then all of the second, and so on.

        The windows run at the same time. Closing the iterator aborts them.

        Raises:
            InvalidRequestError: see `RequestRunner.generate`.
            DeadlineError: the time limit of the request passed before its first output.
            EngineError: the engine failed, or gave a window up.
        """
        await self._detect()
        held: list[deque[RequestOutput]] = [deque() for _ in self._prepared.windows]
        turn = 0  # the window whose outputs are given now
        async with aclosing(self._merged()) as merged:
            async for index, output in merged:
                held[index].append(output)
                while turn < len(held) and held[turn]:
                    output = held[turn].popleft()
                    yield turn, output
                    turn += output.finish_reason is not None

    async def _detect(self) -> None:
        """Find the spoken language if the request does not name it."""
        if self.language is not None or not self._spec.languages:
            return
        probe = self._probe(0, detects=True)
        reply_id = self._prepared.generation.request_id
        output = await self._service.runner.probe(reply_id, probe, self._context)
        self._note_probe(0, output)
        codes = {token_id: code for code, token_id in self._spec.languages.items()}
        # Only these tokens are allowed. A deadline can end a probe without a token.
        self.language = codes[output.new_token_ids[0]] if output.new_token_ids else "en"

    async def _merged(self) -> AsyncGenerator[IndexedOutput, None]:
        """The outputs of all windows in the order of their arrival. Probes are noted."""
        generations: list[Generation] = []
        places: list[tuple[int, bool]] = []  # the window of a prompt, and whether it is a probe
        shows = self._prepared.response_format == "verbose_json"
        needs_probes = shows and self._spec.no_speech_id is not None
        for index in range(len(self._prepared.windows)):
            # Prompts of the same window are neighbours, so the engine computes its audio once.
            if needs_probes and index not in self._probed:
                generations.append(self._probe(index, detects=False))
                places.append((index, True))
            generations.append(self._generation(index))
            places.append((index, False))
            self.num_prompt_tokens += len(generations[-1].prompt_token_ids)
        at_once = _AHEAD * max(1, self._service.client.model.audio_windows)
        reply_id = self._prepared.generation.request_id
        outputs = self._service.runner.generate(
            reply_id, generations, self._context, at_once=at_once
        )
        async with aclosing(outputs):
            async for number, output in outputs:
                index, is_probe = places[number]
                if is_probe:
                    self._note_probe(index, output)
                else:
                    yield index, output

    def _generation(self, index: int) -> Generation:
        prepared = self._prepared
        prompt = transcript_prompt(
            self._spec,
            language=self.language,
            task=prepared.task,
            has_timestamps=prepared.has_times,
            previous_ids=prepared.previous_ids,
            max_model_len=self._service.client.model.max_model_len,
        )
        return msgspec.structs.replace(
            prepared.generation,
            request_id=self._name(f"{index}"),
            prompt_token_ids=prompt,
            audio=prepared.windows[index].audio,
        )

    def _probe(self, index: int, *, detects: bool) -> Generation:
        spec = self._spec
        return msgspec.structs.replace(
            self._prepared.generation,
            request_id=self._name(f"probe-{index}"),
            prompt_token_ids=detection_prompt(spec),
            sampling=probe_sampling(spec, detects=detects),
            audio=self._prepared.windows[index].audio,
        )

    def _name(self, suffix: str) -> str:
        reply_id = self._prepared.generation.request_id
        return reply_id if suffix == "0" and len(self.no_speech) == 1 else f"{reply_id}-{suffix}"

    def _note_probe(self, index: int, output: RequestOutput) -> None:
        if output.logprobs and output.logprobs[0].top_logprobs:
            self._probed.add(index)
            self.no_speech[index] = math.exp(output.logprobs[0].top_logprobs[0])
