"""Reads API keys from a file, and compares the keys of requests with them.

`KeyRing` keeps only digests of keys. A comparison takes the same time for every key. No key is
logged or sent to the engine process. This module imports nothing of the web framework.
"""

from __future__ import annotations

import hmac
from collections.abc import Sequence
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

from ostinato.conf.sections.server_schema import ServerConfig, is_api_key
from ostinato.runtime.errors import StartupError

__all__ = ("KeyRing", "with_keys")


def with_keys(server: ServerConfig) -> ServerConfig:
    """Add the keys of `api_key_file` to `api_keys`.

    Raises:
        StartupError: the file cannot be read, has no key, or has a line that is not a key.
    """
    if not server.api_key_file:
        return server
    keys: list[str] = []
    try:
        lines = Path(server.api_key_file).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise StartupError(
            f"server.api_key_file={server.api_key_file!r} cannot be read: {error}"
        ) from error
    for number, line in enumerate(lines, 1):
        key = line.strip()
        if not key or key.startswith("#"):
            continue
        if not is_api_key(key):
            raise StartupError(
                f"server.api_key_file={server.api_key_file!r}: line {number} is not a key; keys "
                "are ASCII without spaces (the line is not shown)"
            )
        keys.append(key)
    if not keys:
        raise StartupError(
            f"server.api_key_file={server.api_key_file!r} has no key; write one key per line"
        )
    return replace(server, api_keys=[*server.api_keys, *keys], api_key_file="")


class KeyRing:
    """The valid keys, as digests."""

    def __init__(self, keys: Sequence[str]) -> None:
        self._digests = [_digest(key) for key in keys]

    def find(self, key: str) -> int | None:
        """The index of a key in the list; None for an unknown key.

        The time does not depend on the key or on its index.
        """
        digest, found = _digest(key), None
        for index, known in enumerate(self._digests):
            if hmac.compare_digest(digest, known):
                found = index
        return found


def _digest(key: str) -> bytes:
    return sha256(key.encode()).digest()
