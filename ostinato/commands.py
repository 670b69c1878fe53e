"""The commands of `run` and its entry point; the only module that names modules of every layer.

    run serve model=qwen3-0.6b server.port=9000
    run generate "Once upon a time" generate.max_tokens=50
    run plan --help

A command's module is imported when the command runs.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence
from types import FrameType
from typing import NoReturn

from ostinato.api.cli.command_spec import Command
from ostinato.api.cli.main import run_command_line

__all__ = ("COMMANDS", "main", "run")

_MODEL = ("model", "device", "cache", "scheduler", "speculation", "graphs", "runtime")
_ENGINE = (*_MODEL, "sampling")
_INPUTS = ("lora", "images", "video", "audio")

COMMANDS = {
    "serve": Command(
        target="ostinato.api.server.server:serve",
        summary="Serve a model over HTTP with the OpenAI API.",
        sections=("server", "parallel", *_ENGINE, *_INPUTS),
        examples=(
            "run serve",
            "run serve model=qwen3-0.6b cache.block_size=32 server.port=9000",
            "run serve model.path=/some/dir model.dtype=bfloat16",
            "run serve parallel.data=4",
            "run serve parallel.data=4 parallel.nodes=2",
            "run serve parallel.pipeline=2 parallel.nodes=2",
            "run serve some/model --max-model-len 4096 --dtype bfloat16 --port 9000",
        ),
        takes_engine_flags=True,
        starts_engine=True,
    ),
    "generate": Command(
        target="ostinato.api.cli.generate_command:generate",
        summary="Continue a prompt and stream the text to standard output.",
        sections=("generate", *_ENGINE),
        examples=(
            'run generate "Once upon a time" generate.max_tokens=50',
            'run generate "What is a block table?" generate.chat=true generate.temperature=0',
            "run generate - model.path=/some/dir < prompt.txt",
        ),
        takes_prompt=True,
    ),
    "chat": Command(
        target="ostinato.api.cli.chat_command:chat",
        summary="Talk with a model in the terminal.",
        sections=("chat", *_ENGINE),
        examples=("run chat", 'run chat model=qwen3-0.6b chat.system="You are terse."'),
    ),
    "batch": Command(
        target="ostinato.api.cli.batch_command:batch",
        summary="Answer a file of requests of the OpenAI batch API; continues after interruptions.",
        sections=("batch", "parallel", *_ENGINE, *_INPUTS),
        examples=(
            "run batch in.jsonl out.jsonl",
            "run batch in.jsonl out.jsonl model=qwen3-0.6b batch.concurrency=64",
        ),
        files=("INPUT", "OUTPUT"),
    ),
    "bench": Command(
        target="ostinato.benchmarks.bench.command:bench",
        summary="Measure an engine in this process, a server under load, kernels, starts.",
        sections=("bench", "workload", "load", "slo", *_ENGINE),
        examples=(
            "run bench model=llama-45m",
            "run bench serve load.rates=[1,2,4] slo.ttft_ms=300 slo.itl_ms=25",
            "run bench serve load.url=http://127.0.0.1:8001 load.concurrency=[1,8]",
            "run bench startup model=qwen3-0.6b model.load_format=dummy",
            "run bench --multirun scheduler.max_num_seqs=8,16 cache.block_size=16,32",
        ),
        kinds="bench",
        sweep_target="ostinato.benchmarks.sweep.sweep:sweep",
    ),
    "simulate": Command(
        target="ostinato.benchmarks.simulate.command:simulate",
        summary="Predict latency and throughput of one or many servers under load.",
        sections=("simulate", "workload", "load", "slo", *_ENGINE),
        examples=(
            "run simulate workload=random load.rates=[2,4,8]",
            "run simulate model=llama-8b simulate.device=h100 simulate.replicas=8 load.rates=[40]",
            "run simulate workload=trace workload.path=trace.jsonl simulate.rounds=24",
            "run simulate --validate",
        ),
        flags=(("--validate", "simulate.validate=true"),),
    ),
    "tune": Command(
        target="ostinato.benchmarks.tune.command:tune",
        summary="Search for the configuration that best meets latency goals under given traffic.",
        sections=("tune", "slo", "workload", "load", *_ENGINE),
        examples=(
            "run tune workload=random load.rates=[3] slo.ttft_ms=1500 slo.itl_ms=40",
            "run tune workload=trace workload.path=trace.jsonl slo.itl_ms=30 tune.name=chat",
        ),
    ),
    "compile": Command(
        target="ostinato.benchmarks.gpu.without_device.command:compile_bundle",
        summary="Compile a model ahead of time and save the bundle that run serve loads.",
        sections=("compile", *_MODEL, "parallel"),
        examples=(
            "run compile model.path=/some/dir",
            "run compile model=llama-8b model.load_format=dummy compile.gpu=h200",
            "run compile model=qwen3-0.6b model.load_format=dummy graphs.bundle_dir=/some/bundles",
        ),
    ),
    "plan": Command(
        target="ostinato.api.cli.plan_command:plan",
        summary="Show how memory would be divided; loads no weights.",
        sections=("plan", *_MODEL, *_INPUTS, "parallel"),
        examples=(
            "run plan model=llama-8b",
            "run plan model=llama-8b device.name=cuda plan.free_gib=80",
            "run plan model=llama-8b parallel.data=4",
            "run plan model.path=/some/dir plan.json=true",
        ),
    ),
    "rank": Command(
        target="ostinato.api.cli.rank_command:rank",
        summary="Offer this machine to a server on another one, which starts engines here.",
        sections=(),
        examples=(
            "run rank tcp://10.0.0.1:41234 TOKEN",
            "run rank tcp://10.0.0.1:41234 - server.log_level=debug < file-with-the-token",
        ),
        files=("ADDRESS", "TOKEN"),
    ),
    "quantize": Command(
        target="ostinato.api.cli.quantize_command:quantize",
        summary="Write a checkpoint with 4- or 8-bit weights, for this and other servers.",
        sections=("quantize", "model"),
        examples=(
            "run quantize model.path=/some/dir quantize.output=/new/dir",
            "run quantize quantize.output=/new/dir quantize.calibration=a.txt quantize.bits=4",
        ),
    ),
}


def main() -> NoReturn:
    """The console script: `run` with the process's arguments.

    SIGTERM ends a command with the exit code 143: its child processes end and its temporary files
    are removed. `run serve` handles the signal itself.
    """
    signal.signal(signal.SIGTERM, _exit_on_signal)
    sys.exit(run(sys.argv[1:]))


def _exit_on_signal(number: int, frame: FrameType | None) -> NoReturn:
    raise SystemExit(128 + number)


def run(arguments: Sequence[str]) -> int:
    """Runs one command line (without the program's name); returns the exit code."""
    return run_command_line(arguments, COMMANDS)
