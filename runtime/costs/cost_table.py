"""The step-cost table: how many seconds a step takes, by its tokens, sequences and context.

runtime/costs/cost_probe.py measures the table when the engine starts. The bundle, which keeps
compiled programs for later starts, keeps the table as bytes. A lookup takes microseconds and needs
no torch. A step is described by three numbers:

    tokens    T, tokens that the step computes, over all of its sequences
    seqs      S, sequences that take part
    context   C, tokens that a sequence has in the cache before the step

Steps in which every sequence decodes (T = S, all sampled) have a table of their own, because they
can run as another program.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple, Self

import msgspec

__all__ = ("Chunk", "CostTable")


class Chunk(NamedTuple):
    """Part of a prompt: positions [start, start + num_tokens)."""

    num_tokens: int
    start: int
    num_scored: int = 0  # positions whose next token's log-probability is reported


class CostTable(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """Seconds at the points of a grid of T, S and C, and interpolation between the points.

    `seconds` and `decode` never fall when an argument grows. Between points they are multilinear. A
    value below the first point of an axis counts as the first point. Past the last point of an
    axis, the distance from that point times a slope is added. The slope is that of the axis's last
    interval. If this interval is steeper at smaller values of the other arguments, the steepest of
    these slopes is used. So the result never falls there either.

    Raises:
        ValueError: an axis does not rise, the number of entries is wrong, or an entry is negative,
            not finite or smaller than an entry before it on an axis.
    """

    tokens: tuple[int, ...]  # T axis, rising
    seqs: tuple[int, ...]  # S axis, rising
    contexts: tuple[int, ...]  # C axis, rising
    seconds: tuple[float, ...]  # [T, S, C], contexts fastest
    decode: tuple[float, ...]  # [S, C], steps in which every sequence decodes
    # Seconds that the log-probability of one prompt token adds. None = not measured; then it counts
    # like one token.
    scored_seconds: float | None = None
    # `verify` has the seconds that verifying drafts adds to a decode, [Q, S]. Q is the length of
    # `verify_tokens` (tokens per sequence, at least 2), S that of `verify_seqs` (sequences).
    # Empty = not measured.
    verify_tokens: tuple[int, ...] = ()
    verify_seqs: tuple[int, ...] = ()
    verify: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        for name in ("tokens", "seqs", "contexts"):
            axis: tuple[int, ...] = getattr(self, name)
            least = 0 if name == "contexts" else 1
            if not axis or axis[0] < least or any(a >= b for a, b in pairwise(axis)):
                raise ValueError(
                    f"cost table: {name} must rise from at least {least}, got {axis}; measure again"
                )
        shape = self._shape
        for name, sizes in (("seconds", shape), ("decode", shape[1:])):
            values: tuple[float, ...] = getattr(self, name)
            if len(values) != math.prod(sizes):
                raise ValueError(
                    f"cost table: {name} must have {math.prod(sizes)} entries, got {len(values)}; "
                    f"measure again"
                )
            if not all(math.isfinite(value) and value >= 0.0 for value in values):
                raise ValueError(f"cost table: {name} must be finite and at least 0; measure again")
            if values != tuple(_envelope(values, sizes)):
                raise ValueError(f"cost table: {name} falls along an axis; measure again")
        scored = self.scored_seconds
        if scored is not None and not (math.isfinite(scored) and scored >= 0.0):
            raise ValueError(
                "cost table: scored_seconds must be finite and at least 0; measure again"
            )
        self._check_verify()

    @classmethod
    def from_medians(
        cls,
        *,
        tokens: Sequence[int],
        seqs: Sequence[int],
        contexts: Sequence[int],
        seconds: Sequence[float],
        decode: Sequence[float],
        scored_seconds: float | None = None,
        verify: Mapping[tuple[int, int], float] | None = None,
    ) -> Self:
        """A table from measured values, which need not rise along the axes.

        `verify` has the seconds that verification adds, by (tokens of each sequence, sequences), at
        all points of a grid.

        An entry is lowered to the least of the entries whose arguments are all at least as large.
        Disturbances only add time, so if two measurements contradict each other, the larger one is
        wrong.
        """
        shape = (len(tokens), len(seqs), len(contexts))
        points = verify or {}
        verify_tokens, verify_seqs = (sorted({point[axis] for point in points}) for axis in (0, 1))
        added = [points[q, s] for q in verify_tokens for s in verify_seqs]
        return cls(
            tokens=tuple(tokens),
            seqs=tuple(seqs),
            contexts=tuple(contexts),
            seconds=tuple(_envelope(seconds, shape)),
            decode=tuple(_envelope(decode, shape[1:])),
            scored_seconds=scored_seconds,
            verify_tokens=tuple(verify_tokens),
            verify_seqs=tuple(verify_seqs),
            verify=tuple(_envelope(added, (len(verify_tokens), len(verify_seqs)))),
        )

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """The table that `to_bytes` wrote.

        Raises:
            ValueError: `data` is not such a table.
        """
        try:
            return msgspec.msgpack.decode(data, type=cls)
        except msgspec.MsgspecError as error:
            raise ValueError(f"not a step-cost table: {error}") from error

    def to_bytes(self) -> bytes:
        """The table as msgpack. Machines of the same kind can use it."""
        return msgspec.msgpack.encode(self)

    def step_seconds(self, tokens: float, seqs: float, context: float) -> float:
        """Seconds of a step of `tokens` tokens over `seqs` sequences of `context` cached tokens."""
        t, s, c = _at(self.tokens, tokens), _at(self.seqs, seqs), _at(self.contexts, context)
        shape, slopes = self._shape, self._slopes
        seconds = _interpolate(self.seconds, shape, (t, s, c))
        if t.excess:
            seconds += t.excess * _interpolate(slopes[0], shape[1:], (s, c))
        if s.excess:
            seconds += s.excess * _interpolate(slopes[1], (shape[0], shape[2]), (t, c))
        if c.excess:
            seconds += c.excess * _interpolate(slopes[2], shape[:2], (t, s))
        return seconds

    def decode_seconds(self, seqs: float, context: float) -> float:
        """Seconds of a step in which `seqs` sequences decode, each with `context` cached tokens."""
        s, c = _at(self.seqs, seqs), _at(self.contexts, context)
        shape, slopes = self._shape[1:], self._decode_slopes
        seconds = _interpolate(self.decode, shape, (s, c))
        if s.excess:
            seconds += s.excess * _interpolate(slopes[0], shape[1:], (c,))
        if c.excess:
            seconds += c.excess * _interpolate(slopes[1], shape[:1], (s,))
        return seconds

    def verify_surcharge(self, seqs: int, num_drafts: int) -> float:
        """Seconds that verifying `num_drafts` draft tokens adds to a decode of `seqs` sequences.

        If verification was not measured, the draft tokens count like tokens of a prompt.
        """
        if not self.verify:
            plain = self.step_seconds(seqs, seqs, 0)
            return self.step_seconds(seqs + num_drafts, seqs, 0) - plain
        axis, num_seqs = (1, *self.verify_tokens), len(self.verify_seqs)
        values = (*[0.0] * num_seqs, *self.verify)
        q, s = _at(axis, 1 + num_drafts / seqs), _at(self.verify_seqs, seqs)
        seconds = _interpolate(values, (len(axis), num_seqs), (q, s))
        if q.excess:
            place = _Place(len(axis) - 2, 0.0, 0.0)
            before = _interpolate(values, (len(axis), num_seqs), (place, s))
            seconds += q.excess * (seconds - before) / (axis[-1] - axis[-2])
        if s.excess:
            seconds *= seqs / self.verify_seqs[-1]
        return seconds

    def mixed_seconds(self, num_decodes: int, context: float, chunks: Iterable[Chunk]) -> float:
        """Seconds of a step with decodes of `context` cached tokens each, and chunks of prompts.

        The result is the step's cost without contexts, plus a surcharge for the context of the
        decodes and of each chunk. A mean context would be wrong: a decode reads its context for one
        token, a chunk reads its context for all tokens of the chunk.
        """
        chunks = list(chunks)
        if not chunks:
            return self.decode_seconds(num_decodes, context) if num_decodes else 0.0
        num_tokens = num_decodes + sum(chunk.num_tokens for chunk in chunks)
        seconds = self.step_seconds(num_tokens, num_decodes + len(chunks), 0)
        if num_decodes:
            seconds += self.decode_surcharge(num_decodes, context)
        return seconds + sum(self.chunk_surcharge(chunk) for chunk in chunks)

    def decode_surcharge(self, seqs: float, context: float) -> float:
        """The seconds that the context adds to `decode_seconds`."""
        return self.decode_seconds(seqs, context) - self.decode_seconds(seqs, 0)

    def chunk_surcharge(self, chunk: Chunk) -> float:
        """The seconds that a chunk's context and its log-probabilities add to the step."""
        scores = chunk.num_scored * self.seconds_per_score if chunk.num_scored else 0.0
        if chunk.start <= self.contexts[0]:
            return scores
        num_tokens = chunk.num_tokens
        with_context = self.step_seconds(num_tokens, 1, chunk.start)
        return with_context - self.step_seconds(num_tokens, 1, 0) + scores

    @cached_property
    def seconds_per_token(self) -> float:
        """Seconds per token of the largest prompt in the table."""
        return self.step_seconds(self.tokens[-1], 1, 0) / self.tokens[-1]

    @cached_property
    def seconds_per_score(self) -> float:
        """Seconds that the log-probability of one prompt token adds to its step."""
        return self.seconds_per_token if self.scored_seconds is None else self.scored_seconds

    def _check_verify(self) -> None:
        axes, values = (self.verify_tokens, self.verify_seqs), self.verify
        rises = all(a < b for axis in axes for a, b in pairwise(axis))
        is_grid = len(values) == math.prod(map(len, axes))
        is_grid = is_grid and min(self.verify_tokens, default=2) > 1
        if not rises or not is_grid or not all(math.isfinite(v) and v >= 0.0 for v in values):
            raise ValueError("cost table: verify is not a grid of seconds; measure again")
        if values != tuple(_envelope(values, tuple(map(len, axes)))):
            raise ValueError("cost table: verify falls along an axis; measure again")

    @property
    def _shape(self) -> tuple[int, int, int]:
        return len(self.tokens), len(self.seqs), len(self.contexts)

    @cached_property
    def _slopes(self) -> tuple[list[float], list[float], list[float]]:
        """Slopes past the end of each axis, in seconds a unit, at each point of the other axes."""
        axes = (self.tokens, self.seqs, self.contexts)
        t, s, c = (_end_slopes(self.seconds, axes, axis) for axis in range(3))
        return t, s, c

    @cached_property
    def _decode_slopes(self) -> tuple[list[float], list[float]]:
        s, c = (_end_slopes(self.decode, (self.seqs, self.contexts), axis) for axis in range(2))
        return s, c


