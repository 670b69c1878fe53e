"""Builds and checks the grammar of a constraint in a process with limits of time and memory.

    python -m ostinato.runtime.grammar.process

A client's regular expression, schema or grammar can need unbounded time and memory. So this process
builds the grammar first, with the engine's tokenizer and limits, and tries it on random tokens. A
constraint that exceeds a limit, or that cannot be enforced, is refused before it reaches the
engine.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from ostinato.runtime.errors import InvalidRequestError
from ostinato.runtime.grammar.compiler import GrammarAnswer, GrammarModel
from ostinato.runtime.grammar.matcher import (
    build_matcher,
    prepare_forced_texts,
    problem,
    read_grammar_tokenizer,
)
from ostinato.runtime.sandbox import serve
from ostinato.runtime.types.structured_outputs import StructuredOutputsParams

if TYPE_CHECKING:
    from llguidance import LLMatcher

__all__ = ("GrammarBuilder", "main")

_TRIED_TOKENS = 48
# The mean time of a mask over the tried tokens may be at most this long. The first masks of a large
# vocabulary take longer than the mean. The limits in matcher.py bound a mask to about 5 ms on an
# idle core. A busy machine can take twice as long.
_MEAN_MASK_S = 0.015
_MAX_GRAMMAR_CHARACTERS = 8 << 20


class GrammarBuilder:
    """Builds and checks grammars for one model.

    Args:
        model: the model. The constructor loads its tokenizer.
    """

    def __init__(self, model: GrammarModel) -> None:
        self._model = model
        self._no_tokenizer: InvalidRequestError | None = None
        try:
            self.tokenizer, parts = read_grammar_tokenizer(
                model.tokenizer, model.vocab_size, model.eos_token_ids
            )
            prepare_forced_texts(self.tokenizer)
            # Plain text in a grammar does not match special tokens.
            self._special_tokens = parts.special_tokens
            # If only one text can follow, llguidance allows the tokens into which the tokenizer
            # encodes it. These can include the unknown token.
            self._unknown = [] if parts.unknown_id is None else [parts.unknown_id]
            self._eos = [token for token in model.eos_token_ids if token < model.vocab_size]
        except InvalidRequestError as error:
            self._no_tokenizer = error

    def answer(self, params: StructuredOutputsParams) -> GrammarAnswer:
        """The checked grammar of a constraint, or the error for the client."""
        if self._no_tokenizer is not None:
            return GrammarAnswer(error=str(self._no_tokenizer), code=self._no_tokenizer.code or "")
        try:
            return GrammarAnswer(grammar=self._compile(params))
        except RecursionError:
            error = "it is nested too deeply; make it flatter"
        except ValueError as refusal:
            error = str(refusal)
        return GrammarAnswer(error=f"structured_outputs cannot be used: {error}")

    def _compile(self, params: StructuredOutputsParams) -> str:
        from ostinato.runtime.grammar.llguidance_text import grammar_text

        grammar = grammar_text(params, self._special_tokens)
        if len(grammar) > _MAX_GRAMMAR_CHARACTERS:
            raise ValueError(
                f"its grammar has {len(grammar)} characters, but at most "
                f"{_MAX_GRAMMAR_CHARACTERS} are allowed; make it smaller"
            )
        matcher = build_matcher(self.tokenizer, grammar)
        error = problem(matcher)
        if error is not None:
            raise ValueError(error)
        self._try(matcher)
        return grammar

    def _try(self, matcher: LLMatcher) -> None:
        """Compute the masks of an answer of up to 48 random tokens.

        Raises:
            ValueError: a mask fails, allows no text, or the masks take too long.
        """
        choose = random.Random(0)
        seconds: list[float] = []
        while len(seconds) < _TRIED_TOKENS and not matcher.is_stopped():
            begin = time.process_time()
            bits = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
            seconds.append(time.process_time() - begin)
            error = problem(matcher)
            if error is not None:
                raise ValueError(error)
            mask = np.unpackbits(bits, bitorder="little")
            mask[self._eos] = 0
            if not mask.any():
                if len(seconds) == 1:
                    raise ValueError(
                        "it matches only the empty text; make it match at least one character"
                    )
                return
            mask[self._unknown] = 0
            allowed = np.flatnonzero(mask)
            if not len(allowed):
                if len(seconds) == 1:
                    raise ValueError("no text that matches it can begin with a token of the model")
                return  # after other random tokens, the text could have gone on
            if not matcher.consume_token(int(choose.choice(allowed))):
                raise ValueError(problem(matcher) or "a token that it allows is not accepted")
        mean = sum(seconds) / max(1, len(seconds))
        if len(seconds) > 8 and mean > _MEAN_MASK_S:
            raise ValueError(
                f"computing which tokens may follow takes {mean * 1e3:.1f} ms, but at most "
                f"{_MEAN_MASK_S * 1e3:.0f} ms are allowed; make it simpler"
            )


def _begin(first: bytes) -> Callable[[bytes], bytes]:
    builder = GrammarBuilder(msgspec.json.decode(first, type=GrammarModel))

    def answer(job: bytes) -> bytes:
        params = msgspec.json.decode(job, type=StructuredOutputsParams)
        return msgspec.json.encode(builder.answer(params))

    return answer


def main() -> int:
    """Answer jobs from standard input until it ends. Returns the exit code."""
    return serve(sys.argv[1:], _begin)


if __name__ == "__main__":
    sys.exit(main())
