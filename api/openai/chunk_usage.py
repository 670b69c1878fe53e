"""Computes the `usage` of the chunks of a stream, as `stream_options` asks for."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from msgspec import UNSET, UnsetType

from ostinato.api.preparation.generation import Generation
from ostinato.api.schemas.generation_fields import StreamOptions
from ostinato.api.schemas.usage import CompletionUsage, PromptTokensDetails, completion_details
from ostinato.api.service.reply_state import add_prediction
from ostinato.runtime.types.outputs import RequestOutput

__all__ = ("ChunkUsage",)


class ChunkUsage:
    """Counts the tokens of each completion for `continuous_usage_stats`, as vLLM does.

    The usage of a chunk counts the prompt and the output of its own completion. The chunk with the
    role counts no output. Without `include_usage` no chunk has a usage.

    Args:
        options: `stream_options` of the request.
        generations: one per prompt.
        reasons: whether the model reasons, so that the usage has a count of reasoning tokens.

    Attributes:
        at_end: whether the stream ends with a chunk that has the usage of the whole request.
    """

    def __init__(
        self,
        options: StreamOptions | None,
        generations: Sequence[Generation],
        *,
        reasons: bool = False,
    ) -> None:
        self.at_end = options is not None and options.include_usage
        self._is_continuous = self.at_end and options is not None and options.continuous_usage_stats
        self._num_prompt_tokens = [len(one.prompt_token_ids) for one in generations]
        self._reasons = reasons
        self._has_prediction = any(one.prediction_token_ids for one in generations)
        self._counts: dict[int, _Counts] = {}

    def add(self, choice: int, output: RequestOutput, num_reasoning_tokens: int = 0) -> None:
        """Count one output of a completion."""
        counts = self._counts.setdefault(choice, _Counts())
        counts.output += len(output.new_token_ids)
        counts.reasoning += num_reasoning_tokens
        counts.prediction = add_prediction(counts.prediction, output) or (0, 0)
        counts.cached = output.num_cached_tokens

    def of_chunk(self, prompt_index: int, choice: int) -> CompletionUsage | UnsetType | None:
        """The usage so far. None = only the last chunk has it. UNSET = it is not requested."""
        if not self._is_continuous:
            return None if self.at_end else UNSET
        return self._usage(prompt_index, self._counts.get(choice, _Counts()))

    def of_first_chunk(self, prompt_index: int, choice: int) -> CompletionUsage | UnsetType | None:
        """The usage before the first token, for the chunk with the role or the echoed prompt."""
        if not self._is_continuous:
            return self.of_chunk(prompt_index, choice)
        cached = self._counts.get(choice, _Counts()).cached
        return self._usage(prompt_index, _Counts(cached=cached))

    def _usage(self, prompt_index: int, counts: _Counts) -> CompletionUsage:
        num_prompt_tokens = self._num_prompt_tokens[prompt_index]
        return CompletionUsage(
            prompt_tokens=num_prompt_tokens,
            completion_tokens=counts.output,
            total_tokens=num_prompt_tokens + counts.output,
            prompt_tokens_details=PromptTokensDetails(counts.cached),
            completion_tokens_details=completion_details(
                counts.reasoning if self._reasons else None,
                counts.prediction if self._has_prediction else None,
            ),
        )


class _Counts(msgspec.Struct, kw_only=True):
    output: int = 0
    reasoning: int = 0
    cached: int = 0
    prediction: tuple[int, int] = 0, 0  # accepted, rejected
