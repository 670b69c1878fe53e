"""Workloads of token ids: the standard one, random lengths, or a JSON file.

A file holds either a list of requests

    [{"prompt": [1, 2, 3], "max_tokens": 16}, ...]

or an object with some of the standard workload's parts: `single` and `ttft` are one request each,
`offline` and `prefix` are lists. Everything is generated greedily, past any end-of-sequence token,
so that the number of tokens is known.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from ostinato.conf.errors import ConfigError
from ostinato.conf.schema import BenchSection

__all__ = (
    "PARTS",
    "Part",
    "WorkItem",
    "load_workload",
    "random_part",
    "shift",
    "standard_workload",
)

PARTS = ("single", "ttft", "offline", "prefix")
# The standard ids lie in [256, 30000): ordinary tokens of every model with so large a vocabulary.
_FIRST_ID, _END_ID = 256, 30_000
_SEED = 20_240_607


@dataclass(frozen=True, slots=True)
class WorkItem:
    """One request."""

    prompt: list[int]  # token ids
    max_tokens: int  # generated in full

    @property
    def num_tokens(self) -> int:
        return len(self.prompt) + self.max_tokens


@dataclass(frozen=True, slots=True)
class Part:
    """Requests that are sent at once and measured together."""

    name: str
    items: list[WorkItem]
    shifts: bool = False  # repetitions may use other ids, so that no cache carries over

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
        """The same lengths with other ids, the same for every engine that is compared."""
        if not self.shifts:
            return self
        items = [WorkItem(shift(item.prompt, number), item.max_tokens) for item in self.items]
        return Part(self.name, items, shifts=True)

    def folded(self, vocab_size: int) -> Part:
        """The same lengths with ids below `vocab_size`."""
        if self.max_id < vocab_size:
            return self
        items = [
            WorkItem([token_id % vocab_size for token_id in item.prompt], item.max_tokens)
            for item in self.items
        ]
        return Part(self.name, items, shifts=self.shifts)


def shift(token_ids: list[int], number: int) -> list[int]:
    """The ids of repetition `number`; a bijection on [256, 30000)."""
    size = _END_ID - _FIRST_ID
    return [(token_id - _FIRST_ID + 7919 * number) % size + _FIRST_ID for token_id in token_ids]


def standard_workload() -> list[Part]:
    """The four parts that peers are measured with, always the same ids.

    single: 128 prompt and 128 output tokens. ttft: 512 prompt tokens. offline: 32 requests, prompts
    of 64-512, outputs of 32-128. prefix: 16 requests that share 1024 of their 1088 tokens, outputs
    of 32.
    """
    source = random.Random(_SEED)

    def ids(count: int) -> list[int]:
        return [source.randrange(_FIRST_ID, _END_ID) for _ in range(count)]

    single = [WorkItem(ids(128), 128)]
    ttft = [WorkItem(ids(512), 1)]
    # The order of the draws is the format: the prompt's length, its ids, then the output's length.
    offline = [WorkItem(ids(source.randint(64, 512)), source.randint(32, 128)) for _ in range(32)]
    common = ids(1024)
    prefix = [WorkItem(common + ids(64), 32) for _ in range(16)]
    parts = zip(PARTS, (single, ttft, offline, prefix), strict=True)
    return [Part(name, items, shifts=True) for name, items in parts]


def random_part(section: BenchSection, vocab_size: int) -> Part:
    """Requests of random ids; lengths are uniform within mean * (1 +- length_spread)."""
    source = random.Random(section.seed)

    def length(mean: int) -> int:
        spread = int(mean * section.length_spread)
        return source.randint(max(1, mean - spread), mean + spread)

    items: list[WorkItem] = []
    for _ in range(section.num_prompts):
        prompt = [source.randrange(vocab_size) for _ in range(length(section.input_len))]
        items.append(WorkItem(prompt, length(section.output_len)))
    return Part("random", items)


def load_workload(path: str) -> list[Part]:
    """The parts of a JSON file.

    Raises:
        ConfigError: it is missing, not JSON or empty, or an entry is no request; the line names it.
    """
    file = Path(path).expanduser()
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"bench.workload={path} can not be read: {error.strerror}; it must be standard, random "
            "or a JSON file"
        ) from error
    except ValueError as error:  # of JSON and of UTF-8
        raise ConfigError(f"bench.workload={path} is not JSON: {error}") from error
    if isinstance(content, list):
        return [Part("list", _items(path, "", content))]
    if not isinstance(content, dict):
        raise ConfigError(
            f"bench.workload={path} must hold a list of requests or an object with some of "
            f"{', '.join(PARTS)}"
        )
    parts: list[Part] = []
    for name in PARTS:
        if (entries := cast(Mapping[str, Any], content).get(name)) is not None:
            items = _items(path, name, entries if isinstance(entries, list) else [entries])
            parts.append(Part(name, items, shifts=_is_standard(items)))
    if not parts:
        raise ConfigError(f"bench.workload={path} has none of the parts {', '.join(PARTS)}")
    return parts


def _is_standard(items: list[WorkItem]) -> bool:
    return all(_FIRST_ID <= token_id < _END_ID for item in items for token_id in item.prompt)


def _items(path: str, part: str, entries: list[Any]) -> list[WorkItem]:
    if not entries:
        raise ConfigError(f"bench.workload={path} has no requests" + f" in {part}" * bool(part))
    return [_item(path, f"{part}[{index}]", entry) for index, entry in enumerate(entries)]


def _item(path: str, place: str, entry: Any) -> WorkItem:
    where = f"bench.workload={path}, request {place}"
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
