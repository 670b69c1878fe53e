"""`run bench speculation`: compares decoding with each drafter to plain decoding.

    run bench speculation speculation.max_tokens=3 workload=fixed

There is one engine for each drafter, and one that decodes plainly. All engines answer the same
requests, in turns within each round. The requests run one after the other, then together. The
result has the ratio of output tokens per second, the tokens per step, and whether all answers are
equal to those of plain decoding. Drafters, and where their drafts come from:

    ngram    the text of the request itself
    auto     all drafters without a model. One of them searches earlier answers of this engine. When
             the requests run one after the other, it finds answers to the same requests from the
             second round on. When they run together, it already finds them in the first round
    draft    the draft model of speculation.model, only with speculation.method=draft
    eagle3   the EAGLE-3 head of speculation.model, only with speculation.method=eagle3
    mtp      the layer of the checkpoint that predicts one token more (MTP), only with
             speculation.method=mtp
    replay   the answer of plain decoding, in which each token is replaced by a wrong one with
             probability 0.3; it shows the gain of a drafter that is right in 70 % of its tokens
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import NamedTuple
from zlib import crc32

from ostinato.benchmarks.bench.context import BenchContext
from ostinato.benchmarks.report.record import Metric, Point, Record, conditions_of
from ostinato.benchmarks.workload.select import fit_parts, one_part, read_parts
from ostinato.benchmarks.workload.workload import WorkItem
from ostinato.conf.root import RunConfig
from ostinato.conf.sections.speculation_schema import SpeculationMethod
from ostinato.runtime.llm import LLM
from ostinato.runtime.speculation.proposer import Draft, DraftSource
from ostinato.runtime.types.params import SamplingParams
from ostinato.runtime.types.request import Request

__all__ = ("speculation",)

_ACCURACY = 0.7
_METHODS = {
    "plain": SpeculationMethod.none,
    "ngram": SpeculationMethod.ngram,
    "auto": SpeculationMethod.auto,
    "draft": SpeculationMethod.draft,
    "eagle3": SpeculationMethod.eagle3,
    "mtp": SpeculationMethod.mtp,
    # This engine gets a `ReplayProposer`, which replaces the drafter of the method set here.
    f"replay {_ACCURACY}": SpeculationMethod.grammar,
}


class ReplayProposer:
    """Proposes known answers, in which each token is right with a given probability.

    Implements `Proposer`.

    Args:
        max_drafts: draft tokens of one sequence in one step, at most.
        accuracy: the probability that a token is right. A hash decides, so runs can be repeated.
        vocab_size: the size of the model's vocabulary.
    """

    def __init__(self, max_drafts: int, accuracy: float, vocab_size: int) -> None:
        self._max_drafts = max_drafts
        self._accuracy = accuracy
        self._vocab_size = vocab_size
        self._answers: dict[tuple[int, ...], list[int]] = {}

    @property
    def max_drafts(self) -> int:
        return self._max_drafts

    def memorize(self, items: Sequence[WorkItem], answers: Sequence[list[int]]) -> None:
        """Store the answers to these requests."""
        self._answers = {
            tuple(item.prompt): answer for item, answer in zip(items, answers, strict=True)
        }

    def propose(self, request: Request, token_ids: Sequence[int], most: int) -> Draft | None:
        prompt = request.prompt_token_ids
        done = len(token_ids) - len(prompt)
        following = self._answers.get(tuple(prompt), [])[done : done + most]
        draft = [
            token if self._is_right(len(prompt), place) else (token + 1) % self._vocab_size
            for place, token in enumerate(following, done)
        ]
        return Draft(draft, DraftSource.model) if draft else None

    def learn(self, request: Request, token_ids: Sequence[int]) -> None:
        pass

    def forget(self, request_id: str) -> None:
        pass

    def reset(self) -> None:
        pass

    def _is_right(self, length: int, place: int) -> bool:
        return crc32(f"{length}/{place}".encode()) % 1009 < self._accuracy * 1009


class _Round(NamedTuple):
    """All requests answered once."""

    answers: list[list[int]]
    seconds: float
    num_steps: int
    num_draft_tokens: int
    num_accepted: int


def speculation(config: RunConfig, context: BenchContext) -> Record:
    """Measure each drafter in turns with plain decoding.

    Raises:
        ConfigError: the workload is missing, malformed, or not for this model.
        StartupError: an engine cannot start.
    """
    with ExitStack() as stack:
        llms: dict[str, LLM] = {}
        replay = None
        model = config.speculation.model
        for name, method in _METHODS.items():
            is_own = method.needs_model or method is SpeculationMethod.mtp
            if is_own and method is not config.speculation.method:
                continue
            context.show(f"starting the engine: {name}")
            own = dataclasses.replace(
                config.speculation, method=method, model=model if method.needs_model else ""
            )
            if name.startswith("replay"):
                vocab_size = llms["plain"].model.vocab_size
                replay = ReplayProposer(own.max_tokens, _ACCURACY, vocab_size)
            chosen = dataclasses.replace(config, speculation=own)
            proposer = replay if name.startswith("replay") else None
            llms[name] = stack.enter_context(context.open_llm(chosen, proposer=proposer))
        assert replay is not None, "one of the drafters replays"
        plain = llms["plain"]
        encode = None if plain.tokenizer is None else plain.tokenizer.encode
        parts = read_parts(config.workload, plain.model.vocab_size, encode)
        fitting, notes = fit_parts(
            [one_part(parts)],
            model=plain.model.name,
            max_model_len=plain.model.max_model_len,
            vocab_size=plain.model.vocab_size,
        )
        items = fitting[0].folded(plain.model.vocab_size).items
        replay.memorize(items, _answer(plain, items, together=True).answers)
        points: list[Point] = []
        for together in (False, True):
            points += _measure(llms, items, config.bench.repeats, context, together=together)
    differing = [one.label for one in points if one.metrics["equal_to_plain"].value < 1.0]
    notes.insert(0, f"equal to plain: {'no: ' + '; '.join(differing) if differing else 'yes'}")
    return Record(
        kind=config.bench.kind.value,
        conditions=conditions_of(config, model=plain.model.name),
        points=points,
        notes=notes,
    )


def _measure(
    llms: dict[str, LLM],
    items: Sequence[WorkItem],
    num_rounds: int,
    context: BenchContext,
    *,
    together: bool,
) -> list[Point]:
    way = f"{len(items)} at once" if together else "one at a time"
    rounds: dict[str, list[_Round]] = {name: [] for name in llms}
    for number in range(num_rounds):
        for name, llm in llms.items():
            context.show(f"{way}: round {number + 1} of {num_rounds}, {name}")
            rounds[name].append(_answer(llm, items, together=together))
    return [
        Point(
            label=f"{name}, {way}",
            parameters={"drafter": name, "together": together},
            metrics=_metrics(found, rounds["plain"]),
        )
        for name, found in rounds.items()
    ]


def _metrics(found: list[_Round], plain: list[_Round]) -> dict[str, Metric]:
    num_tokens = sum(map(len, plain[0].answers))
    rates = [num_tokens / one.seconds for one in found]
    ratios = [base.seconds / one.seconds for one, base in zip(found, plain, strict=True)]
    drafted = sum(one.num_draft_tokens for one in found)
    equal = [one.answers == plain[0].answers for one in found]
    steps = [num_tokens / max(1, one.num_steps) for one in found]
    metrics = {
        "output_throughput": Metric.of(rates, "tokens/s", "higher"),
        "ratio_to_plain": Metric.of(ratios, "", "higher"),
        "tokens_per_step": Metric.of(steps, "", "higher"),
        "equal_to_plain": Metric(sum(equal) / len(equal), "share", "higher"),
    }
    if drafted:
        accepted = sum(one.num_accepted for one in found)
        metrics["accepted"] = Metric(accepted / drafted, "share", "higher")
    return metrics


def _answer(llm: LLM, items: Sequence[WorkItem], *, together: bool) -> _Round:
    before = llm.stats()
    begin = time.perf_counter()
    groups = [items] if together else [[item] for item in items]
    answers: list[list[int]] = []
    for group in groups:
        outputs = llm.generate(
            [item.prompt for item in group],
            [
                SamplingParams(temperature=0.0, max_tokens=item.max_tokens, ignore_eos=True)
                for item in group
            ],
            use_progress=False,
        )
        answers += [output.outputs[0].token_ids for output in outputs]
    seconds = time.perf_counter() - begin
    after = llm.stats()
    drafted = accepted = 0
    if before.speculation is not None and after.speculation is not None:
        drafted = after.speculation.num_draft_tokens - before.speculation.num_draft_tokens
        accepted = after.speculation.num_accepted_tokens - before.speculation.num_accepted_tokens
    return _Round(answers, seconds, after.num_steps - before.num_steps, drafted, accepted)
