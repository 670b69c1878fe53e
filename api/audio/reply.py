"""The replies of `/v1/audio/transcriptions` and `/v1/audio/translations`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

import msgspec

from ostinato.api.audio.preparation import PreparedTranscript
from ostinato.api.audio.schemas import (
    InputTokenDetails,
    TextDelta,
    TextDone,
    TokenUsage,
    Transcription,
    TranscriptionLogprob,
    TranscriptionVerbose,
    Translation,
    duration_usage,
)
from ostinato.api.audio.subtitles import srt_text, vtt_text
from ostinato.api.audio.transcript_runner import TranscriptRunner
from ostinato.api.base.request_context import RequestContext
from ostinato.api.service.service import Service
from ostinato.models.audio.audio_spec import AudioSpec
from ostinato.models.audio.languages import LANGUAGES
from ostinato.runtime.audio.segments import WindowTranscript, text_ids, transcript_segments
from ostinato.runtime.text.detokenizer import IncrementalDetokenizer
from ostinato.runtime.text.tokenizer import Tokenizer
from ostinato.runtime.types.outputs import TokenLogprobs, TranscriptionSegment
from ostinato.runtime.types.params import SamplingParams

__all__ = ("TranscriptReply",)

_PLAIN = SamplingParams()  # for texts without stop strings


class TranscriptReply:
    """The reply to one request. One of `stream`, `whole` and `text` is called, once.

    Args:
        service: runs prompts.
        prepared: the request, which `RequestRunner.prepare` has accepted.
        context: the context of the HTTP request.
    """

    def __init__(
        self, service: Service, prepared: PreparedTranscript, context: RequestContext
    ) -> None:
        spec = service.client.model.audio
        assert spec is not None, "a model that transcribes takes audio"
        self._prepared = prepared
        self._context = context
        self._spec: AudioSpec = spec
        self._tokenizer: Tokenizer = service.encoder.tokenizer("file")
        self._runner = TranscriptRunner(service, prepared, context)

    async def stream(self) -> AsyncGenerator[TextDelta | TextDone, None]:
        """Events with the text of one window after the other, then one with the whole text."""
        text, logprobs = _StreamedText(), list[TranscriptionLogprob]()
        pending = list[TranscriptionLogprob]()  # of tokens whose text has not been sent
        decoders: dict[int, IncrementalDetokenizer] = {}
        num_output_tokens = 0
        async with aclosing(self._runner.outputs()) as outputs:
            async for index, output in outputs:
                num_output_tokens += len(output.new_token_ids)
                decoder = decoders.get(index)
                if decoder is None:
                    decoder = decoders[index] = IncrementalDetokenizer(self._tokenizer, (), _PLAIN)
                new = decoder.append(text_ids(output.new_token_ids, self._spec))
                if output.finish_reason is not None:
                    new += decoder.flush()
                pending += self._logprobs(output.new_token_ids, output.logprobs)
                if delta := text.add(new):
                    yield TextDelta(delta=delta, logprobs=self._shown(pending))
                    logprobs += pending
                    pending = []
        yield TextDone(
            text=text.sent,
            logprobs=self._shown(logprobs + pending),
            usage=self._token_usage(num_output_tokens),
        )

    async def whole(self) -> Transcription | Translation | TranscriptionVerbose:
        """The answer as JSON."""
        prepared = self._prepared
        windows = await self._windows()
        trace, usage = self._context.report(), duration_usage(prepared.seconds)
        if prepared.response_format == "verbose_json":
            segments = await self._segments(windows)
            is_translation = prepared.task == "translate"
            code = "en" if is_translation else self._runner.language or "en"
            return TranscriptionVerbose(
                task=prepared.task,
                language=LANGUAGES.get(code, code),
                duration=round(prepared.seconds, 3),
                text=await self._text(windows),
                segments=segments,
                usage=msgspec.UNSET if is_translation else usage,
                trace=trace,
            )
        text = await self._text(windows)
        if prepared.task == "translate":
            return Translation(text=text, trace=trace)
        logprobs = [one for window in windows for one in window.shown_logprobs]
        return Transcription(text=text, logprobs=self._shown(logprobs), usage=usage, trace=trace)

    async def text(self) -> str:
        """The answer as text: plain, or subtitles."""
        windows = await self._windows()
        if self._prepared.response_format == "text":
            return await self._text(windows) + "\n"
        segments = await self._segments(windows)
        write = srt_text if self._prepared.response_format == "srt" else vtt_text
        return write(segments)

    async def _windows(self) -> list[_Window]:
        """All outputs, joined by window."""
        windows = [_Window() for _ in self._prepared.windows]
        async with aclosing(self._runner.outputs()) as outputs:
            async for index, output in outputs:
                window = windows[index]
                window.token_ids += output.new_token_ids
                window.logprobs += [entry.logprob for entry in output.logprobs or ()]
                if self._prepared.has_logprobs:
                    window.shown_logprobs += self._logprobs(output.new_token_ids, output.logprobs)
        return windows

    async def _text(self, windows: Sequence[_Window]) -> str:
        texts: list[str] = []
        for window in windows:
            texts.append(self._decode(text_ids(window.token_ids, self._spec)))
            await asyncio.sleep(0)
        return "".join(texts).strip()

    async def _segments(self, windows: Sequence[_Window]) -> list[TranscriptionSegment]:
        """The segments of all windows, made a window at a time, so that other tasks can run."""
        segments: list[TranscriptionSegment] = []
        for index, (window, place) in enumerate(zip(windows, self._prepared.windows, strict=True)):
            transcript = WindowTranscript(
                token_ids=window.token_ids,
                logprobs=window.logprobs,
                begin_s=place.begin_s,
                end_s=place.end_s,
                temperature=self._prepared.generation.sampling.temperature,
                no_speech_prob=self._runner.no_speech[index],
            )
            for segment in transcript_segments([transcript], self._spec, self._decode):
                segments.append(msgspec.structs.replace(segment, id=len(segments)))
            await asyncio.sleep(0)
        return segments

    def _decode(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(token_ids)

    def _logprobs(
        self, token_ids: Sequence[int], entries: Sequence[TokenLogprobs] | None
    ) -> list[TranscriptionLogprob]:
        """The log-probabilities of the tokens that are text; empty if they are not asked for."""
        if not self._prepared.has_logprobs or entries is None:
            return []
        found: list[TranscriptionLogprob] = []
        for token_id, entry in zip(token_ids, entries, strict=True):
            if token_id < self._spec.end_id:
                data = self._tokenizer.token_bytes(token_id)
                text = data.decode(errors="replace")
                shown = TranscriptionLogprob(token=text, bytes=list(data), logprob=entry.logprob)
                found.append(shown)
        return found

    def _shown(
        self, logprobs: list[TranscriptionLogprob]
    ) -> list[TranscriptionLogprob] | msgspec.UnsetType:
        return logprobs if self._prepared.has_logprobs else msgspec.UNSET

    def _token_usage(self, num_output_tokens: int) -> TokenUsage:
        # The encoder has a position for every two frames.
        audio = len(self._prepared.windows) * self._spec.num_frames // 2
        text = self._runner.num_prompt_tokens
        return TokenUsage(
            input_tokens=audio + text,
            output_tokens=num_output_tokens,
            total_tokens=audio + text + num_output_tokens,
            input_token_details=InputTokenDetails(audio_tokens=audio, text_tokens=text),
        )


class _Window(msgspec.Struct):
    """The output for one window."""

    token_ids: list[int] = []
    logprobs: list[float] = []
    shown_logprobs: list[TranscriptionLogprob] = []


class _StreamedText:
    """Removes white space at both ends of a text that arrives in parts.

    Attributes:
        sent: the text so far.
    """

    def __init__(self) -> None:
        self._parts: list[str] = []
        self._space = ""  # white space that is sent if text follows

    @property
    def sent(self) -> str:
        return "".join(self._parts)

    def add(self, new: str) -> str:
        """Take the next part; returns the text that can be sent now."""
        text = self._space + new
        if not self._parts:
            text = text.lstrip()
        kept = text.rstrip()
        self._space = text[len(kept) :]
        if kept:
            self._parts.append(kept)
        return kept
