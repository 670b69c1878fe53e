"""`run bench determinism`: compares a request's tokens across different batches.

    run bench determinism workload=random workload.num_requests=32

Every request runs five times: alone, together with all others, together in another order, and from
the prefix cache both together and alone. All of this is done with greedy and with seeded sampling.
For each of the other four runs, the result has the share of answers that equal those of the
requests alone.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from ostinato.benchmarks.bench.context import BenchContext
from ostinato.benchmarks.report.record import Metric, Point, Record, conditions_of
from ostinato.benchmarks.workload.select import fit_parts, one_part, read_parts
from ostinato.benchmarks.workload.workload import Part, WorkItem
from ostinato.conf.root import RunConfig
from ostinato.runtime.llm import LLM
from ostinato.runtime.types.params import SamplingParams

__all__ = ("determinism",)

Answers = dict[int, list[int]]  # {index of the request: its tokens}


def determinism(config: RunConfig, context: BenchContext) -> Record:
    """Compare the answer to every request alone with its answers in batches.

    Raises:
        ConfigError: the workload is missing, malformed, or not for this model.
        StartupError: the engine cannot start.
    """
    llm = context.open_llm(config)
    try:
        encode = None if llm.tokenizer is None else llm.tokenizer.encode
        parts = read_parts(config.workload, llm.model.vocab_size, encode)
        fitting, notes = fit_parts(
            [one_part(parts)],
            model=llm.model.name,
            max_model_len=llm.model.max_model_len,
            vocab_size=llm.model.vocab_size,
        )
        part = fitting[0].folded(llm.model.vocab_size)
        if any(item.after is not None for item in part.items):
            notes.append("turns of conversations are compared one by one, without their history")
        points = [
            _compare(llm, part, name, temperature, config.workload.seed, context)
            for name, temperature in (("greedy", 0.0), ("sampled", 1.0))
        ]
    finally:
        llm.close()
    return Record(
        kind=config.bench.kind.value,
        conditions=conditions_of(config, model=llm.model.name),
        points=points,
        notes=notes,
    )


def _compare(
    llm: LLM, part: Part, name: str, temperature: float, seed: int, context: BenchContext
) -> Point:
    places = list(range(len(part.items)))
    shuffled = places[:]
    random.Random(seed).shuffle(shuffled)

    def run(order: Sequence[int], *, together: bool, reset: bool = True) -> Answers:
        found: Answers = {}
        groups = [order] if together else [[place] for place in order]
        for group in groups:
            if reset:
                llm.reset_prefix_cache()
            found |= _generate(llm, part.items, group, temperature)
        return found

    context.show(f"{name}: alone")
    alone = run(places, together=False)
    metrics = {"requests": Metric(len(places), "")}
    ways = {
        "together": lambda: run(places, together=True),
        "other_order": lambda: run(shuffled, together=True),
        "cached": lambda: run(places, together=True, reset=False),
        "cached_alone": lambda: run(places, together=False, reset=False),
    }
    differing: dict[str, list[int]] = {}
    for way, measure in ways.items():
        context.show(f"{name}: {way}")
        found = measure()
        differing[way] = [place for place in places if found[place] != alone[place]]
        equal = 1 - len(differing[way]) / len(places)
        metrics[f"equal_{way}"] = Metric(equal, "share", "higher")
    return Point(
        label=name,
        parameters={"temperature": temperature},
        metrics=metrics,
        details={"differing_requests": differing},
    )


def _generate(
    llm: LLM, items: Sequence[WorkItem], places: Sequence[int], temperature: float
) -> Answers:
    sampling = [
        SamplingParams(
            temperature=temperature,
            max_tokens=items[place].max_tokens,
            ignore_eos=True,
            seed=None if temperature == 0 else place,
        )
        for place in places
    ]
    prompts = [items[place].prompt for place in places]
    outputs = llm.generate(prompts, sampling, use_progress=False)
    return {
        place: output.outputs[0].token_ids for place, output in zip(places, outputs, strict=True)
    }
