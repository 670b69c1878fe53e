"""Measures ways to run decoder layers on a CPU: milliseconds of a decode step.

    python -m ostinato.benchmarks.micro.model.cpu_programs
    python -m ostinato.benchmarks.micro.model.cpu_programs --steps 100 --batches 1 8 --json F

The model is `model=llama-45m` with random weights. Every way runs the same ops on the same weights
and inputs, on one thread. The ways take turns, step by step, so that a change of the machine's
state affects all of them. The result is the CPU time of the step's thread, which excludes time in
which another program has the core.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch._inductor.utils import fresh_cache

import ostinato
from ostinato.benchmarks.machine.probes import LoadMeter, commit_of
from ostinato.benchmarks.micro.model.compile_forms import Bench
from ostinato.benchmarks.report.json_file import write_json
from ostinato.conf.schema import GraphForm
from ostinato.graphs.compiler.compile import compile_model
from ostinato.graphs.recorder import CpuRecorder
from ostinato.models.step_tensors import ForwardBatch, RopeRows, StepInputs, StepTensors
from ostinato.ops.attention import AttentionMetadata
from ostinato.runtime.machine_info import cpu_name

__all__ = ("WAYS", "measure")

WAYS = (
    "captured (CpuGraph)",
    "FX text",
    "Inductor",
    "Inductor, cpp_wrapper",
    "AOTInductor",
)
_DEPTH = 8
_WARMUP_STEPS = 10
_OPTIONS: dict[str, Any] = {
    "size_asserts": False,
    "cpp.dynamic_threads": True,
    "cpp.vec_isa_ok": True,
}

Step = Callable[[ForwardBatch], Tensor]
"""A decode step: step tensors -> hidden [R, D]."""


class Layer(torch.nn.Module):
    """A decoder layer as a function of tensors only; its weights are arguments too."""

    def __init__(self, layer: torch.nn.Module, kind: str) -> None:
        super().__init__()
        self._layer = [layer]  # in a list, so that this module does not register its weights
        self._names = [name for name, _ in layer.named_parameters()]
        self._kind = kind

    def forward(
        self,
        weights: list[Tensor],
        hidden: Tensor,
        cos: Tensor,
        sin: Tensor,
        metadata: list[Tensor],
        k_cache: Tensor,
        v_cache: Tensor,
    ) -> Tensor:
        """hidden [T, D] -> [T, D]; `metadata` has the fields of the attention op's metadata."""
        query_start_loc, seq_lens, block_table, slot_mapping, plan = metadata
        tensors = StepTensors(
            token_ids=slot_mapping,
            positions=slot_mapping,
            slot_mapping=slot_mapping,
            logits_indices=slot_mapping,
            sampled_rows=slot_mapping,
            query_start_loc=query_start_loc,
            seq_lens=seq_lens,
            block_table=block_table,
            plan=plan,
        )
        step = StepInputs({self._kind: RopeRows(cos, sin)}, tensors)
        named = dict(zip(self._names, weights, strict=True))
        arguments = (hidden, step, k_cache, v_cache)
        return torch.func.functional_call(self._layer[0], named, arguments)


