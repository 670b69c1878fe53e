"""Makes a tokenizer.json and a tokenizer_config.json from a GGUF file's metadata.

`tokenizer.ggml.model` names one of two kinds of vocabularies. `gpt2` is byte-level BPE:
`tokenizer.ggml.pre` names the expressions that split a text into words (pre_tokenizers.py).
`llama` is SentencePiece: if the file states no merges, they follow from the scores of the tokens,
or for Gemma from their order. This module imports neither torch nor transformers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from ostinato.models.gguf.gguf_file import GGUFFile
from ostinato.models.gguf.gguf_paths import GGUFError
from ostinato.models.gguf.pre_tokenizers import PRE_TOKENIZERS

__all__ = (
    "NO_TOKEN",
    "end_tokens",
    "gguf_merges",
    "gguf_tokenizer_config",
    "gguf_tokenizer_json",
    "gguf_tokenizer_parts",
    "whole_tokenizer_json",
)

NO_TOKEN = 0xFFFFFFFF
"""The id of a special token that a tokenizer does not have, in files that state it."""

# Types of tokens in tokenizer.ggml.token_type.
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6
_UNDERSCORE = "▁"

# Tokens that end an answer in the chat formats of known models. A file names one of them as
# `eos_token_id`; generation_config.json of the same models lists several.
_END_TOKENS = {
    "<|eot_id|>",
    "<|im_end|>",
    "<|end|>",
    "<|return|>",
    "<|call|>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<|eom_id|>",
    "<end_of_turn>",
    "<eos>",
    "<EOT>",
}


def end_tokens(tokens: Sequence[str]) -> list[int]:
    """The ids of the tokens that end an answer in the chat formats of known models.

    The text of a token tells it, as in llama.cpp, because published files of Gemma have
    `<end_of_turn>` as a user-defined or normal token.

    Args:
        tokens: the vocabulary.
    """
    found = {token_id: text for token_id, text in enumerate(tokens) if text in _END_TOKENS}
    if "<|return|>" in found.values():  # in the harmony format <|end|> ends a part of an answer
        found = {token_id: text for token_id, text in found.items() if text != "<|end|>"}
    return list(found)


def gguf_tokenizer_json(file: GGUFFile) -> str:
    """The tokenizer.json of a file's vocabulary.

    Raises:
        GGUFError: the vocabulary is missing, has a contradiction, or is of a kind that is not
            supported.
    """
    whole = whole_tokenizer_json(file)
    if whole is not None:
        return whole
    made = gguf_tokenizer_parts(file)
    return msgspec.json.encode(made).decode()  # json.dumps takes ten times as long


def whole_tokenizer_json(file: GGUFFile) -> str | None:
    """The tokenizer.json that a file has as a text; None if it has none.

    Raises:
        GGUFError: the entry is not a text.
    """
    return file.get("tokenizer.huggingface.json", str)


def gguf_merges(file: GGUFFile) -> list[tuple[str, str]]:
    """The merges of a file without a whole tokenizer.json, best first.

    Raises:
        GGUFError: as `gguf_tokenizer_json`.
    """
    return gguf_tokenizer_parts(file)["model"]["merges"]


def gguf_tokenizer_parts(file: GGUFFile, *, has_merges: bool = True) -> dict[str, Any]:
    """The contents of `gguf_tokenizer_json`, for a file without a whole tokenizer.json.

    Args:
        file: the opened file.
        has_merges: False = without the merges, which take most of the time.

    Raises:
        GGUFError: as `gguf_tokenizer_json`.
    """
    vocabulary = _Vocabulary(file)
    make = _byte_level if vocabulary.model == "gpt2" else _sentencepiece
    made = make(vocabulary, has_merges=has_merges)
    return made | {"version": "1.0", "truncation": None, "padding": None}


def gguf_tokenizer_config(file: GGUFFile) -> dict[str, Any]:
    """The special tokens and the chat template, as in a tokenizer_config.json.

    Raises:
        GGUFError: there is no vocabulary, its kind is not supported, or an id lies outside it.
    """
    vocabulary = _Vocabulary(file)
    config: dict[str, Any] = {}
    for ours, theirs in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        token_id = vocabulary.special_id(theirs)
        if token_id is not None:
            config[f"{ours}_token"] = vocabulary.tokens[token_id]
    template = file.get("tokenizer.chat_template", str)
    if template is not None:
        config["chat_template"] = template
    for_tools = file.get("tokenizer.chat_template.tool_use", str)
    if template is not None and for_tools is not None:
        named = {"default": template, "tool_use": for_tools}
        config["chat_template"] = [{"name": key, "template": text} for key, text in named.items()]
    return config


class _Vocabulary:
    """The metadata of a tokenizer, checked."""

    def __init__(self, file: GGUFFile) -> None:
        self.file = file
        self.model = file.get("tokenizer.ggml.model", str)
        if self.model not in ("gpt2", "llama"):
            raise self.error(
                f"tokenizer.ggml.model is {self.model!r}; byte-level BPE (gpt2) and SentencePiece "
                "(llama) are supported"
            )
        self.tokens: list[str] = file.get("tokenizer.ggml.tokens", list) or []
        if not self.tokens:
            raise self.error("there is no list tokenizer.ggml.tokens")
        types = self._numbers("token_type")
        self.types: list[int] = (
            [1] * len(self.tokens) if types is None else types.astype(np.int64).tolist()
        )

    def error(self, what: str) -> GGUFError:
        return GGUFError(
            f"{self.file.path}: {what}; give the model's Hugging Face tokenizer with "
            "model.tokenizer=DIRECTORY"
        )

    def special_id(self, name: str) -> int | None:
        """The id of the `bos`, `eos`, `unknown` or `padding` token."""
        token_id = self.file.get(f"tokenizer.ggml.{name}_token_id", int)
        if token_id in (None, NO_TOKEN):
            return None
        if not 0 <= token_id < len(self.tokens):
            raise self.error(f"tokenizer.ggml.{name}_token_id={token_id!r} is not a token")
        return token_id

    def flag(self, key: str, default: bool) -> bool:
        value = self.file.get(f"tokenizer.ggml.{key}", bool)
        return default if value is None else value

    def scores(self) -> list[float]:
        """One score for each token.

        Raises:
            GGUFError: there are none.
        """
        scores = self._numbers("scores")
        if scores is None:
            raise self.error("there are neither tokenizer.ggml.merges nor tokenizer.ggml.scores")
        return scores.tolist()

    def merges(self) -> list[tuple[str, str]] | None:
        """The merges that the file states, best first; None if it states none.

        Raises:
            GGUFError: an entry is not a pair of tokens.
        """
        stated = self.file.get("tokenizer.ggml.merges", list)
        if stated is None:
            return None
        known = set(self.tokens)
        pairs: list[tuple[str, str]] = []
        for text in stated:
            place = text.find(" ", 1)  # a token can begin with a space
            left, right = (text, "") if place < 0 else (text[:place], text[place + 1 :])
            # A file can have 100,000 merges. To test each with a set of its three tokens would take
            # twice as long.
            if left not in known or right not in known or left + right not in known:
                raise self.error(
                    f"tokenizer.ggml.merges has {text!r}, which does not join two tokens into a "
                    "third"
                )
            pairs.append((left, right))
        return pairs

    def added_tokens(self, vocab: Mapping[str, int]) -> list[dict[str, Any]]:
        """The tokens that are found in a text before it is split.

        Args:
            vocab: the tokenizer's vocabulary. A token that this vocabulary spells differently is
                not listed, because it is found in the normalised text.
        """
        named = {self.special_id(name) for name in ("bos", "eos", "unknown", "padding")}
        named.update(end_tokens(self.tokens))
        found: list[dict[str, Any]] = []
        for token_id, kind in enumerate(self.types):
            if kind == _NORMAL and token_id not in named:
                continue  # nearly all tokens
            is_special = kind == _CONTROL or token_id in named
            is_added = is_special or kind == _USER_DEFINED
            if is_added and self.tokens[token_id] in vocab:
                found.append(
                    {
                        "id": token_id,
                        "content": self.tokens[token_id],
                        "single_word": False,
                        "lstrip": False,
                        "rstrip": self._strips_right(token_id),
                        "normalized": False,
                        "special": is_special,
                    }
                )
        return found

    def _strips_right(self, token_id: int) -> bool:
        """Whether white space after a token is dropped (Phi-3's chats). Files do not state it."""
        if self.file.architecture != "phi3" or self.model != "llama":
            return False
        token = self.tokens[token_id]
        return token == "</s>" or (token.startswith("<|") and token != "<|endoftext|>")

    def around(self, *, adds_bos: bool) -> dict[str, Any] | None:
        """The post-processor, which adds the first and the last token of a text."""
        ids = {"bos": self.special_id("bos"), "eos": self.special_id("eos")}
        bos = ids["bos"] if self.flag("add_bos_token", adds_bos) else None
        eos = ids["eos"] if self.flag("add_eos_token", False) else None
        special = {
            self.tokens[token_id]: {
                "id": self.tokens[token_id],
                "ids": [token_id],
                "tokens": [self.tokens[token_id]],
            }
            for token_id in (bos, eos)
            if token_id is not None
        }
        if not special:
            return None

        def text(name: str, type_id: int) -> list[dict[str, Any]]:
            pieces: list[dict[str, Any]] = [{"Sequence": {"id": name, "type_id": type_id}}]
            if bos is not None:
                pieces.insert(0, {"SpecialToken": {"id": self.tokens[bos], "type_id": type_id}})
            if eos is not None:
                pieces.append({"SpecialToken": {"id": self.tokens[eos], "type_id": type_id}})
            return pieces

        return {
            "type": "TemplateProcessing",
            "single": text("A", 0),
            "pair": text("A", 0) + text("B", 1),
            "special_tokens": special,
        }

    def _numbers(self, key: str) -> Any:
        """An array with a number for each token; None when there is none."""
        numbers = self.file.metadata.get(f"tokenizer.ggml.{key}")
        if numbers is None:
            return None
        if not isinstance(numbers, np.ndarray) or len(numbers) != len(self.tokens):
            raise self.error(f"tokenizer.ggml.{key} must have {len(self.tokens)} numbers")
        return numbers


def _model(vocab: dict[str, int], merges: list[tuple[str, str]], **settings: Any) -> dict[str, Any]:
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
        "vocab": vocab,
        "merges": merges,
    } | settings


