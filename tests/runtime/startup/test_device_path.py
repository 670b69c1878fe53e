"""Builds and runs an engine on a CPU as if on a GPU: only the device interface is replaced.

Two parts are replaced: the recorder, which replays on static tensors as a CUDA graph does, and the
device's report of its memory. Measuring, planning, capturing, sampling from static buffers and
staging are the real code.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest
import torch
from torch import Tensor

from ostinato import LLM, SamplingParams
from ostinato.graphs.sampling_graph import GraphSampler
from ostinato.runtime.execution.executor import Pending
from ostinato.runtime.host_resources import FreeMemory
from ostinato.runtime.speculation.proposer import Proposer
from ostinato.runtime.startup import rank
from ostinato.runtime.startup.plan import planning
from ostinato.runtime.startup.plan.engine_plan import EnginePlan
from ostinato.runtime.startup.rank_parts import DraftSetup
from ostinato.runtime.types.step import SchedulerOutput
from tests.graphs.test_capture import OUT_OF_MEMORY, StaticRecorder
from tests.runtime.drafters import ReplayDrafter, make_llm
from tests.runtime.engine.test_engine import generate, make_prompts
from tests.runtime.tiny import VOCAB_SIZE, tiny_config

MIB = 1 << 20
SAMPLING = [
    SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True),
    SamplingParams(temperature=1.2, seed=1, max_tokens=9, ignore_eos=True),
    SamplingParams(temperature=0.9, seed=2, top_k=5, max_tokens=7, ignore_eos=True),
    SamplingParams(temperature=1.0, seed=3, top_p=0.7, min_p=0.01, max_tokens=9),
    SamplingParams(temperature=0.8, seed=4, logprobs=3, frequency_penalty=0.3, max_tokens=5),
]
PROMPTS = make_prompts(5, seed=7)


class Memory:
    """1 GiB is free at first. A step takes 24 MiB, and the code that is loaded with it 8 MiB."""

    def __init__(self) -> None:
        self.free_bytes = 1024 * MIB

    def free(self) -> int:
        return self.free_bytes

    def peak_of(self, run: Callable[[], None]) -> int:
        run()
        self.free_bytes -= 8 * MIB
        return 24 * MIB


class Scarce(StaticRecorder):
    """Has no memory for graphs whose number of rows is in `missing`."""

    def __init__(self, missing: set[int]) -> None:
        super().__init__()
        self.missing = missing

    def capture(self, run: Callable[[], Tensor]) -> Callable[[], Tensor]:
        replay = super().capture(run)
        if len(replay()) in self.missing:
            raise OUT_OF_MEMORY
        return replay


def llm_of(
    monkeypatch: pytest.MonkeyPatch,
    *overrides: str,
    missing: frozenset[int] = frozenset(),
    drafter: Proposer | None = None,
) -> LLM:
    memory = Memory()

    def make_recorder(
        plan: EnginePlan, draft: DraftSetup | None, num_copies: int
    ) -> tuple[Scarce, GraphSampler | None]:
        source = plan.source
        logits = torch.zeros(source.limits.max_num_rows, source.config.vocab_size)
        return Scarce(set(missing)), GraphSampler(logits, recorder=Scarce(set(missing)))

    def free_memory(*, is_cpu: bool) -> FreeMemory:
        return FreeMemory(total_bytes=2048 * MIB, free_bytes=memory.free(), source="a test")

    monkeypatch.setattr(planning, "free_memory", free_memory)
    monkeypatch.setattr(rank, "_make_cuda_recorder", make_recorder)
    monkeypatch.setattr(rank, "CudaMemory", lambda: memory)
    monkeypatch.setattr(planning, "CudaMemory", lambda: memory)
    words = ["graphs.mode=captured", "scheduler.overlap=true"]  # a GPU's defaults
    return make_llm(tiny_config(*words, *overrides), drafter)


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    return generate(LLM(config=tiny_config()), PROMPTS, SAMPLING)


def test_tokens_are_those_of_the_plain_engine(
    monkeypatch: pytest.MonkeyPatch, expected: list[list[int]]
) -> None:
    llm = llm_of(monkeypatch)
    assert generate(llm, PROMPTS, SAMPLING) == expected
    assert "measure" in llm.model.startup_seconds
    assert llm.stats().steps_by_kind["captured"] > 0
    assert llm.stats().late_compiles == []


def test_captures_that_lack_memory_are_one_warning_and_change_no_token(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    expected: list[list[int]],
) -> None:
    llm = llm_of(monkeypatch, missing=frozenset({8, 4, 3}))
    records = [
        record for record in caplog.records if record.name == "ostinato.runtime.startup.rank"
    ]
    assert [record.getMessage() for record in records if record.levelname == "WARNING"] == [
        "out of memory during capture, buckets left out: decode of 8, 4, 3 sequences; 8 "
        "buckets of the sampler. Their steps run in larger buckets or uncaptured, and take longer; lower "
        "cache.memory_gib, device.memory_fraction or scheduler.max_num_seqs, or shorten "
        "graphs.capture_sizes"
    ]
    assert generate(llm, PROMPTS, SAMPLING) == expected


def test_an_engine_without_any_capture_serves(
    monkeypatch: pytest.MonkeyPatch, expected: list[list[int]]
) -> None:
    llm = llm_of(monkeypatch, missing=frozenset(range(1, 9)))
    assert generate(llm, PROMPTS, SAMPLING) == expected
    assert llm.stats().steps_by_kind["captured"] == 0
    assert llm.stats().steps_by_kind["compiled"] > 0


def test_more_rows_of_logits_than_sequences_are_captured_and_sampled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With 3 drafts a sequence, static logits, sampling parameters and buckets hold all rows."""
    sampling = [msgspec.structs.replace(one, max_tokens=21, ignore_eos=True) for one in SAMPLING]
    expected = generate(LLM(config=tiny_config()), PROMPTS, sampling)
    drafter = ReplayDrafter(max_drafts=3, vocab_size=VOCAB_SIZE)
    drafter.memorize(PROMPTS, expected)
    llm = llm_of(monkeypatch, "scheduler.overlap=false", drafter=drafter)
    num_rows = rows_by_step(llm)
    assert generate(llm, PROMPTS, sampling) == expected
    assert max(num_rows) == 4 * len(PROMPTS) > 8
    drafts = llm.stats().speculation
    assert drafts is not None
    assert drafts.num_accepted_tokens == drafts.num_draft_tokens > 0
    # Decodes of 1 to 8 tokens, and verifications of 4 tokens a sequence: 4, 8, ..., 32.
    assert set(llm._engine._executor.stats().bucket_tokens) >= {*range(1, 9), *range(4, 36, 4)}
    assert llm.stats().steps_by_kind["captured"] > 0
    assert llm.stats().late_compiles == []


def rows_by_step(llm: LLM) -> list[int]:
    """A list to which each step from now on adds its number of rows of logits."""
    executor, counts = llm._engine._executor, []
    launch = executor.launch

    def counting(output: SchedulerOutput) -> Pending:
        counts.append(sum(entry.num_logits for entry in output.scheduled))
        return launch(output)

    executor.launch = counting  # type: ignore[method-assign]
    return counts
