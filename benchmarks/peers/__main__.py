"""Compares this engine with vLLM, OpenVINO, llama.cpp and transformers, in turns within one run.

    python -m ostinato.benchmarks.peers --model DIR --dtype bfloat16 \\
        --vllm VENV/bin/python --openvino VENV/bin/python=IR_DIR --llama-cpp SERVER=GGUF \\
        --transformers VENV/bin/python --rounds 3 --json FILE

    ... --quantized int8 --quantized int4 --openvino VENV/bin/python=IR_DIR=int8 \\
        --llama-cpp SERVER=Q8_0.gguf=int8 --llama-cpp SERVER=Q4_0.gguf=int4 \\
        --stored gptq-int4=GPTQ_DIR --stored gguf-int4=Q4_0.gguf

    ... --drafts --llama-cpp-draft Q4_0.gguf --parts decode repeat

Each peer runs in its own virtual environment at its best settings (the drive_*.py files in this
folder), with the same prompts, numbers of tokens and threads. Engines stay loaded and take turns
part by part, round by round (A B C, A B C). The memory speed of shared machines changes by a factor
of two, so ratios from separate runs are not valid. Outside of its turn an engine is stopped
(SIGSTOP), so that its idle threads do not slow another engine. The read bandwidth is measured
before each turn. The parts (`--parts`; `repeat` runs only if it is named):

decode: tokens per second of one stream after its first token, from the times for 1 and 128 tokens.
repeat: the same for 256 tokens after a prompt that repeats 32 tokens. A greedy model continues it.
ttft: milliseconds to the first token after 512 prompt tokens, the median of five prompts.
offline: 32 requests at once, with 64-512 prompt and 32-128 output tokens.
prefix: 16 requests at once that share 1024 of 1088 prompt tokens, with an empty cache.

The weights of every peer must have the requested precision: OpenVINO's exporter converts float32 to
16 bits unless it gets `--weight-format fp32`.

Engines of a class (int8, int4, drafts, or unquantised) are compared with each other: this engine
with the best peer of the class. `--stored` also runs this engine with a quantised checkpoint or a
GGUF file. `--drafts` adds engines with drafts that come from earlier text: this engine with
`speculation.method=auto`, vLLM's n-grams, OpenVINO's prompt lookup and each n-gram drafter of
llama-server. Every engine draws the likeliest token.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil
import torch
from rich import box
from rich.console import Console
from rich.table import Table

import ostinato
from ostinato.benchmarks.machine.probes import LoadMeter, commit_of, read_bandwidth
from ostinato.benchmarks.report.json_file import write_json
from ostinato.benchmarks.report.tables import median_and_range
from ostinato.benchmarks.workload.workload import Part, WorkItem, standard_workload
from ostinato.conf.environment import environment_with
from ostinato.runtime.machine_info import cpu_name, package_versions

__all__ = ("Engine", "measure_part")

_FOLDER = Path(__file__).parent
_OURS = "ostinato"
_PARTS = ("decode", "ttft", "offline", "prefix")
_UNITS = {
    **dict.fromkeys(("decode", "offline", "prefix", "repeat"), "tok/s"),
    "ttft": "ms",
}
_PERIOD, _PERIODS, _REPEAT_TOKENS = 32, 4, 256  # of `repeat`: its prompt and output
# prompts of `ttft` in a round; several, because one takes only a tenth of a second
_NUM_PROMPTS = 5
_KINDS = ("int8", "int4", "drafts")
# The drafters of llama-server that need no model; {} = draft tokens. The first three look for
# matches of only 3 or 4 tokens, because longer ones are less frequent.
_NGRAM_TYPES = {
    "ngram-simple": "--spec-ngram-simple-size-n 3 --spec-ngram-simple-size-m {}",
    "ngram-map-k": "--spec-ngram-map-k-size-n 3 --spec-ngram-map-k-size-m {}",
    "ngram-mod": "--spec-ngram-mod-n-match 4 --spec-ngram-mod-n-min 1 --spec-ngram-mod-n-max {}",
    "ngram-cache": "--spec-draft-n-max {}",
}
_WIDTH = 100


class Engine:
    """One engine's process, loaded once and stopped between its turns.

    Raises:
        RuntimeError: the process ended or answered with an error; its log is on standard error.
    """

    def __init__(self, name: str, command: list[str], variables: dict[str, str]) -> None:
        self.name = name
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=_FOLDER,
            env=environment_with(**variables),
        )
        self.ready_s = self._read()["ready_s"]
        self.peak_rss_mib = 0.0
        self._signal(signal.SIGSTOP)

    def run(self, part: Part) -> float:
        """Seconds until all output tokens of a part's requests were generated."""
        self._signal(signal.SIGCONT)
        assert self._process.stdin is not None, "stdin=PIPE"
        requests = [{"prompt": item.prompt, "max_tokens": item.max_tokens} for item in part.items]
        self._process.stdin.write(json.dumps({"requests": requests}) + "\n")
        self._process.stdin.flush()
        answer = self._read()
        self.peak_rss_mib = answer["peak_rss_mib"]
        self._signal(signal.SIGSTOP)
        return answer["seconds"]

    def close(self) -> None:
        """End the process and its child processes."""
        for process in self._family():
            process.kill()
        self._process.wait()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None, "stdout=PIPE"
        line = self._process.stdout.readline()
        answer = json.loads(line) if line else {"error": f"it ended with {self._process.wait()}"}
        if "error" in answer:
            raise RuntimeError(f"{self.name}: {answer['error']}")
        return answer

    def _family(self) -> list[psutil.Process]:
        try:
            root = psutil.Process(self._process.pid)
            return [root, *root.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def _signal(self, number: int) -> None:
        for process in self._family():
            process.send_signal(number)


def measure_part(engine: Engine, name: str, number: int) -> float:
    """Measure one part with one engine.

    Args:
        engine: the engine.
        name: decode, repeat, ttft, offline or prefix.
        number: the repetition. Each has other token ids, so that no cache has its prompts.
    """
    parts = {part.name: part for part in standard_workload()}
    if name in ("decode", "repeat"):
        single = parts["single"]
        [item] = single.items
        if name == "repeat":
            item = WorkItem(item.prompt[:_PERIOD] * _PERIODS, _REPEAT_TOKENS)
            single = Part(name, [item], shifts=True)
        one = Part("single", [WorkItem(item.prompt, 1)], shifts=True)
        first = engine.run(one.repetition(2 * number))
        whole = engine.run(single.repetition(2 * number + 1))
        return (item.max_tokens - 1) / (whole - first)
    if name == "ttft":
        prompts = (
            parts[name].repetition(1000 + _NUM_PROMPTS * number + i) for i in range(_NUM_PROMPTS)
        )
        return statistics.median(engine.run(prompt) for prompt in prompts) * 1000
    part = parts[name].repetition(1000 + number)
    return part.num_output_tokens / engine.run(part)


def _commands(options: argparse.Namespace) -> dict[str, list[str]]:
    """{name of an engine: command line of its driver}."""
    model, tail = str(Path(options.model).resolve()), [options.dtype, str(options.threads)]

    def drive(python: str, script: str, *arguments: str) -> list[str]:
        return [python, str(_FOLDER / f"drive_{script}.py"), *arguments]

    plain = ["speculation.method=none", *options.overrides]
    ours = drive(sys.executable, "ostinato", model, *tail, *plain)
    commands = {} if options.only_quantized else {_OURS: ours}
    drafts = [str(options.draft_tokens)] if options.drafts else []
    if drafts:
        more = ["speculation.method=auto", f"speculation.max_tokens={options.draft_tokens}"]
        commands[_named(_OURS, "drafts")] = ours + more
    for quantized in options.quantized:
        kind, _, more = quantized.partition(":")
        overrides = [f"model.quantization={kind}", *filter(None, more.split(","))]
        commands[_named(_OURS, kind)] = ours + overrides
    for stored in options.stored:
        name, _, path = stored.partition("=")
        checkpoint = str(Path(path).resolve())
        commands[_named(_OURS, name)] = drive(sys.executable, "ostinato", checkpoint, *tail, *plain)
    if options.vllm:
        commands["vllm"] = drive(options.vllm, "vllm", model, *tail)
        if drafts:
            commands["vllm-drafts"] = commands["vllm"] + drafts
    for openvino in options.openvino:
        python, directory, *kind = openvino.split("=")
        command = drive(python, "openvino", str(Path(directory).resolve()), *tail)
        commands[_named("openvino", *kind)] = command
        if drafts and not kind:
            commands["openvino-drafts"] = command + drafts
    for llama_cpp in options.llama_cpp:
        binary, gguf, *kind = llama_cpp.split("=")
        paths = (str(Path(binary).resolve()), str(Path(gguf).resolve()))
        command = drive(sys.executable, "llamacpp", *paths, str(options.threads))
        commands[_named("llama.cpp", *kind)] = command
        if drafts and not kind:
            commands |= _with_drafts(command, options)
    if options.transformers:
        commands["transformers"] = drive(options.transformers, "transformers", model, *tail)
    return commands


def _with_drafts(command: list[str], options: argparse.Namespace) -> dict[str, list[str]]:
    """llama-server with each of its drafters that needs no model, and with a draft model."""
    most = str(options.draft_tokens)
    commands = {
        f"llama.cpp-{kind}-drafts": [*command, "--spec-type", kind, *more.format(most).split()]
        for kind, more in _NGRAM_TYPES.items()
    }
    if options.llama_cpp_draft:
        gguf = str(Path(options.llama_cpp_draft).resolve())
        more = ["--spec-type", "draft-simple", "-md", gguf, "--spec-draft-n-max", most]
        commands["llama.cpp-model-drafts"] = command + more
    return commands


def _named(engine: str, kind: str = "") -> str:
    return f"{engine}-{kind}" if kind else engine


def _kind(name: str) -> str:
    """The class of an engine by its name; "" = unquantised."""
    last = name.rpartition("-")[2]
    return last if last in _KINDS else ""


def _measure(
    engines: list[Engine], parts: list[str], warmup: int, rounds: int
) -> list[dict[str, Any]]:
    device = torch.device("cpu")
    results = []
    for number in range(warmup + rounds):
        for part in parts:
            for engine in engines:
                bandwidth = read_bandwidth(device)
                load = LoadMeter()
                value = measure_part(engine, part, number)
                if number >= warmup:
                    results.append(
                        {
                            "round": number - warmup,
                            "part": part,
                            "engine": engine.name,
                            "value": value,
                            "unit": _UNITS[part],
                            "read_gb_s": bandwidth,
                            "other_cpu": load.stop(),
                        }
                    )
                _show(f"round {number + 1}: {part} of {engine.name}: {value:.1f} {_UNITS[part]}")
    return results


@contextmanager
def _busy_processes(count: int) -> Iterator[None]:
    command = [sys.executable, "-c", "while True: pass"]
    processes = [subprocess.Popen(command) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def _conditions(options: argparse.Namespace, engines: list[Engine]) -> dict[str, Any]:
    return {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit_of(Path(ostinato.__file__).parent),
        "model": Path(options.model).resolve().name,
        "dtype": options.dtype,
        "threads": options.threads,
        "busy_processes": options.busy,
        "cpu": cpu_name(),
        "versions": package_versions(),
        "ready_s": {engine.name: engine.ready_s for engine in engines},
        "peak_rss_mib": {engine.name: engine.peak_rss_mib for engine in engines},
    }


def _show(text: str) -> None:
    if sys.stderr.isatty():
        sys.stderr.write(f"\r\x1b[K{text}")
        sys.stderr.flush()


def _print(record: dict[str, Any], names: list[str], parts: list[str]) -> None:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("part")
    for name in names:
        table.add_column(name, justify="right")
    ours = [name for name in names if name.startswith(_OURS)]
    for name in ours:
        table.add_column(f"{name} to the best peer", justify="right")
    table.add_column("GB/s", justify="right")
    for part in parts:
        results = [result for result in record["results"] if result["part"] == part]
        values = {
            name: [result["value"] for result in results if result["engine"] == name]
            for name in names
        }
        bandwidth = statistics.median(result["read_gb_s"] for result in results)
        table.add_row(
            f"{part}, {_UNITS[part]}",
            *(median_and_range(values[name]) for name in names),
            *(_ratio(part, values, name) for name in ours),
            f"{bandwidth:.0f}",
        )
    console = Console(width=max(_WIDTH, 24 * (len(names) + len(ours))), highlight=False)
    conditions = record["conditions"]
    console.print(
        f"{conditions['model']} {conditions['dtype']}, {conditions['threads']} threads, "
        f"{conditions['cpu']}, {conditions['busy_processes']} other busy processes",
        markup=False,
    )
    console.print(table)
    console.print(
        f"medians of the rounds with ranges; a ratio above 1 means that {_OURS} is faster",
        markup=False,
    )


def _ratio(part: str, values: dict[str, list[float]], own: str) -> str:
    """The median over the rounds of the ratio of `own` to the best peer of its class."""
    kind = _kind(own)
    peers = [name for name in values if not name.startswith(_OURS) and _kind(name) == kind]
    if not peers:
        return ""
    best = min if part == "ttft" else max
    ratios = []
    for number, ours in enumerate(values[own]):
        peer = best(values[name][number] for name in peers)
        ratios.append(peer / ours if part == "ttft" else ours / peer)
    return median_and_range(ratios)


def main(arguments: list[str]) -> None:
    """Compare what the command line names; see --help."""
    parser = argparse.ArgumentParser(
        prog="python -m ostinato.benchmarks.peers",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", required=True, help="checkpoint directory, the same for all")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--vllm", help="python of its environment")
    parser.add_argument(
        "--vllm-preload", default="", help="its LD_PRELOAD: libtcmalloc and its own libiomp5.so"
    )
    parser.add_argument(
        "--openvino",
        action="append",
        default=[],
        help="python of its environment=directory of the exported IR[=int8|int4]; repeatable",
    )
    parser.add_argument(
        "--llama-cpp",
        action="append",
        default=[],
        help="llama-server=file.gguf[=int8|int4]; repeatable",
    )
    parser.add_argument(
        "--quantized",
        action="append",
        default=[],
        help="also run this engine with model.quantization=VALUE; VALUE:KEY=VALUE,... sets more",
    )
    parser.add_argument("--stored", action="append", default=[], help="NAME=CHECKPOINT; repeatable")
    parser.add_argument(
        "--only-quantized", action="store_true", help="do not run this engine unquantised"
    )
    parser.add_argument("--transformers", help="python of its environment")
    parser.add_argument(
        "--drafts", action="store_true", help="also run the unquantised engines with drafts"
    )
    parser.add_argument(
        "--draft-tokens", type=int, default=7, help="of one sequence in one step, at most"
    )
    parser.add_argument("--llama-cpp-draft", help="a draft model for llama-server: file.gguf")
    parser.add_argument("--parts", nargs="+", default=list(_PARTS), choices=list(_UNITS))
    parser.add_argument("--warmup", type=int, default=1, help="rounds that do not count")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--busy",
        type=int,
        default=0,
        help="processes that compute all the time beside the engines, as other programs would",
    )
    parser.add_argument("--overrides", nargs="+", default=[], help="configuration of this engine")
    parser.add_argument("--json", type=Path, help="write every single figure to this file")
    options = parser.parse_args(arguments)
    # On SIGTERM the engines are ended too. Those that are stopped (SIGSTOP) would otherwise stay.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))
    engines: list[Engine] = []
    variables = {
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{options.threads - 1}",
        "VLLM_CPU_KVCACHE_SPACE": "2",  # GiB
        "HF_HUB_OFFLINE": "1",
    }
    try:
        for name, command in _commands(options).items():
            _show(f"loading {name}")
            preload = options.vllm_preload if name.startswith("vllm") else ""
            engines.append(
                Engine(name, command, variables | ({"LD_PRELOAD": preload} if preload else {}))
            )
        with _busy_processes(options.busy):
            results = _measure(engines, options.parts, options.warmup, options.rounds)
        record = {"conditions": _conditions(options, engines), "results": results}
    finally:
        for engine in engines:
            engine.close()
    _show("")
    _print(record, [engine.name for engine in engines], options.parts)
    if options.json is not None:
        write_json(record, options.json)


if __name__ == "__main__":
    main(sys.argv[1:])
