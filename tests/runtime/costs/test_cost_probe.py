"""The probe of step costs: on a device with a simulated clock, and in a whole engine."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from ostinato import LLM, SamplingParams
from ostinato.models.kv_groups import KVGroup
from ostinato.runtime.costs.cost_probe import StepSpace, measure_costs
from ostinato.runtime.costs.cost_table import CostTable
from ostinato.runtime.errors import StartupError
from ostinato.runtime.types.step import SchedulerOutput
from tests.runtime.tiny import tiny_config

BLOCK_SIZE = 16


class Device:
    """A device with a simulated clock.

    Steps take 2 ms, plus 0.1 ms a token, 0.05 ms a sequence, 1 us for each pair of a token and an
    earlier step's token in its context, and 0.3 ms for each log-probability of a prompt. All these
    times are multiplied by `slowdown`.

    The device checks that a runner could execute each step, and which blocks it would write.
    """

    def __init__(self, space: StepSpace, slowdown: float = 1.0) -> None:
        self.space = space
        self.slowdown = slowdown
        self.now = 100.0
        self.tables: dict[int, list[list[int]]] = {}
        self.prompts: dict[int, list[int]] = {}
        self.steps: list[tuple[int, int]] = []
        self.blocks_read: set[int] = set()
        self.spikes: set[int] = set()  # indices of steps that take 0.3 s longer

    def clock(self) -> float:
        return self.now

    def execute(self, output: SchedulerOutput) -> None:
        space = self.space
        assert output.num_tokens == sum(entry.num_new_tokens for entry in output.scheduled)
        assert output.num_tokens <= space.max_num_batched_tokens
        assert output.num_seqs <= space.max_num_seqs
        for admitted in output.admitted:
            self.tables[admitted.row] = [[] for _ in space.groups]
            self.prompts[admitted.row] = admitted.request.prompt_token_ids
        pairs = 0
        for entry in output.scheduled:
            end = entry.start + entry.num_new_tokens
            assert end <= space.max_model_len
            new_ids = entry.new_block_ids, entry.new_window_block_ids
            for group, table, new in zip(
                space.groups, self.tables[entry.row], new_ids, strict=False
            ):
                table += new
                size = group.units * BLOCK_SIZE
                assert len(table) == math.ceil(end / size)
                written = {table[p // size] for p in range(entry.start, end)}
                assert written == {0}, "a block other than the null block is written"
                assert 0 not in table[: entry.start // size]
                self.blocks_read |= set(table) - {0}
            assert entry.num_new_tokens == 1 or len(entry.token_ids) == entry.num_new_tokens
            pairs += entry.num_new_tokens * entry.start
            if entry.num_prompt_logits:
                prompt = self.prompts[entry.row]
                assert entry.num_prompt_logits <= entry.num_new_tokens
                assert entry.start + entry.num_prompt_logits < len(prompt), "no token to score"
        assert output.num_prompt_logits == sum(e.num_prompt_logits for e in output.scheduled)
        seconds = 2e-3 + output.num_tokens * 1e-4 + output.num_seqs * 5e-5 + pairs * 1e-6
        seconds += output.num_prompt_logits * 3e-4
        if len(self.steps) in self.spikes:
            seconds += 0.3
        self.steps.append((output.num_tokens, output.num_seqs))
        self.now += seconds * self.slowdown


def make_space(**changes: object) -> StepSpace:
    fields: dict = {
        "max_num_seqs": 8,
        "max_num_batched_tokens": 300,
        "max_model_len": 4096,
        "block_size": BLOCK_SIZE,
        "vocab_size": 1000,
        "decode_sizes": [1, 2, 4, 8],
        "context_block_ids": range(1, 40),
        "sampling": SamplingParams(),
        "max_num_rows": 64,
    }
    return StepSpace(**{**fields, **changes})


def measure(device: Device, budget_s: float | None = 5.0) -> CostTable:
    return measure_costs(device.execute, device.space, budget_s=budget_s, clock=device.clock)


def test_it_finds_the_devices_costs() -> None:
    device = Device(make_space())
    table = measure(device)
    assert table.tokens == (1, 4, 16, 64, 128, 256, 300)
    assert table.seqs == (1, 2, 4, 8)
    assert table.contexts == (0, 1024, 2048)
    for tokens in (1, 16, 100, 256, 300):
        for context in (0, 500, 1024, 3000):
            expected = 2e-3 + tokens * 1e-4 + 5e-5 + tokens * context * 1e-6
            assert table.step_seconds(tokens, 1, context) == pytest.approx(expected, rel=1e-6)
    for seqs in (1, 3, 8):
        for context in (0, 700, 4000):
            expected = 2e-3 + seqs * 1.5e-4 + seqs * context * 1e-6
            assert table.decode_seconds(seqs, context) == pytest.approx(expected, rel=1e-6)
    # A mixed step was not measured. Its cost is derived from the measured steps.
    assert table.step_seconds(64, 8, 0) == pytest.approx(2e-3 + 64e-4 + 8 * 5e-5, rel=1e-6)
    assert device.blocks_read == set(range(1, 40))
    assert table.seconds_per_score == pytest.approx(3e-4)


def test_a_model_with_two_kv_groups() -> None:
    device = Device(make_space(groups=(KVGroup(0, 6, 1), KVGroup(100, 1, 6))))
    table = measure(device)
    assert table.contexts == (0, 960, 2016)  # multiples of 96
    assert device.blocks_read == set(range(1, 40))


def test_larger_steps_than_the_budget_allows_are_extrapolated() -> None:
    device = Device(make_space(max_num_batched_tokens=2048), slowdown=10.0)
    table = measure(device, budget_s=2.0)
    assert max(tokens for tokens, _ in device.steps) < 2048
    assert table.step_seconds(2048, 1, 0) == pytest.approx(10 * (2e-3 + 0.2048 + 5e-5), rel=0.01)


@pytest.mark.parametrize("slowdown", [0.01, 1.0, 10.0, 100.0])
@pytest.mark.parametrize("budget_s", [0.2, 1.0, 5.0, None])
def test_the_budget_is_kept(budget_s: float | None, slowdown: float) -> None:
    device = Device(make_space(max_num_batched_tokens=4096), slowdown)
    begin = device.now
    table = measure(device, budget_s)
    one = table.decode_seconds(1, 0)
    allowed = min(max(0.5, 150 * one), 4.0) if budget_s is None else budget_s
    # However slow the device is, one token of one sequence is measured.
    assert device.now - begin <= max(allowed * 1.1, 20 * one)
    assert table.decode_seconds(1, 0) == pytest.approx(slowdown * 2.15e-3)


def test_some_disturbed_steps_change_nothing() -> None:
    quiet, disturbed = Device(make_space()), Device(make_space())
    disturbed.spikes = set(range(0, 200, 11))
    assert measure(disturbed, 60.0) == measure(quiet, 60.0)


def test_a_disturbed_first_step_does_not_end_its_line() -> None:
    device = Device(make_space())
    device.spikes = {5}  # the first step of a prompt, after five decodes
    assert max(measure(device, 1.5).tokens) >= 128


def test_a_short_context_and_few_blocks() -> None:
    device = Device(make_space(max_model_len=48, context_block_ids=[7]))
    table = measure(device)
    assert table.contexts == (0, 16)
    assert device.blocks_read == {7}
    # 300 tokens are 7 sequences of at most 48.
    assert (300, 7) in device.steps


def test_a_context_of_less_than_two_blocks_has_no_line() -> None:
    table = measure(Device(make_space(max_model_len=20)))
    assert table.contexts == (0,)
    assert max(table.tokens) == 8 * 20


# --- in an engine ---------------------------------------------------------------------------------


def test_an_engine_measures_before_its_first_request() -> None:
    phases: list[str] = []
    llm = LLM(
        config=tiny_config("graphs.cost_table_budget_s=0.3"),
        report=lambda name, seconds: phases.append(name),
    )
    engine = llm._engine
    assert "cost table" in phases
    assert "cost table" in llm.model.startup_seconds
    table = engine.cost_table
    assert table is not None
    assert table.tokens[0] == 1
    assert 0.0 < table.decode_seconds(1, 0) <= table.decode_seconds(8, 100)
    stats = llm.stats()
    assert stats.steps_by_kind == {"captured": 0, "compiled": 0, "eager": 0}
    assert (stats.num_steps, stats.model_seconds, stats.device_seconds) == (0, 0.0, 0.0)
    assert (stats.max_num_seqs, stats.max_num_batched_tokens) == (8, 64)
    assert stats.predicted_step_seconds == table.decode_seconds(1, 0)
    assert stats.predicted_ttft_seconds == engine.predict_ttft(255) > engine.predict_ttft(1)
    assert stats.num_free_blocks == stats.num_blocks


@torch.inference_mode()
def test_no_block_but_the_null_block_is_written() -> None:
    llm = LLM(config=tiny_config("graphs.cost_table_budget_s=0.3"))
    caches = llm._engine._executor._runner.graphs._kv_cache
    assert any(side[0].any() for layer in caches for side in layer)
    assert not any(side[1:].any() for layer in caches for side in layer)


def test_predictions_grow_with_the_queue() -> None:
    engine = LLM(config=tiny_config("graphs.cost_table_budget_s=0.3"))._engine
    from ostinato.runtime.types.request import Request

    predictions = [engine.predict_ttft(50)]
    for index in range(12):
        engine.add_request(
            Request(
                request_id=str(index),
                prompt_token_ids=[3 + index] * 40,
                sampling=SamplingParams(max_tokens=20, temperature=0.0),
            )
        )
        predictions.append(engine.predict_ttft(50))
    assert predictions == sorted(predictions)
    assert predictions[-1] > predictions[0]
    engine.step()
    assert engine.stats().predicted_ttft_seconds > 0.0
    engine.abort_all()


def test_tokens_do_not_depend_on_table_or_target() -> None:
    prompts = [[5 + i, 9, 11] * (10 + i) for i in range(6)]
    sampling = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)

    def tokens(*overrides: str) -> list[list[int]]:
        llm = LLM(config=tiny_config(*overrides))
        outputs = llm.generate(prompts, sampling, use_progress=False)
        return [output.outputs[0].token_ids for output in outputs]

    expected = tokens("graphs.cost_table_budget_s=0")
    assert tokens("graphs.cost_table_budget_s=0.2") == expected
    assert tokens("graphs.cost_table_budget_s=0.2", "scheduler.itl_target_ms=0.001") == expected


def test_without_a_table() -> None:
    llm = LLM(config=tiny_config("graphs.cost_table_budget_s=0"))
    assert llm._engine.cost_table is None
    assert llm._engine.predict_ttft(10) is None
    stats = llm.stats()
    assert (stats.predicted_step_seconds, stats.predicted_ttft_seconds) == (0.0, 0.0)
    assert "cost table" not in llm.model.startup_seconds


@pytest.mark.parametrize("num_states", [0, 10, 4])
def test_each_sequence_has_a_slot_for_its_states(num_states: int) -> None:
    slots: list[list[tuple[int, ...] | None]] = []
    device = Device(make_space(num_states=num_states))

    def execute(output: SchedulerOutput) -> None:
        slots.append([entry.state_slots for entry in output.scheduled])
        device.execute(output)

    measure_costs(execute, device.space, budget_s=5.0, clock=device.clock)
    for step in slots:
        if not num_states:
            assert set(step) == {None}
            continue
        one = [slot for slot in step if slot is not None]
        assert [(read, *rest) for read, _, *rest in one] == [(write, 0, 0) for _, write, *_ in one]
        assert {slot[0] for slot in one} <= set(range(1, num_states))
        assert len(set(one)) == min(len(step), num_states - 1)


def test_a_target_needs_a_table() -> None:
    with pytest.raises(StartupError, match="itl_target_ms=20 needs measured step costs"):
        LLM(config=tiny_config("graphs.cost_table_budget_s=0", "scheduler.itl_target_ms=20"))


def test_a_second_start_takes_the_table_from_the_bundle(tmp_path: Path) -> None:
    def start(*overrides: str) -> tuple[CostTable | None, dict[str, float]]:
        config = tiny_config(
            "graphs.mode=compiled",
            "graphs.bundle=true",
            *overrides,
            graphs__bundle_dir=str(tmp_path),
        )
        llm = LLM(config=config)
        return llm._engine.cost_table, llm.model.startup_seconds

    first, phases = start()
    assert "cost table" in phases
    again, phases = start()
    assert "cost table" not in phases
    assert again == first
    # The table in the bundle is for other step limits, so the costs are measured again.
    other, phases = start("scheduler.max_num_seqs=4")
    assert "cost table" in phases
    assert other is not None
    assert max(other.seqs) <= 4
    # Without a budget no table is used, although the bundle has one.
    assert start("graphs.cost_table_budget_s=0")[0] is None