def _byte_level(vocabulary: _Vocabulary, *, has_merges: bool) -> dict[str, Any]:
    name = vocabulary.file.get("tokenizer.ggml.pre", str)
    pre_tokenizer = None if name is None else PRE_TOKENIZERS.get(name)
    if pre_tokenizer is None:
        raise vocabulary.error(
            f"tokenizer.ggml.pre is {name!r}; supported: {', '.join(PRE_TOKENIZERS)}"
        )
    merges = vocabulary.merges() if has_merges else []
    if merges is None:
        raise vocabulary.error("there is no list tokenizer.ggml.merges")
    splits = [
        {"type": "Split", "pattern": {"Regex": each}, "behavior": "Isolated", "invert": False}
        for each in pre_tokenizer.expressions
    ]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False}
    vocab = {token: token_id for token_id, token in enumerate(vocabulary.tokens)}
    return {
        "added_tokens": vocabulary.added_tokens(vocab),
        "normalizer": {"type": "NFC"} if pre_tokenizer.nfc else None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [*splits, byte_level | {"use_regex": pre_tokenizer.then_gpt2}],
        },
        "post_processor": vocabulary.around(adds_bos=pre_tokenizer.add_bos),
        "decoder": byte_level | {"use_regex": True},
        "model": _model(vocab, merges, ignore_merges=pre_tokenizer.ignore_merges),
    }


