"""`stream_interval`: the outputs that one chunk carries."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ostinato.api.service.stream_interval import StreamInterval
from ostinato.runtime.client.completion import join_outputs
from ostinato.runtime.types.outputs import FinishReason, RequestOutput, TokenLogprobs
from tests.api.dialect_values import output

# (index of the output's completion, number of the output's tokens), for three completions.
OUTPUTS = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 3)), max_size=30)


def outputs_of(sizes: list[tuple[int, int]]) -> list[RequestOutput]:
    """The outputs as the engine's client gives them. The last of each completion has no tokens."""
    totals = {0: 0, 1: 0, 2: 0}
    result = []
    for index, count in [*sizes, *((index, 0) for index in totals)]:
        tokens = list(range(totals[index], totals[index] + count))
        totals[index] += count
        one = output(f"<{tokens}>", tokens, totals[index], index=index)
        one.logprobs = [TokenLogprobs(-float(token), 1, [], []) for token in tokens]
        one.finish_reason = FinishReason.stop if len(result) >= len(sizes) else None
        result.append(one)
    return result


@given(OUTPUTS, st.integers(1, 6))
def test_nothing_is_lost_and_the_sizes_are_right(sizes, num_tokens):
    interval = StreamInterval(num_tokens, join_outputs)
    before = outputs_of(sizes)
    after = [interval.add(one.index, one, one) for one in before]
    for index in range(3):
        given_out = [one for one in after if one is not None and one.index == index]
        came = [one for one in before if one.index == index]
        assert join_outputs(given_out) == join_outputs(came)
        assert given_out[-1].finish_reason is FinishReason.stop
        sizes = [len(one.new_token_ids) for one in given_out]
        if num_tokens == 1:
            assert given_out == came
            continue
        first = next((place for place, size in enumerate(sizes) if size), len(sizes) - 1)
        # The first output with tokens is sent at once and unchanged.
        assert given_out[first] in came
        assert all(num_tokens <= size < num_tokens + 3 for size in sizes[first + 1 : -1])
