"""Patterns that enforce `format` in JSON schemas, in the syntax of Rust's `regex`.

A string has a format if each pattern of the format matches the whole string. Sources: RFC 3339
(dates, times, durations), RFC 5321 (email), RFC 1123 (hostname), RFC 2673 (ipv4), RFC 4291 (ipv6),
RFC 3986 (uri), RFC 4122 (uuid), RFC 6901 (json-pointer).
"""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ("FORMATS",)


def _any(*options: str) -> str:
    return f"(?:{'|'.join(options)})"


_LEAP_YEAR = _any(
    "[0-9]{2}" + _any("0[48]", "[2468][048]", "[13579][26]"),
    _any("[02468][048]", "[13579][26]") + "00",
)
_DATE = _any(
    f"[0-9]{{4}}-{_any('0[13578]', '1[02]')}-{_any('0[1-9]', '[12][0-9]', '3[01]')}",
    f"[0-9]{{4}}-{_any('0[469]', '11')}-{_any('0[1-9]', '[12][0-9]', '30')}",
    f"[0-9]{{4}}-02-{_any('0[1-9]', '1[0-9]', '2[0-8]')}",
    f"{_LEAP_YEAR}-02-29",
)
_HOUR, _MINUTE = _any("[01][0-9]", "2[0-3]"), "[0-5][0-9]"
_ZONE = _any("[zZ]", f"[+-]{_HOUR}:{_MINUTE}")
_FRACTION = r"(?:\.[0-9]+)?"
_TIME = f"{_HOUR}:{_MINUTE}:{_any('[0-5][0-9]', '60')}{_FRACTION}{_ZONE}"


def _leap_second(hours: list[str], minutes: list[str]) -> list[str]:
    """Patterns that allow the second 60 only at 23:59 UTC.

    Args:
        hours: patterns of times with second 60. Each is for one time zone and matches the local
            hour that is hour 23 in UTC.
        minutes: the same for the local minute that is minute 59 in UTC.
    """
    other = f"..:..:[0-5][0-9]{_FRACTION}.*"
    return [_any(other, *hours), _any(other, *minutes)]


_LATE = rf"60{_FRACTION}"
_TIMES = [
    _TIME,
    *_leap_second(
        hours=[
            rf"23:..:{_LATE}[zZ]",
            *(f"{23 - hour:02}:..:{_LATE}-{hour:02}:.." for hour in range(24)),
            *(rf"{(23 + hour) % 24:02}:..:{_LATE}\+{hour:02}:00" for hour in range(24)),
            *(rf"{hour:02}:..:{_LATE}\+{hour:02}:(?:0[1-9]|[1-5].)" for hour in range(24)),
        ],
        minutes=[
            rf"..:59:{_LATE}[zZ]",
            *(f"..:{59 - minute:02}:{_LATE}-..:{minute:02}" for minute in range(60)),
            *(rf"..:{(59 + minute) % 60:02}:{_LATE}\+..:{minute:02}" for minute in range(60)),
        ],
    ),
]

_OCTET = _any("25[0-5]", "2[0-4][0-9]", "1[0-9]{2}", "[1-9]?[0-9]")
_IPV4 = rf"(?:{_OCTET}\.){{3}}{_OCTET}"
_GROUP = "[0-9a-fA-F]{1,4}"
_LAST_TWO = _any(f"{_GROUP}:{_GROUP}", _IPV4)
_IPV6 = _any(
    f"(?:{_GROUP}:){{6}}{_LAST_TWO}",
    f"::(?:{_GROUP}:){{5}}{_LAST_TWO}",
    f"(?:{_GROUP})?::(?:{_GROUP}:){{4}}{_LAST_TWO}",
    f"(?:(?:{_GROUP}:){{0,1}}{_GROUP})?::(?:{_GROUP}:){{3}}{_LAST_TWO}",
    f"(?:(?:{_GROUP}:){{0,2}}{_GROUP})?::(?:{_GROUP}:){{2}}{_LAST_TWO}",
    f"(?:(?:{_GROUP}:){{0,3}}{_GROUP})?::{_GROUP}:{_LAST_TWO}",
    f"(?:(?:{_GROUP}:){{0,4}}{_GROUP})?::{_LAST_TWO}",
    f"(?:(?:{_GROUP}:){{0,5}}{_GROUP})?::{_GROUP}",
    f"(?:(?:{_GROUP}:){{0,6}}{_GROUP})?::",
)

