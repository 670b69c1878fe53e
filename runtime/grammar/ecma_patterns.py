"""Translates the patterns of JSON schemas, which are ECMA-262, into the syntax of Rust's `regex`.

The two syntaxes agree in most points. They differ in what `.`, `\\d`, `\\w` and `\\s` match, in the
escapes of characters, and in the meaning of `[`, `&`, `-` and `~` within a class. So a pattern
that is not translated would match other strings than the schema means.
"""

from __future__ import annotations

import re

__all__ = ("to_rust",)

_SPACE = r"\t-\r \u00a0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000\ufeff"
_CLASSES = {"d": "0-9", "w": "0-9A-Za-z_", "s": _SPACE}
_ANY_BUT_LINE_END = r"[^\n\r\u2028\u2029]"
_CONTROLS = {"f": 0x0C, "n": 0x0A, "r": 0x0D, "t": 0x09, "v": 0x0B}
_CODE = re.compile(r"x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|u\{([0-9a-fA-F]{1,6})\}|c([A-Za-z])")
_LOW_SURROGATE = re.compile(r"\\u([dD][c-fC-F][0-9a-fA-F]{2})")
_PROPERTY = re.compile(r"[pP]\{[^}]*\}")


def to_rust(pattern: str) -> str:
    """Translate a pattern. Syntax that Rust lacks, such as look-around, is not changed.

    Raises:
        ValueError: an escape or a class is not ECMA-262.
    """
    return _Translator(pattern).all()


class _Translator:
    def __init__(self, pattern: str) -> None:
        self._pattern = pattern
        self._at = 0

    def all(self) -> str:
        """The whole pattern."""
        parts: list[str] = []
        while self._at < len(self._pattern):
            char = self._take()
            if char == "\\":
                parts.append(self._escape())
            elif char == "[":
                parts.append(self._class())
            else:
                parts.append(_ANY_BUT_LINE_END if char == "." else char)
        return "".join(parts)

    def _take(self) -> str:
        if self._at >= len(self._pattern):
            raise ValueError(f"the pattern {self._pattern[:80]!r} ends within an escape or a class")
        self._at += 1
        return self._pattern[self._at - 1]

    def _escape(self) -> str:
        """Translate an escape outside of a class. The backslash has been read."""
        place = self._at
        named = self._named_class()
        if named is not None:
            return f"[{named}]"
        code = self._code()
        if code is not None:
            return _literal(code)
        self._at = place + 1
        char = self._pattern[place]
        # Word boundaries, and back-references, which llguidance refuses.
        if char in "bB" or char in "123456789":
            return "\\" + char
        if char == "k":
            return "\\k"
        return self._identity(char)

    def _named_class(self) -> str | None:
        """Translate `\\d`, `\\w`, `\\s`, `\\p{...}` and their negations, without brackets.

        None for other escapes.
        """
        char = self._take()
        if char.lower() in _CLASSES:
            inner = _CLASSES[char.lower()]
            return inner if char.islower() else f"^{inner}"
        if found := _PROPERTY.match(self._pattern, self._at - 1):
            self._at = found.end()
            return "\\" + found[0]
        self._at -= 1
        return None

    def _code(self) -> int | None:
        """The code point of an escape that names a character; None for another escape."""
        found = _CODE.match(self._pattern, self._at)
        if found is None:
            char = self._take()
            if char == "0":
                return 0
            if char not in _CONTROLS:
                self._at -= 1
            return _CONTROLS.get(char)
        self._at = found.end()
        if found[4] is not None:
            return ord(found[4]) % 32
        code = int(found[1] or found[2] or found[3], 16)
        if 0xD800 <= code < 0xDC00 and (low := _LOW_SURROGATE.match(self._pattern, self._at)):
            self._at = low.end()
            return 0x10000 + ((code - 0xD800) << 10) + int(low[1], 16) - 0xDC00
        if code > 0x10FFFF or 0xD800 <= code < 0xE000:
            raise ValueError(
                f"the pattern {self._pattern[:80]!r} has {found[0]}, which is not a character"
            )
        return code

    def _identity(self, char: str) -> str:
        if char.isascii() and char.isalnum():
            raise ValueError(
                f"the pattern {self._pattern[:80]!r} has \\{char}, which is not an escape of "
                "ECMA-262"
            )
        return re.escape(char)

    def _class(self) -> str:
        """Translate a class. The opening bracket has been read."""
        is_negated = self._pattern.startswith("^", self._at)
        self._at += is_negated
        parts: list[str] = []
        while (char := self._take()) != "]":
            first = self._atom(char)
            if isinstance(first, str):
                parts.append(first)
                continue
            parts.append(self._range(first) or _literal(first))
        if not parts:  # "[]" matches nothing, "[^]" anything
            parts, is_negated = [r"\x{0}-\x{10FFFF}"], not is_negated
        return f"[{'^' if is_negated else ''}{''.join(parts)}]"

    def _range(self, first: int) -> str | None:
        """The range that begins with the code point `first`; None if there is no range."""
        place = self._at
        if self._pattern.startswith("-", place) and not self._pattern.startswith("-]", place):
            self._at += 1
            last = self._atom(self._take())
            if isinstance(last, int):
                return f"{_literal(first)}-{_literal(last)}"
            self._at = place
        return None

    def _atom(self, char: str) -> int | str:
        """One member of a class: a code point, or the text of a named class such as `\\d`."""
        if char != "\\":
            return ord(char)
        named = self._named_class()
        if named is not None:
            return f"[{named}]" if named.startswith("^") else named
        code = self._code()
        if code is not None:
            return code
        char = self._take()
        if char == "b":
            return 0x08
        self._identity(char)
        return ord(char)


def _literal(code: int) -> str:
    char = chr(code)
    return char if char.isalnum() and char.isascii() else f"\\x{{{code:x}}}"
