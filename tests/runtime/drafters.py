"""Drafters for tests: guesses that are right with a given probability."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from zlib import crc32

import pytest

from ostinato import LLM
from ostinato.conf.root import RunConfig
from ostinato.runtime import llm as llm_module
from ostinato.runtime.scheduling.proposer import Proposer
from ostinato.runtime.startup.build_engine import build_engine
from ostinato.runtime.types.request import Request


class OracleDrafter:
    """Knows the outputs of all requests and errs by a keyed hash, so that a run can be repeated.

    Args:
        accuracy: probability that a guess is right.
        vocab_size: wrong guesses are below it too.
    """

    max_drafts = 7

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
        max_drafts: guesses for one sequence in one step.
        vocab_size: wrong guesses are below it too.

    Attributes:
        accuracy: probability that a guess is right.
    """

    def __init__(self, max_drafts: int, vocab_size: int) -> None:
        self.max_drafts = max_drafts
        self.accuracy = 1.0
        self._outputs: dict[tuple[int, ...], list[int]] = {}
        self._vocab_size = vocab_size

    def learn(self, prompts: list[list[int]], outputs: list[list[int]]) -> None:
        """Prompts, no two alike, and what followed them; of other prompts nothing is guessed."""
        self._outputs = dict(zip(map(tuple, prompts), outputs, strict=True))

    def propose(self, request: Request, token_ids: Sequence[int], most: int) -> list[int]:
        prompt = request.prompt_token_ids
        done = len(token_ids) - len(prompt)
        following = self._outputs.get(tuple(prompt), [])[done : done + most]
        return [
            token
            if crc32(f"{prompt}/{place}".encode()) % 1009 / 1009 < self.accuracy
            else (token + 1) % self._vocab_size
            for place, token in enumerate(following, done)
        ]

    def forget(self, request_id: str) -> None:
        pass


def make_llm(config: RunConfig, drafter: Proposer | None) -> LLM:
    """An `LLM` whose engine is built with this drafter, if there is one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(llm_module, "build_engine", partial(build_engine, proposer=drafter))
        return LLM(config=config)