_WORD = r"[a-zA-Z0-9!#$%&'*+\-/=?\^_`{|}~]+"
_QUOTED = r'"(?:[ !#-\[\]-~]|\\[ -~])*"'
_DOMAIN_LABEL = "[a-zA-Z0-9](?:[a-zA-Z0-9-]{0,61}[a-zA-Z0-9])?"
_DOMAIN = rf"{_DOMAIN_LABEL}(?:\.{_DOMAIN_LABEL})*"
_EMAIL = (
    _any(rf"{_WORD}(?:\.{_WORD})*", _QUOTED)
    + "@"
    + _any(_DOMAIN, rf"\[{_IPV4}\]", rf"\[IPv6:{_IPV6}\]")
)

_PLAIN = r"a-zA-Z0-9\-._~!$&'()*+,;="  # unreserved characters and sub-delimiters of RFC 3986
_PERCENT = "%[0-9a-fA-F]{2}"
_SEGMENT = _any(f"[{_PLAIN}:@]", _PERCENT)
_HOST = _any(
    r"\[" + _any(_IPV6, rf"[vV][0-9a-fA-F]+\.[{_PLAIN}:]+") + r"\]",
    _any(f"[{_PLAIN}]", _PERCENT) + "*",
)
_AUTHORITY = f"(?:{_any(f'[{_PLAIN}:]', _PERCENT)}*@)?{_HOST}(?::[0-9]*)?"
_ABSOLUTE_PATH = f"/(?:{_SEGMENT}+(?:/{_SEGMENT}*)*)?"
_TAIL = rf"(?:\?(?:{_SEGMENT}|[/?])*)?(?:\#(?:{_SEGMENT}|[/?])*)?"
_URI = (
    r"[a-zA-Z][a-zA-Z0-9+\-.]*:"
    + _any(f"//{_AUTHORITY}(?:/{_SEGMENT}*)*", _ABSOLUTE_PATH, f"{_SEGMENT}+(?:/{_SEGMENT}*)*", "")
    + _TAIL
)
_RELATIVE = (
    _any(
        f"//{_AUTHORITY}(?:/{_SEGMENT}*)*",
        _ABSOLUTE_PATH,
        f"{_any(f'[{_PLAIN}@]', _PERCENT)}+(?:/{_SEGMENT}*)*",
        "",
    )
    + _TAIL
)

_DAYS = _any("[0-9]+Y(?:[0-9]+M(?:[0-9]+D)?)?", "[0-9]+M(?:[0-9]+D)?", "[0-9]+D")
_HOURS = "T" + _any("[0-9]+H(?:[0-9]+M(?:[0-9]+S)?)?", "[0-9]+M(?:[0-9]+S)?", "[0-9]+S")
_POINTER = "(?:/(?:[^/~]|~[01])*)*"
_HEX = "[0-9a-fA-F]"

FORMATS: Mapping[str, list[str]] = {
    "date": [_DATE],
    "time": _TIMES,
    "date-time": [f"{_DATE}[tT]{_TIME}", *(f".{{11}}{one}" for one in _TIMES[1:])],
    "duration": ["P" + _any(f"{_DAYS}(?:{_HOURS})?", _HOURS, "[0-9]+W")],
    "email": [_EMAIL],
    "hostname": [_DOMAIN, ".{1,253}"],
    "ipv4": [_IPV4],
    "ipv6": [_IPV6],
    "uuid": [f"{_HEX}{{8}}-{_HEX}{{4}}-{_HEX}{{4}}-{_HEX}{{4}}-{_HEX}{{12}}"],
    "uri": [_URI],
    "uri-reference": [_any(_URI, _RELATIVE)],
    "json-pointer": [_POINTER],
    "relative-json-pointer": [f"(?:0|[1-9][0-9]*)(?:#|{_POINTER})"],
}
