"""Tokenizers of GGUF files give the ids of the tokenizers that they were written from."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from llguidance import LLTokenizer
from tokenizers import pre_tokenizers
from transformers.integrations.gguf.gguf_tokenizer_mapping import (
    GGUF_PRE_TOKENIZER_SPLITS,
    convert_gguf_tokenizer,
)

from ostinato.models.gguf.gguf_config import read_gguf_generation_config
from ostinato.models.gguf.gguf_file import open_gguf
from ostinato.models.gguf.gguf_paths import GGUFError
from ostinato.models.gguf.gguf_tokenizer import end_tokens, gguf_tokenizer_json
from ostinato.models.gguf.pre_tokenizers import PRE_TOKENIZERS
from ostinato.runtime.errors import StartupError
from ostinato.runtime.grammar.matcher import load_grammar_tokenizer
from ostinato.runtime.text.tokenizer import Tokenizer, load_backend
from ostinato.runtime.text.tokenizer_files import TokenizerFiles
from tests.models.gguf_files import add_tokenizer
from tests.runtime.text import tokenizer_builders as build

TEXTS = [
    *build.CORPUS,
    "",
    " ",
    "   three spaces\n\n\nthree lines\t\ttabs ",
    "I'll say: it's 1234567 o'clock, ISN'T IT? (x_1+y)//2 == 3.14",
    "<|begin|>user\nplain added é<|end|> <s>after</s>",
    "ﬁ e\u0301 \u1e9b\u0323 \U0001f469\u200d\U0001f469 \ud55c\uae00",
]


def write(
    file: Path,
    tokenizer: tokenizers.Tokenizer | None,
    *,
    architecture: str = "llama",
    more: Callable[[gguf.GGUFWriter], None] = lambda writer: None,
    **keys: Any,
) -> Path:
    writer = gguf.GGUFWriter(file, architecture)
    if tokenizer is not None:
        add_tokenizer(writer, json.loads(tokenizer.to_str()), **keys)
    more(writer)
    writer.add_tensor("token_embd.weight", np.ones((2, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def split_by(expression: str) -> tokenizers.Tokenizer:
    """The byte-level tokenizer with another splitting of texts into words."""
    made = tokenizers.Tokenizer.from_str(build.byte_level_bpe().to_str())
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(tokenizers.Regex(expression), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    return made


@pytest.mark.parametrize("pre", ["llama-bpe", "qwen2", "tekken", "gpt-4o", "smaug-bpe"])
def test_byte_level_tokenizers_split_words_as_transformers_does(tmp_path: Path, pre: str) -> None:
    theirs = split_by(GGUF_PRE_TOKENIZER_SPLITS[pre])
    file = write(tmp_path / "t.gguf", theirs, pre=pre, bos_token_id=0, add_bos_token=False)
    ours = Tokenizer.from_path(file)
    if pre == "qwen2":  # qwen2's own tokenizer composes characters first
        theirs.normalizer = tokenizers.normalizers.NFC()
    if pre in ("llama-bpe", "tekken"):
        theirs.model.ignore_merges = True
    for text in TEXTS:
        expected = theirs.encode(text)
        assert ours.encode(text) == expected.ids, text
        assert ours.decode(expected.ids) == theirs.decode(expected.ids)
    assert ours.vocab_size == theirs.get_vocab_size()


@pytest.mark.parametrize(("pre", "digits"), [("gpt-2", False), ("smollm", True)])
def test_byte_level_tokenizers_with_the_words_of_gpt2(
    tmp_path: Path, pre: str, digits: bool
) -> None:
    theirs = tokenizers.Tokenizer.from_str(build.byte_level_bpe().to_str())
    if digits:
        steps = [pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        theirs.pre_tokenizer = pre_tokenizers.Sequence(steps)
    ours = Tokenizer.from_path(write(tmp_path / "t.gguf", theirs, pre=pre))
    for text in TEXTS:
        assert ours.encode(text) == theirs.encode(text).ids, text


LLAMA_CPP = json.loads(Path(__file__).with_name("llama_cpp_ids.json").read_text(encoding="utf-8"))
# Splitting -> indices of the texts for which llama.cpp differs from the models' own tokenizer.json:
# it composes no characters for Qwen 2, its classes of cased letters have no marks, and its \b is
# that of ASCII.
OTHERWISE = {
    **dict.fromkeys(("qwen2", "tekken", "gpt-4o"), (5,)),
    **dict.fromkeys(("llama4", "kanana2", "talkie", "minimax-m2"), (5,)),
    **dict.fromkeys(("tiny_aya", "cohere2moe"), (2,)),
}


def every_pair(texts: list[str]) -> tokenizers.Tokenizer:
    """A tokenizer whose tokens are all bytes and all pairs of neighbours in the texts.

    Its ids show where words end.
    """
    whole = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    shown = [whole.pre_tokenize_str(text)[0][0] for text in texts]
    merges = list(dict.fromkeys(pair for text in shown for pair in pairwise(text)))
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *map("".join, merges)]
    vocab = {token: number for number, token in enumerate(tokens)}
    return tokenizers.Tokenizer(tokenizers.models.BPE(vocab, merges))


def test_every_splitting_gives_the_ids_of_llama_cpp(tmp_path: Path) -> None:
    texts = LLAMA_CPP["texts"]
    known = {pre: ids for names, ids in LLAMA_CPP["ids"].items() for pre in names.split()}
    assert known.keys() == PRE_TOKENIZERS.keys()
    file = open_gguf(write(tmp_path / "t.gguf", every_pair(texts), pre="gpt-2"))
    for pre, expected in known.items():
        file.metadata = {**file.metadata, "tokenizer.ggml.pre": pre}
        ours = tokenizers.Tokenizer.from_str(gguf_tokenizer_json(file))
        for number, text in enumerate(texts):
            found = ours.encode(text, add_special_tokens=False).ids
            assert (found == expected[number]) != (number in OTHERWISE.get(pre, ())), (pre, text)


@pytest.fixture(scope="module")
def sentencepiece(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    file = tmp_path_factory.mktemp("spm") / "t.gguf"
    keys: dict[str, Any] = {"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0}
    return Tokenizer.from_path(write(file, build.byte_fallback_bpe(), **keys))


def test_sentencepiece_tokenizers(sentencepiece: Tokenizer) -> None:
    theirs = build.byte_fallback_bpe()
    for text in TEXTS:
        expected = theirs.encode(text)
        assert sentencepiece.encode(text) == expected.ids, text
        assert sentencepiece.decode(expected.ids) == theirs.decode(expected.ids)
    assert sentencepiece.special_tokens == {
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
    }


@given(text=st.text(alphabet="the quickbrown ▁é\n<s>", max_size=30))
def test_merges_follow_from_scores(sentencepiece: Tokenizer, text: str) -> None:
    expected = build.byte_fallback_bpe().encode(text).ids
    assert sentencepiece.encode(text) == expected


def test_gemma(tmp_path: Path) -> None:
    """Spaces are tokens of their own; a text gets no space before it."""
    tokens = ["<pad>", "<eos>", "<bos>", "<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokens += ["  ", "▁a", "ab", "▁ab", "▁", "a", "b", "<start_of_turn>"]
    kinds = [3, 3, 3, 2] + [6] * 256 + [4] + [1] * 6 + [3]

    def vocabulary(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("llama")
        writer.add_token_list(tokens)
        writer.add_token_scores([0.0] * len(tokens))
        writer.add_token_types(kinds)
        writer.add_bos_token_id(2)
        writer.add_unk_token_id(3)
        writer.add_add_space_prefix(False)

    file = write(tmp_path / "t.gguf", None, architecture="gemma2", more=vocabulary)
    theirs, _ = convert_gguf_tokenizer(
        "gemma2",
        {
            "tokenizer_type": "llama",
            "tokens": tokens,
            "scores": [0.0] * len(tokens),
            "token_type": kinds,
            "bos_token_id": 2,
            "unk_token_id": 3,
        },
    )
    ours = Tokenizer.from_path(file)
    for text in ("ab", " ab", "a  b", "<start_of_turn>ab a\n", "é▁a"):
        expected = theirs.encode(text, add_special_tokens=False).ids
        assert ours.encode(text) == [2, *expected], text
        assert ours.decode(expected) == theirs.decode(expected)


@pytest.mark.parametrize("kind", list(gguf.TokenType)[:4])
def test_the_end_of_a_turn_ends_an_answer_whatever_its_type_is(
    tmp_path: Path, kind: gguf.TokenType
) -> None:
    """Published files of Gemma have it as a user-defined token, and `<eos>` as `eos_token_id`."""
    theirs = tokenizers.Tokenizer.from_str(build.byte_level_bpe().to_str())  # token 1 is <|end|>
    theirs.add_tokens(["<end_of_turn>"])
    file = open_gguf(write(tmp_path / "t.gguf", theirs, pre="gpt-2"))
    end_of_turn = theirs.get_vocab_size() - 1
    types = file.metadata["tokenizer.ggml.token_type"].copy()
    types[end_of_turn] = kind
    none = {"tokenizer.ggml.eos_token_id": 0xFFFFFFFF}
    file.metadata = {**file.metadata, "tokenizer.ggml.token_type": types, **none}
    assert read_gguf_generation_config(file)["eos_token_id"] == [1, end_of_turn]
    ours = Tokenizer(tokenizers.Tokenizer.from_str(gguf_tokenizer_json(file)), {}, None)
    assert end_of_turn in ours.special_token_ids
    assert ours.encode("the<end_of_turn>\n") == theirs.encode("the<end_of_turn>\n").ids


def test_in_the_harmony_format_a_part_of_an_answer_does_not_end_it() -> None:
    assert end_tokens(["a", "<|end|>", "<|endoftext|>"]) == [1, 2]
    assert end_tokens(["<|call|>", "<|end|>", "<|return|>"]) == [0, 2]


@pytest.mark.parametrize(
    ("keys", "added"),
    [
        ({"pre": "gpt-2"}, ([], [])),
        ({"pre": "gpt-2", "add_bos_token": True, "add_eos_token": True}, ([0], [1])),
        ({"pre": "llama-bpe"}, ([0], [])),
        ({"pre": "llama-bpe", "add_bos_token": False, "add_eos_token": True}, ([], [1])),
    ],
)
def test_tokens_around_a_text(
    tmp_path: Path, keys: dict[str, Any], added: tuple[list[int], list[int]]
) -> None:
    keys = {**keys, "bos_token_id": 0, "eos_token_id": 1}
    tokenizer = Tokenizer.from_path(write(tmp_path / "t.gguf", build.byte_level_bpe(), **keys))
    plain = tokenizer.encode("the fox", add_special_tokens=False)
    assert tokenizer.encode("the fox") == [*added[0], *plain, *added[1]]


def test_the_chat_template(tmp_path: Path) -> None:
    file = write(
        tmp_path / "t.gguf",
        build.byte_level_bpe(),
        pre="gpt-2",
        bos_token_id=0,
        more=lambda writer: writer.add_chat_template(
            [
                {"name": "default", "template": "{{ bos_token }}{{ messages[0].content }}"},
                {"name": "tool_use", "template": "{{ tools[0].type }}"},
            ]
        ),
    )
    messages = [{"role": "user", "content": "Hello"}]
    assert Tokenizer.from_path(file).apply_chat_template(messages) == "<|begin|>Hello"
    tools = [{"type": "function", "function": {"name": "add"}}]
    assert Tokenizer.from_path(file).apply_chat_template(messages, tools=tools) == "function"
    mine = tmp_path / "mine.jinja"
    mine.write_text("mine")
    ours = Tokenizer.from_path(file, chat_template_file=str(mine))
    assert ours.apply_chat_template(messages) == "mine"


@pytest.mark.parametrize(
    ("tokenizer", "keys"),
    [
        (build.byte_level_bpe, {"pre": "gpt-2"}),
        (build.byte_level_bpe, {"pre": "llama-bpe", "bos_token_id": 0}),
        (build.byte_level_bpe, {"pre": "qwen2", "eos_token_id": 1}),
        (build.byte_fallback_bpe, {"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0}),
    ],
)
def test_the_tokenizer_is_that_of_the_json(
    tmp_path: Path, tokenizer: Callable[[], tokenizers.Tokenizer], keys: dict[str, Any]
) -> None:
    """A tokenizer is assembled from its parts, which is faster than reading them from a text."""
    files = TokenizerFiles(write(tmp_path / "t.gguf", tokenizer(), **keys))
    slow = tokenizers.Tokenizer.from_str(files.tokenizer_json() or "")
    assert load_backend(files).to_str() == slow.to_str()


@pytest.mark.parametrize(
    ("tokenizer", "keys"),
    [
        (build.byte_level_bpe, {"pre": "gpt-2"}),
        (build.byte_fallback_bpe, {"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0}),
    ],
)
def test_grammars_read_the_merges_later(
    tmp_path: Path, tokenizer: Callable[[], tokenizers.Tokenizer], keys: dict[str, Any]
) -> None:
    """The merges are stated, or follow from scores. The bytes of the tokens do not need them."""
    path = write(tmp_path / "t.gguf", tokenizer(), **keys)
    files = TokenizerFiles(path)
    whole_text = files.tokenizer_json() or ""
    whole, bare = json.loads(whole_text), files.gguf_parts(has_merges=False)
    assert bare is not None
    assert files.merges() == [tuple(pair) for pair in whole["model"].pop("merges")]
    assert bare["model"].pop("merges") == []
    assert bare == whole
    count = tokenizers.Tokenizer.from_str(whole_text).get_vocab_size()
    ours = load_grammar_tokenizer(str(path), count, (1,))
    theirs = LLTokenizer(whole_text, n_vocab=count, eos_token=[1])
    assert [ours.decode_bytes([n]) for n in range(count)] == [
        theirs.decode_bytes([n]) for n in range(count)
    ]
    for text in build.CORPUS:
        assert ours.tokenize_str(text) == theirs.tokenize_str(text)


def test_a_whole_tokenizer_json_is_taken_as_it_is(tmp_path: Path) -> None:
    text = build.metaspace_unigram().to_str()
    file = write(
        tmp_path / "t.gguf",
        build.byte_level_bpe(),
        pre="gpt-2",
        more=lambda writer: writer.add_string("tokenizer.huggingface.json", text),
    )
    assert gguf_tokenizer_json(open_gguf(file)) == text


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (lambda writer: None, "tokenizer.ggml.model is None"),
        (lambda writer: writer.add_tokenizer_model("rwkv"), "is 'rwkv'; byte-level BPE"),
        (lambda writer: writer.add_tokenizer_model("gpt2"), "no list tokenizer.ggml.tokens"),
    ],
)
def test_other_vocabularies_are_refused(
    tmp_path: Path, more: Callable[[gguf.GGUFWriter], None], message: str
) -> None:
    file = write(tmp_path / "t.gguf", None, more=more)
    with pytest.raises(StartupError, match=message) as refused:
        Tokenizer.from_path(file)
    assert "model.tokenizer=DIRECTORY" in str(refused.value)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"pre": "kimi-k2"}, "tokenizer.ggml.pre is 'kimi-k2'; supported: llama3"),
        ({"pre": "gpt-2", "eos_token_id": 9999}, "eos_token_id=9999 is not a token"),
        ({"pre": "gpt-2", "token_type": [1, 2]}, "token_type must have 401 numbers"),
        ({"pre": "gpt-2", "merges": ["a b", "zz"]}, "has 'zz', which does not join two tokens"),
    ],
)
def test_wrong_keys_are_refused(tmp_path: Path, keys: dict[str, Any], message: str) -> None:
    file = write(tmp_path / "t.gguf", build.byte_level_bpe(), pre="gpt-2")
    opened = open_gguf(file)
    changed = {f"tokenizer.ggml.{key}": value for key, value in keys.items()}
    if "token_type" in keys:
        changed["tokenizer.ggml.token_type"] = np.array(keys["token_type"])
    opened.metadata = {**opened.metadata, **changed}
    with pytest.raises(GGUFError, match=message):
        gguf_tokenizer_json(opened)
