"""Incremental detokenisation gives the text of decoding all tokens at once, in any grouping."""

from __future__ import annotations

from itertools import pairwise

import pytest
import tokenizers
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from ostinato.runtime.text.detokenizer import (
    IncrementalDetokenizer,
    PieceText,
    WindowText,
    prompt_context,
)
from ostinato.runtime.text.stop_strings import StopStringMatcher
from ostinato.runtime.text.tokenizer import Tokenizer
from ostinato.runtime.types.params import SamplingParams
from tests.runtime.text import tokenizer_builders as build

BYTE_LEVEL = Tokenizer(build.byte_level_bpe(), {}, None)
BYTE_FALLBACK = Tokenizer(build.byte_fallback_bpe(), {}, None)
BYTE_FALLBACK_NO_STRIP = Tokenizer(build.byte_fallback_bpe(strip=False), {}, None)
METASPACE = Tokenizer(build.metaspace_unigram(), {}, None)
WORDPIECE = Tokenizer(build.wordpiece(), {}, None)
JOINING = {
    "byte_level": BYTE_LEVEL,
    "byte_fallback": BYTE_FALLBACK,
    "byte_fallback_no_strip": BYTE_FALLBACK_NO_STRIP,
}
ALL = JOINING | {"metaspace": METASPACE, "wordpiece": WORDPIECE}

any_text = st.text(
    alphabet=st.one_of(
        st.characters(exclude_categories=("Cs",)),
        st.sampled_from("the lazy dog 你好世界👩‍👧🎉e\u0301ß\n"),
    ),
    max_size=40,
)


def chunks(data: st.DataObject, token_ids: list[int]) -> list[list[int]]:
    """Draws a way to cut `token_ids` into groups, empty ones included."""
    cuts = sorted(data.draw(st.lists(st.integers(0, len(token_ids)), max_size=8)))
    edges = [0, *cuts, len(token_ids)]
    return [token_ids[start:end] for start, end in pairwise(edges)]


def detokenize(
    tokenizer: Tokenizer,
    groups: list[list[int]],
    *,
    prompt: list[int] | None = None,
    **sampling: object,
) -> tuple[str, IncrementalDetokenizer]:
    detokenizer = IncrementalDetokenizer(tokenizer, prompt or [], SamplingParams(**sampling))
    text = "".join(detokenizer.append(group) for group in groups)
    return text + detokenizer.flush(), detokenizer


