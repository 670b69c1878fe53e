"""`ConfigError`, and a function for quoting other errors in messages."""

from __future__ import annotations

__all__ = ("ConfigError", "first_line")


class ConfigError(ValueError):
    """A wrong setting, command line or input file, or a missing package.

    The text is one line. For a setting it has the key, the value, and what is allowed.
    """


def first_line(error: BaseException) -> str:
    """The first line of an error's text; its type's name when it has no text."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
