"""Tokenizes the prompts of all endpoints; refuses texts that are too long for the context."""

from __future__ import annotations

from typing import Literal, Protocol

from ostinato.runtime.errors import InvalidRequestError
from ostinato.runtime.text.tokenizer import Tokenizer
from ostinato.runtime.types.engine_info import ServedModel

__all__ = ("PromptEncoder", "TextSource", "TruncationFields")


class TextSource(Protocol):
    """Has the model and its tokenizer when the engine has started."""

    model: ServedModel
    tokenizer: Tokenizer | None


class TruncationFields(Protocol):
    """The fields of a request by which its prompts are truncated."""

    @property
    def truncate_prompt_tokens(self) -> int | None: ...

    @property
    def truncation_side(self) -> Literal["left", "right"]: ...


class PromptEncoder:
    """The model's tokenizer, with errors for a model that was loaded without one.

    Args:
        source: the model and its tokenizer, read at each call.
    """

    def __init__(self, source: TextSource) -> None:
        self._source = source

    def tokenizer(self, param: str) -> Tokenizer:
        """The model's tokenizer; raises InvalidRequestError for `param` if there is none."""
        if self._source.tokenizer is None:
            raise InvalidRequestError(
                "this model was loaded without a tokenizer: send token ids as the prompt of"
                " /v1/completions or the input of /v1/embeddings, or start the server with"
                " model.tokenizer=DIRECTORY",
                param=param,
                code="no_tokenizer",
            )
        return self._source.tokenizer

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of a token; `token_id:N` for a model without a tokenizer."""
        if self._source.tokenizer is None:
            return f"token_id:{token_id}".encode()
        return self._source.tokenizer.token_bytes(token_id)

    def encode(
        self, text: str, fields: TruncationFields, *, param: str, add_special_tokens: bool
    ) -> list[int]:
        """Token ids of a prompt.

        If the request asks for truncation, tokens of the prompt can be missing, but none that the
        truncation keeps. `runtime/client/requests.py` makes the final cut.

        Args:
            text: the prompt.
            fields: the truncation that the request asks for; its range is checked later.
            param: the name of the field that the text comes from.
            add_special_tokens: whether special tokens are added around the text.

        Raises:
            InvalidRequestError: the text is so long that it cannot fit into the context, or there
                is no tokenizer.
        """
        tokenizer = self.tokenizer(param)
        limit = self._num_kept(fields)
        if limit is None:
            self.check_length(text, param)
            return tokenizer.encode(text, add_special_tokens=add_special_tokens)
        side = fields.truncation_side
        return tokenizer.encode_truncated(
            text, limit, side=side, add_special_tokens=add_special_tokens
        )

    def offsets(
        self, text: str, fields: TruncationFields, *, add_special_tokens: bool
    ) -> list[tuple[int, int]]:
        """The characters [begin, end) of the text for each token that `encode` returns."""
        tokenizer = self.tokenizer("return_token_offsets")
        limit = self._num_kept(fields)
        if limit is None:
            return tokenizer.token_offsets(text, add_special_tokens=add_special_tokens)
        side = fields.truncation_side
        return tokenizer.offsets_truncated(
            text, limit, side=side, add_special_tokens=add_special_tokens
        )

    def check_length(self, text: str, param: str) -> None:
        """Raise InvalidRequestError if a text has too many characters for the context."""
        model = self._source.model
        if len(text) <= model.max_model_len:
            return
        most = self.tokenizer(param).max_token_characters
        if most is not None and len(text) > most * model.max_model_len:
            raise InvalidRequestError(
                f"{param} has {len(text)} characters, and the context of {model.name} holds "
                f"{model.max_model_len} tokens of at most {most} characters each, so at most "
                f"{most * model.max_model_len}; shorten it, or set truncate_prompt_tokens where the"
                " endpoint has it",
                param=param,
                code="context_length_exceeded",
            )

    def _num_kept(self, fields: TruncationFields) -> int | None:
        """The number of tokens that `encode` cuts a prompt to; None = `encode` does not cut.

        It is at least the number that truncation keeps. A limit of the context's length or more
        gives None: then a text that does not fit is refused, as without truncation.
        """
        limit, most = fields.truncate_prompt_tokens, self._source.model.max_model_len
        if limit == -1:
            return most
        return limit if limit is not None and 1 <= limit < most else None
