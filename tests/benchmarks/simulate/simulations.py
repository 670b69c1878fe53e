"""An engine, traffic and a table of results for the tests of the simulator."""

from __future__ import annotations

import random

import numpy as np

from ostinato.benchmarks.simulate.results import SimulationResults
from ostinato.benchmarks.simulate.simulated_engine import EngineSpec
from ostinato.benchmarks.simulate.simulated_replica import Arrival
from ostinato.conf.schema import SchedulerConfig
from ostinato.runtime.costs.step_limits import StepLimits
from tests.runtime.cost_tables import make_table


def make_spec(**changes) -> EngineSpec:
    values = {
        "scheduler": SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=64),
        "upper": StepLimits(8, 64),
        "num_blocks": 129,
        "block_size": 8,
        "max_model_len": 256,
        "costs": make_table(),
    }
    return EngineSpec(**(values | changes))


def random_traffic(seed: int, count: int, rate: float, *, shared: int = 0):
    """Poisson arrivals of prompts that begin with `shared` common tokens."""
    numbers = random.Random(seed)
    now = 0.0
    for key in range(count):
        now += numbers.expovariate(rate)
        prompt = [*range(shared), *range(1000 * key, 1000 * key + numbers.randint(1, 90))]
        yield Arrival(now, prompt, numbers.randint(1, 60), numbers.randint(0, 2))


def rows(results: SimulationResults) -> np.ndarray:
    """[requests, (key, sent, first, last, prompt, output, cached)], by key."""
    columns = [
        results.keys,
        results.sent_s,
        results.first_s,
        results.last_s,
        results.num_prompt,
        results.num_output,
        results.num_cached,
    ]
    table = np.array(columns).T
    return table[np.argsort(table[:, 0])]
