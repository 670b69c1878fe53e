"""The cache of built grammars is bounded by their number and by the size of their texts."""

from __future__ import annotations

from pathlib import Path

import pytest

from ostinato import StructuredOutputsParams
from ostinato.runtime.grammar import store as store_module
from ostinato.runtime.grammar.llguidance_text import grammar_text
from ostinato.runtime.grammar.store import GrammarStore
from ostinato.runtime.types.params import SamplingParams
from ostinato.runtime.types.request import Request

DEMO = str(Path(__file__).parents[3] / "models" / "demo")
TEXTS = [grammar_text(StructuredOutputsParams(regex=letter * 9), {}) for letter in "abcdef"]


@pytest.mark.parametrize(("most", "most_characters"), [(3, 10**9), (64, 3 * len(TEXTS[0]))])
def test_the_oldest_grammars_are_dropped(
    most: int, most_characters: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "_MAX_CACHED", most)
    monkeypatch.setattr(store_module, "_MAX_CACHED_CHARACTERS", most_characters)
    store = GrammarStore(DEMO, 3072, (2,))
    try:
        for index, text in enumerate(TEXTS):
            store.prepare(str(index), text)
        assert list(store._cache) == TEXTS[-3:]
        assert store._num_characters == sum(map(len, TEXTS[-3:]))
        # A grammar that was dropped is still there for its request.
        request = Request(request_id="0", prompt_token_ids=[3], sampling=SamplingParams())
        first = store.matcher(request)
        assert first.matcher.consume_tokens([67] * 3)
        assert store.matcher(request) is first
        store.release("0")
        store.prepare("0", TEXTS[0])
        assert store.matcher(request) is not first
    finally:
        store.close()


def test_one_large_grammar_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "_MAX_CACHED_CHARACTERS", 1)
    store = GrammarStore(DEMO, 3072, (2,))
    try:
        for text in TEXTS:
            store.prepare(text, text)
        assert list(store._cache) == TEXTS[-1:]
    finally:
        store.close()


def test_a_build_that_failed_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    store = GrammarStore(DEMO, 3072, (2,))
    try:
        with monkeypatch.context() as patch:
            patch.setattr(store_module, "build_matcher", _without_memory)
            store.prepare("first", TEXTS[0])
            [failed] = store.take_built(timeout_s=60)
            assert (failed.error, failed.is_refusal) == ("no memory", False)
        assert store._num_characters == 0
        store.prepare("second", TEXTS[0])
        [built] = store.take_built(timeout_s=60)
        assert built.error is None
    finally:
        store.close()


def _without_memory(tokenizer: object, grammar: str) -> None:
    raise MemoryError("no memory")
