"""Draft models and heads on a device that works as late, or as early, as it may.

Drafts stay on the device: the model that verifies them reads them there. They are those of an
engine on a CPU, and they change no answer.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

from ostinato import LLM, SamplingParams
from ostinato.runtime.speculation.proposer import DraftJob
from tests.runtime.drafters import DraftRecorder
from tests.runtime.engine.test_engine import generate, make_prompts
from tests.runtime.late_device import LateDevice, Timing
from tests.runtime.speculation.eagle_reference import write_head
from tests.runtime.speculation.test_equality import GLM
from tests.runtime.startup.test_late_device import TIGHT_GIB, device, on
from tests.runtime.tiny import MODEL, VOCAB_SIZE, tiny_config

__all__ = ("device",)  # a fixture

pytestmark = pytest.mark.slow

PROMPTS = [prompt[:20] for prompt in make_prompts(6, seed=8)]
SAMPLING = [
    SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True),
    SamplingParams(temperature=0.8, seed=3, max_tokens=20, ignore_eos=True),
    SamplingParams(temperature=0.7, seed=4, top_k=9, max_tokens=20, logit_bias={7: 2.0}),
    SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True, logprobs=2),
    SamplingParams(temperature=0.0, max_tokens=20, presence_penalty=0.6),
    SamplingParams(temperature=0.9, seed=5, max_tokens=20, speculation=False),
]
PLAIN = SAMPLING[:3] * 2  # no draw depends on the tokens before it


class Drafter(NamedTuple):
    """The settings of a drafter, and the config of the model that it drafts for."""

    words: list[str]
    model: dict[str, object]


def drafter(name: str, directory: Path) -> Drafter:
    """A drafter by its name in the tests.

    The draft model has the weights of its target, and another epsilon of the norms.
    """
    common = ["speculation.max_tokens=3", "speculation.adaptive=false"]
    if name == "next token":
        return Drafter(["speculation.method=mtp", *common], {**GLM, "vocab_size": VOCAB_SIZE})
    if name == "head":
        write_head(directory, MODEL, eagle_aux_hidden_state_layer_ids=[0, 1])
        method = "eagle3"
    else:
        (directory / "config.json").write_text(json.dumps({**MODEL, "rms_norm_eps": 1e-4}))
        method = "draft"
    words = [f"speculation.method={method}", f"speculation.model={directory}"]
    return Drafter([*words, *common], MODEL)


class DeviceRecorder(DraftRecorder):
    """Records drafts. To read them from the device, the host has to wait for it."""

    def __init__(self, llm: LLM) -> None:
        super().__init__(llm)
        self._buffers = llm._engine._executor._runner._buffers

    def draw(self, jobs: Sequence[DraftJob], most_tokens: int) -> list[list[int]]:
        drafts = self._draw(jobs, most_tokens)
        known = self._buffers._known_tokens.tolist()
        for job, draft in zip(jobs, drafts, strict=True):
            assert all(token < 0 for token in draft)
            self.drawn.append((list(job.token_ids), [known[-1 - token] for token in draft]))
        return drafts


def by_context(drawn: list[tuple[list[int], list[int]]]) -> dict[tuple[int, ...], list[int]]:
    return {tuple(token_ids): draft for token_ids, draft in drawn}


@pytest.mark.parametrize("name", ["model", "head", "next token"])
def test_drafts_and_answers_are_those_of_a_cpu(
    name: str, device: LateDevice, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    words, model = drafter(name, tmp_path)
    with LLM(config=tiny_config(model__config=model)) as plain:
        answers = plain.generate(PROMPTS, SAMPLING, use_progress=False)
    with LLM(config=tiny_config(*words, model__config=model)) as cpu:
        recorder = DraftRecorder(cpu)
        assert cpu.generate(PROMPTS, SAMPLING, use_progress=False) == answers
        expected = by_context(recorder.drawn)
    with device.installed(monkeypatch):
        llm = on(device, monkeypatch, *words, "graphs.capture_sizes=[2,8]", model__config=model)
        there = DeviceRecorder(llm)
        found = llm.generate(PROMPTS, SAMPLING, use_progress=False)
        llm._engine.check_integrity()
        stats = llm.stats()
    assert [one.outputs[0].token_ids for one in found] == [
        one.outputs[0].token_ids for one in answers
    ]
    drafts = by_context(there.drawn)
    assert len(drafts) > 20
    assert sum(context in expected for context in drafts) > 20
    for context in drafts.keys() & expected.keys():
        shorter = min(len(drafts[context]), len(expected[context]))
        assert drafts[context][:shorter] == expected[context][:shorter]
    assert stats.speculation is not None
    assert (stats.speculation.num_accepted_tokens > 40) == (name == "model")


@pytest.mark.parametrize("overlap", ["true", "false"])
@pytest.mark.parametrize("name", ["model", "head"])
def test_the_host_waits_only_for_the_tokens_of_whole_steps(
    name: str, overlap: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with LLM(config=tiny_config()) as plain:
        expected = generate(plain, PROMPTS, PLAIN)
    device = LateDevice(Timing.late)
    words = [*drafter(name, tmp_path).words, f"scheduler.overlap={overlap}"]
    with device.installed(monkeypatch):
        llm = on(device, monkeypatch, *words)
        drafts = llm._engine._scheduler.drafts
        assert drafts is not None
        draw = drafts.proposer.draw
        num_drawn: list[int] = []

        def watched(jobs: Sequence[DraftJob], most_tokens: int) -> list[list[int]]:
            num_run = device.current.num_run
            found = draw(jobs, most_tokens)
            assert device.current.num_run == num_run, "drafting waited for the device"
            num_drawn.append(sum(map(len, found)))
            return found

        drafts.proposer.draw = watched
        num_waits = len(device.waits)
        assert generate(llm, PROMPTS, PLAIN) == expected
        assert device.waits[num_waits:] == []
    assert sum(num_drawn) > 50


@pytest.mark.parametrize("name", ["model", "head"])
def test_preemption_changes_no_token(
    name: str, device: LateDevice, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    sampling = SamplingParams(temperature=0.9, seed=2, max_tokens=40, ignore_eos=True)
    prompts = [prompt[:6] for prompt in make_prompts(9, seed=5)]
    with LLM(config=tiny_config()) as plain:
        expected = generate(plain, prompts, sampling)
    share = 2  # the drafter's blocks are as large as the model's
    with device.installed(monkeypatch):
        llm = on(
            device,
            monkeypatch,
            *drafter(name, tmp_path).words,
            model__max_model_len=112,
            cache__memory_gib=TIGHT_GIB * share,
        )
        assert generate(llm, prompts, sampling) == expected
        llm._engine.check_integrity()
        stats = llm.stats()
    assert stats.num_preemptions > 0
    assert stats.speculation is not None
    assert stats.speculation.num_draft_tokens > 50
