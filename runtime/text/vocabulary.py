"""Compares the vocabularies of a draft model and its target, whose token ids must mean the same."""

from __future__ import annotations

import json
from pathlib import Path

from ostinato.runtime.errors import StartupError
from ostinato.runtime.text.tokenizer_files import TokenizerFiles

__all__ = ("vocabulary_difference",)


def vocabulary_difference(draft: Path, target: Path) -> str | None:
    """How the tokens of a draft model differ from the target's; None = no known difference.

    Added tokens are not compared. Models of one family differ in them, and draft tokens are rarely
    added tokens.

    Args:
        draft: a directory or a GGUF file.
        target: a directory or a GGUF file. A directory without tokenizer.json is not compared.

    Raises:
        StartupError: a file cannot be read.
    """
    texts = [TokenizerFiles(path).tokenizer_json() for path in (draft, target)]
    if texts[0] is None or texts[1] is None or texts[0] == texts[1]:
        return None
    theirs, ours = (
        _tokens(text, path) for text, path in zip(texts, (draft, target), strict=True) if text
    )
    for token_id in sorted(theirs.keys() & ours.keys()):
        if theirs[token_id] != ours[token_id]:
            return (
                f"it has another vocabulary: its token {token_id} is {theirs[token_id]!r}, and the "
                f"model's is {ours[token_id]!r}"
            )
    return None


def _tokens(text: str, path: Path) -> dict[int, str]:
    """The tokens of a tokenizer.json by id."""
    try:
        vocab = json.loads(text)["model"]["vocab"]
    except (ValueError, KeyError, TypeError) as error:
        raise StartupError(f"the tokenizer.json of {path} has no vocabulary: {error}") from error
    if isinstance(vocab, dict):
        return {token_id: token for token, token_id in vocab.items()}
    return {token_id: str(entry[0]) for token_id, entry in enumerate(vocab)}
