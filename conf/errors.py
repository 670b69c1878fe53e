"""What is raised for a configuration that can not be."""

from __future__ import annotations

__all__ = ("ConfigError",)


class ConfigError(ValueError):
    """A key or value that can not be, in one line: the key, the value, what is allowed."""
