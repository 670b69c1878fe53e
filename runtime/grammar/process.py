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
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from ostinato.runtime.errors import InvalidRequestError
from ostinato.runtime.grammar.compiler import GrammarAnswer, GrammarModel
from ostinato.runtime.grammar.matcher import build_matcher, load_grammar_tokenizer, problem
from ostinato.runtime.sandbox import serve
from ostinato.runtime.types.structured_outputs import StructuredOutputsParams

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

__all__ = ("main",)

_TRIED_TOKENS = 48
_MEAN_MASK_S = 0.004  # of the tried tokens; the first ones of a large vocabulary take longer
_MAX_GRAMMAR_CHARACTERS = 4 << 20


class _Compiler:
    def __init__(self, first: bytes) -> None:
        self._model = msgspec.msgpack.decode(first, type=GrammarModel)
        self._tokenizer: LLTokenizer | None = None
        self._special_tokens: dict[str, int] = {}

    def answer(self, job: bytes) -> bytes:
        """A `GrammarAnswer` to `StructuredOutputsParams`."""
        params = msgspec.msgpack.decode(job, type=StructuredOutputsParams)
        try:
            answer = GrammarAnswer(grammar=self._compile(params))
        except InvalidRequestError as error:
            answer = GrammarAnswer(error=str(error), code=error.code or "invalid_value")
        except RecursionError:
            answer = GrammarAnswer(error=f"{params.kind} is nested too deeply")
        except ValueError as error:
            answer = GrammarAnswer(error=f"{params.kind}: {error}")
        return msgspec.msgpack.encode(answer)

    def _compile(self, params: StructuredOutputsParams) -> str:
        from ostinato.runtime.grammar.llguidance_text import grammar_text

        model = self._model
        if self._tokenizer is None:
            self._tokenizer = load_grammar_tokenizer(
                model.tokenizer, model.vocab_size, model.eos_token_ids
            )
            self._special_tokens = _special_tokens(Path(model.tokenizer) / "tokenizer.json")
        grammar = grammar_text(params, self._special_tokens)
        if len(grammar) > _MAX_GRAMMAR_CHARACTERS:
            raise ValueError(f"its grammar has more than {_MAX_GRAMMAR_CHARACTERS} characters")
        matcher = build_matcher(self._tokenizer, grammar)
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
            matcher.consume_token(int(choose.choice(allowed)))
        mean = sum(seconds) / max(1, len(seconds))
        if len(seconds) > 8 and mean > _MEAN_MASK_S:
            raise ValueError(
                f"it takes {mean * 1e3:.1f} ms to find the next token's choices, more than "
                f"{_MEAN_MASK_S * 1e3:.0f} ms; make it simpler"
            )


def _special_tokens(file: Path) -> dict[str, int]:
    """Text -> id of the tokens that a grammar's text does not match."""
    added = msgspec.json.decode(file.read_bytes()).get("added_tokens") or ()
    return {token["content"]: token["id"] for token in added if token.get("special")}


def _begin(first: bytes) -> Callable[[bytes], bytes]:
    return _Compiler(first).answer


def main() -> int:
    """Answer jobs from standard input."""
    return serve(sys.argv[1:], _begin)


if __name__ == "__main__":
    sys.exit(main())
