"""`TierOpening`: a thread that prepares the directory of the KV tier on disk.

The name of the directory depends on the contents of all weight files. The first start with some
weights reads them for that, which can take a minute. Later starts know their digest.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

from ostinato.conf.environment import expand_user
from ostinato.runtime.tiers.own_files import TierError
from ostinato.runtime.tiers.tier_directory import TierDirectory, make_root, open_directory
from ostinato.runtime.tiers.weights_digest import (
    FileState,
    cached_digest,
    states_of,
    weights_digest,
)

__all__ = ("TierOpening",)

_WEIGHTS = "weights.digests"  # in the root: digests of weight files


class TierOpening:
    """Begins to prepare the directory when it is made.

    Args:
        root: `cache.disk_dir`.
        identity: everything that the contents of blocks depend on besides their hashes and the
            weights.
        weight_files: the files of the weights; empty = the identity says which weights.
        quota_bytes: bytes that directories of other identities may keep.
        states: of the files, from before they were loaded. If they have changed since, the
            directory is not used. Empty = they are not compared.
    """

    def __init__(
        self,
        root: str,
        identity: Mapping[str, str],
        weight_files: Sequence[Path],
        quota_bytes: int,
        states: Sequence[FileState] = (),
    ) -> None:
        self._root = root
        self._identity = dict(identity)
        self._files = weight_files
        self._states = list(states)
        self._quota_bytes = quota_bytes
        self._digests = expand_user(root) / _WEIGHTS
        self._directory: TierDirectory | None = None
        self._error: Exception | None = None
        self._guard = threading.Lock()  # of `_directory` and `_is_dropped`
        self._is_dropped = False
        self._is_short = not weight_files or cached_digest(weight_files, self._digests) is not None
        self._thread = threading.Thread(target=self._run, name="open-tier", daemon=True)
        self._thread.start()

    @property
    def is_done(self) -> bool:
        """Whether `take` returns at once."""
        return not self._thread.is_alive()

    def wait_if_short(self, timeout_s: float) -> None:
        """Wait until the directory is prepared, if no weights have to be read for it."""
        if self._is_short:
            self._thread.join(timeout_s)

    def take(self) -> TierDirectory:
        """The directory. The caller closes it.

        Raises:
            TierError: it cannot be used.
        """
        self._thread.join()
        if self._error is not None:
            raise TierError(str(self._error)) from self._error
        assert self._directory is not None, "the thread has ended without an error"
        return self._directory

    def drop(self) -> None:
        """Release the directory as soon as it is prepared. Nothing may call `take` any more."""
        with self._guard:
            self._is_dropped = True
            directory = self._directory
        if directory is not None:
            directory.close()

    def _check_states(self) -> None:
        if self._states and states_of(self._files) != self._states:
            raise TierError(
                "the files of the weights have changed since they were loaded; start the server "
                "again"
            )

    def _run(self) -> None:
        try:
            if self._files:
                make_root(self._root)  # before a minute of reading, and before its file is written
                digest = weights_digest(self._files, self._digests)
                self._identity["weights"] = digest
                self._check_states()
            directory = open_directory(self._root, self._identity, self._quota_bytes)
            with self._guard:
                self._directory = directory
                is_dropped = self._is_dropped
            if is_dropped:
                directory.close()
        except Exception as error:  # raised by `take`
            self._error = error
