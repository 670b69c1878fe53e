"""Turns the engine's outputs into text completions; ends them at stop strings, picks the best."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import msgspec

from ostinato.runtime.text.detokenizer import (
    IncrementalDetokenizer,
    TextDecoder,
    prompt_context,
)
from ostinato.runtime.types.outputs import (
    BeamOutput,
    FinishReason,
    RequestOutput,
    SequenceOutput,
    TimelineEvent,
    TokenLogprobs,
)
from ostinato.runtime.types.params import SamplingParams
from ostinato.runtime.types.request import Request
from ostinato.runtime.types.speculation import SpeculationReport, sum_reports

__all__ = ("CompletionStream", "PromptCompletions", "join_outputs")


class CompletionStream:
    """Turns the engine's outputs of one request into `RequestOutput`s; finds stop strings."""

    def __init__(
        self,
        request: Request,
        index: int,
        tokenizer: TextDecoder | None,
        context: Sequence[int],
    ) -> None:
        """
        Args:
            request: the request that was sent to the engine.
            index: its index among the n completions.
            tokenizer: None = no text, token ids only.
            context: the prompt, or its `prompt_context`.
        """
        self._request = request
        self._index = index
        self._text = (
            IncrementalDetokenizer(tokenizer, context, request.sampling)
            if tokenizer is not None
            else None
        )
        self._num_output_tokens = 0
        self._num_cached_tokens = 0
        self.is_finished = False

    def process(self, engine_output: SequenceOutput) -> RequestOutput:
        """Turn an output of the engine into an output for the caller.

        A stop string ends the completion here, while the engine still runs the request. The caller
        then aborts the request in the engine and ignores later outputs.
        """
        new_token_ids, finish = engine_output.new_token_ids, engine_output.finish_reason
        logprobs = engine_output.logprobs
        texts, stop_reason, speculation = [""], None, engine_output.speculation
        stops_at_token = finish is FinishReason.stop and not engine_output.is_complete
        if self._text is not None:
            before = self._text.num_tokens
            texts = self._text.append_each(new_token_ids, ends_with_stop_token=stops_at_token)
            if self._text.stop_reason is None and finish is not None:
                texts = [*texts[:-1], "".join(texts[-1:]) + self._text.flush()]
            stop_reason = self._text.stop_reason
            if stop_reason is not None:
                # Tokens past the stop string were computed but are not part of the answer.
                kept = self._text.num_tokens - before
                new_token_ids = new_token_ids[:kept]
                logprobs = logprobs[:kept] if logprobs is not None else None
                speculation = None if speculation is None else speculation.limited(kept)
                finish = FinishReason.stop
        self._num_output_tokens += len(new_token_ids)
        self._num_cached_tokens = max(self._num_cached_tokens, engine_output.num_cached_tokens)
        self.is_finished = finish is not None
        return RequestOutput(
            request_id=self._request.request_id,
            index=self._index,
            text_delta="".join(texts),
            new_token_ids=new_token_ids,
            logprobs=logprobs,
            finish_reason=finish,
            stop_reason=engine_output.stop_reason if stop_reason is None else stop_reason,
            token_texts=texts if len(texts) > 1 else None,
            num_prompt_tokens=len(self._request.prompt_token_ids),
            num_cached_tokens=self._num_cached_tokens,
            num_output_tokens=self._num_output_tokens,
            error=engine_output.error,
            refusal=engine_output.refusal,
            prompt_logprobs=engine_output.prompt_logprobs,
            scheduled_time=engine_output.scheduled_time,
            num_preemptions=engine_output.num_preemptions,
            events=engine_output.events,
            speculation=speculation,
        )


