"""Incremental detokenization: turns the tokens of a completion into text that can be streamed.

Three things are held back: the bytes of an incomplete character, text that can become a stop
string, and (in the window method) text whose last character can change with the next token. The
result does not depend on how the tokens are grouped into calls.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Protocol

from ostinato.runtime.text.stop_strings import StopStringMatcher
from ostinato.runtime.text.token_bytes import TokenPieces
from ostinato.runtime.types.params import SamplingParams

__all__ = ("IncrementalDetokenizer", "PieceText", "TextDecoder", "WindowText", "prompt_context")

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_PROMPT_WINDOW = 6  # prompt tokens at the beginning of the first window
_MAX_SILENT = 16  # most tokens without text in the window, such as ids that the tokenizer lacks
_LONGEST_CHARACTER = 4  # most bytes, and so most tokens, of a UTF-8 character


class TextDecoder(Protocol):
    """The methods of a tokenizer that detokenization needs."""

    @property
    def pieces(self) -> TokenPieces | None:
        """The bytes of each token. None if a text is more than the joined bytes of its tokens."""
        ...

    @property
    def special_token_ids(self) -> frozenset[int]:
        """The ids that `skip_special_tokens` leaves out."""
        ...

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of a whole token sequence."""
        ...


def prompt_context(
    tokenizer: TextDecoder, prompt_token_ids: Sequence[int], *, skip_special_tokens: bool
) -> Sequence[int]:
    """The tokens of a prompt that the text of its completions depends on.

    A prompt can have 100,000 tokens without text and 128 completions, so the prompt is read once.

    Args:
        tokenizer: decodes tokens.
        prompt_token_ids: the whole prompt.
        skip_special_tokens: whether special tokens have no text.
    """
    last = prompt_token_ids[-_PROMPT_WINDOW:]
    pieces = tokenizer.pieces
    if pieces is None or not pieces.strips_leading_space:
        return last
    piece = pieces.shown_piece if skip_special_tokens else pieces.piece
    if any(map(piece, last)):
        return last
    shown = next(filter(piece, reversed(prompt_token_ids)), None)
    return last if shown is None else [shown, *last]


class IncrementalDetokenizer:
    """The text of one completion as its tokens arrive.

    The tokens are decoded as a continuation of the prompt. So the first word gets a space before it
    where the tokenizer makes the space a part of the word. Special tokens are left out with
    `sampling.skip_special_tokens`.

    Args:
        tokenizer: decodes tokens; see `TextDecoder`.
        prompt_token_ids: the tokens that the completion continues, or their `prompt_context`.
        sampling: `stop`, `min_tokens`, `include_stop_str_in_output` and `skip_special_tokens` are
            read.

    Attributes:
        stop_reason: the stop string that ended the text, else None. Later tokens are ignored.
        num_tokens: output tokens so far, up to the token that completed the stop string.
    """

    def __init__(
        self, tokenizer: TextDecoder, prompt_token_ids: Sequence[int], sampling: SamplingParams
    ) -> None:
        skip = sampling.skip_special_tokens
        pieces = tokenizer.pieces
        self._text = (
            WindowText(tokenizer, prompt_token_ids, skip_special_tokens=skip)
            if pieces is None
            else PieceText(pieces, prompt_token_ids, skip_special_tokens=skip)
        )
        self._min_tokens = sampling.min_tokens
        self._include_stop = sampling.include_stop_str_in_output
        self._matcher = (
            StopStringMatcher(sampling.stop, include_stop=self._include_stop)
            if sampling.stop
            else None
        )
        self.num_tokens = 0

    @property
    def stop_reason(self) -> str | None:
        return None if self._matcher is None else self._matcher.matched

    def append(self, token_ids: Sequence[int], *, ends_with_stop_token: bool = False) -> str:
        """Take new output tokens; returns the text that can be shown now.

        Args:
            token_ids: the next output tokens.
            ends_with_stop_token: the last token is the end-of-sequence token or a stop token that
                ended the completion. Its text is left out without `include_stop_str_in_output`.
        """
        hidden = 1 if ends_with_stop_token and not self._include_stop else 0
        shown = token_ids[: len(token_ids) - hidden]
        if self._matcher is None:
            self.num_tokens += len(token_ids)
            return self._text.append(shown)
        released = []
        for token_id in shown:
            if self._matcher.matched is not None:
                break
            self.num_tokens += 1
            may_stop = self.num_tokens > self._min_tokens
            released.append(self._matcher.feed(self._text.append((token_id,)), may_stop=may_stop))
        if self._matcher.matched is None:
            self.num_tokens += hidden
        return "".join(released)

    def append_each(
        self, token_ids: Sequence[int], *, ends_with_stop_token: bool = False
    ) -> list[str]:
        """The text that each of several new tokens adds, up to the token that completes a stop
        string.

        Args:
            token_ids: as for `append`.
            ends_with_stop_token: as for `append`.
        """
        texts: list[str] = []
        for place, token_id in enumerate(token_ids, 1):
            is_stop = ends_with_stop_token and place == len(token_ids)
            texts.append(self.append((token_id,), ends_with_stop_token=is_stop))
            if self.stop_reason is not None:
                break
        return texts

    def flush(self) -> str:
        """Return the text that was held back. Called once, when the completion has ended."""
        text = self._text.flush()
        if self._matcher is None:
            return text
        if self._matcher.matched is not None:
            return ""
        may_stop = self.num_tokens > self._min_tokens
        released = self._matcher.feed(text, may_stop=may_stop)
        return released + self._matcher.flush()


