"""Measures the accuracy of quantised weights and of an int8 KV cache: perplexity, logit errors.

    python -m ostinato.benchmarks.micro.model.quantization_accuracy --json FILE

The perplexity is that of the demo model on text that it was not trained on. The text is in rows of
`--length` tokens. Each row begins where a document begins, and is scored without text before it.
Logit errors are those of random weights in the shapes of larger models, relative to the same
weights unquantised. Each format of weights is measured twice. The first measurement uses the
kernels of the format. The second one dequantises the weights and uses the kernels for floats. So
the second measurement excludes the rounding of activations.
"""

from __future__ import annotations

import argparse
import itertools
import math
import sys
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich import box
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer
from torch import Tensor, nn

import ostinato
from ostinato.benchmarks.machine.probes import basic_conditions
from ostinato.benchmarks.report.json_file import write_json
from ostinato.conf.compose import load_config
from ostinato.conf.schema import LoadFormat
from ostinato.models.base import CausalLM
from ostinato.models.checkpoints.weights import init_dummy_weights, load_weights
from ostinato.models.demo.training.corpus import documents
from ostinato.models.kv_cache import KVCache
from ostinato.models.layers.linear_layers import LinearBase
from ostinato.models.registry import build_model
from ostinato.models.step_tensors import ForwardBatch
from ostinato.models.weight_methods.packed import Packed
from ostinato.ops.native.library import load
from ostinato.runtime.startup.plan.model_source import open_model

__all__ = ("Loaded", "perplexity")

_DEMO = Path(ostinato.__file__).parents[1] / "models" / "demo"
# The documents of the held-out loss in models/demo/training: `batches` adds 1 to HELD_OUT_SEED.
_HELD_OUT_SEED = 10**9 + 1
_BLOCK_SIZE = 16
_KEY = "model.quantization"
_FORMATS: dict[str, list[str]] = {
    "none": [],
    "head int8, layers floats": [f"{_KEY}_head=int8"],
    "int8": [f"{_KEY}=int8"],
    "int8, groups of 32": [f"{_KEY}=int8", f"{_KEY}_group_size=32"],
    "int8, zero points": [f"{_KEY}=int8", f"{_KEY}_symmetric=false"],
    "int4": [f"{_KEY}=int4"],
    "int4, zero points": [f"{_KEY}=int4", f"{_KEY}_symmetric=false"],
    "int4, groups of 128": [f"{_KEY}=int4", f"{_KEY}_group_size=128"],
    "int4, head too": [f"{_KEY}=int4", f"{_KEY}_head=int4"],
    "int8 cache": ["cache.dtype=int8"],
    "int4, int8 cache": [f"{_KEY}=int4", "cache.dtype=int8"],
}


