"""The CUDA control flow of the engine on a device that works as late, or as early, as it may.

A test fails if the host rewrites a buffer while a copy still needs it, or reads a result before
its event. Three tests plant a race and check that it is found. The engine compiles nothing.
Its other parts are real: overlap, capture and replay, preemption, masks of reasoning limits,
sampling, beams, log-probabilities.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest
import torch

from ostinato import LLM, SamplingParams
from ostinato.conf.environment import cache_dir
from ostinato.graphs.buffers import StaticBuffers
from ostinato.graphs.compile_monitor import CompileMonitor
from ostinato.graphs.sampling_graph import GraphSampler
from ostinato.models.sharding import shard_of_rank
from ostinato.ops.parallel.exchange import Exchange
from ostinato.runtime.ranks.link_ends import RankLayout, create_links
from ostinato.runtime.ranks.rank_links import RankLinks
from ostinato.runtime.sampling.pending_tokens import PendingTokens
from ostinato.runtime.startup import loading
from ostinato.runtime.startup.phases import PhaseTimer
from ostinato.runtime.startup.plan.engine_plan import make_plan
from ostinato.runtime.startup.rank import build_rank
from ostinato.runtime.startup.rank_parts import Peers
from tests.runtime.drafters import ReplayDrafter, make_llm
from tests.runtime.engine.test_engine import generate, make_prompts
from tests.runtime.engine.test_overlap import SAMPLING, flat
from tests.runtime.late_device import DeviceRaceError, LateDevice, LateTensor, Timing
from tests.runtime.tiny import MODEL, VOCAB_SIZE, tiny_config

PROMPTS = [prompt[:12] for prompt in make_prompts(9, seed=5)]
MIXED = [list(SAMPLING.values())[index % len(SAMPLING)] for index in range(9)]
LONG = SamplingParams(temperature=0.9, seed=2, max_tokens=40, ignore_eos=True)
TIGHT_GIB = 15 * 8 * 2 * 2 * 2 * 16 * 4 / 2**30  # 15 blocks


@pytest.fixture(params=[Timing.late, pytest.param(Timing.early, marks=pytest.mark.slow)])
def device(request: pytest.FixtureRequest) -> LateDevice:
    return LateDevice(request.param)


def on(
    device: LateDevice,
    monkeypatch: pytest.MonkeyPatch,
    *overrides: str,
    drafter: ReplayDrafter | None = None,
    **values: object,
) -> LLM:
    """An engine on the device, which must be installed. Its steps are captured without Inductor."""
    load_there(device, monkeypatch)
    words = ["device.name=cuda", "graphs.mode=captured", "graphs.attention=triton"]
    return make_llm(tiny_config(*words, *overrides, **values), drafter)


def load_there(device: LateDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the thread that loads weights use the device, and compile nothing."""
    load: Callable[..., None] = loading._load

    def load_on_device(*arguments: Any) -> None:
        with device.entered():
            load(*arguments)

    monkeypatch.setattr(loading, "_load", load_on_device)
    monkeypatch.setattr(loading, "_compile", lambda *arguments: None)


@pytest.fixture(scope="module")
def plain() -> LLM:
    return LLM(config=tiny_config())


@pytest.fixture(scope="module")
def expected(plain: LLM) -> list[Any]:
    return flat(plain.generate(PROMPTS, MIXED, use_progress=False))


def tokens(found: list[Any]) -> list[Any]:
    return [[one[:3] for one in output] for output in found]


def test_all_kinds_of_requests(
    device: LateDevice, monkeypatch: pytest.MonkeyPatch, expected: list[Any]
) -> None:
    with device.installed(monkeypatch):
        llm = on(device, monkeypatch)
        assert llm.stats().steps_by_kind["captured"] == 0
        found = flat(llm.generate(PROMPTS, MIXED, use_progress=False))
        assert llm.stats().steps_by_kind["captured"] > 0
    assert tokens(found) == tokens(expected)
    assert (device.num_late > 1000) == (device.timing is Timing.late)


def test_a_scale_of_embeddings_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gemma rounds it to the dtype of hidden states. A capture copies no number from the host."""
    gemma = {**MODEL, "architectures": ["GemmaForCausalLM"], "model_type": "gemma"}
    prompts, device = PROMPTS[:3], LateDevice(Timing.late)
    expected = generate(LLM(config=tiny_config(model__config=gemma)), prompts, LONG)
    with device.installed(monkeypatch):
        llm = on(device, monkeypatch, model__config=gemma)
        assert generate(llm, prompts, LONG) == expected
        assert llm.stats().steps_by_kind["captured"] > 0


def test_a_limit_of_the_memory_is_not_taken_for_the_free_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The weights of this engine take 100 MiB of 1 GiB. Half of it is allowed."""
    config = tiny_config("device.name=cuda", "device.memory_gib=0.5").engine
    device = LateDevice(Timing.late)
    with device.installed(monkeypatch), ExitStack() as undo:
        load_there(device, monkeypatch)
        plan = make_plan(config, 1)
        total = torch.cuda.mem_get_info()[1]
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *a: (924 << 20, total))
        parts = build_rank(plan, PhaseTimer(print), CompileMonitor(), undo, None)
        parts.executor.close()
    assert plan.memory.free_bytes == 512 << 20
    assert parts.plan.memory.weights_bytes == 100 << 20


def _guards() -> list[Path]:
    """The libraries of the device guard in the cache; old versions of it may lie there too."""
    return list((cache_dir() / "benchmarks").glob("device_guard-*.so"))


