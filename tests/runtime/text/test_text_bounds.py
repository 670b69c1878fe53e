"""Texts cut before tokenisation give the same tokens as the whole text, and length bounds hold."""

from __future__ import annotations

import random
import unicodedata
from collections.abc import Callable

import pytest
import tokenizers
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, models, normalizers, pre_tokenizers, processors, trainers

from ostinato.runtime.text.text_bounds import TextCutter, max_token_characters
from ostinato.runtime.text.tokenizer import Tokenizer
from tests.models.minilm import minilm_directory
from tests.runtime.text import tokenizer_builders

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
DEEPSEEK = (
    r"\p{N}{1,3}",
    r"[一-龥぀-ゟ゠-ヿ]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)


def _byte_level(*patterns: str, normalizer: object = None) -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE())
    splits = [
        pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated", invert=False)
        for pattern in patterns
    ]
    last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*splits, last])
    if normalizer is not None:
        backend.normalizer = normalizer
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=tokenizer_builders.SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator([*tokenizer_builders.CORPUS, "a aa aaa aaaaaaaa" * 9], trainer)
    backend.post_processor = processors.TemplateProcessing(
        single="<|begin|> $A <|end|>", special_tokens=[("<|begin|>", 0), ("<|end|>", 1)]
    )
    return backend


def _gpt2(*, add_prefix_space: bool) -> tokenizers.Tokenizer:
    backend = _byte_level()
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space)
    return backend


def _metaspace(scheme: str, *, split: bool) -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer.from_str(tokenizer_builders.byte_fallback_bpe().to_str())
    backend.normalizer = normalizers.Sequence([])
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=split)
    return backend


CUTTABLE: dict[str, Callable[[], tokenizers.Tokenizer]] = {
    "demo": lambda: tokenizers.Tokenizer.from_file("models/demo/tokenizer.json"),
    "gpt2": lambda: _gpt2(add_prefix_space=False),
    "gpt2 with a space before": lambda: _gpt2(add_prefix_space=True),
    "gpt2 as a pattern": lambda: _byte_level(GPT2),
    "llama3": lambda: _byte_level(LLAMA3),
    "qwen, NFC": lambda: _byte_level(QWEN, normalizer=normalizers.NFC()),
    "o200k": lambda: _byte_level(O200K),
    "deepseek": lambda: _byte_level(*DEEPSEEK),
    "llama2": tokenizer_builders.byte_fallback_bpe,
    "gemma": lambda: tokenizer_builders.byte_fallback_bpe(strip=False),
    "metaspace always": lambda: _metaspace("always", split=True),
    "metaspace first": lambda: _metaspace("first", split=False),
    "metaspace never": lambda: _metaspace("never", split=False),
    "unigram": tokenizer_builders.metaspace_unigram,
    "wordpiece": tokenizer_builders.wordpiece,
    "minilm": lambda: tokenizers.Tokenizer.from_file(f"{minilm_directory()}/tokenizer.json"),
}
# Tokenizers whose tokens have a known maximum of characters.
BOUNDED = {*CUTTABLE} - {"unigram", "wordpiece", "minilm"}

WORDS = (
    "the",
    "quick",
    "aaaa",
    "a",
    "fox's",
    "n't",
    "isn't",
    "Hello",
    "HTTPServer",
    "x1",
    "don't",
    "naïve",
)
GAPS = (
    " ",
    " ",
    " ",
    "  ",
    "\n",
    " \n ",
    ", ",
    " 12",
    "123 ",
    " — ",
    "你好",
    "e\u0301 ",
    "🎉",
    "<|begin|>",
    "<s>",
    "\t",
    "▁",
    "'s ",
    "",
)
# Mostly prose, so that there are places to cut.
gaps = st.sampled_from([" "] * 3 * len(GAPS) + [*GAPS])
prose = st.lists(st.tuples(st.sampled_from(WORDS), gaps), max_size=40).map(
    lambda pairs: "".join(map("".join, pairs))
)
texts = prose | prose | st.text(max_size=40)


@pytest.fixture(scope="module", params=CUTTABLE)
def backend(request: pytest.FixtureRequest) -> tokenizers.Tokenizer:
    return CUTTABLE[request.param]()


@settings(max_examples=60, deadline=None)
@given(
    text=texts,
    limit=st.integers(1, 30),
    side=st.sampled_from(["left", "right"]),
    special=st.booleans(),
)
@example(text="the the", limit=1, side="left", special=False)
def test_a_truncated_text_has_the_tokens_of_the_whole_text(backend, text, limit, side, special):
    tokenizer = Tokenizer(backend, {}, None)
    whole = backend.encode(text, add_special_tokens=special)
    kept = slice(limit) if side == "right" else slice(-limit, None)
    given_ = tokenizer.encode_truncated(text, limit, side=side, add_special_tokens=special)
    assert given_ == whole.ids[kept]
    offsets = tokenizer.offsets_truncated(text, limit, side=side, add_special_tokens=special)
    assert offsets == whole.offsets[kept]


