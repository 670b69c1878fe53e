"""Builds the configured workload, of any kind, as requests that fit a model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from ostinato.benchmarks.workload.files import sharegpt_part, trace_part
from ostinato.benchmarks.workload.synthetic import conversations_part, prefix_part, random_part
from ostinato.benchmarks.workload.workload import Part, WorkItem, load_tokens, standard_workload
from ostinato.conf.errors import ConfigError
from ostinato.conf.sections.bench_schema import WorkloadKind, WorkloadSection

__all__ = ("fit_parts", "one_part", "read_parts")

Encode = Callable[[str], list[int]]

_MADE = {
    WorkloadKind.random: random_part,
    WorkloadKind.fixed: random_part,
    WorkloadKind.prefix: prefix_part,
    WorkloadKind.conversations: conversations_part,
    WorkloadKind.trace: trace_part,
}
_FROM_FILE = {WorkloadKind.sharegpt, WorkloadKind.tokens, WorkloadKind.trace}


def read_parts(
    section: WorkloadSection,
    vocab_size: int,
    encode: Encode | None = None,
    parts: Sequence[str] = ("single", "ttft", "offline", "prefix"),
) -> list[Part]:
    """The workload's parts. Only the standard kind and files of token ids can have several.

    Args:
        section: the workload.
        vocab_size: random ids are below it.
        encode: text to token ids, for ShareGPT files.
        parts: the wanted parts of the standard kind, or of a file of token ids.

    Raises:
        ConfigError: the file is missing, malformed or empty; it has texts and there is no
            tokenizer; this kind reads no file; or no part is left.
    """
    kind = section.kind
    if section.path and kind not in _FROM_FILE:
        raise ConfigError(
            f"workload.path={section.path}: workload={kind} reads no file; choose "
            "workload=sharegpt, tokens or trace"
        )
    if kind in _MADE:
        return [_MADE[kind](section, vocab_size)]
    if kind is WorkloadKind.sharegpt:
        if encode is None:
            raise ConfigError("workload=sharegpt needs a tokenizer: set model.tokenizer")
        return [sharegpt_part(section, encode)]
    if kind is WorkloadKind.tokens:
        if not section.path:
            raise ConfigError("workload=tokens needs a file: workload.path=FILE")
        found = [
            replace(part, items=part.items[: section.num_requests])
            for part in load_tokens(section.path)
        ]
    else:
        found = standard_workload()
    chosen = [part for part in found if part.name in parts or part.name == "list"]
    if not chosen:
        raise ConfigError(
            f"bench.parts=[{','.join(parts)}] leaves nothing of workload={kind}, which has "
            f"{', '.join(part.name for part in found)}"
        )
    return chosen


def fit_parts(
    parts: Sequence[Part], *, model: str, max_model_len: int, vocab_size: int
) -> tuple[list[Part], list[str]]:
    """The parts that the model can serve, and notes on requests that were changed or left out.

    Raises:
        ConfigError: no request is left, or a file has ids outside the vocabulary.
    """
    notes: list[str] = []
    fitting: list[Part] = []
    shifted: list[str] = []
    for part in parts:
        kept, dropped = _within(part, max_model_len)
        if not kept.items:
            notes.append(
                f"{part.name} left out: {part.longest()} tokens, the context holds {max_model_len}"
            )
            continue
        if dropped:
            notes.append(
                f"{part.name}: {dropped} of {len(part.items)} requests left out, longer than the "
                f"context of {max_model_len}"
            )
        if kept.max_id >= vocab_size:
            if not kept.shifts:
                raise ConfigError(
                    f"workload.path: {part.name} has token id {kept.max_id}, but the vocabulary "
                    f"of {model} is [0, {vocab_size})"
                )
            shifted.append(part.name)
        fitting.append(kept)
    if not fitting:
        raise ConfigError(f"the workload does not fit {model}: {'; '.join(notes)}")
    if shifted:
        notes.insert(0, f"{', '.join(shifted)}: ids modulo the vocabulary of {vocab_size}")
    return fitting, notes


def _within(part: Part, max_model_len: int) -> tuple[Part, int]:
    """Leave out requests that are too long, and the turns after them.

    The standard parts are compared between engines, so they are kept as a whole or left out.

    Returns:
        The rest of the part, and the number of requests that were left out.
    """
    if part.longest() <= max_model_len:
        return part, 0
    if part.shifts:
        return Part(part.name, []), len(part.items)
    places: dict[int, int] = {}
    totals: dict[int, int] = {}
    kept: list[WorkItem] = []
    for place, item in enumerate(part.items):
        if item.after is not None and item.after not in places:
            continue
        total = item.num_tokens + (0 if item.after is None else totals[item.after])
        if total > max_model_len:
            continue
        places[place], totals[place] = len(kept), total
        after = None if item.after is None else places[item.after]
        kept.append(replace(item, after=after))
    return Part(part.name, kept, part.shifts), len(part.items) - len(kept)


def one_part(parts: Sequence[Part]) -> Part:
    """The part for a load measurement: the only one, else `offline`, else the first."""
    if len(parts) == 1:
        return parts[0]
    for part in parts:
        if part.name == "offline":
            return part
    return parts[0]