class TestWholeText:
    @pytest.mark.parametrize("name", ALL)
    @given(data=st.data(), text=any_text)
    @settings(max_examples=60, deadline=None)
    def test_any_grouping_gives_the_text_of_decoding_at_once(self, name, data, text):
        tokenizer = ALL[name]
        token_ids = tokenizer.encode(text, add_special_tokens=False)
        got, _ = detokenize(tokenizer, chunks(data, token_ids))
        assert got == tokenizer.decode(token_ids)

    @pytest.mark.parametrize("name", JOINING)
    @given(text=any_text)
    @settings(max_examples=60, deadline=None)
    def test_round_trip(self, name, text):
        tokenizer = JOINING[name]
        token_ids = tokenizer.encode(text, add_special_tokens=False)
        assert detokenize(tokenizer, [token_ids])[0] == text

    @pytest.mark.parametrize("skip_special_tokens", [True, False])
    @given(data=st.data())
    @settings(max_examples=150, deadline=None)
    def test_any_tokens_of_byte_level_bpe_even_invalid_utf8(self, skip_special_tokens, data):
        vocabulary = st.integers(0, BYTE_LEVEL.vocab_size + 3)
        token_ids = data.draw(st.lists(vocabulary, max_size=24))
        got, _ = detokenize(
            BYTE_LEVEL, chunks(data, token_ids), skip_special_tokens=skip_special_tokens
        )
        assert got == BYTE_LEVEL.decode(token_ids, skip_special_tokens=skip_special_tokens)

    @pytest.mark.parametrize("name", ALL)
    @given(data=st.data())
    @settings(max_examples=60, deadline=None)
    def test_any_tokens_grouping_does_not_matter(self, name, data):
        tokenizer = ALL[name]
        vocabulary = st.integers(0, tokenizer.vocab_size - 1)
        prompt = data.draw(st.lists(vocabulary, max_size=8))
        token_ids = data.draw(st.lists(vocabulary, max_size=24))
        whole, _ = detokenize(tokenizer, [token_ids], prompt=prompt)
        one_by_one, _ = detokenize(tokenizer, [[token] for token in token_ids], prompt=prompt)
        grouped, _ = detokenize(tokenizer, chunks(data, token_ids), prompt=prompt)
        assert whole == one_by_one == grouped

    @pytest.mark.parametrize("name", ALL)
    @given(text=any_text, cut=st.integers(1, 40))
    @settings(max_examples=60, deadline=None)
    def test_the_text_continues_the_prompt(self, name, text, cut):
        tokenizer = ALL[name]
        token_ids = tokenizer.encode("the " + text, add_special_tokens=False)
        prompt, output = token_ids[:cut], token_ids[cut:]
        prompt_text = tokenizer.decode(prompt)
        assume(not prompt_text.endswith("�"))
        got, _ = detokenize(tokenizer, [output], prompt=prompt)
        assert prompt_text + got == tokenizer.decode(token_ids)

    @pytest.mark.parametrize("name", JOINING)
    @given(data=st.data(), text=any_text)
    @settings(max_examples=60, deadline=None)
    def test_the_two_methods_agree(self, name, data, text):
        tokenizer = JOINING[name]
        token_ids = tokenizer.encode("the " + text, add_special_tokens=False)
        cut = data.draw(st.integers(0, 3))
        prompt, output = token_ids[:cut], token_ids[cut:]
        assume(not tokenizer.decode(prompt).endswith("�"))
        fast = PieceText(tokenizer.pieces, prompt, skip_special_tokens=True)
        slow = WindowText(tokenizer, prompt, skip_special_tokens=True)
        assert fast.append(output) + fast.flush() == slow.append(output) + slow.flush()


class TestByteFallback:
    def test_bytes_of_a_character_come_out_together(self):
        token_ids = [BYTE_FALLBACK.token_id(f"<0x{byte:02X}>") for byte in "你".encode()]
        detokenizer = IncrementalDetokenizer(BYTE_FALLBACK, [], SamplingParams())
        assert [detokenizer.append([token]) for token in token_ids] == ["", "", "你"]
        assert detokenizer.flush() == ""

    def test_a_broken_character_is_replaced_when_it_is_known_to_be_broken(self):
        first, second = (BYTE_FALLBACK.token_id(token) for token in ("<0xE4>", "<0xBD>"))
        word = BYTE_FALLBACK.token_id("▁the")
        detokenizer = IncrementalDetokenizer(BYTE_FALLBACK, [], SamplingParams())
        released = [detokenizer.append([token]) for token in (first, second, word)]
        assert released == ["", "", "� the"]

    def test_an_unfinished_character_at_the_end(self):
        detokenizer = IncrementalDetokenizer(BYTE_FALLBACK, [], SamplingParams())
        assert detokenizer.append([BYTE_FALLBACK.token_id("<0xF0>")]) == ""
        assert detokenizer.flush() == "�"

    def test_leading_space_is_dropped_only_at_the_beginning_of_the_whole_text(self):
        word = BYTE_FALLBACK.token_id("▁the")
        assert detokenize(BYTE_FALLBACK, [[word, word]])[0] == "the the"
        assert detokenize(BYTE_FALLBACK, [[word]], prompt=[word])[0] == " the"
        only_bos = [BYTE_FALLBACK.token_id("<s>")]
        assert detokenize(BYTE_FALLBACK, [[word]], prompt=only_bos)[0] == "the"