class _Place(NamedTuple):
    """The place of a value on an axis: between the points with index `below` and `below + 1`."""

    below: int
    fraction: float  # 0 at the point `below`, 1 at the next point; 0 at and past the last point
    excess: float  # distance past the last point, in units of the axis


def _at(axis: tuple[int, ...], value: float) -> _Place:
    if value >= axis[-1]:
        return _Place(len(axis) - 1, 0.0, value - axis[-1])
    if value <= axis[0]:
        return _Place(0, 0.0, 0.0)
    index = bisect_right(axis, value) - 1
    return _Place(index, (value - axis[index]) / (axis[index + 1] - axis[index]), 0.0)


def _interpolate(
    values: Sequence[float], shape: Sequence[int], places: Sequence[_Place], offset: int = 0
) -> float:
    """Multilinear interpolation in `values[offset:]`, which has the given shape, row-major."""
    if not places:
        return values[offset]
    below, fraction, _ = places[0]
    stride = math.prod(shape[1:])
    offset += below * stride
    low = _interpolate(values, shape[1:], places[1:], offset)
    if not fraction:
        return low
    high = _interpolate(values, shape[1:], places[1:], offset + stride)
    # Rounding must not give a value outside the interval.
    return min(low + fraction * (high - low), high) if high > low else low