def test_building_the_guard_of_the_device_is_no_late_compile(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Engines of earlier tests, which are ready, would count it in a new cache folder."""
    with LateDevice(Timing.late).installed(monkeypatch):
        built = max(_guards(), key=lambda path: path.stat().st_mtime)
    compiler = tmp_path / "c++"
    compiler.write_text(f"#!/bin/sh\nwhile [ $1 != -o ]; do shift; done\ncp {built} $2\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("OSTINATO_CACHE_DIR", str(tmp_path / "new"))
    with closing(CompileMonitor()) as monitor:
        monitor.mark_ready()
        with LateDevice(Timing.late).installed(monkeypatch):
            assert _guards() != []
        assert monitor.late_compiles == []


@pytest.mark.slow
def test_preemption(device: LateDevice, monkeypatch: pytest.MonkeyPatch, plain: LLM) -> None:
    prompts = [prompt[:6] for prompt in PROMPTS]
    expected = generate(plain, prompts, LONG)
    with device.installed(monkeypatch):
        tight = on(device, monkeypatch, model__max_model_len=112, cache__memory_gib=TIGHT_GIB)
        assert generate(tight, prompts, LONG) == expected
        assert tight.stats().num_preemptions > 0


@pytest.mark.slow
def test_several_tokens_a_step(
    device: LateDevice, monkeypatch: pytest.MonkeyPatch, plain: LLM
) -> None:
    expected = generate(plain, PROMPTS, LONG)
    drafter = ReplayDrafter(max_drafts=3, vocab_size=VOCAB_SIZE)
    drafter.memorize(PROMPTS, expected)
    with device.installed(monkeypatch):
        llm = on(device, monkeypatch, "scheduler.overlap=false", drafter=drafter)
        assert generate(llm, PROMPTS, LONG) == expected
        drafts = llm.stats().speculation
    assert drafts is not None
    assert drafts.num_accepted_tokens > 0


def test_only_the_last_stage_of_a_pipeline_has_logits_and_a_sampler(
    device: LateDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny_config("device.name=cuda", "graphs.mode=captured", "parallel.pipeline=2").engine
    layout, found = RankLayout(1, 2), dict[int, tuple[int, int]]()
    with device.installed(monkeypatch), ExitStack() as undo:
        load_there(device, monkeypatch)
        plans = [make_plan(config, 1, shard=shard_of_rank(rank, 1, 2)) for rank in range(2)]
        shape = plans[0].source.handoff_shape
        made = create_links(layout, 0, shape.slot_bytes, Exchange.nccl)
        for rank in (1, 0):  # rank 0 belongs to the last stage
            plan, source = plans[rank], plans[rank].source
            links = RankLinks(layout, source.shard, shape, 1, made.ranks[rank], source.exchange)
            undo.callback(links.close)
            peers = Peers(links=links, meet=lambda name, numbers: [numbers], turn=0, num_turns=1)
            monitor = CompileMonitor()
            parts = build_rank(plan, PhaseTimer(print), monitor, undo, None, peers)
            assert parts.runner.graphs.captured_keys, "steps of every stage must be captured"
            sizes = (source.limits.max_num_rows, VOCAB_SIZE)
            there = [one for one in gc.get_objects() if type(one) in (LateTensor, GraphSampler)]
            samplers = [one for one in there if isinstance(one, GraphSampler)]
            found[rank] = (
                sum(one.shape == sizes for one in there if of(one, device)),
                sum(of(one._logits, device) for one in samplers),
            )
            parts.executor.close()
    assert found[1] == (0, 0)
    assert found[0][0] > 0
    assert found[0][1] == 1


def of(one: object, device: LateDevice) -> bool:
    """Whether `one` is a tensor of this device. Earlier tests may have left tensors of others."""
    return isinstance(one, LateTensor) and one.owner is device


@pytest.mark.slow
def test_a_batch_that_is_rewritten_while_it_is_copied_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device = LateDevice(Timing.late)
    with device.installed(monkeypatch):
        llm = on(device, monkeypatch)
        monkeypatch.setattr(StaticBuffers, "wait_for_upload", lambda self: None)
        with pytest.raises(
            DeviceRaceError, match=r"(buffers|sampling_graph)\.py:\d+ had started to copy"
        ):
            generate(llm, PROMPTS, LONG)


def outcome(llm: LLM) -> object:
    """The tokens, or the error that the engine raises if it reads nonsense in place of tokens."""
    try:
        return generate(llm, PROMPTS, LONG)
    except (ValueError, OverflowError, IndexError) as error:
        return error


def test_tokens_that_are_read_before_their_event_are_found(
    monkeypatch: pytest.MonkeyPatch, plain: LLM
) -> None:
    expected = generate(plain, PROMPTS, LONG)
    device = LateDevice(Timing.late)
    with device.installed(monkeypatch):
        llm = on(device, monkeypatch)
        read = PendingTokens.read

        def hasty(self: PendingTokens) -> Any:
            self._copy._copied = None
            return read(self)

        monkeypatch.setattr(PendingTokens, "read", hasty)
        assert outcome(llm) != expected


@pytest.mark.slow
def test_tokens_that_are_read_from_a_graph_after_its_next_replay_are_found(
    monkeypatch: pytest.MonkeyPatch, plain: LLM
) -> None:
    """The next step is launched before this one is read, and writes to the same tensor."""
    expected = generate(plain, PROMPTS, LONG)
    device = LateDevice(Timing.late)
    with device.installed(monkeypatch):
        llm = on(device, monkeypatch)
        read = PendingTokens.read

        def tardy(self: PendingTokens) -> Any:
            self._copy._host = self.last_tokens.cpu()
            return read(self)

        monkeypatch.setattr(PendingTokens, "read", tardy)
        assert outcome(llm) != expected