class PromptCompletions:
    """All completions of one prompt: each is streamed, or the n best are returned at the end.

    Args:
        requests: the engine's requests for the prompt, from `make_requests`.
        sampling: the prompt's parameters.
        tokenizer: None = no text, token ids only.
    """

    def __init__(
        self, requests: Sequence[Request], sampling: SamplingParams, tokenizer: TextDecoder | None
    ) -> None:
        self._requests = requests
        self._sampling = sampling
        self._tokenizer = tokenizer
        prompt = requests[0].prompt_token_ids
        skip = sampling.skip_special_tokens
        self._context = (
            prompt
            if tokenizer is None
            else prompt_context(tokenizer, prompt, skip_special_tokens=skip)
        )
        self._streams = {
            request.request_id: CompletionStream(request, index, tokenizer, self._context)
            for index, request in enumerate(requests)
        }
        # With more candidates than `n`, the best are known only when all have ended.
        self._candidates: dict[str, _Candidate] | None = (
            {request.request_id: _Candidate(sampling) for request in requests}
            if len(requests) > sampling.n
            else None
        )
        self._parts: dict[str, _Parts] = {}  # by request id, until the rest of the output arrives
        self._scores = (
            _SharedScores() if sampling.prompt_logprobs is not None and len(requests) > 1 else None
        )

    @property
    def unfinished_ids(self) -> list[str]:
        """The engine's requests that have not ended."""
        return list(self._streams)

    def process(self, engine_output: SequenceOutput) -> Iterable[RequestOutput]:
        """Turn an output of one of the requests into outputs for the caller.

        The texts of beams are made when they are taken from the iterable.

        A request that a stop string ended leaves `unfinished_ids` although `engine_output` has no
        finish reason. The caller aborts it in the engine.
        """
        stream = self._streams.get(engine_output.request_id)
        if stream is None:  # it ended here a moment ago, for example by a stop string
            return ()
        if engine_output.is_part:
            self._parts.setdefault(engine_output.request_id, _Parts()).add(engine_output)
            return ()
        if (parts := self._parts.pop(engine_output.request_id, None)) is not None:
            engine_output = parts.joined(engine_output)
        if engine_output.beams is not None:
            del self._streams[engine_output.request_id]
            return self._of_beams(engine_output)
        output = stream.process(engine_output)
        if stream.is_finished:
            del self._streams[engine_output.request_id]
        if self._candidates is None:
            return [output] if self._scores is None else self._scores.shared(output)
        if output.finish_reason in (FinishReason.error, FinishReason.abort):
            self._streams.clear()
            return [output]
        self._candidates[engine_output.request_id].add(output)
        return [] if self._streams else self._best(self._candidates)

    def cut(self, stop_reason: str) -> list[RequestOutput]:
        """End the unfinished completions with the text so far; `stop_reason` says why."""
        outputs = [
            output
            for request_id in self.unfinished_ids
            for output in self.process(SequenceOutput(request_id, [], FinishReason.length))
        ]
        for output in outputs:
            output.stop_reason = stop_reason
        return outputs

    def _best(self, candidates: dict[str, _Candidate]) -> list[RequestOutput]:
        """The n candidates with the highest mean log-probability; of equals, the first."""
        ranked = sorted(candidates.values(), key=_Candidate.score, reverse=True)
        chosen, others = ranked[: self._sampling.n], ranked[self._sampling.n :]
        scores = next(iter(candidates.values())).prompt_logprobs
        outputs = [one.joined(index, scores) for index, one in enumerate(chosen)]
        outputs[0].num_discarded_tokens = sum(len(one.token_ids) for one in others)
        return outputs

    def _of_beams(self, engine_output: SequenceOutput) -> Iterator[RequestOutput]:
        (request,) = self._requests
        for index, beam in enumerate(engine_output.beams or ()):
            stream = CompletionStream(request, index, self._tokenizer, self._context)
            output = stream.process(
                SequenceOutput(
                    engine_output.request_id,
                    beam.token_ids,
                    beam.finish_reason,
                    beam.stop_reason,
                    beam.logprobs,
                    engine_output.num_cached_tokens,
                    prompt_logprobs=engine_output.prompt_logprobs,
                    scheduled_time=engine_output.scheduled_time,
                    num_preemptions=engine_output.num_preemptions,
                    events=None if index else engine_output.events,
                )
            )
            output.score = beam.score
            yield output


class _SharedScores:
    """Gives each completion of a prompt the log-probabilities of the prompt's tokens.

    The engine computes them with the first completion. Outputs of the other completions wait for
    these log-probabilities.
    """

    def __init__(self) -> None:
        self._scores: list[TokenLogprobs] | None = None
        self._has_come = False
        self._begun: set[int] = set()  # completions whose first output was given
        self._held: list[RequestOutput] = []

    def shared(self, output: RequestOutput) -> list[RequestOutput]:
        """Take a new output; returns the outputs that can be given to the caller now."""
        if output.index == 0:
            self._scores = output.prompt_logprobs if not self._has_come else self._scores
            self._has_come = True
        self._held.append(output)
        if not self._has_come:
            return []
        given, self._held = self._held, []
        given.sort(key=lambda one: one.index != 0)  # the sort keeps each completion's order
        for one in given:
            if one.index not in self._begun:
                self._begun.add(one.index)
                one.prompt_logprobs = self._scores
        return given


