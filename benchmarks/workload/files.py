"""Reads workloads from files: conversations of ShareGPT, and traces of requests with their times.

| trace | recognised by | fields |
|---|---|---|
| Azure LLM inference | CSV with `TIMESTAMP` | `ContextTokens`, `GeneratedTokens` |
| BurstGPT | CSV with `Timestamp` | `Request tokens`, `Response tokens` |
| Mooncake, Ostinato | JSON lines | `timestamp` (ms), `input_length`, `output_length`, `hash_ids` |

Traces have no text. If a trace has `hash_ids`, a prompt gets one block of random ids for each hash,
with the hash as the seed. So prompts that began alike in the recorded traffic begin alike here too.
Blocks have the size `block_size`, if the line has this field (`server.record_trace` writes it),
else 512 as in Mooncake's traces. Prompts without `hash_ids` have nothing in common.
"""

from __future__ import annotations

import csv
import io
import json
import math
import random
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from typing import Any, NamedTuple, cast

from ostinato.benchmarks.workload.workload import Part, WorkItem
from ostinato.conf.environment import expand_user
from ostinato.conf.errors import ConfigError
from ostinato.conf.sections.bench_schema import WorkloadSection

__all__ = ("MOONCAKE_BLOCK", "sharegpt_part", "trace_part")

MOONCAKE_BLOCK = 512  # tokens of one entry of Mooncake's hash_ids
_MAX_TOKENS = 100_000_000  # a request in a file may not have more
_MIN_TOKENS = 4  # shorter questions and answers are left out


class _Arrival(NamedTuple):
    """One request of a trace."""

    seconds: float
    input_length: int
    output_length: int
    hash_ids: list[int]
    block_size: int


def sharegpt_part(section: WorkloadSection, encode: Callable[[str], list[int]]) -> Part:
    """The first question and answer of each conversation, in an order that follows the seed.

    Args:
        section: path, num_requests and seed.
        encode: text to token ids, of the model that is measured.

    Raises:
        ConfigError: the file is missing, malformed or without a usable conversation.
    """
    where = f"workload.path={section.path}"
    content = _json(_read(section), where)
    if not isinstance(content, list) or not content:
        raise ConfigError(
            f'{where} must hold a list of {{"conversations": [{{"from": ..., "value": text}}, '
            f"...]}}, got {content!r:.60}"
        )
    entries = list(enumerate(cast(list[Any], content)))
    random.Random(section.seed).shuffle(entries)
    items: list[WorkItem] = []
    for index, entry in entries:
        turns = _turns(entry, f"{where}, entry [{index}]")
        if len(turns) >= 2:
            prompt, answer = encode(turns[0]), encode(turns[1])
            if min(len(prompt), len(answer)) >= _MIN_TOKENS:
                items.append(WorkItem(prompt, len(answer)))
        if len(items) == section.num_requests:
            break
    if not items:
        raise ConfigError(
            f"{where} has no conversation with a question and an answer of at least "
            f"{_MIN_TOKENS} tokens each"
        )
    return Part("sharegpt", items)


def _turns(entry: Any, where: str) -> list[str]:
    turns = entry.get("conversations") if isinstance(entry, dict) else None
    if not isinstance(turns, list):
        raise ConfigError(f"{where} must have a list named conversations, got {entry!r:.60}")
    texts = [turn.get("value") if isinstance(turn, dict) else None for turn in turns[:2]]
    found = [text for text in texts if isinstance(text, str)]
    if len(found) < len(texts):
        raise ConfigError(f'{where}: a turn must be {{"from": ..., "value": text}}')
    return found


def trace_part(section: WorkloadSection, vocab_size: int) -> Part:
    """Requests with the lengths, arrivals and common prefixes of recorded traffic.

    Raises:
        ConfigError: the file is missing, empty or of no known format, or a line is malformed.
    """
    where = f"workload.path={section.path}"
    text = _read(section)
    if text.lstrip()[0] in "{[":
        arrivals = list(_json_lines(text, where))
    else:
        try:
            arrivals = list(_csv(text, where))
        except csv.Error as error:
            raise ConfigError(f"{where} is not CSV: {error}") from error
    arrivals = [one for one in arrivals if one.input_length > 0 and one.output_length > 0]
    if not arrivals:
        raise ConfigError(f"{where} has no request with input and output tokens")
    arrivals.sort(key=lambda one: one.seconds)
    arrivals = arrivals[: section.num_requests]
    first = arrivals[0].seconds
    make = _PromptMaker(section.seed, vocab_size)
    items = [
        WorkItem(
            make.prompt(one),
            one.output_length,
            arrival_s=(one.seconds - first) * section.time_scale,
        )
        for one in arrivals
    ]
    return Part("trace", items)