def _envelope(values: Sequence[float], shape: Sequence[int]) -> list[float]:
    """Lower each value to the least of the values whose indices are all at least as large."""
    result = list(values)
    for axis, size in enumerate(shape):
        stride = math.prod(shape[axis + 1 :])
        for index in reversed(range(len(result))):
            if index // stride % size < size - 1:
                result[index] = min(result[index], result[index + stride])
    return result


def _end_slopes(values: Sequence[float], axes: Sequence[tuple[int, ...]], axis: int) -> list[float]:
    """The slope of the last interval of `axis`, at every point of the other axes.

    Slopes are raised where necessary, so that they do not fall along the other axes. An axis of
    tokens or sequences with a single point has the slope of the line through the origin. A context
    axis with a single point has slope 0.
    """
    shape = [len(points) for points in axes]
    points, stride = axes[axis], math.prod(shape[axis + 1 :])
    last = [i for i in range(len(values)) if i // stride % shape[axis] == shape[axis] - 1]
    end = points[-1]
    interval = end - points[-2] if len(points) > 1 else 0
    if interval:
        slopes = [(values[i] - values[i - stride]) / interval for i in last]
    else:
        slopes = [values[i] / max(1, end) if axis != len(axes) - 1 else 0.0 for i in last]
    others = [size for index, size in enumerate(shape) if index != axis]
    # Raise each slope to the largest slope before it. `_envelope` lowers each value to the least
    # value after it, so the slopes are negated and reversed for the call.
    return [-value for value in reversed(_envelope([-v for v in reversed(slopes)], others))]