class Ways:
    """One model, and a step of each way."""

    def __init__(self, bench: Bench) -> None:
        self._bench, self._model, self._cache = bench, bench.model, bench.kv_cache
        self._weights = [
            [weight.detach() for weight in layer.parameters()] for layer in self._model.layers
        ]
        self._folder = tempfile.TemporaryDirectory()

    def make(self, way: str) -> Step:
        """The step of one of `WAYS`."""
        if way in WAYS[:2]:
            program = compile_model(
                self._model, GraphForm.layer, self._bench.buffers.batch(16, 2, 2), self._cache
            )(self._model)
            if way == WAYS[0]:
                self._bench.fill(1)
                batch = self._bench.buffers.batch(1, 1, 1)
                CpuRecorder(program).capture(lambda: program(batch, self._cache))
            return lambda batch: program(batch, self._cache)
        if way == "AOTInductor":
            return self._over_layers(self._aot_inductor())
        return self._over_layers(self._inductor(cpp_wrapper=way != "Inductor"))

    def _over_layers(self, call: Callable[..., Tensor]) -> Step:
        def step(batch: ForwardBatch) -> Tensor:
            hidden, inputs = self._model.begin(batch)
            ((cos, sin),) = inputs.rope.values()
            metadata = _given(inputs.attention(0))
            for weights, caches in zip(self._weights, self._cache, strict=True):
                hidden = call(weights, hidden, cos, sin, metadata, *caches)
            return self._model.finish(hidden)

        return step

    def _example(self) -> tuple[Layer, tuple[Any, ...]]:
        batch = self._bench.buffers.batch(16, 3, 3)
        hidden, inputs = self._model.begin(batch)
        ((kind, (cos, sin)),) = inputs.rope.items()
        # Zeros describe a step of padding only. The values of the last step would not fit this
        # shape, and the attention kernel would refuse them when the C++ wrapper first runs.
        metadata = [torch.zeros_like(tensor) for tensor in _given(inputs.attention(0))]
        tensors = (hidden.clone(), cos.clone(), sin.clone(), metadata)
        return Layer(self._model.layers[0], kind), (self._weights[0], *tensors, *self._cache[0])

    def _inductor(self, *, cpp_wrapper: bool) -> Callable[..., Tensor]:
        layer, arguments = self._example()
        _, hidden, cos, sin, metadata, *_ = arguments
        for tensor in (hidden, cos, sin, *metadata[:4]):
            torch._dynamo.mark_dynamic(tensor, 0)
        options = {**_OPTIONS, "cpp_wrapper": cpp_wrapper}
        compiled: Any = torch.compile(layer.forward, fullgraph=True, dynamic=False, options=options)
        if cpp_wrapper:  # torch 2.13 compiles no serialisable function in this form
            compiled(*arguments)
            return compiled
        function = compiled.aot_compile((arguments, {})).fn
        return lambda *tensors: function(layer, *tensors)

    def _aot_inductor(self) -> Callable[..., Tensor]:
        from torch._inductor import aoti_compile_and_package, aoti_load_package
        from torch.export import Dim, export

        layer, arguments = self._example()
        tokens, seqs = Dim("tokens", min=1, max=1 << 20), Dim("seqs", min=1, max=1 << 20)
        per_token, per_seq = {0: tokens}, {0: seqs}
        metadata = [{0: seqs + 1}, per_seq, per_seq, per_token, {}]
        weights = [{} for _ in arguments[0]]
        sizes = (weights, per_token, per_token, per_token, metadata, {}, {})
        exported = export(layer, arguments, dynamic_shapes=sizes, strict=False)
        path = str(Path(self._folder.name) / "layer.pt2")
        package = aoti_compile_and_package(exported, package_path=path, inductor_configs=_OPTIONS)
        loader: Any = aoti_load_package(str(package)).loader

        def call(
            weights: list[Tensor],
            hidden: Tensor,
            cos: Tensor,
            sin: Tensor,
            metadata: list[Tensor],
            *caches: Tensor,
        ) -> Tensor:
            return loader.run([*weights, hidden, cos, sin, *metadata, *caches])[0]

        return call


def _given(metadata: AttentionMetadata) -> list[Tensor]:
    """The tensors without the last one, which this model does not have."""
    return [tensor for tensor in metadata if tensor is not None]


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)[:60]


def measure(batches: list[int], context: int, num_steps: int) -> dict[str, dict[str, float | str]]:
    """{way: {batch: median milliseconds}}; for a way that does not compile, its error."""
    bench = Bench(_DEPTH, ["device.threads=1"], max_batch=max(*batches, 3), context=context)
    ways, steps = Ways(bench), {}
    results: dict[str, dict[str, float | str]] = {way: {} for way in WAYS}
    with fresh_cache():
        for way in WAYS:
            try:
                steps[way] = ways.make(way)
            # this version of torch does not support this way; the table shows the error
            except Exception as error:
                results[way] = dict.fromkeys(map(str, batches), _first_line(error))
    for batch in batches:
        times: dict[str, list[float]] = {way: [] for way in steps}
        bench.fill(batch)
        tensors = bench.buffers.batch(batch, batch, batch)
        expected = steps[WAYS[1]](tensors)
        for way, step in steps.items():
            torch.testing.assert_close(step(tensors), expected, msg=way)
        for number in range(_WARMUP_STEPS + num_steps):
            for way, step in steps.items():
                begin = time.thread_time()
                step(tensors)
                if number >= _WARMUP_STEPS:
                    times[way].append((time.thread_time() - begin) * 1000)
        for way, values in times.items():
            results[way][str(batch)] = statistics.median(values)
    return results


def main(arguments: list[str]) -> None:
    """Measure and print a table; see --help."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8], help="decode batch sizes")
    parser.add_argument("--context", type=int, default=256, help="tokens before the timed step")
    parser.add_argument("--steps", type=int, default=200, help="timed steps of each way")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    options = parser.parse_args(arguments)
    meter = LoadMeter()
    with torch.inference_mode():
        results = measure(options.batches, options.context, options.steps)
    conditions = {
        "model": "llama-45m, bfloat16, one thread",
        "context": options.context,
        "cpu": cpu_name(),
        "torch": torch.__version__,
        "commit": commit_of(Path(ostinato.__file__).parent),
        "other_cpu": meter.stop(),
    }
    table = Table(box=box.SIMPLE_HEAD)
    for heading in ("way", *(f"batch {batch}: ms" for batch in options.batches)):
        table.add_column(heading, no_wrap=True)
    for way, by_batch in results.items():
        cells = [
            f"{value:.3f}" if isinstance(value, float) else str(value)
            for value in by_batch.values()
        ]
        table.add_row(way, *cells)
    console = Console(width=110, highlight=False)
    console.print(json.dumps(conditions), markup=False)
    console.print(table)
    if options.json is not None:
        write_json({"conditions": conditions, "median_ms": results}, options.json)


if __name__ == "__main__":
    main(sys.argv[1:])
