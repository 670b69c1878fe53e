"""Checks the numbers in a JSON schema before llguidance enforces them.

llguidance computes with floats, and rounds long decimals twice when it reads them. A number that
would change in this way is refused. A maximum that no answer reaches is dropped.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from decimal import Decimal
from typing import Any

__all__ = (
    "BOUNDS",
    "COUNTS",
    "MAX_EXACT",
    "Multiples",
    "NotEnforcedError",
    "bound",
    "check_interval",
    "count",
    "exact",
    "shown",
)

COUNTS = ("minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties")
BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
MAX_EXACT = 1 << 53  # whole numbers below it are exact as floats
_LONGEST = 1 << 31  # no answer has this many characters or items
_MAX_EXPONENT = 22  # 10 ** 22 is the last power of 10 that a float holds exactly
# The automaton of `multipleOf` has a state for each remainder. 100,000 states take 0.7 s and 50 MB;
# a million take 13 s.
_MAX_MULTIPLE = 100_000


class NotEnforcedError(ValueError):
    """A keyword is valid, but a grammar cannot enforce it."""


def count(value: Any, place: str) -> int | None:
    """The value of a keyword of COUNTS, as an int; None = it limits nothing.

    A float such as 2.0 is accepted, because JSON does not tell 2 from 2.0.

    Args:
        place: JSON pointer to the keyword, for the error.

    Raises:
        ValueError: the value is not a whole number of at least 0, or is a minimum of 2^31 or more.
    """
    if not _is_number(value) or value < 0 or value != value // 1:
        raise ValueError(f"{place} must be a whole number of at least 0, got {shown(value)}")
    if value < _LONGEST:
        return int(value)
    if place.rpartition("/")[2].startswith("max"):
        return None
    raise ValueError(
        f"{place} must be less than {_LONGEST}, because no answer can reach it; got {shown(value)}"
    )


def bound(value: Any, place: str) -> Any:
    """The value of a keyword of BOUNDS.

    Raises:
        ValueError: the value is not a number.
        NotEnforcedError: the value is 2^53 or more away from 0, or a float does not hold it.
    """
    if isinstance(value, bool):  # draft 4 has `exclusiveMinimum: true`
        return value
    _check_number(value, place)
    if abs(value) >= MAX_EXACT:
        raise NotEnforcedError(
            f"{place} must be less than {MAX_EXACT} away from 0, because floats do not hold larger "
            f"whole numbers exactly; got {shown(value)}"
        )
    return exact(value, place)


def exact(value: Any, place: str) -> Any:
    """Convert a JSON value so that llguidance reads its numbers without a change.

    Raises:
        ValueError: a number is infinite or NaN.
        NotEnforcedError: a float does not hold a number exactly.
    """
    if isinstance(value, list):
        return [exact(one, place) for one in value]
    if isinstance(value, dict):
        return {name: exact(one, place) for name, one in value.items()}
    if isinstance(value, bool) or not isinstance(value, int | float):
        return value
    _check_number(value, place)
    if isinstance(value, int) and abs(value) < MAX_EXACT:
        return value
    if not _is_exact(value):
        raise NotEnforcedError(
            f"{place} has the number {shown(value)}, which a float does not hold exactly; give "
            f"at most 15 digits, or a whole number below {MAX_EXACT}"
        )
    return float(value)


class Multiples:
    """Checks all `multipleOf` of one schema. llguidance combines them in one automaton."""

    def __init__(self) -> None:
        # Value -> the value without its decimal point, number of decimals.
        self._found: dict[float, tuple[int, int]] = {}

    def take(self, value: Any, place: str) -> float:
        """Check and return one value, as an int where it is whole.

        Raises:
            ValueError: the value is not a number above 0.
            NotEnforcedError: the automaton of all values so far has more than 100,000 states.
        """
        _check_number(value, place)
        if value <= 0:
            raise ValueError(f"{place} must be greater than 0, got {shown(value)}")
        digits, num_decimals = min(value, _MAX_MULTIPLE + 1), 0
        while digits % 1 and digits <= _MAX_MULTIPLE:  # as llguidance does, with its rounding
            digits, num_decimals = digits * 10, num_decimals + 1
        found = {**self._found, value: (int(digits), num_decimals)}
        most = max(decimals for _, decimals in found.values())
        if math.prod(whole * 10 ** (most - few) for whole, few in found.values()) > _MAX_MULTIPLE:
            raise NotEnforcedError(
                f"{place}: multipleOf without its decimal point must be at most {_MAX_MULTIPLE}, "
                f"and so must the product of all multipleOf of a schema; got {shown(value)}"
            )
        self._found = found
        return int(value) if value == value // 1 else value


def check_interval(schema: dict[str, Any], place: str) -> None:
    """Refuse an exclusive bound that is a whole number and less than 1 from the other bound.

    An example is 0 < x < 0.5. llguidance would allow 0 here.

    Raises:
        NotEnforcedError: the schema has such bounds.
    """
    for sign, lower, upper in ((1, "Minimum", "maximum"), (-1, "Maximum", "minimum")):
        ends = [sign * value for value in _values(schema, [f"exclusive{lower}"])]
        others = _values(schema, [upper, f"exclusive{upper.capitalize()}"])
        if any(
            end == end // 1 and end < sign * other < end + 1 for end in ends for other in others
        ):
            raise NotEnforcedError(
                f"{place}/exclusive{lower} cannot be enforced together with a bound that is less "
                "than 1 away; give the first number that is allowed instead, as in minimum: 0.001"
            )


def shown(value: object) -> str:
    """A JSON value for an error text, cut to a readable length."""
    try:
        text = json.dumps(value, ensure_ascii=False)
    except ValueError:
        text = "a number of very many digits"
    return text if len(text) <= 80 else f"{text[:80]}..."


def _values(schema: Any, names: Iterable[str]) -> list[float]:
    """The values of the named bounds in a schema and in its `allOf`."""
    if not isinstance(schema, dict):
        return []
    found: list[float] = []
    for name in names:
        value: Any = schema.get(name)
        if value is True:  # in draft 4 this makes `minimum` or `maximum` exclusive
            value = schema.get(name.removeprefix("exclusive").lower())
        if _is_number(value):
            found.append(value)
    return found + [value for one in schema.get("allOf", ()) for value in _values(one, names)]


def _is_number(value: Any) -> bool:
    if isinstance(value, float):
        return math.isfinite(value)
    return isinstance(value, int) and not isinstance(value, bool)


def _check_number(value: Any, place: str) -> None:
    if not _is_number(value):
        raise ValueError(f"{place} must be a number, got {shown(value)}")


def _is_exact(value: float) -> bool:
    """Whether a float holds the number, and llguidance reads it without rounding twice."""
    try:
        decimal = Decimal(repr(float(value))).normalize()
    except OverflowError:
        return False
    _, digits, exponent = decimal.as_tuple()
    return (
        decimal == Decimal(value if isinstance(value, int) else repr(value))
        and int("".join(map(str, digits))) < MAX_EXACT
        and isinstance(exponent, int)
        and abs(exponent) <= _MAX_EXPONENT
    )
