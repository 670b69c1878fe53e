"""Texts are cut to a number of tokens as transformers cuts them; special tokens are kept."""

from __future__ import annotations

import pytest
from transformers import AutoTokenizer

from ostinato.runtime.text.tokenizer import Tokenizer, tokenizer_facts
from tests.models.minilm import minilm_directory

TEXT = "The quick brown fox jumps over the lazy dog, again and again."
OTHER = "Kittens were sleeping on an extraordinarily soft rug."


@pytest.fixture(scope="module")
def ours() -> Tokenizer:
    return Tokenizer.from_path(minilm_directory())


@pytest.fixture(scope="module")
def theirs():
    return AutoTokenizer.from_pretrained(minilm_directory())


@pytest.mark.parametrize("limit", [3, 7, 200])
@pytest.mark.parametrize("side", ["left", "right"])
def test_a_text(ours, theirs, limit, side):
    theirs.truncation_side = side
    expected = theirs(TEXT, truncation=True, max_length=limit).input_ids
    assert ours.encode_at_most(TEXT, limit, side=side, add_special_tokens=True) == expected
    bare = theirs(TEXT, truncation=True, max_length=limit, add_special_tokens=False).input_ids
    assert ours.encode_at_most(TEXT, limit, side=side, add_special_tokens=False) == bare


@pytest.mark.parametrize("limit", [None, 5, 13, 22, 200])
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("pair", [(TEXT, OTHER), (OTHER, TEXT), ("fox", TEXT)])
def test_a_pair_is_cut_in_its_longer_text(ours, theirs, limit, side, pair):
    theirs.truncation_side = side
    cut = {"truncation": True, "max_length": limit} if limit else {}
    expected = theirs(*pair, **cut)
    ids, segments = ours.encode_pair(*pair, limit=limit, side=side)
    assert (ids, segments) == (expected.input_ids, expected.token_type_ids)


def test_facts(ours):
    facts = tokenizer_facts(minilm_directory(), ours)
    assert facts["tokenizer_class"] == "BertTokenizer"
    assert facts["cls_token"] == "[CLS]"
    assert facts["vocab_size"] == 30522
    assert facts["chat_template"] is None
