"""The tokenizer and the limits of llguidance matchers, equal in the grammar process and the engine.

What passes the check is what the engine builds: both make it from one text with one tokenizer.
Imports llguidance only inside functions; it is needed by requests with a constraint.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ostinato.runtime.errors import InvalidRequestError
from ostinato.runtime.grammar.library_errors import explain, tokenizer_problem

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

__all__ = ("build_matcher", "load_grammar_tokenizer", "problem")

# Per mask: what a mask may cost the step that waits for it. llguidance's own default is 4 times
# as much. A grammar that needs more ends its request.
_STEP_LEXER_FUEL = 50_000  # about 4 ms
_STEP_ITEMS = 20_000  # about 1 ms
# Of the whole grammar. An enum of 100,000 texts of 10 characters takes 1,100,000.
_LEXER_FUEL = 8_000_000


def load_grammar_tokenizer(
    directory: str, vocab_size: int, eos_token_ids: tuple[int, ...]
) -> LLTokenizer:
    """The model's vocabulary as a trie of bytes.

    Raises:
        InvalidRequestError: the model has no tokenizer.json, or one that grammars can not use.
    """
    from llguidance import LLTokenizer

    file = Path(directory) / "tokenizer.json"
    if not directory or not file.is_file():
        raise InvalidRequestError(
            "structured_outputs can not be used: the model has no tokenizer.json; leave it out, or "
            "start the server with model.tokenizer=DIRECTORY",
            param="structured_outputs",
            code="no_tokenizer",
        )
    try:
        return LLTokenizer(
            file.read_text(encoding="utf-8"),
            n_vocab=vocab_size,
            eos_token=list(eos_token_ids) or None,
        )
    except ValueError as error:
        raise InvalidRequestError(
            "structured_outputs can not be used: the vocabulary of this model's tokenizer.json can "
            f"not be read as bytes ({tokenizer_problem(str(error))}); leave it out",
            param="structured_outputs",
            code="no_tokenizer",
        ) from error


def build_matcher(tokenizer: LLTokenizer, grammar: str) -> LLMatcher:
    """The grammar's matcher at its beginning; it may be in error, see `problem`."""
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
    """The error of a matcher in the words of a request; None without an error."""
    if not matcher.is_error():
        return None
    return explain(matcher.get_error())
