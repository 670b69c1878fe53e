"""The parts of a tokenizer.json without its merges, which take longest to read."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import msgspec

from ostinato.runtime.text.token_bytes import steps
from ostinato.runtime.text.tokenizer_files import TokenizerFiles

__all__ = ("AddedToken", "TokenizerParts")


class AddedToken(msgspec.Struct):
    """An entry of `added_tokens` in a tokenizer.json."""

    id: int
    content: str
    special: bool = False
    single_word: bool = False
    lstrip: bool = False
    rstrip: bool = False
    normalized: bool = True


class _Model(msgspec.Struct):
    """The model of a tokenizer.json. Its vocabulary has another form if it is Unigram."""

    type: str = ""
    vocab: msgspec.Raw = msgspec.Raw(b"{}")
    dropout: float | None = None
    unk_token: str | None = None
    unk_id: int | None = None  # of Unigram
    continuing_subword_prefix: str | None = None
    end_of_word_suffix: str | None = None
    fuse_unk: bool = False
    byte_fallback: bool = False
    ignore_merges: bool = False


class TokenizerParts(msgspec.Struct, dict=True):
    """A tokenizer.json without its merges."""

    model: _Model
    added_tokens: list[AddedToken] | None = None
    normalizer: Any = None
    pre_tokenizer: Any = None
    decoder: Any = None

    @classmethod
    def read(cls, files: TokenizerFiles) -> TokenizerParts | None:
        """The parts of a tokenizer; None if there is no tokenizer.json.

        Raises:
            StartupError: the file cannot be read.
            msgspec.DecodeError: it is not a tokenizer.json.
        """
        made = files.gguf_parts(has_merges=False)
        if made is None:
            text = files.tokenizer_json()
            return None if text is None else msgspec.json.decode(text, type=cls)
        model = dict(made["model"])
        vocab = model.pop("vocab")
        parts = msgspec.convert(made | {"model": model}, cls)
        parts.vocab = vocab
        return parts

    @property
    def is_plain_bpe(self) -> bool:
        """Whether the tokens of an encoding are parts of the text, made by merges only."""
        model = self.model
        adds_space = any(
            step.get("add_prefix_space") for step in steps(self.pre_tokenizer, "pretokenizers")
        )
        return (
            model.type == "BPE"
            and not model.dropout
            and not model.continuing_subword_prefix
            and not model.end_of_word_suffix
            and not any(token.single_word for token in self.added_tokens or ())
            and not adds_space
        )

    @cached_property
    def vocab(self) -> dict[str, int]:
        """The ids of the tokens of a model other than Unigram. Added tokens can be missing.

        Raises:
            msgspec.DecodeError: it has another form.
        """
        return msgspec.json.decode(self.model.vocab, type=dict[str, int])

    @property
    def special_tokens(self) -> dict[str, int]:
        """Text -> id of the special tokens."""
        return {token.content: token.id for token in self.added_tokens or () if token.special}

    @property
    def unknown_id(self) -> int | None:
        """The id of the unknown token; None for a tokenizer without one."""
        model = self.model
        if model.type == "Unigram" or model.unk_token is None:
            return model.unk_id
        return self.vocab.get(model.unk_token)
