"""The table of tokens and the encoder of forced texts, beside llguidance's reading of the file."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from llguidance import LLTokenizer
from tokenizers import AddedToken, Tokenizer

import ostinato
from ostinato.runtime.errors import InvalidRequestError
from ostinato.runtime.grammar.llguidance_text import grammar_text
from ostinato.runtime.grammar.matcher import build_matcher, load_grammar_tokenizer
from ostinato.runtime.grammar.token_table import TokenTable, read_token_table
from ostinato.runtime.text.tokenizer_files import TokenizerFiles
from ostinato.runtime.text.tokenizer_parts import TokenizerParts
from ostinato.runtime.types.structured_outputs import StructuredOutputsParams
from tests.runtime.text.tokenizer_builders import (
    CORPUS,
    SPECIAL,
    byte_fallback_bpe,
    byte_level_bpe,
    metaspace_unigram,
)

DEMO = Path(ostinato.__file__).parents[1] / "models" / "demo"
EOS = (1,)


def _with_added_tokens() -> Tokenizer:
    """Byte-level BPE with added tokens that occur in plain texts."""
    tokenizer = Tokenizer.from_str(byte_level_bpe().to_str())
    tokenizer.add_tokens([AddedToken("\n\n", normalized=False), AddedToken("  "), "<tool>"])
    tokenizer.add_special_tokens(["[PAD]", "<|é|>"])
    return tokenizer


def _texts_as_merges() -> str:
    """A file of an older version, with merges such as "a b"."""
    file = json.loads(byte_level_bpe().to_str())
    file["model"]["merges"] = [" ".join(pair) for pair in file["model"]["merges"]]
    return json.dumps(file)


def _ignores_merges() -> str:
    file = json.loads(byte_level_bpe().to_str())
    file["model"]["ignore_merges"] = True
    vocab = file["model"]["vocab"]
    file["added_tokens"] = [token for token in file["added_tokens"] if token["content"] in vocab]
    vocab["jumps"] = len(vocab)  # no merge makes it
    return json.dumps(file)


def _nfc() -> str:
    file = json.loads(byte_level_bpe().to_str())
    return json.dumps(file | {"normalizer": {"type": "NFC"}})


KINDS: dict[str, Callable[[], str]] = {
    "byte level": lambda: byte_level_bpe().to_str(),
    "byte fallback": lambda: byte_fallback_bpe().to_str(),
    "byte fallback without strip": lambda: byte_fallback_bpe(strip=False).to_str(),
    "added tokens": lambda: _with_added_tokens().to_str(),
    "merges as texts": _texts_as_merges,
    "ignored merges": _ignores_merges,
    "NFC": _nfc,
    "demo": lambda: (DEMO / "tokenizer.json").read_text(encoding="utf-8"),
}


def _sizes(text: str) -> tuple[int, int]:
    """The number of the tokenizer's ids, and V, which is larger."""
    count = Tokenizer.from_str(text).get_vocab_size(with_added_tokens=True)
    return count, count + 5


def _table(text: str, directory: Path) -> TokenTable:
    (directory / "tokenizer.json").write_text(text, encoding="utf-8")
    table = _read_table(directory, _sizes(text)[1])
    assert table is not None
    return table


def _read_table(directory: Path, vocab_size: int) -> TokenTable | None:
    files = TokenizerFiles(directory)
    parts = TokenizerParts.read(files)
    assert parts is not None
    return read_token_table(files, parts, vocab_size, EOS)


