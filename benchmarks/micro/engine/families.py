"""Compares the decode speed of model families at equal bytes of weights, in turns in one run.

    python -m ostinato.benchmarks.micro.engine.families
    python -m ostinato.benchmarks.micro.engine.families --pairs pythia,moe --rounds 9 --json F

Each pair is a family and a reference whose decode step reads as many bytes of weights. Both have
dummy weights in bfloat16 and run in this process, one after the other within each round, in a
changing order. The ratio compares tokens per second of one round.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table

from ostinato.benchmarks.machine.probes import basic_conditions
from ostinato.benchmarks.micro.engine.scaling import measure_decode
from ostinato.benchmarks.report.json_file import write_json
from ostinato.benchmarks.report.statistics import bootstrap_ratio
from ostinato.conf.compose import load_config
from ostinato.models.config.model_config import ModelConfig
from ostinato.runtime.llm import LLM
from ostinato.runtime.machine_info import gpu_names

__all__ = ("PAIRS", "Pair", "bytes_of_step")

_CONTEXT = 128
_SHARED = {
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": 0,
    "dtype": "bfloat16",
}


def _llama(**sizes: Any) -> dict[str, Any]:
    return {"architectures": ["LlamaForCausalLM"], "model_type": "llama", **_SHARED, **sizes}


_PYTHIA = {
    "vocab_size": 50304,
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
}
# Four of the 32 layers. All layers are equal, and 32 would take 14 GB.
_FALCON = {"vocab_size": 65024, "hidden_size": 4544, "num_hidden_layers": 4}
_LLAMA_45M = _llama(
    vocab_size=32000,
    hidden_size=512,
    intermediate_size=1408,
    num_hidden_layers=8,
    num_attention_heads=8,
    num_key_value_heads=4,
)
_MOE = {
    "vocab_size": 32000,
    "hidden_size": 1024,
    "num_hidden_layers": 16,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "tie_word_embeddings": False,
    **_SHARED,
}


@dataclass(frozen=True, slots=True)
class Pair:
    """A family's shape and the shape that it is compared with: each a config.json."""

    family: dict[str, Any]
    reference: dict[str, Any]
    note: str
    implementation: str = "auto"  # of the family, a value of model.implementation


PAIRS = {
    "pythia": Pair(
        {
            "architectures": ["GPTNeoXForCausalLM"],
            "model_type": "gpt_neox",
            "intermediate_size": 3072,
            "rotary_pct": 0.25,
            "tie_word_embeddings": False,
            **_PYTHIA,
            **_SHARED,
        },
        _llama(intermediate_size=2048, **_PYTHIA),
        "Pythia-160m and a Llama with as many bytes of weights",
    ),
    "falcon": Pair(
        {
            "architectures": ["FalconForCausalLM"],
            "model_type": "falcon",
            "num_attention_heads": 71,
            "multi_query": True,
            "parallel_attn": True,
            "bias": False,
            "alibi": False,
            "new_decoder_architecture": False,
            "tie_word_embeddings": True,
            **_FALCON,
            **_SHARED,
        },
        _llama(
            intermediate_size=12128,
            num_attention_heads=71,
            num_key_value_heads=1,
            head_dim=64,
            tie_word_embeddings=True,
            **_FALCON,
        ),
        "4 layers of Falcon-7b and a Llama with as many bytes of weights",
    ),
    "transformers": Pair(
        _LLAMA_45M,
        _LLAMA_45M,
        "llama-45m through transformers and native",
        implementation="transformers",
    ),
    "moe": Pair(
        {
            "architectures": ["Qwen3MoeForCausalLM"],
            "model_type": "qwen3_moe",
            "intermediate_size": 1280,
            "moe_intermediate_size": 160,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "norm_topk_prob": True,
            **_MOE,
        },
        {
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            "intermediate_size": 1280,
            **_MOE,
        },
        "Qwen3-MoE, 1.1 B weights, 8 of 128 experts, and a dense Qwen3 with the bytes of one token",
    ),
}


def _engine(name: str, config: dict[str, Any], implementation: str) -> LLM:
    overrides = [
        'model.path=""',
        f"model.name={name}",
        "model.load_format=dummy",
        "model.dtype=bfloat16",
        f"model.implementation={implementation}",
        "scheduler.max_num_seqs=1",
        "cache.memory_gib=0.5",
    ]
    values = {"model.config": config, "model.max_model_len": config["max_position_embeddings"]}
    return LLM(config=load_config(overrides, values=values))


def bytes_of_step(config: ModelConfig, parameters: Callable[[], int]) -> int:
    """Bytes of weights that a decode step of one sequence reads.

    An embedding that is not also the output head is not counted. Only as many experts of a layer
    are counted as one token uses.

    Args:
        config: the model's configuration.
        parameters: returns the number of the model's parameters.
    """
    count = parameters()
    if not config.tie_word_embeddings:
        count -= config.vocab_size * config.hidden_size
    if config.moe is not None:
        matrices = 3 * config.hidden_size * config.moe.intermediate_size
        idle = config.moe.route.num_experts - config.moe.route.top_k
        count -= idle * matrices * sum(config.moe.layers)
    return 2 * count


def _measure(name: str, pair: Pair, rounds: int) -> dict[str, Any]:
    """Measure a pair; returns the tokens per second of each round and their ratio."""
    engines = [
        _engine(name, pair.family, pair.implementation),
        _engine(f"{name}-reference", pair.reference, "native"),
    ]
    found: list[list[float]] = [[], []]
    for number in range(rounds + 1):
        for turn in (0, 1):
            place = (number + turn) % 2
            (seconds,) = measure_decode(engines[place], 1, _CONTEXT, 1)
            if number:  # the first round warms up
                found[place].append(1.0 / seconds)
    del engines
    gc.collect()
    ratio, (low, high) = bootstrap_ratio(*found)
    return {
        "pair": name,
        "note": pair.note,
        "tokens_per_s": found[0],
        "reference_tokens_per_s": found[1],
        "ratio": ratio,
        "interval": [low, high],
        **asdict(pair),
    }


def main(arguments: list[str]) -> None:
    """Measure what the command line names; see --help."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--pairs", default=",".join(PAIRS))
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", type=Path, help="write every run to this file")
    options = parser.parse_args(arguments)
    names = options.pairs.split(",")
    if unknown := set(names) - PAIRS.keys():
        parser.error(f"unknown: {', '.join(sorted(unknown))}; choose from {', '.join(PAIRS)}")
    results = []
    for name in names:
        print(f"measuring {name}", file=sys.stderr)
        results.append(_measure(name, PAIRS[name], options.rounds))
    conditions = {
        **basic_conditions(),
        "gpus": gpu_names(),
        "threads": torch.get_num_threads(),
        "context": _CONTEXT,
    }
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("pair", "tokens/s", "reference", "ratio", "95 %"):
        table.add_column(heading, justify="left" if heading == "pair" else "right")
    for result in results:
        low, high = result["interval"]
        table.add_row(
            result["note"],
            f"{statistics.median(result['tokens_per_s']):.1f}",
            f"{statistics.median(result['reference_tokens_per_s']):.1f}",
            f"{result['ratio']:.3f}",
            f"{low:.3f} to {high:.3f}",
        )
    console = Console(width=120, highlight=False)
    console.print(f"{conditions['cpu']}, bfloat16, one sequence", markup=False)
    console.print(table)
    if options.json is not None:
        write_json({"conditions": conditions, "results": results}, options.json)


if __name__ == "__main__":
    main(sys.argv[1:])
