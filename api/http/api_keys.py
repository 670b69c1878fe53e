"""API keys: where they come from, and how one is recognised. Imports nothing of the web framework.

Keys are compared as digests, all of them, in constant time; none is kept in plain, logged, or sent
to the engine process.
"""

from __future__ import annotations

import hmac
from collections.abc import Sequence
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

from ostinato.conf.server_schema import ServerConfig, is_api_key
from ostinato.runtime.errors import StartupError

__all__ = ("KeyRing", "with_keys")


def with_keys(server: ServerConfig) -> ServerConfig:
    """The section with the keys of its file among `api_keys`.

    Raises:
        StartupError: the file can not be read, has no key, or a line that is none.
    """
    if not server.api_key_file:
        return server
    keys: list[str] = []
    try:
        lines = Path(server.api_key_file).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise StartupError(
            f"server.api_key_file={server.api_key_file!r} can not be read: {error}"
        ) from error
    for number, line in enumerate(lines, 1):
        key = line.strip()
        if not key or key.startswith("#"):
            continue
        if not is_api_key(key):
            raise StartupError(
                f"server.api_key_file={server.api_key_file!r}: line {number} is no key, which has "
                "no spaces and is ASCII (the line is not shown)"
            )
        keys.append(key)
    if not keys:
        raise StartupError(f"server.api_key_file={server.api_key_file!r} has no key")
    return replace(server, api_keys=[*server.api_keys, *keys], api_key_file="")


class KeyRing:
    """The keys that are let in, as digests."""

    def __init__(self, keys: Sequence[str]) -> None:
        self._digests = [_digest(key) for key in keys]

    def find(self, key: str) -> int | None:
        """A key's place in the list; None when it is not in it.

        The time it takes depends neither on the key nor on the place.
        """
        digest, found = _digest(key), None
        for index, known in enumerate(self._digests):
            if hmac.compare_digest(digest, known):
                found = index
        return found


def _digest(key: str) -> bytes:
    return sha256(key.encode()).digest()
