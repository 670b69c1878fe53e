"""The joined parts of a JSON answer equal the encoder's output, and no part is large."""

from __future__ import annotations

import asyncio

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from ostinato.api.http.json_parts import joined_parts, json_parts


class Leaf(msgspec.Struct):
    number: int
    text: str | msgspec.UnsetType = msgspec.UNSET


class Renamed(msgspec.Struct, rename="camel"):
    some_name: list[int]


class Sparse(msgspec.Struct, omit_defaults=True):
    entries: list[int] = []
    number: int = 0


class Tagged(msgspec.Struct, tag_field="type", tag="one"):
    entries: list[object]


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


def trees(inner: st.SearchStrategy[object]) -> st.SearchStrategy[Tree | Tagged]:
    unset = st.one_of(few, st.just(msgspec.UNSET))
    mapping = st.dictionaries(texts, few, max_size=2)
    entries = st.lists(inner, max_size=5)
    return st.one_of(
        st.builds(Tree, unset, st.none(), entries, mapping), st.builds(Tagged, entries)
    )


@given(st.recursive(leaves, trees, max_leaves=20))
def test_the_parts_are_the_whole(value: object) -> None:
    assert b"".join(json_parts(value)) == msgspec.json.encode(value)


def test_many_entries_are_many_parts() -> None:
    entry = msgspec.Raw(b'"' + b"x" * 1000 + b'"')
    value = [Tagged([Tree(msgspec.UNSET, None, [entry] * 5000, {})])] * 20
    sizes = [len(part) for part in json_parts(value)]
    assert sum(sizes) == len(msgspec.json.encode(value))
    assert max(sizes) < 300_000


def test_a_value_above_a_limit_is_not_encoded_to_its_end() -> None:
    value, made = [["x" * 1000] for _ in range(100_000)], []

    def noting():
        for part in json_parts(value):
            made.append(len(part))
            yield part

    assert asyncio.run(joined_parts(noting(), most=1 << 20)) is None
    assert sum(made) < 2 << 20
    whole = msgspec.json.encode(value[:2000])
    assert asyncio.run(joined_parts(json_parts(value[:2000]), most=len(whole))) == whole
    assert asyncio.run(joined_parts(json_parts(value[:2000]), most=len(whole) - 1)) is None
