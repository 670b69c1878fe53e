"""The parts of the prompt that a reply shows: token ids, text, and offsets of the tokens."""

from __future__ import annotations

from typing import TypeVar

import msgspec
from msgspec import UNSET, UnsetType

from ostinato.api.preparation.generation import Generation
from ostinato.api.preparation.prompt_encoder import PromptEncoder
from ostinato.api.schemas.chat_completions import ChatChunk, ChatResponse
from ostinato.api.schemas.generation_fields import GenerationFields
from ostinato.api.schemas.text_completions import CompletionChoice
from ostinato.api.schemas.usage import TokenOffsets

__all__ = ("PromptReport", "prompt_report")

T = TypeVar("T", ChatChunk, ChatResponse, CompletionChoice)


class PromptReport(msgspec.Struct, frozen=True, kw_only=True):
    """The parts of the prompt that the reply shows; UNSET = not requested."""

    token_ids: list[int] | UnsetType = UNSET
    text: str | UnsetType = UNSET
    token_offsets: TokenOffsets | UnsetType | None = UNSET  # None = the prompt came as token ids

    def added_to(self, shown: T) -> T:
        """A copy of a chunk or answer with these fields added."""
        return msgspec.structs.replace(
            shown,
            prompt_token_ids=self.token_ids,
            prompt_text=self.text,
            prompt_token_offsets=self.token_offsets,
        )


def prompt_report(
    encoder: PromptEncoder,
    fields: GenerationFields,
    source: str | list[int],
    generation: Generation,
    *,
    add_special_tokens: bool,
) -> PromptReport:
    """The parts of the prompt that the reply shows.

    Args:
        encoder: the tokenizer.
        fields: the request's fields, which say what is shown.
        source: the prompt's text, or the token ids of the request.
        generation: the prepared prompt.
        add_special_tokens: whether tokenisation added special tokens.

    Raises:
        InvalidRequestError: the prompt came as token ids, and there is no tokenizer for its text.
    """
    text: str | UnsetType = UNSET
    offsets: TokenOffsets | UnsetType | None = UNSET
    token_ids = generation.prompt_token_ids
    if fields.return_prompt_text:
        text = (
            source
            if isinstance(source, str)
            else encoder.tokenizer("return_prompt_text").decode(
                token_ids, skip_special_tokens=False
            )
        )
    if fields.return_token_offsets:
        offsets = None
        if isinstance(source, str):
            of_all = encoder.offsets(source, fields, add_special_tokens=add_special_tokens)
            # Keep the offsets of the tokens that truncation kept. They count from the beginning of
            # the whole text.
            keeps_end = generation.sampling.truncation_side == "left"
            count = len(token_ids)
            kept = of_all[-count:] if keeps_end else of_all[:count]
            offsets = [[begin, end] for begin, end in kept]
    return PromptReport(
        token_ids=token_ids if fields.return_token_ids else UNSET,
        text=text,
        token_offsets=offsets,
    )
