"""One completion on the client's side of the border: token news in, text news out."""

from __future__ import annotations

from ostinato.runtime.detokenizer import IncrementalDetokenizer, TextDecoder
from ostinato.runtime.types import FinishReason, Request, RequestOutput, SequenceOutput

__all__ = ("CompletionStream",)


class CompletionStream:
    """Turns the engine's news of one request into `RequestOutput`s; decides stop strings."""

    def __init__(self, request: Request, index: int, tokenizer: TextDecoder | None) -> None:
        """
        Args:
            request: what was sent to the engine.
            index: which of the n completions it is.
            tokenizer: None = no text, token ids only.
        """
        self._request = request
        self._index = index
        self._text = (
            IncrementalDetokenizer(tokenizer, request.prompt_token_ids, request.sampling)
            if tokenizer is not None
            else None
        )
        self._num_output_tokens = 0
        self._num_cached_tokens = 0
        self.is_finished = False

    def process(self, news: SequenceOutput) -> RequestOutput:
        """The client's view of `news`.

        When a stop string ends the completion the output says so before the engine knows: the
        caller then aborts the request in the engine and ignores later news.
        """
        new_token_ids, finish, reason = news.new_token_ids, news.finish_reason, news.stop_reason
        logprobs = news.logprobs
        text, stop_reason = "", None
        stops_at_token = finish is FinishReason.stop
        if self._text is not None:
            before = self._text.num_tokens
            text = self._text.append(new_token_ids, ends_with_stop_token=stops_at_token)
            if self._text.stop_reason is None and finish is not None:
                text += self._text.flush()
            stop_reason = self._text.stop_reason
            if stop_reason is not None:
                # Tokens past the stop string were computed but are not part of the answer.
                kept = self._text.num_tokens - before
                new_token_ids = new_token_ids[:kept]
                logprobs = logprobs[:kept] if logprobs is not None else None
                finish = FinishReason.stop
        self._num_output_tokens += len(new_token_ids)
        self._num_cached_tokens = max(self._num_cached_tokens, news.num_cached_tokens)
        self.is_finished = finish is not None
        return RequestOutput(
            request_id=self._request.request_id,
            index=self._index,
            text_delta=text,
            new_token_ids=new_token_ids,
            logprobs=logprobs,
            finish_reason=finish,
            stop_reason=stop_reason if stop_reason is not None else reason,
            num_prompt_tokens=len(self._request.prompt_token_ids),
            num_cached_tokens=self._num_cached_tokens,
            num_output_tokens=self._num_output_tokens,
            error=news.error,
        )
