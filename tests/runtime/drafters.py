"""Drafters for tests: guesses that are right with a given probability."""

from __future__ import annotations

from collections.abc import Sequence
from zlib import crc32

from ostinato.runtime.types.request import Request


class OracleDrafter:
    """Knows the outputs of all requests and errs by a keyed hash, so that a run can be repeated.

    Args:
        accuracy: probability that a guess is right.
        vocab_size: wrong guesses are below it too.
    """

    def __init__(self, accuracy: float, vocab_size: int) -> None:
        self.accuracy = accuracy
        self.outputs: dict[str, list[int]] = {}  # by request id, set by the test
        self.live: set[str] = set()  # requests that it was asked about and told nothing of the end
        self._vocab_size = vocab_size

    def propose(self, request: Request, token_ids: Sequence[int], most: int) -> list[int]:
        assert most >= 1
        self.live.add(request.request_id)
        done = len(token_ids) - len(request.prompt_token_ids)
        following = self.outputs[request.request_id][done : done + most + 1]
        return [
            token if self._is_right(request.request_id, place) else (token + 1) % self._vocab_size
            for place, token in enumerate(following, done)
        ]

    def forget(self, request_id: str) -> None:
        self.live.discard(request_id)

    def _is_right(self, request_id: str, place: int) -> bool:
        return crc32(f"{request_id}/{place}".encode()) % 1009 / 1009 < self.accuracy


class ReplayDrafter:
    """Continues the outputs of an earlier run; errs as `OracleDrafter` does.

    Args:
        outputs: prompts, no two alike, and what followed them.
        accuracy: probability that a guess is right.
        vocab_size: wrong guesses are below it too.
    """

    def __init__(
        self, outputs: list[tuple[list[int], list[int]]], accuracy: float, vocab_size: int
    ) -> None:
        self._outputs = {tuple(prompt): output for prompt, output in outputs}
        self._accuracy = accuracy
        self._vocab_size = vocab_size

    def propose(self, request: Request, token_ids: Sequence[int], most: int) -> list[int]:
        prompt = request.prompt_token_ids
        done = len(token_ids) - len(prompt)
        following = self._outputs[tuple(prompt)][done : done + most]
        return [
            token
            if crc32(f"{prompt}/{place}".encode()) % 1009 / 1009 < self._accuracy
            else (token + 1) % self._vocab_size
            for place, token in enumerate(following, done)
        ]

    def forget(self, request_id: str) -> None:
        pass
