"""`/v1/completions`: converts the body to engine requests, and outputs to chunks.

`preparation` calls the functions that read the body, `reply` the others. `TextOffsets` has
the offsets of one reply.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import msgspec

from ostinato.api.openai.logprobs import (
    TokenBytes,
    all_completion_logprobs,
    join_logprobs,
    prompt_logprobs,
    token_text,
)
from ostinato.api.preparation.generation import Generation, check_fields, make_generations
from ostinato.api.preparation.preparation import Preparation
from ostinato.api.schemas.prompt_inputs import read_inputs
from ostinato.api.schemas.text_completions import (
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    CompletionRequest,
)
from ostinato.api.schemas.usage import CompletionUsage, PromptLogprobs
from ostinato.api.service.reply_state import CollectedCompletion, ReplyHead, ReplyOptions
from ostinato.runtime.errors import InvalidRequestError
from ostinato.runtime.types.outputs import RequestOutput, TokenLogprobs
from ostinato.runtime.types.params import MAX_N

__all__ = (
    "Echo",
    "TextOffsets",
    "check",
    "echo_chunk",
    "prompts",
    "reply_options",
    "to_chunk",
    "to_completion",
    "to_generations",
    "to_response",
)

_MAX_SEQUENCES = 2048  # prompts times n (or best_of) of one request


def check(body: CompletionRequest) -> None:
    """Check the fields that need no tokenisation.

    Raises:
        InvalidRequestError: two fields contradict each other.
    """
    check_fields(body)
    if body.max_tokens == 0 and not body.echo:
        raise InvalidRequestError(
            "max_tokens=0 needs echo=true, which returns the prompt; set echo=true, or max_tokens"
            " to at least 1",
            param="max_tokens",
            code="invalid_value",
        )
    if body.echo and body.logprob_token_ids:
        raise InvalidRequestError(
            "logprob_token_ids needs echo=false: for the tokens of a prompt only the likeliest"
            " alternatives are reported",
            param="logprob_token_ids",
            code="invalid_value",
        )


def reply_options(body: CompletionRequest) -> ReplyOptions:
    """The parts of the outputs that the reply shows."""
    return ReplyOptions(
        num_top_logprobs=(
            None if body.logprobs is None else len(body.logprob_token_ids or ()) or body.logprobs
        ),
        num_prompt_logprobs=body.prompt_logprobs,
        return_token_ids=body.return_token_ids,
        as_token_ids=body.return_tokens_as_token_ids,
    )


def prompts(body: CompletionRequest) -> list[str] | list[list[int]]:
    """The prompts: either all are texts, or all are lists of token ids.

    Raises:
        InvalidRequestError: there is no prompt, there are too many, or the list mixes texts, token
            ids or lists.
    """
    inputs = read_inputs(body.prompt, "prompt")
    num_sequences = len(inputs) * min(body.best_of or body.n or 1, MAX_N)
    if len(inputs) > 1 and num_sequences > _MAX_SEQUENCES:
        raise InvalidRequestError(
            f"prompt has {len(inputs)} prompts, which make {num_sequences} sequences with n and"
            f" best_of; a request may have at most {_MAX_SEQUENCES}: send several requests",
            param="prompt",
        )
    return inputs


def to_generations(
    body: CompletionRequest,
    prompts_token_ids: list[list[int]],
    preparation: Preparation,
) -> list[Generation]:
    """One generation per prompt, without a request id; see `make_generations`.

    With `max_tokens=0` the engine generates one token, which the reply leaves out.
    """
    scored = [body.prompt_logprobs, body.logprobs if body.echo else None]
    reports = {
        "logprobs": body.logprobs,
        "prompt_logprobs": max((count for count in scored if count is not None), default=None),
    }
    return make_generations(
        body,
        prompts_token_ids,
        preparation,
        request_id="",
        max_tokens=1 if body.max_tokens == 0 else body.max_tokens,
        reports=reports,
        field_names={},
    )


class Echo(msgspec.Struct, frozen=True, kw_only=True):
    """A prompt that the completion repeats (`echo`)."""

    text: str
    token_ids: list[int]

    async def logprobs(
        self,
        scores: Sequence[TokenLogprobs] | None,
        token_bytes: TokenBytes,
        options: ReplyOptions,
    ) -> tuple[CompletionLogprobs, int] | None:
        """Log-probabilities of the prompt's tokens, and the number of characters of their texts.

        None = the request does not ask for them.

        Args:
            scores: the computed log-probabilities; None = the request ended too early.
            token_bytes: returns the bytes of a token.
            options: the parts of the outputs that the reply shows.
        """
        if options.num_top_logprobs is None:
            return None
        entries = [None] * len(self.token_ids) if scores is None else [None, *scores]
        return await all_completion_logprobs(
            self.token_ids,
            entries.__getitem__,
            token_bytes,
            num_top=options.num_top_logprobs,
            as_ids=options.as_token_ids,
        )


class TextOffsets:
    """Counts the characters of each completion, for `text_offset`."""

    def __init__(self, token_bytes: TokenBytes) -> None:
        self._token_bytes = token_bytes
        self._offsets: dict[int, int] = {}

    def begin(self, choice: int, offset: int) -> None:
        """Note the number of characters before a completion."""
        self._offsets[choice] = offset

    def advance(self, choice: int, token_ids: list[int]) -> int:
        """Advance by the text of `token_ids`; returns the offset of the first token."""
        begin = self._offsets.get(choice, 0)
        length = sum(len(token_text(self._token_bytes(token_id))) for token_id in token_ids)
        self._offsets[choice] = begin + length
        return begin


def to_completion(
    head: ReplyHead,
    choices: list[CompletionChoice],
    usage: CompletionUsage | msgspec.UnsetType | None,
) -> Completion:
    """The answer or the chunk with some choices; none for the last chunk, which has the usage."""
    return Completion(
        id=head.id,
        created=head.created,
        model=head.model,
        system_fingerprint=head.system_fingerprint,
        choices=choices,
        usage=usage,
    )


def echo_chunk(
    head: ReplyHead,
    choice: int,
    echo: Echo,
    logprobs: CompletionLogprobs | None,
    *,
    usage: CompletionUsage | msgspec.UnsetType | None = msgspec.UNSET,
) -> Completion:
    """The chunk with the prompt, which is sent before the chunks of the completion.

    Args:
        head: the fields that every chunk repeats.
        choice: prompt index * n + completion index.
        echo: the prompt.
        logprobs: from `Echo.logprobs`.
        usage: `usage` of the chunk; UNSET = the chunk has no such field.
    """
    shown = CompletionChoice(index=choice, text=echo.text, logprobs=logprobs, finish_reason=None)
    return to_completion(head, [shown], usage)


async def to_chunk(
    head: ReplyHead,
    choice: int,
    output: RequestOutput,
    token_bytes: TokenBytes,
    *,
    options: ReplyOptions,
    text_offset: int = 0,
    usage: CompletionUsage | msgspec.UnsetType | None = msgspec.UNSET,
) -> Completion | None:
    """The chunk for one output; None = its text is held back. Other tasks run while a large one is
    made. See `echo_chunk` for other arguments.

    Args:
        output: the output.
        token_bytes: returns the bytes of a token.
        options: the parts of the outputs that the reply shows.
        text_offset: see `TextOffsets`.
        usage: `usage` of the chunk; UNSET = the chunk has no such field.
    """
    logprobs = None
    if options.num_top_logprobs is not None and output.new_token_ids:
        assert output.logprobs is not None, "the engine reports what the request asked for"
        logprobs, _ = await all_completion_logprobs(
            output.new_token_ids,
            output.logprobs.__getitem__,
            token_bytes,
            num_top=options.num_top_logprobs,
            text_offset=text_offset,
            as_ids=options.as_token_ids,
        )
    has_content = logprobs is not None or (options.return_token_ids and output.new_token_ids)
    if not output.text_delta and not has_content and output.finish_reason is None:
        return None
    shown = CompletionChoice(
        index=choice,
        text=output.text_delta,
        logprobs=logprobs,
        finish_reason=output.finish_reason,
        stop_reason=msgspec.UNSET if output.finish_reason is None else output.stop_reason,
        token_ids=options.token_ids(output.new_token_ids),
    )
    return to_completion(head, [shown], usage)


async def to_response(
    head: ReplyHead,
    generations: Sequence[Generation],
    completions: dict[tuple[int, int], CollectedCompletion],
    token_bytes: TokenBytes,
    *,
    options: ReplyOptions,
    echoes: Sequence[Echo] = (),
    usage: CompletionUsage,
) -> Completion:
    """The whole answer to a request without `stream`. Other tasks run while a large one is made.

    Args:
        head: the fields of the reply.
        generations: the prepared prompts.
        completions: (prompt index, completion index) -> the joined completion.
        token_bytes: returns the bytes of a token.
        options: the parts of the outputs that the reply shows.
        echoes: the prompts, if the completions repeat them; else empty.
        usage: the token counts.
    """
    choices = []
    scores: PromptLogprobs | msgspec.UnsetType = msgspec.UNSET
    echoed: tuple[CompletionLogprobs, int] | None = None
    for (prompt_index, index), one in sorted(completions.items()):
        generation = generations[prompt_index]
        echo = echoes[prompt_index] if echoes else None
        if index == 0:  # the other completions of the prompt have the same scores
            scores = await _prompt_logprobs(generation, one, token_bytes, options)
            echoed = echo and await echo.logprobs(one.prompt_logprobs, token_bytes, options)
        choices.append(
            CompletionChoice(
                index=prompt_index * generation.sampling.n + index,
                text=one.text if echo is None else echo.text + one.text,
                logprobs=await _logprobs(one, echoed, token_bytes, options),
                finish_reason=one.finish_reason,
                stop_reason=one.stop_reason,
                token_ids=options.token_ids(one.token_ids),
                prompt_logprobs=scores,
            )
        )
        await asyncio.sleep(0)
    return to_completion(head, choices, usage)


async def _logprobs(
    one: CollectedCompletion,
    echoed: tuple[CompletionLogprobs, int] | None,
    token_bytes: TokenBytes,
    options: ReplyOptions,
) -> CompletionLogprobs | None:
    """The log-probabilities of an echoed prompt, followed by those of its completion."""
    if options.num_top_logprobs is None:
        return None
    own, _ = await all_completion_logprobs(
        one.token_ids,
        one.logprobs,
        token_bytes,
        num_top=options.num_top_logprobs,
        text_offset=0 if echoed is None else echoed[1],
        as_ids=options.as_token_ids,
    )
    return own if echoed is None else join_logprobs(echoed[0], own)


async def _prompt_logprobs(
    generation: Generation,
    one: CollectedCompletion,
    token_bytes: TokenBytes,
    options: ReplyOptions,
) -> PromptLogprobs | msgspec.UnsetType:
    if options.num_prompt_logprobs is None:
        return msgspec.UNSET
    return await prompt_logprobs(
        generation.prompt_token_ids,
        one.prompt_logprobs,
        token_bytes,
        num_top=options.num_prompt_logprobs,
    )
