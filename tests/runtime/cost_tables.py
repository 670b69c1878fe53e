"""Step-cost tables for tests: from a formula, or drawn by hypothesis."""

from __future__ import annotations

from hypothesis import strategies as st

from ostinato.runtime.costs.cost_table import CostTable

TOKENS = (1, 4, 16, 64, 256)
SEQS = (1, 2, 4, 8)
CONTEXTS = (0, 64)


def make_table(
    *,
    step_ms: float = 2.0,
    token_ms: float = 0.1,
    seq_ms: float = 0.05,
    pair_us: float = 1.0,
    score_ms: float | None = None,
) -> CostTable:
    """A table with a fixed cost a step, and a cost for each token, each sequence, each token of
    context that a token attends to, and, with `score_ms`, each log-probability of a prompt.
    """

    def seconds(tokens: int, seqs: int, context: int) -> float:
        micros = tokens * context * pair_us
        return (step_ms + tokens * token_ms + seqs * seq_ms) / 1e3 + micros / 1e6

    return CostTable(
        tokens=TOKENS,
        seqs=SEQS,
        contexts=CONTEXTS,
        seconds=tuple(seconds(t, s, c) for t in TOKENS for s in SEQS for c in CONTEXTS),
        decode=tuple(seconds(s, s, c) for s in SEQS for c in CONTEXTS),
        scored_seconds=None if score_ms is None else score_ms / 1e3,
    )


def axes(least: int) -> st.SearchStrategy[list[int]]:
    return st.lists(st.integers(least, 300), min_size=1, max_size=4, unique=True).map(sorted)


@st.composite
def tables(draw: st.DrawFn) -> CostTable:
    tokens, seqs, contexts = draw(axes(1)), draw(axes(1)), draw(axes(0))
    costs = st.floats(0.0, 10.0, allow_subnormal=False)

    def values(count: int) -> list[float]:
        return draw(st.lists(costs, min_size=count, max_size=count))

    return CostTable.from_medians(
        tokens=tokens,
        seqs=seqs,
        contexts=contexts,
        seconds=values(len(tokens) * len(seqs) * len(contexts)),
        decode=values(len(seqs) * len(contexts)),
        scored_seconds=draw(st.none() | costs),
    )
