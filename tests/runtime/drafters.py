"""Drafters for tests: guesses that are right with a given probability."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from zlib import crc32

from ostinato import LLM
from ostinato.conf.root import RunConfig
from ostinato.runtime.speculation.proposer import Draft, DraftJob, DraftSource, Proposer
from ostinato.runtime.types.request import Request


class OracleDrafter:
    """Drafts from the known outputs of all requests, with repeatable errors.

    A hash of request and position decides where a guess is wrong.

    Args:
        accuracy: probability that a guess is right.
        vocab_size: upper bound of all guesses, wrong ones included.
    """

    max_drafts = 7

    def __init__(self, accuracy: float, vocab_size: int) -> None:
        self.accuracy = accuracy
        self.outputs: dict[str, list[int]] = {}  # by request id, set by the test
        self.live: set[str] = set()  # requests that it drafted for, and that have not ended
        self._vocab_size = vocab_size

    def propose(self, request: Request, token_ids: Sequence[int], most: int) -> Draft | None:
        assert most >= 1
        self.live.add(request.request_id)
        done = len(token_ids) - len(request.prompt_token_ids)
        following = self.outputs[request.request_id][done : done + most + 1]
        draft = [
            token if self._is_right(request.request_id, place) else (token + 1) % self._vocab_size
            for place, token in enumerate(following, done)
        ]
        return Draft(draft, DraftSource.model)

    def learn(self, request: Request, token_ids: Sequence[int]) -> None:
        output = token_ids[len(request.prompt_token_ids) :]
        assert output == self.outputs[request.request_id], "learn() must get the complete output"

    def reset(self) -> None:
        pass

    def forget(self, request_id: str) -> None:
        self.live.discard(request_id)

    def _is_right(self, request_id: str, place: int) -> bool:
        return crc32(f"{request_id}/{place}".encode()) % 1009 / 1009 < self.accuracy


class ReplayDrafter:
    """Drafts the tokens that an earlier run gave for the same prompt, with repeatable errors.

    A hash of prompt and position decides where a guess is wrong.

    Args:
        max_drafts: the most guesses for one sequence in one step.
        vocab_size: upper bound of all guesses, wrong ones included.

    Attributes:
        accuracy: probability that a guess is right.
    """

    def __init__(self, max_drafts: int, vocab_size: int) -> None:
        self.max_drafts = max_drafts
        self.accuracy = 1.0
        self._outputs: dict[tuple[int, ...], list[int]] = {}
        self._vocab_size = vocab_size

    def memorize(self, prompts: list[list[int]], outputs: list[list[int]]) -> None:
        """Keep distinct prompts and their outputs. There are no drafts for other prompts."""
        self._outputs = dict(zip(map(tuple, prompts), outputs, strict=True))

    def propose(self, request: Request, token_ids: Sequence[int], most: int) -> Draft | None:
        prompt = request.prompt_token_ids
        done = len(token_ids) - len(prompt)
        following = self._outputs.get(tuple(prompt), [])[done : done + most]
        draft = [
            token
            if crc32(f"{prompt}/{place}".encode()) % 1009 / 1009 < self.accuracy
            else (token + 1) % self._vocab_size
            for place, token in enumerate(following, done)
        ]
        return Draft(draft, DraftSource.model) if draft else None

    def learn(self, request: Request, token_ids: Sequence[int]) -> None:
        pass

    def reset(self) -> None:
        pass

    def forget(self, request_id: str) -> None:
        pass


def make_llm(config: RunConfig, drafter: Proposer | None) -> LLM:
    """An `LLM` whose engine has this drafter, if there is one, and verifies all drafts."""
    speculation = dataclasses.replace(config.speculation, adaptive=False)
    config = dataclasses.replace(config, speculation=speculation)
    return LLM(config=config, proposer=drafter)


class DraftRecorder:
    """Records the drafts of a running engine."""

    def __init__(self, llm: LLM) -> None:
        drafts = llm._engine._scheduler.drafts
        assert drafts is not None
        self._draw = drafts.proposer.draw
        drafts.proposer.draw = self.draw
        self.drawn: list[tuple[list[int], list[int]]] = []

    def draw(self, jobs: list[DraftJob], most_tokens: int) -> list[list[int]]:
        drafts = self._draw(jobs, most_tokens)
        self.drawn += [
            (list(job.token_ids), draft) for job, draft in zip(jobs, drafts, strict=True)
        ]
        return drafts
