"""The error of an invalid configuration, and how messages quote other errors."""

from __future__ import annotations

__all__ = ("ConfigError", "first_line")


class ConfigError(ValueError):
    """A wrong key or value. The text is one line: the key, the value, what is allowed."""


def first_line(error: BaseException) -> str:
    """The first line of an error's text; its type's name when it has no text."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