class _Parts:
    """The parts of an output that have arrived; see `runtime.process.output_parts`."""

    def __init__(self) -> None:
        self._prompt_logprobs: list[TokenLogprobs] = []
        self._beams: list[BeamOutput] = []

    def add(self, part: SequenceOutput) -> None:
        # After the death of an engine, the new engine sends all parts again.
        if part.prompt_logprobs is not None:
            self._prompt_logprobs[part.num_before :] = part.prompt_logprobs
        if part.beams is not None:
            self._beams[part.num_before :] = part.beams

    def joined(self, output: SequenceOutput) -> SequenceOutput:
        """The output with all parts."""
        return msgspec.structs.replace(
            output,
            prompt_logprobs=self._prompt_logprobs or output.prompt_logprobs,
            beams=None if output.beams is None else self._beams,
        )


class _Candidate:
    """One completion that can be among the best.

    Its outputs are joined when they arrive. Joining the outputs of 128 candidates at the end would
    take long.

    Args:
        sampling: the request's parameters; without `logprobs` the joined output has none.
    """

    def __init__(self, sampling: SamplingParams) -> None:
        self._first: RequestOutput | None = None
        self._last: RequestOutput | None = None
        self._texts: list[str] = []  # the text that each token adds
        self._reports: list[SpeculationReport | None] = []
        self._logprobs: list[TokenLogprobs] | None = None if sampling.logprobs is None else []
        self._num_scored = 0
        self._events: list[TimelineEvent] = []
        self._sum = 0.0
        self.token_ids: list[int] = []

    def add(self, output: RequestOutput) -> None:
        self._first, self._last = self._first or output, output
        if output.new_token_ids:
            self._texts += output.token_texts or [output.text_delta]
        elif self._texts:  # text that was held back until the end
            self._texts[-1] += output.text_delta
        self._reports.append(output.speculation)
        self.token_ids += output.new_token_ids
        self._events += output.events or ()
        entries = output.logprobs or ()
        self._sum += sum(entry.logprob for entry in entries)
        self._num_scored += len(entries)
        if self._logprobs is not None:
            self._logprobs += entries

    def score(self) -> float:
        """The mean log-probability of the completion's tokens."""
        return self._sum / max(1, self._num_scored)

    @property
    def prompt_logprobs(self) -> list[TokenLogprobs] | None:
        """The prompt's log-probabilities, which come with the first output."""
        return None if self._first is None else self._first.prompt_logprobs

    def joined(self, index: int, scores: list[TokenLogprobs] | None) -> RequestOutput:
        """All outputs joined to one; `scores` are the log-probabilities of the prompt's tokens."""
        assert self._first is not None, "it has ended"
        assert self._last is not None, "it has ended"
        return msgspec.structs.replace(
            self._last,
            index=index,
            score=self.score(),
            text_delta="".join(self._texts),
            new_token_ids=self.token_ids,
            logprobs=self._logprobs,
            token_texts=self._texts if len(self._texts) > 1 else None,
            prompt_logprobs=scores,
            scheduled_time=self._first.scheduled_time,
            events=self._events or None,
            speculation=sum_reports(self._reports),
        )


def join_outputs(outputs: Sequence[RequestOutput]) -> RequestOutput:
    """Join consecutive outputs of one completion to one output."""
    logprobs = [entry for output in outputs for entry in output.logprobs or ()]
    return msgspec.structs.replace(
        outputs[-1],
        text_delta="".join(output.text_delta for output in outputs),
        new_token_ids=[token_id for output in outputs for token_id in output.new_token_ids],
        logprobs=None if all(output.logprobs is None for output in outputs) else logprobs,
        token_texts=None,
        prompt_logprobs=outputs[0].prompt_logprobs,
        num_discarded_tokens=sum(output.num_discarded_tokens for output in outputs),
        scheduled_time=outputs[0].scheduled_time,
        events=[one for output in outputs for one in output.events or ()] or None,
        speculation=sum_reports(output.speculation for output in outputs),
    )
