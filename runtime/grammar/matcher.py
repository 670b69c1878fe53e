"""Builds llguidance's tokenizer and matchers, for the grammar process and for the engine.

The grammar process and the engine use the same grammar text, tokenizer and limits. So the engine
can build every grammar that the process has checked. llguidance is imported inside functions,
because only requests with a constraint need it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ostinato.runtime.errors import InvalidRequestError
from ostinato.runtime.grammar.library_errors import explain, tokenizer_problem
from ostinato.runtime.grammar.token_table import read_token_table
from ostinato.runtime.text.tokenizer_files import TokenizerFiles
from ostinato.runtime.text.tokenizer_parts import TokenizerParts

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

__all__ = (
    "RequestMatcher",
    "build_matcher",
    "load_grammar_tokenizer",
    "prepare_forced_texts",
    "problem",
    "read_grammar_tokenizer",
)

# Limits of one mask, because a step waits for it. llguidance's defaults are 200,000 fuel and 50,000
# items. `_STEP_ITEMS` also raises the limit of one row of the parser, which is 2,000 items by
# default. A request whose grammar exceeds a limit ends with an error.
_STEP_LEXER_FUEL = 50_000  # about 4 ms
_STEP_ITEMS = 20_000  # about 1 ms
# Limit for building a whole grammar. An enum of 100,000 texts of 10 characters takes 1,100,000.
_LEXER_FUEL = 8_000_000


class RequestMatcher:
    """The matcher of a request, which a preemption of the request does not end.

    Attributes:
        matcher: the grammar's state.
        num_taken: tokens of the answer that the matcher has taken.
    """

    __slots__ = ("matcher", "num_taken")

    def __init__(self, matcher: LLMatcher) -> None:
        self.matcher = matcher
        self.num_taken = 0


def read_grammar_tokenizer(
    path: str, vocab_size: int, eos_token_ids: tuple[int, ...]
) -> tuple[LLTokenizer, TokenizerParts]:
    """The model's vocabulary as a trie of bytes, and the parts of the tokenizer.

    Args:
        path: directory or GGUF file of the tokenizer; "" = the model has none.
        vocab_size: V.
        eos_token_ids: tokens that end an answer.

    Raises:
        InvalidRequestError: the model has no tokenizer.json, or one that grammars cannot use.
    """
    from llguidance import LLTokenizer, TokenizerWrapper

    eos = list(eos_token_ids) or None
    files = TokenizerFiles(path) if path else None
    try:
        parts = None if files is None else TokenizerParts.read(files)
        if files is not None and parts is not None:
            table = read_token_table(files, parts, vocab_size, eos_token_ids)
            if table is not None:
                return LLTokenizer(TokenizerWrapper(table), eos_token=eos), parts
            text = files.tokenizer_json() or ""
            return LLTokenizer(text, n_vocab=vocab_size, eos_token=eos), parts
    except ValueError as error:
        raise InvalidRequestError(
            "structured_outputs cannot be used: the vocabulary of this model's tokenizer.json "
            f"cannot be read as bytes ({tokenizer_problem(str(error))}); leave structured_outputs "
            "out",
            param="structured_outputs",
            code="no_tokenizer",
        ) from error
    raise InvalidRequestError(
        "structured_outputs cannot be used: the model has no tokenizer.json; leave "
        "structured_outputs out, or start the server with model.tokenizer=DIRECTORY",
        param="structured_outputs",
        code="no_tokenizer",
    )


def load_grammar_tokenizer(
    path: str, vocab_size: int, eos_token_ids: tuple[int, ...]
) -> LLTokenizer:
    """The first result of `read_grammar_tokenizer`."""
    return read_grammar_tokenizer(path, vocab_size, eos_token_ids)[0]


def prepare_forced_texts(tokenizer: LLTokenizer) -> None:
    """Read the tokenizer's merges now. Otherwise the first mask that needs them would wait."""
    tokenizer.tokenize_str("a")


def build_matcher(tokenizer: LLTokenizer, grammar: str) -> LLMatcher:
    """A matcher at the beginning of a grammar. `problem` returns the grammar's error, if any."""
    from llguidance import LLMatcher, LLParserLimits

    limits = LLParserLimits(
        initial_lexer_fuel=_LEXER_FUEL,
        step_lexer_fuel=_STEP_LEXER_FUEL,
        step_max_items=_STEP_ITEMS,
        max_items_in_row=_STEP_ITEMS,
        verbose_errors=False,
    )
    return LLMatcher(tokenizer, grammar, log_level=0, limits=limits)


def problem(matcher: LLMatcher) -> str | None:
    """The error of a matcher as a text for the client; None without an error."""
    if not matcher.is_error():
        return None
    return explain(matcher.get_error())
