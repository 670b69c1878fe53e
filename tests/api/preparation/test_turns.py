"""Decoding large results of a preparation: the value is right, and other tasks run meanwhile."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from ostinato.api.openai.preparation import PreparedPrompt
from ostinato.api.pooling.preparation import PreparedRanking
from ostinato.api.preparation.turns import decoder_in_turns
from ostinato.runtime.types.params import PoolingParams


class Many(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    name: str
    prompts: list[PreparedPrompt]
    words: list[str] = msgspec.field(default_factory=lambda: ["default"])
    pairs: list[tuple[int, int]] | None = None


def ranking(num_documents: int) -> PreparedRanking:
    return PreparedRanking(
        model=None,
        id="rerank-1",
        batch=[[number, *range(300, 400)] for number in range(num_documents)],
        params=PoolingParams(),
        param="documents",
        priority=2,
        cache_salt="",
        pairs=None,
        documents=["one"] * num_documents,
        top_n=None,
    )


@pytest.mark.parametrize(
    "value",
    [
        ranking(0),
        ranking(3000),
        Many(name="a", prompts=[PreparedPrompt(token_ids=[1], max_tokens=None, echo="b")]),
        Many(name="a", prompts=[], words=[], pairs=[(1, 2)]),
    ],
)
def test_the_value_is_that_of_decoding_at_once(value):
    data = msgspec.json.encode(value)
    assert msgspec.json.decode(data, type=type(value)) == value
    assert asyncio.run(decoder_in_turns(type(value))(memoryview(data))) == value


def test_other_tasks_run_after_every_part():
    data = msgspec.json.encode(ranking(3000))
    assert len(data) > 1 << 20

    async def main() -> int:
        turns = 0
        work = asyncio.ensure_future(decoder_in_turns(PreparedRanking)(memoryview(data)))
        while not work.done():
            await asyncio.sleep(0)
            turns += 1
        return turns

    assert asyncio.run(main()) >= (1 << 20) // (64 << 10)


def test_a_broken_value_is_an_error():
    data = msgspec.json.encode(ranking(2)).replace(b"[1,", b'["x",')
    with pytest.raises(msgspec.ValidationError):
        asyncio.run(decoder_in_turns(PreparedRanking)(memoryview(data)))