class PieceText:
    """Decodes with a table of the bytes of each token, and an incremental UTF-8 decoder.

    Each maximal invalid part becomes one replacement character (Unicode standard, section 3.9).
    """

    def __init__(
        self, pieces: TokenPieces, prompt_token_ids: Sequence[int], *, skip_special_tokens: bool
    ) -> None:
        self._piece = pieces.shown_piece if skip_special_tokens else pieces.piece
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._at_beginning = pieces.strips_leading_space and not any(
            map(self._piece, reversed(prompt_token_ids))
        )
        # A prompt of token ids can end within a character, which the output then completes.
        self._decoder.decode(b"".join(map(self._piece, prompt_token_ids[-_LONGEST_CHARACTER:])))

    def append(self, token_ids: Sequence[int]) -> str:
        return self._begin(self._decoder.decode(b"".join(map(self._piece, token_ids))))

    def flush(self) -> str:
        return self._begin(self._decoder.decode(b"", final=True))

    def _begin(self, text: str) -> str:
        if self._at_beginning and text:
            self._at_beginning = False
            return text.removeprefix(" ")
        return text


class WindowText:
    """Works with any tokenizer: decodes a short window of tokens and returns the new text.

    The window begins with tokens whose text was returned already. Some decoders change the
    beginning of a text, for example drop a space. Such a change does not affect new tokens.
    """

    def __init__(
        self,
        tokenizer: TextDecoder,
        prompt_token_ids: Sequence[int],
        *,
        skip_special_tokens: bool,
    ) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._skipped = tokenizer.special_token_ids if skip_special_tokens else frozenset()
        self._window = list(prompt_token_ids[-_PROMPT_WINDOW:])
        self._num_read = len(self._window)  # tokens of the window whose text was returned
        self._read_text = self._decode(self._window)

    def append(self, token_ids: Sequence[int]) -> str:
        return "".join(map(self._append_one, token_ids))

    def flush(self) -> str:
        return self._release(self._decode(self._window))

    def _append_one(self, token_id: int) -> str:
        if token_id in self._skipped:
            return ""
        self._window.append(token_id)
        text = self._decode(self._window)
        num_unread = len(self._window) - self._num_read
        if text == self._read_text:
            if num_unread >= _MAX_SILENT:
                del self._window[self._num_read :]
            return ""
        if text.endswith(_REPLACEMENT) and num_unread < _LONGEST_CHARACTER:
            return ""
        return self._release(text)

    def _release(self, text: str) -> str:
        new_text = text[len(self._read_text) :]
        self._window = self._window[self._num_read :]
        self._num_read = len(self._window)
        self._read_text = self._decode(self._window)
        return new_text

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=self._skip_special_tokens)