@settings(max_examples=60, deadline=None)
@given(text=texts, limit=st.integers(1, 6), side=st.sampled_from(["left", "right"]))
def test_all_tokens_of_the_part_are_those_of_the_whole_text(backend, text, limit, side):
    begin, end = TextCutter(backend).window(text, limit, side)
    whole = backend.encode(text, add_special_tokens=False).ids
    part = backend.encode(text[begin:end], add_special_tokens=False).ids
    assert part == (whole[: len(part)] if side == "right" else whole[len(whole) - len(part) :])
    assert len(part) >= min(limit, len(whole))


def test_only_what_matters_is_tokenised(backend):
    text = "the quick brown fox " * 5000
    cutter = TextCutter(backend)
    for side in ("left", "right"):
        window = cutter.window(text, 100, side)
        assert 300 < window.end - window.begin < 700
        assert (window.begin == 0) == (side == "right")
    long_words = "a" * 100_000
    assert cutter.window(long_words, 10, "left") == (0, 100_000)


def test_a_place_is_found_wherever_the_stretches_end():
    cutter = TextCutter(CUTTABLE["gpt2"]())
    numbers = random.Random(0)
    for _ in range(200):
        filler = numbers.choice(["aa aa", "...."]) * 1
        text = filler + "." * numbers.randrange(1 << 16, (1 << 16) + 12) + "xy zw" + "." * (1 << 16)
        text = text[: numbers.randrange(len(text) - 12, len(text))]
        expected = text.rindex("xy zw") + 2
        assert cutter.window(text, 1, "left").begin == expected


class TestLengths:
    @settings(max_examples=40)
    @given(text=texts)
    def test_no_token_stands_for_more_characters(self, backend, text):
        most = max_token_characters(backend)
        if most is None:
            return
        assert len(text) <= most * len(backend.encode(text, add_special_tokens=False).ids)

    @pytest.mark.parametrize("name", CUTTABLE)
    def test_which_have_a_bound(self, name):
        assert (max_token_characters(CUTTABLE[name]()) is not None) == (name in BOUNDED)

    def test_the_bound_is_the_longest_token(self):
        backend = CUTTABLE["gpt2"]()
        assert max_token_characters(backend) == max(map(len, backend.get_vocab()))
        composed = CUTTABLE["qwen, NFC"]()
        assert max_token_characters(composed) == 4 * max(map(len, composed.get_vocab()))

    def test_normal_forms_compose_at_most_so_many(self):
        decomposed = (unicodedata.normalize("NFD", chr(code)) for code in range(0x110000))
        composed = (text for text in decomposed if len(unicodedata.normalize("NFC", text)) == 1)
        assert max(map(len, composed)) == 4


class TestUnknownKinds:
    """Some other tokenizers: their texts are not cut, or their token lengths have no bound."""

    @pytest.mark.parametrize(
        "change",
        [
            lambda backend: backend.add_tokens([AddedToken("two words")]),
            lambda backend: backend.add_tokens([AddedToken("mask", lstrip=True)]),
            lambda backend: setattr(backend, "normalizer", normalizers.Strip()),
            lambda backend: setattr(backend, "normalizer", normalizers.Replace("a", "b")),
            lambda backend: setattr(backend, "normalizer", normalizers.Prepend("_")),
            lambda backend: setattr(
                backend,
                "pre_tokenizer",
                pre_tokenizers.Split(tokenizers.Regex(r"\w+\s*"), "isolated"),
            ),
            lambda backend: setattr(
                backend, "pre_tokenizer", pre_tokenizers.Split(tokenizers.Regex(GPT2), "removed")
            ),
            lambda backend: setattr(
                backend, "pre_tokenizer", pre_tokenizers.Split(" ", "isolated")
            ),
            lambda backend: setattr(backend.model, "dropout", 0.5),
        ],
    )
    def test_nothing_is_cut(self, change):
        backend = CUTTABLE["llama3"]()
        change(backend)
        text = "the quick brown fox " * 100
        assert TextCutter(backend).window(text, 3, "right") == (0, len(text))

    def test_tokens_across_spaces_are_not_cut(self):
        backend = tokenizers.Tokenizer.from_str(CUTTABLE["llama2"]().to_str())
        vocabulary = backend.get_vocab()
        merges = [("▁", "t"), ("e", "▁")]
        vocabulary |= {"e▁": len(vocabulary)}
        backend.model = models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True)
        assert TextCutter(backend).window("one two three", 1, "right") == (0, 13)

    @pytest.mark.parametrize(
        "change",
        [
            lambda backend: backend.add_tokens([AddedToken("<mask>", rstrip=True)]),
            lambda backend: setattr(backend, "normalizer", normalizers.StripAccents()),
            lambda backend: setattr(backend, "normalizer", normalizers.Replace("ab", "")),
            lambda backend: setattr(
                backend, "pre_tokenizer", pre_tokenizers.Split(tokenizers.Regex(GPT2), "removed")
            ),
            lambda backend: setattr(backend, "model", models.BPE()),
        ],
    )
    def test_lengths_have_no_bound(self, change):
        backend = CUTTABLE["llama3"]()
        change(backend)
        assert max_token_characters(backend) is None