@pytest.mark.parametrize("kind", KINDS)
class TestLikeTheWholeTokenizer:
    """`LLTokenizer` with the whole tokenizer.json is the slow twin."""

    def test_bytes_of_tokens(self, kind, tmp_path):
        text = KINDS[kind]()
        (tmp_path / "tokenizer.json").write_text(text, encoding="utf-8")
        count, vocab_size = _sizes(text)
        ours = load_grammar_tokenizer(str(tmp_path), vocab_size, EOS)
        whole = LLTokenizer(text, n_vocab=vocab_size, eos_token=list(EOS))
        assert ours.vocab_size == whole.vocab_size == vocab_size
        assert ours.eos_tokens == whole.eos_tokens
        for token in range(vocab_size):
            assert ours.is_special_token(token) == whole.is_special_token(token), token
        for token in range(count):
            assert ours.decode_bytes([token]) == whole.decode_bytes([token]), token

    def test_forced_texts(self, kind, tmp_path):
        text = KINDS[kind]()
        table = _table(text, tmp_path)
        whole = LLTokenizer(text, n_vocab=_sizes(text)[1], eos_token=list(EOS))
        chance = random.Random(0)
        pieces = [*CORPUS, *SPECIAL, "<tool>", "  ", "\n\n", " ", "é", "e\u0301", "plain added é"]
        for _ in range(60):
            parts = [chance.choice(pieces) for _ in range(chance.randint(1, 5))]
            parts = [part[chance.randrange(len(part)) :] for part in parts]
            forced = "".join(parts)
            assert table(forced) == whole.tokenize_str(forced), forced

    @pytest.mark.parametrize(
        "constraint",
        [
            {"choice": ["the quick brown fox", "the quick dog  \n\n", "naïve <tool>"]},
            {"regex": "How are you [a-z]+(today|tomorrow)\\?"},
            {"json": {"type": "object", "properties": {"name": {"type": "string"}}}},
        ],
    )
    def test_masks(self, kind, tmp_path, constraint: dict[str, Any]):
        text = KINDS[kind]()
        (tmp_path / "tokenizer.json").write_text(text, encoding="utf-8")
        vocab_size = _sizes(text)[1]
        grammar = grammar_text(StructuredOutputsParams(**constraint), {})
        ours, whole = (
            build_matcher(tokenizer, grammar)
            for tokenizer in (
                load_grammar_tokenizer(str(tmp_path), vocab_size, EOS),
                LLTokenizer(text, n_vocab=vocab_size, eos_token=list(EOS)),
            )
        )
        chance = random.Random(0)
        for _ in range(30):
            mask = whole.compute_bitmask()
            assert ours.compute_bitmask() == mask
            allowed = [n for n in range(vocab_size) if mask[n // 8] >> n % 8 & 1]
            token = chance.choice(allowed)
            assert whole.consume_token(token) == ours.consume_token(token)
            if whole.is_stopped():
                break
        assert whole.is_stopped() == ours.is_stopped()


def test_texts_are_forgotten(tmp_path, monkeypatch):
    """Tokens of earlier texts are dropped if there are too many, and each text is encoded right."""
    monkeypatch.setattr("ostinato.runtime.text.forced_text._MAX_CHARACTERS", 100)
    text = byte_level_bpe().to_str()
    table = _table(text, tmp_path)
    whole = LLTokenizer(text, n_vocab=_sizes(text)[1], eos_token=list(EOS))
    for forced in [*CORPUS, *reversed(CORPUS)]:
        assert table(forced) == whole.tokenize_str(forced)
        assert sum(map(len, table._forced_text._texts)) <= max(100, len(forced))


def test_the_directory_may_change_after_the_start(tmp_path):
    text = byte_level_bpe().to_str()
    table = _table(text, tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    whole = LLTokenizer(text, n_vocab=_sizes(text)[1], eos_token=list(EOS))
    assert table(CORPUS[0]) == whole.tokenize_str(CORPUS[0])


def test_many_added_tokens(tmp_path):
    """llguidance's own reading of 20,000 added tokens takes seconds: its time is quadratic."""
    tokenizer = Tokenizer.from_str(byte_level_bpe().to_str())
    count = tokenizer.get_vocab_size(with_added_tokens=True)
    file = json.loads(tokenizer.to_str())
    file["added_tokens"] += [
        file["added_tokens"][0] | {"id": count + n, "content": f"<|unused {n}|>"}
        for n in range(20_000)
    ]
    text = json.dumps(file)
    (tmp_path / "tokenizer.json").write_text(text, encoding="utf-8")
    tokenizer = load_grammar_tokenizer(str(tmp_path), count + 20_000, EOS)
    assert tokenizer.is_special_token(count + 19_999)
    assert tokenizer.tokenize_str("a<|unused 19999|>")[-1] == count + 19_999


@pytest.mark.parametrize(
    "change",
    [
        {"dropout": 0.1},
        {"continuing_subword_prefix": "##"},
        {"end_of_word_suffix": "</w>"},
        {"type": "WordLevel"},
    ],
)
def test_other_models_have_no_table(tmp_path, change: dict[str, Any]):
    file = json.loads(byte_level_bpe().to_str())
    file["model"] |= change
    for text in (json.dumps(file), metaspace_unigram().to_str()):
        (tmp_path / "tokenizer.json").write_text(text, encoding="utf-8")
        assert _read_table(tmp_path, 1000) is None


def test_special_and_unknown_tokens(tmp_path):
    """Beside the tokenizer.json read as plain JSON."""
    word_level = json.loads(byte_level_bpe().to_str())
    word_level["model"] |= {"type": "WordLevel", "unk_token": SPECIAL[0]}
    unigram = json.loads(metaspace_unigram().to_str())
    texts = [make() for make in KINDS.values()] + [json.dumps(word_level), json.dumps(unigram)]
    unknown: list[int | None] = []
    for text in texts:
        (tmp_path / "tokenizer.json").write_text(text, encoding="utf-8")
        parts = TokenizerParts.read(TokenizerFiles(tmp_path))
        assert parts is not None
        file = json.loads(text)
        assert parts.special_tokens == {
            token["content"]: token["id"] for token in file["added_tokens"] if token["special"]
        }
        model = file["model"]
        expected = model.get("unk_id")
        if isinstance(model["vocab"], dict):
            expected = model["vocab"].get(model["unk_token"])
        assert parts.unknown_id == expected
        unknown.append(expected)
    assert unknown[-1] is not None
    assert unknown[-2] is not None


def test_a_vocabulary_that_is_too_small(tmp_path):
    text = byte_level_bpe().to_str()
    (tmp_path / "tokenizer.json").write_text(text, encoding="utf-8")
    with pytest.raises(InvalidRequestError, match="vocab size too small"):
        load_grammar_tokenizer(str(tmp_path), 300, EOS)