def _sentencepiece(vocabulary: _Vocabulary, *, has_merges: bool) -> dict[str, Any]:
    is_gemma = vocabulary.file.architecture.startswith("gemma")
    tokens = vocabulary.tokens
    if is_gemma:  # files have spaces where normalised texts have _UNDERSCORE
        tokens = [
            _UNDERSCORE * len(each) if each and not each.strip(" ") else each for each in tokens
        ]
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    merges = vocabulary.merges() if has_merges else []
    if merges is None:
        # Gemma's merges are in the order of its tokens, and not of its scores.
        ranks = [-float(n) for n in range(len(tokens))] if is_gemma else vocabulary.scores()
        skipped = {_UNKNOWN, _CONTROL, _UNUSED, _BYTE}
        kinds = vocabulary.types
        merges = _merges_of(
            vocab, {t: ranks[n] for n, t in enumerate(tokens) if kinds[n] not in skipped}
        )
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": _UNDERSCORE}
    has_prefix = vocabulary.flag("add_space_prefix", not is_gemma)
    steps: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": _UNDERSCORE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if has_prefix:
        prepend = {"type": "Prepend", "prepend": _UNDERSCORE}
        replace = {"type": "Sequence", "normalizers": [prepend, replace]}
        steps.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    unknown = vocabulary.special_id("unknown")
    if unknown is None and _UNKNOWN in vocabulary.types:
        unknown = vocabulary.types.index(_UNKNOWN)
    return {
        "added_tokens": vocabulary.added_tokens(vocab),
        "normalizer": replace,
        "pre_tokenizer": None,
        "post_processor": vocabulary.around(adds_bos=True),
        "decoder": {"type": "Sequence", "decoders": steps},
        "model": _model(
            vocab,
            merges,
            unk_token=None if unknown is None else tokens[unknown],
            fuse_unk=True,
            byte_fallback=_BYTE in vocabulary.types,
        ),
    }


def _merges_of(vocab: Mapping[str, int], ranks: Mapping[str, float]) -> list[tuple[str, str]]:
    """All pairs of tokens that join into a token; the pair of the joined token with the highest
    score comes first.

    SentencePiece merges the pair whose result has the highest score. If scores are equal, it merges
    the leftmost pair.

    Args:
        vocab: all tokens.
        ranks: the scores of the tokens that can be the result of a merge.
    """
    found: list[tuple[float, int, int, str, str]] = []
    for token, rank in ranks.items():
        for place in range(1, len(token)):
            left, right = token[:place], token[place:]
            if left in vocab and right in vocab:
                found.append((-rank, vocab[left], vocab[right], left, right))
    found.sort()
    return [(left, right) for *_, left, right in found]
