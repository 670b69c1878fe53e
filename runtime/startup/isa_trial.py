"""Chooses the CPU instruction set at start-up, by timing a model's linear layers on each.

The highest level of `ISA_LEVELS` is not always the fastest. `avx512bf16` multiplies with the
bfloat16 dot product; `avx512` widens to float32 first, which is faster on some processors. So with
`device.isa=auto` the levels are timed at the first start, and the fastest level is used. The
decision is stored beside the bundles. Later starts on this processor use the same level, because
the bits of logits depend on the level.

Only levels whose kernels are compiled are timed. A wheel carries the kernels of all levels, and
`run compile` builds them and decides again. Only bfloat16 layers are timed: for float32 and
quantised weights a higher level has the same instructions or better ones. The level `portable` is
not timed. oneDNN and other libraries are not candidates, because their order of sums depends on the
number of rows.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Mapping, Sequence

import msgspec
import torch
from filelock import FileLock
from torch import Tensor

from ostinato.conf.engine_config import EngineConfig
from ostinato.conf.schema import InstructionSetName
from ostinato.graphs.bundle import Bundle
from ostinato.models.choose_weights import WeightsByRole
from ostinato.models.config.model_config import ModelConfig
from ostinato.models.weight_methods.packed import Packed
from ostinato.ops.linear.packed_linear import empty_packed
from ostinato.ops.native import build
from ostinato.ops.native.instruction_sets import runnable_levels
from ostinato.ops.native.library import load, loaded_isa
from ostinato.runtime.machine_info import cpu_name
from ostinato.runtime.startup.bundles import bundle_root
from ostinato.runtime.startup.plan.model_source import ModelSource
from ostinato.runtime.types.engine_info import IsaTrial

__all__ = ("build_levels", "describe_times", "fastest", "stored_trial", "time_levels", "try_levels")

_LOG = logging.getLogger(__name__)
_ENTRY = "trial.json"
_ROWS = (1, 4, 16, 64, 512)
_SAMPLES = 3
_MOST_WEIGHTS = 1 << 22  # larger matrices are cut to this size; the ratios of the times stay
_MANY_ROWS = 64  # with more rows than this, an eighth of the weights is multiplied
# A lower level is chosen if its figure (`fastest`) is below this fraction of the figure of the
# level chosen so far.
_MARGIN = 0.85


def try_levels(config: EngineConfig, source: ModelSource, *, anew: bool = False) -> IsaTrial | None:
    """The stored decision for a model on this processor. Without one: decide now and store it.

    Args:
        config: the engine's configuration.
        source: the opened model.
        anew: decide again, even if a decision is stored.

    Returns:
        The decision. If `device.isa` names a level, the stored decision for that level, or None. If
        this process has loaded kernels already, their level, without times. None if the decision
        cannot be stored, or if there is nothing to decide:

        - the machine has one level only,
        - the layers are not bfloat16, or do not use this project's kernels, or
        - measuring or storing is off (`graphs.cost_table_budget_s=0`, `graphs.bundle=false`).
    """
    if not _matters(config, source):
        return None
    if config.device.isa is not InstructionSetName.auto:
        stored = stored_trial(config, source)
        return stored if stored is not None and stored.isa == config.device.isa.value else None
    if (used := loaded_isa()) is not None:  # a process uses one instruction set only
        return IsaTrial(used, {})
    if not anew and (stored := stored_trial(config, source)) is not None:
        return stored  # also from a directory that cannot be written
    root = bundle_root(config.graphs)
    try:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        with FileLock(root / ".isa.lock"):  # of engines that start together, one decides
            bundle = _open(config, source)
            stored = None if anew else _read(bundle)
            if stored is not None:
                return stored
            trial = _decide(source.config)
            bundle.put(_ENTRY, msgspec.json.encode(trial))
            bundle.save()
            return trial
    except OSError as error:
        _LOG.warning("instruction sets are not compared: %s cannot be written: %s", root, error)
        return None


def stored_trial(config: EngineConfig, source: ModelSource) -> IsaTrial | None:
    """The stored decision for a model on this processor, or None."""
    if not _matters(config, source):
        return None
    return _read(_open(config, source))


def build_levels(config: EngineConfig, source: ModelSource) -> None:
    """Compile the kernels of every level that is timed. Failures are ignored."""
    for level in _vector_levels() if _matters(config, source) else []:
        with contextlib.suppress(build.NativeBuildError):  # `load` reports it for the level in use
            build.build("core", level)


def time_levels(levels: Sequence[str], config: ModelConfig) -> dict[str, dict[str, float]]:
    """Microseconds of the matrix products of one layer, by level and number of rows.

    Each figure is the least of three measurements. It is the CPU time of one thread, because other
    programs on the machine hardly change CPU time.

    Args:
        levels: some of ISA_LEVELS. Their libraries are loaded; a missing library is built first.
        config: the model's shapes.
    """
    ops = {level: getattr(torch.ops, load("core", level).namespace) for level in levels}
    pack = next(iter(ops.values())).pack_linear  # all levels pack alike
    weights: list[tuple[Tensor, int, int]] = []
    for shape in _shapes(config):
        weight = torch.full(shape, 0.5, dtype=torch.bfloat16)
        packed = torch.zeros_like(empty_packed(weight))
        pack(packed, weight, 0)
        weights.append((packed, *shape))
    times: dict[str, dict[str, float]] = {level: {} for level in levels}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for _ in range(_SAMPLES):
            for rows in _ROWS:
                for level in levels:
                    seconds = _run_layer(ops[level].packed_linear, weights, rows)
                    least = times[level].get(str(rows), float("inf"))
                    times[level][str(rows)] = min(least, max(round(seconds * 1e6, 1), 0.1))
    finally:
        torch.set_num_threads(threads)
    return times


def fastest(microseconds: Mapping[str, Mapping[str, float]]) -> str:
    """The level to use.

    For each number of rows, a level's time is divided by the least time of all levels. A level's
    figure is the mean of these ratios. From the highest level down, a level replaces the level
    chosen so far only if its figure is below `_MARGIN` times the figure of the chosen level.

    Args:
        microseconds: by level, the highest level first, then by number of rows.
    """
    rows = next(iter(microseconds.values()))
    least = {count: min(times[count] for times in microseconds.values()) for count in rows}
    chosen, best = "", float("inf")
    for level, times in microseconds.items():
        slowdown = sum(times[count] / least[count] for count in rows) / len(rows)
        if slowdown < _MARGIN * best:
            chosen, best = level, slowdown
    return chosen


def describe_times(isa: str, microseconds: Mapping[str, Mapping[str, float]]) -> str:
    """A text such as `avx512 (timed, 64 rows: amx 2.3 ms, avx512 1.2 ms)`; without times, the level
    alone."""
    if not microseconds:
        return isa
    times = ", ".join(f"{level} {each['64'] / 1e3:.2g} ms" for level, each in microseconds.items())
    return f"{isa} (timed, 64 rows: {times})"


def _matters(config: EngineConfig, source: ModelSource) -> bool:
    """Whether levels differ in speed for this model, and a decision can be measured and stored."""
    graphs = config.graphs
    return (
        source.device.type == "cpu"
        and graphs.bundle
        and graphs.cost_table_budget_s != 0
        and source.dtype == torch.bfloat16
        and isinstance(source.weights, WeightsByRole)
        and isinstance(source.weights.layers, Packed)
        and len(_vector_levels()) > 1
    )


def _vector_levels() -> list[str]:
    return [level for level in runnable_levels() if level != "portable"]


def _decide(config: ModelConfig) -> IsaTrial:
    levels = _vector_levels()
    compiled = [level for level in levels if build.intact_libraries("core", level)]
    if len(compiled) < 2 or compiled[0] != levels[0]:
        return IsaTrial(levels[0], {})
    try:
        times = time_levels(compiled, config)
    except build.NativeBuildError as error:
        _LOG.warning("instruction sets are not compared: %s", error)
        return IsaTrial(levels[0], {})
    return IsaTrial(fastest(times), times)


def _open(config: EngineConfig, source: ModelSource) -> Bundle:
    shapes = repr(_shapes(source.config))
    identity = {"processor": cpu_name(), "shapes": shapes}
    return Bundle(bundle_root(config.graphs), "instruction-set", identity)


def _read(bundle: Bundle) -> IsaTrial | None:
    data = bundle.get(_ENTRY)
    if data is None:
        return None
    try:
        trial = msgspec.json.decode(data, type=IsaTrial)
    except msgspec.DecodeError as error:
        _LOG.warning("instruction sets are compared again: %s", error)
        return None
    # A level that ran when the decision was stored may now be forbidden by the operating system.
    return trial if trial.isa in runnable_levels() else None


def _shapes(config: ModelConfig) -> list[tuple[int, int]]:
    """[out_features, in_features] of a layer's products, cut to `_MOST_WEIGHTS`."""
    hidden, heads = config.hidden_size, config.num_heads * (config.value_dim or config.head_dim)
    mlp = config.widest_mlp
    whole = [
        (config.qkv_size(), hidden),
        (hidden, heads),
        (2 * mlp, hidden),
        (hidden, mlp),
    ]
    return [
        (min(rows, max(32, _MOST_WEIGHTS // columns // 32 * 32)), columns)
        for rows, columns in whole
    ]


def _run_layer(
    op: Callable[..., Tensor], weights: list[tuple[Tensor, int, int]], rows: int
) -> float:
    """CPU seconds of one call with each of the weights."""
    seconds = 0.0
    for packed, out_features, in_features in weights:
        panels = max(1, len(packed) // 8) if rows > _MANY_ROWS else len(packed)
        x = torch.full((rows, in_features), 0.5, dtype=torch.bfloat16)
        columns = min(out_features, 32 * panels)
        begin = time.thread_time()
        op(x, packed[:panels], None, columns, False)
        seconds += time.thread_time() - begin
    return seconds
