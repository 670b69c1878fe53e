"""`server.record_trace`: a file of request lengths, times and shared prefixes, without text.

The file has one line of JSON for each completion that had an output, in the format of Mooncake's
traces (Qin et al. 2024). The line is written when the request ends. It has `timestamp` (ms),
`input_length`, `output_length`, `hash_ids` and `block_size` (tokens). `hash_ids` has one number for
each full block of the prompt. Prompts with equal beginnings begin with equal numbers. The numbers
count blocks in the order of their first appearance, so they reveal no text. `run bench serve
workload=trace` replays such a file.
"""

from __future__ import annotations

import contextlib
import json
import logging
import time
from collections import OrderedDict
from collections.abc import Sequence

from ostinato.conf.environment import expand_user
from ostinato.runtime.errors import StartupError
from ostinato.runtime.kv.block_pool import hash_blocks, hash_root

__all__ = ("TraceRecorder",)

_LOG = logging.getLogger(__name__)
_MAX_BLOCKS = 1 << 20  # blocks that are remembered; the least recently used are dropped


class TraceRecorder:
    """Appends to one file, one complete line at a time.

    Args:
        path: file to append to.
        block_size: tokens of a block.

    Raises:
        StartupError: the file cannot be written.
    """

    def __init__(self, path: str, block_size: int) -> None:
        try:
            self._file = expand_user(path).open("a", encoding="utf-8", buffering=1)
        except OSError as error:
            raise StartupError(
                f"server.record_trace={path} cannot be written: {error.strerror}; name another file"
            ) from error
        self._path = path
        self._is_broken = False
        self._block_size = block_size
        self._numbers: OrderedDict[bytes, int] = OrderedDict()
        self._next = 0
        self._to_wall = time.time() - time.monotonic()

    def add(
        self,
        arrival: float,
        prompt_token_ids: Sequence[int],
        output_lengths: Sequence[int],
        cache_salt: str = "",
    ) -> None:
        """Add the completions of one prompt. Does nothing after a write has failed.

        Args:
            arrival: time of arrival, in seconds of time.monotonic().
            prompt_token_ids: the prompt.
            output_lengths: number of tokens of each completion.
            cache_salt: the request's cache salt. Equal blocks of requests with different salts get
                different numbers.
        """
        if self._is_broken:
            return
        size = self._block_size
        full = len(prompt_token_ids) // size * size
        hashes = hash_blocks(hash_root(cache_salt), prompt_token_ids[:full], size)
        line = {
            "timestamp": round(1000 * (arrival + self._to_wall)),
            "input_length": len(prompt_token_ids),
            "output_length": 0,
            "hash_ids": [self._number(digest) for digest in hashes],
            "block_size": size,
        }
        try:
            for length in output_lengths:
                line["output_length"] = length
                self._file.write(json.dumps(line, separators=(",", ":")) + "\n")
        except OSError as error:
            self._is_broken = True
            _LOG.error(
                "server.record_trace=%s cannot be written any more, recording has ended: %s",
                self._path,
                error.strerror or error,
            )

    def close(self) -> None:
        with contextlib.suppress(OSError):  # after a failed write, the buffer cannot be written
            self._file.close()

    def _number(self, digest: bytes) -> int:
        number = self._numbers.get(digest)
        if number is None:
            number, self._next = self._next, self._next + 1
            self._numbers[digest] = number
            if len(self._numbers) > _MAX_BLOCKS:
                self._numbers.popitem(last=False)
        else:
            self._numbers.move_to_end(digest)
        return number
