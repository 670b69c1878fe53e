"""The joined parts of a JSON answer equal the encoder's output, and no part is large."""

from __future__ import annotations

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from ostinato.api.http.json_parts import json_parts


class Leaf(msgspec.Struct):
    number: int
    text: str | msgspec.UnsetType = msgspec.UNSET


class Renamed(msgspec.Struct, rename="camel"):
    some_name: list[int]


class Sparse(msgspec.Struct, omit_defaults=True):
    entries: list[int] = []
    number: int = 0


class Tagged(msgspec.Struct, tag_field="type", tag="one"):
    entries: list[int]


class Tree(msgspec.Struct):
    unset: list[int] | msgspec.UnsetType
    nothing: None
    entries: list[object]
    mapping: dict[str, list[int]]


numbers = st.integers(0, 9)
few = st.lists(numbers, max_size=3)
texts = st.text(max_size=3)
leaves = st.one_of(
    numbers,
    texts,
    st.none(),
    few,
    st.builds(Leaf, numbers, st.one_of(texts, st.just(msgspec.UNSET))),
    st.builds(Renamed, few),
    st.builds(Sparse, few, numbers),
    st.builds(Tagged, few),
    st.binary(max_size=3).map(lambda data: msgspec.Raw(msgspec.json.encode(data.hex()))),
)


def trees(inner: st.SearchStrategy[object]) -> st.SearchStrategy[Tree]:
    unset = st.one_of(few, st.just(msgspec.UNSET))
    mapping = st.dictionaries(texts, few, max_size=2)
    return st.builds(Tree, unset, st.none(), st.lists(inner, max_size=5), mapping)


@given(st.recursive(leaves, trees, max_leaves=20))
def test_the_parts_are_the_whole(value: object) -> None:
    assert b"".join(json_parts(value)) == msgspec.json.encode(value)


def test_many_entries_are_many_parts() -> None:
    entry = msgspec.Raw(b'"' + b"x" * 1000 + b'"')
    value = [Tree(msgspec.UNSET, None, [entry] * 5000, {})] * 20
    sizes = [len(part) for part in json_parts(value)]
    assert sum(sizes) == len(msgspec.json.encode(value))
    assert max(sizes) < 300_000