class TestCharacters:
    def test_never_half_an_emoji(self):
        token_ids = BYTE_LEVEL.encode("a🦆b")
        detokenizer = IncrementalDetokenizer(BYTE_LEVEL, [], SamplingParams())
        released = [detokenizer.append([token]) for token in token_ids]
        assert len(released) > 3
        assert "".join(released) == "a🦆b"
        assert not any("�" in text for text in released)

    def test_a_character_begun_in_the_prompt_is_completed(self):
        token_ids = BYTE_LEVEL.encode("a🦆b")
        assert detokenize(BYTE_LEVEL, [token_ids[2:]], prompt=token_ids[:2])[0] == "🦆b"

    def test_special_tokens_are_left_out_or_shown(self):
        token_ids = [*BYTE_LEVEL.encode("dog"), BYTE_LEVEL.token_id("<|end|>")]
        assert detokenize(BYTE_LEVEL, [token_ids])[0] == "dog"
        shown, _ = detokenize(BYTE_LEVEL, [token_ids], skip_special_tokens=False)
        assert shown == "dog<|end|>"

    def test_a_long_run_of_skipped_tokens_does_not_hide_the_space_after_it(self):
        end, word = METASPACE.token_id("<|end|>"), METASPACE.encode("the", add_special_tokens=False)
        got, _ = detokenize(METASPACE, [[*word, *[end] * 20, *word]])
        assert got == "the the"

    def test_a_stop_token_is_not_shown(self):
        dog, end = BYTE_LEVEL.encode("dog"), BYTE_LEVEL.token_id("<|end|>")
        for include, expected in ((False, "dog"), (True, "dog<|end|>")):
            sampling = SamplingParams(skip_special_tokens=False, include_stop_str_in_output=include)
            detokenizer = IncrementalDetokenizer(BYTE_LEVEL, [], sampling)
            assert detokenizer.append([*dog, end], ends_with_stop_token=True) == expected
            assert detokenizer.num_tokens == len(dog) + 1

    def test_pieces_are_found_for_the_common_families_only(self):
        assert {name: tokenizer.pieces is not None for name, tokenizer in ALL.items()} == {
            "byte_level": True,
            "byte_fallback": True,
            "byte_fallback_no_strip": True,
            "metaspace": False,
            "wordpiece": False,
        }

    def test_no_decoder_at_all(self):
        backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
        tokenizer = Tokenizer(backend, {}, None)
        assert detokenize(tokenizer, [[0], [1, 0]])[0] == "a b a"


def character_tokens(text: str) -> list[int]:
    """One token per byte, so that every character is at least one token."""
    tokens = {bytes(BYTE_LEVEL.token_bytes(token)): token for token in range(2, 258)}
    return [tokens[bytes([byte])] for byte in text.encode()]


