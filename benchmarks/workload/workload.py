"""Workloads of token ids: the request type, the standard requests, and requests from a JSON file.

A file holds either a list of requests

    [{"prompt": [1, 2, 3], "max_tokens": 16}, ...]

or an object with some of the standard workload's parts: `single` and `ttft` are one request each,
`offline` and `prefix` are lists. Requests are greedy and ignore end-of-sequence tokens, so that the
number of output tokens is known.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

from ostinato.conf.environment import expand_user
from ostinato.conf.errors import ConfigError

__all__ = (
    "PARTS",
    "Part",
    "WorkItem",
    "load_tokens",
    "shift",
    "standard_workload",
)

PARTS = ("single", "ttft", "offline", "prefix")
# The standard ids are in [256, 30000), which are ordinary tokens in every large enough vocabulary.
_FIRST_ID, _END_ID = 256, 30_000
_SEED = 20_240_607


@dataclass(frozen=True, slots=True)
class WorkItem:
    """One request."""

    prompt: list[int]  # token ids; for a later turn, the ids after the previous answer
    max_tokens: int  # the number of output tokens
    arrival_s: float | None = None  # seconds after the first request, for recorded traffic
    after: int | None = None  # index of the previous turn in the list
    think_s: float = 0.0  # seconds from the previous turn's answer to this request

    @property
    def num_tokens(self) -> int:
        return len(self.prompt) + self.max_tokens


@dataclass(frozen=True, slots=True)
class Part:
    """Requests that are measured together. A later turn waits for the previous answer."""

    name: str
    items: list[WorkItem]
    shifts: bool = False  # whether repetitions use other ids, so that no cache has them

    @property
    def num_prompt_tokens(self) -> int:
        return sum(len(item.prompt) for item in self.items)

    @property
    def num_output_tokens(self) -> int:
        return sum(item.max_tokens for item in self.items)

    @property
    def max_id(self) -> int:
        return max(max(item.prompt) for item in self.items)

    def repetition(self, number: int) -> Part:
        """The same lengths with ids that depend on `number`; without `shifts`, this part itself."""
        if not self.shifts:
            return self
        items = [replace(item, prompt=shift(item.prompt, number)) for item in self.items]
        return Part(self.name, items, shifts=True)

    def rotated(self, number: int, vocab_size: int) -> Part:
        """The same lengths and common prefixes with other ids, for any workload."""
        items = [
            replace(item, prompt=[(i + 7919 * number) % vocab_size for i in item.prompt])
            for item in self.items
        ]
        return Part(self.name, items, self.shifts)

    def waves(self) -> list[list[int]]:
        """Indices of the first turns, of the second turns, and so on. Each can run as a batch."""
        depth: list[int] = []
        for item in self.items:
            depth.append(0 if item.after is None else depth[item.after] + 1)
        return [
            [place for place, d in enumerate(depth) if d == turn]
            for turn in range(max(depth, default=-1) + 1)
        ]

    def longest(self) -> int:
        """Tokens of the longest request, all turns before it included."""
        totals: list[int] = []
        for item in self.items:
            before = 0 if item.after is None else totals[item.after]
            totals.append(before + item.num_tokens)
        return max(totals)

    def folded(self, vocab_size: int) -> Part:
        """The same lengths with ids below `vocab_size`."""
        if self.max_id < vocab_size:
            return self
        items = [
            replace(item, prompt=[token_id % vocab_size for token_id in item.prompt])
            for item in self.items
        ]
        return Part(self.name, items, shifts=self.shifts)


def shift(token_ids: list[int], number: int) -> list[int]:
    """The ids of repetition `number`; a bijection on [256, 30000)."""
    size = _END_ID - _FIRST_ID
    return [(token_id - _FIRST_ID + 7919 * number) % size + _FIRST_ID for token_id in token_ids]


def standard_workload() -> list[Part]:
    """The four parts with which engines are compared. The ids are always the same.

    single: 128 prompt and 128 output tokens. ttft: 512 prompt tokens. offline: 32 requests, prompts
    of 64-512, outputs of 32-128. prefix: 16 requests that share 1024 of their 1088 tokens, outputs
    of 32.
    """
    source = random.Random(_SEED)

    def ids(count: int) -> list[int]:
        return [source.randrange(_FIRST_ID, _END_ID) for _ in range(count)]

    single = [WorkItem(ids(128), 128)]
    ttft = [WorkItem(ids(512), 1)]
    # The order of the draws must stay: the prompt's length, its ids, the output's length.
    offline = [WorkItem(ids(source.randint(64, 512)), source.randint(32, 128)) for _ in range(32)]
    common = ids(1024)
    prefix = [WorkItem(common + ids(64), 32) for _ in range(16)]
    parts = zip(PARTS, (single, ttft, offline, prefix), strict=True)
    return [Part(name, items, shifts=True) for name, items in parts]


def load_tokens(path: str) -> list[Part]:
    """The parts of a JSON file.

    Raises:
        ConfigError: the file is missing, not JSON or empty, or an entry is not a request; the
            message names the entry.
    """
    file = expand_user(path)
    try:
        text = file.read_text(encoding="utf-8")
        content = json.loads(text) if text.strip() else None
    except OSError as error:
        raise ConfigError(f"workload.path={path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:  # errors of JSON and of UTF-8; too deep nesting
        raise ConfigError(f"workload.path={path} is not JSON: {error}") from error
    if not text.strip():
        raise ConfigError(f"workload.path={path} is empty")
    if isinstance(content, list):
        return [Part("list", _items(path, "", content))]
    if not isinstance(content, dict):
        raise ConfigError(
            f"workload.path={path} must hold a list of requests or an object with some of "
            f"{', '.join(PARTS)}"
        )
    parts: list[Part] = []
    for name in PARTS:
        if (entries := cast(Mapping[str, Any], content).get(name)) is not None:
            items = _items(path, name, entries if isinstance(entries, list) else [entries])
            parts.append(Part(name, items, shifts=_is_standard(items)))
    if not parts:
        raise ConfigError(f"workload.path={path} has none of the parts {', '.join(PARTS)}")
    return parts


def _is_standard(items: list[WorkItem]) -> bool:
    return all(_FIRST_ID <= token_id < _END_ID for item in items for token_id in item.prompt)


def _items(path: str, part: str, entries: list[Any]) -> list[WorkItem]:
    if not entries:
        raise ConfigError(f"workload.path={path} has no requests" + f" in {part}" * bool(part))
    return [_item(path, f"{part}[{index}]", entry) for index, entry in enumerate(entries)]


def _item(path: str, place: str, entry: Any) -> WorkItem:
    where = f"workload.path={path}, request {place}"
    if not isinstance(entry, dict):
        raise ConfigError(
            f'{where} must be {{"prompt": [ids], "max_tokens": n}}, got {entry!r:.60}'
        )
    fields = cast(Mapping[str, Any], entry)
    prompt, max_tokens = fields.get("prompt"), fields.get("max_tokens")
    if not isinstance(prompt, list) or not prompt:
        raise ConfigError(f"{where}: prompt must be a list of token ids, got {prompt!r:.60}")
    ids = cast(list[Any], prompt)
    wrong = [value for value in ids if type(value) is not int or value < 0]
    if wrong:
        raise ConfigError(
            f"{where}: prompt must hold token ids of at least 0, got {wrong[0]!r:.60}"
        )
    if type(max_tokens) is not int or max_tokens < 1:
        raise ConfigError(
            f"{where}: max_tokens must be an integer of at least 1, got {max_tokens!r:.60}"
        )
    return WorkItem(ids, max_tokens)