class _PromptMaker:
    """Makes prompts of a trace; the same hash always gives the same ids."""

    def __init__(self, seed: int, vocab_size: int) -> None:
        self._seed = seed
        self._vocabulary = range(vocab_size)
        self._own = random.Random(seed)
        self._blocks: dict[tuple[int, int], list[int]] = {}

    def prompt(self, one: _Arrival) -> list[int]:
        ids = [token_id for h in one.hash_ids for token_id in self._block(h, one.block_size)]
        missing = one.input_length - len(ids)
        if missing > 0:
            ids += self._own.choices(self._vocabulary, k=missing)
        return ids[: one.input_length]

    def _block(self, hash_id: int, size: int) -> list[int]:
        key = (hash_id, size)
        if key not in self._blocks:
            source = random.Random(f"{self._seed} {hash_id}")
            self._blocks[key] = source.choices(self._vocabulary, k=size)
        return self._blocks[key]


def _json_lines(text: str, where: str) -> Iterator[_Arrival]:
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        place = f"{where}, line {number}"
        entry = _json(line, place)
        if not isinstance(entry, dict):
            raise ConfigError(f"{place} must be an object, got {entry!r:.60}")
        fields = cast(Mapping[str, Any], entry)
        hash_ids = fields.get("hash_ids", [])
        if not isinstance(hash_ids, list) or not all(type(h) is int for h in hash_ids):
            raise ConfigError(f"{place}: hash_ids must be a list of integers, got {hash_ids!r:.60}")
        yield _Arrival(
            _number(fields, "timestamp", place) / 1000,
            _count(fields, "input_length", place),
            _count(fields, "output_length", place),
            hash_ids,
            _count(fields, "block_size", place) if "block_size" in fields else MOONCAKE_BLOCK,
        )


def _csv(text: str, where: str) -> Iterator[_Arrival]:
    reader = csv.DictReader(io.StringIO(text), skipinitialspace=True)
    reader.fieldnames = [name.strip() for name in reader.fieldnames or ()]
    names = set(reader.fieldnames)
    if {"TIMESTAMP", "ContextTokens", "GeneratedTokens"} <= names:
        time, lengths = "TIMESTAMP", ("ContextTokens", "GeneratedTokens")
    elif {"Timestamp", "Request tokens", "Response tokens"} <= names:
        time, lengths = "Timestamp", ("Request tokens", "Response tokens")
    else:
        raise ConfigError(
            f"{where} is not a trace: it must be CSV with TIMESTAMP, ContextTokens, "
            "GeneratedTokens (Azure) or Timestamp, Request tokens, Response tokens (BurstGPT), or "
            "JSON lines with timestamp, input_length, output_length (Mooncake); its header is "
            f"{','.join(reader.fieldnames or ())!r:.80}"
        )
    for row in reader:
        place = f"{where}, line {reader.line_num}"
        yield _Arrival(
            _seconds(row[time], time, place),
            _count(row, lengths[0], place),
            _count(row, lengths[1], place),
            [],
            1,
        )


def _seconds(value: str | None, name: str, place: str) -> float:
    """Unix seconds of a text: a number of seconds, or a date and time.

    A date and time without an offset is in UTC.

    Azure's times of 2023 have seven decimals and no offset, those of 2024 up to six and "+00:00".
    """
    text = (value or "").strip()
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if math.isfinite(seconds):
        return seconds
    try:
        moment = datetime.fromisoformat(text)
    except ValueError as error:
        raise ConfigError(f"{place}: {name} must be seconds or a date, got {text!r:.60}") from error
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


def _number(fields: Mapping[str, Any], name: str, place: str) -> float:
    value = fields.get(name)
    try:
        number = float(cast(Any, value))
    except (TypeError, ValueError, OverflowError):  # an integer of hundreds of digits overflows
        number = math.nan
    if not math.isfinite(number):
        raise ConfigError(f"{place}: {name} must be a number, got {value!r:.60}")
    return number


def _count(fields: Mapping[str, Any], name: str, place: str) -> int:
    number = _number(fields, name, place)
    if not 0 <= number <= _MAX_TOKENS or number != int(number):
        raise ConfigError(f"{place}: {name} must be a number of tokens, got {fields[name]!r:.60}")
    return int(number)


def _read(section: WorkloadSection) -> str:
    if not section.path:
        raise ConfigError(f"workload={section.kind} needs a file: workload.path=FILE")
    try:
        text = expand_user(section.path).read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ConfigError(
            f"workload.path={section.path} cannot be read: {error.strerror}"
        ) from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"workload.path={section.path} is not UTF-8 text: {error}") from error
    if not text.strip():
        raise ConfigError(f"workload.path={section.path} is empty")
    return text


def _json(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where} is not JSON: {error}") from error
