"""Builds and checks the grammar of a constraint in a process with limits of time and memory.

    python -m ostinato.runtime.grammar.process

A regular expression, a schema or a grammar of a client may need unbounded time and memory. It is
built here first, with the engine's tokenizer and limits, and tried on random tokens. A constraint
that takes too much, or that can not be enforced, is refused before it reaches the engine.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from ostinato.runtime.errors import InvalidRequestError
from ostinato.runtime.grammar.compiler import GrammarAnswer, GrammarModel
from ostinato.runtime.grammar.matcher import build_matcher, load_grammar_tokenizer, problem
from ostinato.runtime.sandbox import serve
from ostinato.runtime.types.structured_outputs import StructuredOutputsParams

if TYPE_CHECKING:
    from llguidance import LLMatcher

__all__ = ("GrammarBuilder", "main")

_TRIED_TOKENS = 48
_MEAN_MASK_S = 0.004  # of the tried tokens; the first ones of a large vocabulary take longer
_MAX_GRAMMAR_CHARACTERS = 8 << 20


class GrammarBuilder:
    """Makes grammars for one model.

    Args:
        model: its tokenizer is loaded at once.
    """

    def __init__(self, model: GrammarModel) -> None:
        self._model = model
        self._no_tokenizer: InvalidRequestError | None = None
        try:
            self.tokenizer = load_grammar_tokenizer(
                model.tokenizer, model.vocab_size, model.eos_token_ids
            )
            file = msgspec.json.decode((Path(model.tokenizer) / "tokenizer.json").read_bytes())
            self._special_tokens = _special_tokens(file)
            self._unknown = _unknown_tokens(file)
        except InvalidRequestError as error:
            self._no_tokenizer = error

    def answer(self, params: StructuredOutputsParams) -> GrammarAnswer:
        """The checked grammar of a constraint, or why there is none."""
        if self._no_tokenizer is not None:
            return GrammarAnswer(error=str(self._no_tokenizer), code=self._no_tokenizer.code or "")
        try:
            return GrammarAnswer(grammar=self._compile(params))
        except RecursionError:
            error = "it is nested too deeply; make it flatter"
        except ValueError as refusal:
            error = str(refusal)
        return GrammarAnswer(error=f"structured_outputs can not be used: {error}")

    def _compile(self, params: StructuredOutputsParams) -> str:
        from ostinato.runtime.grammar.llguidance_text import grammar_text

        grammar = grammar_text(params, self._special_tokens)
        if len(grammar) > _MAX_GRAMMAR_CHARACTERS:
            raise ValueError(
                f"as a grammar it has {len(grammar)} characters, at most "
                f"{_MAX_GRAMMAR_CHARACTERS} are allowed; make it smaller"
            )
        matcher = build_matcher(self.tokenizer, grammar)
        error = problem(matcher)
        if error is not None:
            raise ValueError(error)
        self._try(matcher)
        return grammar

    def _try(self, matcher: LLMatcher) -> None:
        """Write an answer of random tokens, for masks that fail or take long.

        Raises:
            ValueError: there are such.
        """
        eos = np.array(self._model.eos_token_ids, dtype=np.int64)
        choose = random.Random(0)
        seconds: list[float] = []
        while len(seconds) < _TRIED_TOKENS and not matcher.is_stopped():
            begin = time.process_time()
            mask = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
            seconds.append(time.process_time() - begin)
            error = problem(matcher)
            if error is not None:
                raise ValueError(error)
            allowed = np.setdiff1d(np.flatnonzero(np.unpackbits(mask, bitorder="little")), eos)
            if not len(allowed):
                if len(seconds) == 1:
                    raise ValueError("nothing but the empty text matches it")
                return
            allowed = np.setdiff1d(allowed, self._unknown)
            if not len(allowed):
                if len(seconds) == 1:
                    raise ValueError("the model has no tokens for the text that it begins with")
                return  # a model that chose other tokens before can go on
            if not matcher.consume_token(int(choose.choice(allowed))):
                raise ValueError(problem(matcher) or "a text that it allows can not be written")
        mean = sum(seconds) / max(1, len(seconds))
        if len(seconds) > 8 and mean > _MEAN_MASK_S:
            raise ValueError(
                f"to find the tokens that may come next takes {mean * 1e3:.1f} ms, at most "
                f"{_MEAN_MASK_S * 1e3:.0f} ms are allowed; make it simpler"
            )


def _special_tokens(file: dict[str, Any]) -> dict[str, int]:
    """Text -> id of the tokens that a grammar's text does not match."""
    added = file.get("added_tokens") or ()
    return {token["content"]: token["id"] for token in added if token.get("special")}


def _unknown_tokens(file: dict[str, Any]) -> list[int]:
    """The id of the token that stands for text of which the vocabulary has no tokens, if any.

    Where one text alone can follow, llguidance allows what the tokenizer makes of it.
    """
    model = file.get("model") or {}
    token_id = model.get("unk_id")  # of Unigram; the others give a text
    if token_id is None and isinstance(model.get("vocab"), dict):
        token_id = model["vocab"].get(model.get("unk_token"))
    return [] if token_id is None else [token_id]


def _begin(first: bytes) -> Callable[[bytes], bytes]:
    builder = GrammarBuilder(msgspec.json.decode(first, type=GrammarModel))

    def answer(job: bytes) -> bytes:
        params = msgspec.json.decode(job, type=StructuredOutputsParams)
        return msgspec.json.encode(builder.answer(params))

    return answer


def main() -> int:
    """Answer jobs from standard input."""
    return serve(sys.argv[1:], _begin)


if __name__ == "__main__":
    sys.exit(main())