class Loaded(NamedTuple):
    """A model that computes the logits of one sequence at a time."""

    model: CausalLM
    cache: KVCache
    weight_bytes: int

    @classmethod
    @torch.inference_mode()
    def make(cls, overrides: list[str], *, exact_inputs: bool, length: int) -> Loaded:
        """The model of a configuration.

        Args:
            overrides: overrides of the configuration.
            exact_inputs: replace quantised weights by their dequantised values.
            length: tokens of the longest sequence.
        """
        config = load_config(overrides)
        source = open_model(config)
        model = build_model(
            source.config,
            dtype=source.dtype,
            device=torch.device("cpu"),
            attention_backend="cpu",
            max_model_len=length,
            weights=source.weights,
        )
        assert isinstance(model, CausalLM), "the benchmark's models generate"

        if config.model.load_format is LoadFormat.dummy:
            init_dummy_weights(model, config.model.seed)
        else:
            load_weights(model, source.checkpoint)
        size = sum(parameter.nbytes for parameter in model.parameters())
        if exact_inputs:
            _restore(model, source.dtype)
        spec = source.config.kv_cache_spec(_BLOCK_SIZE, source.cache_dtype)
        cache = spec.allocate(-(-length // _BLOCK_SIZE) + 1, torch.device("cpu"))
        return cls(model, cache, size)

    @torch.inference_mode()
    def logits(self, token_ids: list[int]) -> Tensor:
        """[T] -> [T, vocab_size] float32."""
        count = len(token_ids)
        positions = torch.arange(count)
        blocks = torch.arange(1, -(-count // _BLOCK_SIZE) + 1, dtype=torch.int32)
        batch = ForwardBatch(
            token_ids=torch.tensor(token_ids),
            positions=positions,
            slot_mapping=positions + _BLOCK_SIZE,
            logits_indices=positions,
            sampled_rows=positions,
            query_start_loc=torch.tensor([0, count], dtype=torch.int32),
            seq_lens=torch.tensor([count], dtype=torch.int32),
            block_table=blocks[None],
            plan=torch.zeros(1, dtype=torch.int64),
        )
        return self.model.compute_logits(self.model(batch, self.cache))


def _restore(model: nn.Module, dtype: torch.dtype) -> None:
    for module in model.modules():
        if isinstance(module, LinearBase) and module.method.is_quantized:
            weight = module.dense().to(dtype)
            (part,) = module.parts()
            module.use(Packed())
            module.load("weight", weight, part)


def perplexity(loaded: Loaded, rows: list[list[int]]) -> float:
    """exp of the mean negative log-likelihood of each row's tokens after its first."""
    total, count = 0.0, 0
    for row in rows:
        likelihoods = loaded.logits(row)[:-1].log_softmax(-1)
        chosen = likelihoods.gather(1, torch.tensor(row[1:])[:, None])
        total -= float(chosen.double().sum())
        count += len(row) - 1
    return math.exp(total / count)


def _held_out(num_rows: int, length: int) -> list[list[int]]:
    tokenizer = Tokenizer.from_file(str(_DEMO / "tokenizer.json"))
    end_of_text = tokenizer.token_to_id("<|endoftext|>")
    stream = documents(_HELD_OUT_SEED)
    rows: list[list[int]] = []
    while len(rows) < num_rows:
        row: list[int] = []
        while len(row) < length:
            row += [*tokenizer.encode(next(stream)).ids, end_of_text]
        rows.append(row[:length])
    return rows


def _measure_demo(num_rows: int, length: int) -> list[dict[str, Any]]:
    rows, results = _held_out(num_rows, length), []
    for name, overrides in _FORMATS.items():
        has_weights = any(each.startswith(_KEY) for each in overrides)
        for exact_inputs in (False, True) if has_weights else (False,):
            loaded = Loaded.make(overrides, exact_inputs=exact_inputs, length=length)
            results.append(
                {
                    "model": "demo",
                    "format": name,
                    "exact_inputs": exact_inputs,
                    "weight_mib": loaded.weight_bytes / (1 << 20),
                    "perplexity": perplexity(loaded, rows),
                }
            )
    return results


def _measure_random(option: str, length: int) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(1)
    results: list[dict[str, Any]] = []
    expected = torch.empty(0)
    vocab_size = load_config([f"model={option}"]).model.config["vocab_size"]
    ids = torch.randint(vocab_size, (length,), generator=generator).tolist()
    for name, exact_inputs in itertools.product(("none", "int8", "int4"), (False, True)):
        if name == "none" and exact_inputs:
            continue
        overrides = [f"model={option}", "model.load_format=dummy", *_FORMATS[name]]
        loaded = Loaded.make(overrides, exact_inputs=exact_inputs, length=length)
        if name == "none":
            expected = loaded.logits(ids).double()
            continue
        logits = loaded.logits(ids).double()
        before, after = expected.log_softmax(-1), logits.log_softmax(-1)
        results.append(
            {
                "model": option,
                "format": name,
                "exact_inputs": exact_inputs,
                "weight_mib": loaded.weight_bytes / (1 << 20),
                "relative_error": float((logits - expected).norm() / expected.norm()),
                "kl_divergence": float((before.exp() * (before - after)).sum(-1).mean()),
                "same_likeliest": float((logits.argmax(-1) == expected.argmax(-1)).double().mean()),
            }
        )
        del loaded
    return results


def _print(results: list[dict[str, Any]]) -> None:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("model", "format", "inputs", "weights MiB", "perplexity", "logit error", "KL"):
        table.add_column(column)
    for result in results:
        perplexities, errors = result.get("perplexity"), result.get("relative_error")
        table.add_row(
            result["model"],
            result["format"],
            "exact" if result["exact_inputs"] else "as it runs",
            f"{result['weight_mib']:.1f}",
            "" if perplexities is None else f"{perplexities:.4f}",
            "" if errors is None else f"{errors:.2%}",
            f"{result['kl_divergence']:.1e}" if errors is not None else "",
        )
    Console(width=110, highlight=False).print(table)


def main(arguments: list[str]) -> None:
    """Measure what the command line names; see --help."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rows", type=int, default=48, help="of held-out text")
    parser.add_argument("--length", type=int, default=512, help="tokens of a row")
    parser.add_argument("--random", default="llama-45m,qwen3-0.6b", help="options of model=")
    parser.add_argument("--random-length", type=int, default=64)
    parser.add_argument("--json", type=Path, help="also write every figure to this file")
    options = parser.parse_args(arguments)
    conditions = {
        **basic_conditions(),
        "isa": load("core").isa,
        "torch": torch.__version__,
        "held_out_tokens": options.rows * (options.length - 1),
        "random_tokens": options.random_length,
    }
    results = _measure_demo(options.rows, options.length)
    for option in filter(None, options.random.split(",")):
        results += _measure_random(option, options.random_length)
    _print(results)
    if options.json is not None:
        write_json({"conditions": conditions, "results": results}, options.json)


if __name__ == "__main__":
    main(sys.argv[1:])