class TestStopStrings:
    def test_the_text_ends_before_the_stop_string(self):
        text, detokenizer = detokenize(
            BYTE_LEVEL, [BYTE_LEVEL.encode("the quick brown fox")], stop=("brown",)
        )
        assert text == "the quick "
        assert detokenizer.stop_reason == "brown"

    def test_the_stop_string_is_part_of_the_text_on_request(self):
        text, _ = detokenize(
            BYTE_LEVEL,
            [BYTE_LEVEL.encode("the quick brown fox")],
            stop=("brown",),
            include_stop_str_in_output=True,
        )
        assert text == "the quick brown"

    def test_what_may_become_a_stop_string_is_held_back(self):
        detokenizer = IncrementalDetokenizer(BYTE_LEVEL, [], SamplingParams(stop=("END",)))
        assert [detokenizer.append([token]) for token in character_tokens("aENbEN")] == [
            "a",
            "",
            "",
            "ENb",
            "",
            "",
        ]
        assert detokenizer.flush() == "EN"
        assert detokenizer.stop_reason is None

    def test_tokens_after_the_stop_string_are_not_counted(self):
        detokenizer = IncrementalDetokenizer(BYTE_LEVEL, [], SamplingParams(stop=("b",)))
        assert detokenizer.append(character_tokens("abcdef")) == "a"
        assert detokenizer.num_tokens == 2
        assert detokenizer.append(character_tokens("x")) == ""
        assert detokenizer.flush() == ""

    def test_min_tokens_makes_an_early_stop_string_ordinary_text(self):
        text, detokenizer = detokenize(
            BYTE_LEVEL,
            [character_tokens("ab-ab-")],
            stop=("ab",),
            min_tokens=2,
            max_tokens=16,
        )
        assert (text, detokenizer.stop_reason, detokenizer.num_tokens) == ("ab-", "ab", 5)

    def test_the_stop_that_completes_first_wins(self):
        matcher = StopStringMatcher(("cdef", "bc"))
        assert matcher.feed("abcdef") == "a"
        assert matcher.matched == "bc"

    def test_of_two_stops_that_complete_at_once_the_longer_one_wins(self):
        matcher = StopStringMatcher(("c", "abc"))
        assert matcher.feed("xabc") == "x"
        assert matcher.matched == "abc"

    def test_a_stop_inside_held_text_that_was_not_allowed_is_not_found_later(self):
        matcher = StopStringMatcher(("ab", "xaby"))
        assert matcher.feed("xab", may_stop=False) == ""
        assert matcher.feed("z") == "xabz"
        assert matcher.matched is None

    @given(
        text=st.text(alphabet="ab", max_size=20),
        stop=st.lists(st.text(alphabet="ab", min_size=1, max_size=4), min_size=1, max_size=3),
        data=st.data(),
    )
    @settings(max_examples=300, deadline=None)
    def test_any_cut_of_the_text_gives_the_same_result(self, text, stop, data):
        ends = sorted(
            (start + len(word), start, word)
            for word in stop
            for start in range(len(text))
            if text.startswith(word, start)
        )
        expected = (text[: ends[0][1]], ends[0][2]) if ends else (text, None)
        cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
        edges = [0, *cuts, len(text)]
        matcher = StopStringMatcher(tuple(stop))
        got = "".join(matcher.feed(text[start:end]) for start, end in pairwise(edges))
        assert (got + matcher.flush(), matcher.matched) == expected

    @given(text=any_text, stop=st.lists(st.text(min_size=1, max_size=3), min_size=1, max_size=3))
    @settings(max_examples=100, deadline=None)
    def test_shown_text_never_has_to_be_taken_back(self, text, stop):
        matcher = StopStringMatcher(tuple(stop))
        shown = ""
        for character in text:
            shown += matcher.feed(character)
            assert text.startswith(shown)
            assert not any(word in shown for word in stop)

    def test_each_character_takes_a_constant_number_of_comparisons(self):
        """After each character the text may still become the last stop string, and no other one."""

        class Counted(str):
            __slots__ = ()
            num_reads = 0

            def __getitem__(self, index):
                Counted.num_reads += 1
                return super().__getitem__(index)

        length, others = 1000, 15
        stop = [Counted(first + "a" * length) for first in "bcdefghijklmnop"]
        matcher = StopStringMatcher((*stop, Counted("a" * length + "b")))
        Counted.num_reads = 0
        for _ in range(length):
            assert matcher.feed("a") == ""
        assert matcher.feed("z") == "a" * length + "z"
        # One read for each string and character. The last string also computes its borders and
        # falls back.
        assert Counted.num_reads <= (others + 6) * (length + 1)


@pytest.mark.parametrize("tokenizer", ALL.values(), ids=ALL)
@given(data=st.data())
@settings(max_examples=50, deadline=None)
def test_the_context_of_a_prompt_gives_the_text_of_the_whole_prompt(tokenizer, data):
    tokens = st.integers(0, 40)  # among them special tokens, bytes of characters and unknown ids
    ids = data.draw(st.lists(st.one_of(tokens, st.just(0)), max_size=20))
    prompt, output = ids[: len(ids) // 2], ids[len(ids) // 2 :]
    for skip in (True, False):
        sampling = SamplingParams(skip_special_tokens=skip)
        context = prompt_context(tokenizer, prompt, skip_special_tokens=skip)
        texts = [
            (one := IncrementalDetokenizer(tokenizer, before, sampling)).append(output)
            + one.flush()
            for before in (prompt, context)
        ]
        assert texts[0] == texts[1]
