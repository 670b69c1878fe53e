"""Compares this engine with vLLM, OpenVINO, llama.cpp and transformers, in turns within one run.

    python -m ostinato.benchmarks.peers --model DIR --dtype bfloat16 \\
        --vllm VENV/bin/python --openvino VENV/bin/python=IR_DIR --llama-cpp SERVER=GGUF \\
        --transformers VENV/bin/python --rounds 3 --json FILE

    ... --quantized int8 --quantized int4 --openvino VENV/bin/python=IR_DIR=int8 \\
        --llama-cpp SERVER=Q8_0.gguf=int8 --llama-cpp SERVER=Q4_0.gguf=int4 \\
        --stored gptq-int4=GPTQ_DIR --stored gguf-int4=Q4_0.gguf

    ... --drafts --llama-cpp-draft Q4_0.gguf --parts decode repeat

    ... --isa avx2 --llama-cpp SERVER_FOR_AVX2=GGUF

    python -m ostinato.benchmarks.peers --show FILE

Each peer runs in its own virtual environment at its best settings (the drive_*.py files in this
folder), with the same prompts, numbers of tokens and threads. Engines stay loaded and take turns
part by part, round by round (A B C, A B C). The memory speed of shared machines changes by a factor
of two, so ratios from separate runs are not valid. Outside of its turn an engine is stopped
(SIGSTOP), so that its idle threads do not slow another engine. The read bandwidth is measured
before each turn.

The file of `--json` is replaced after each round. On SIGINT, SIGTERM and SIGHUP the engines are
ended and the table of the complete rounds is printed; `--show` prints it again. Figures of a round
that is not complete are dropped, because ratios compare engines within a round.

The parts (`--parts`; `repeat` runs only if it is named):

decode: tokens per second of one stream after its first token, from the times for 1 and 128 tokens.
repeat: the same for 256 tokens after a prompt that repeats 32 tokens. A greedy model continues it.
ttft: milliseconds to the first token after 512 prompt tokens, the median of five prompts.
offline: 32 requests at once, with 64-512 prompt and 32-128 output tokens.
prefix: 16 requests at once that share 1024 of 1088 prompt tokens, with an empty cache.

The KV caches of this engine, vLLM and OpenVINO have 2 GiB each. A larger one of this engine would
be written for the first time in every round, and a host gives some virtual machines new memory
slowly. llama-server's cache has the tokens of the part's requests.

The weights of every peer must have the requested precision: OpenVINO's exporter converts float32 to
16 bits unless it gets `--weight-format fp32`.

Engines of a class (int8, int4, drafts, or unquantised) are compared with each other: this engine
with the best peer of the class. `--stored` also runs this engine with a quantised checkpoint or a
GGUF file. `--drafts` adds engines with drafts that come from earlier text: this engine with
`speculation.method=auto`, vLLM's n-grams, OpenVINO's prompt lookup and each n-gram drafter of
llama-server. Every engine draws the likeliest token.

`--isa avx2` hides AVX-512, AMX and AVX-VNNI from every engine: a preloaded library intercepts the
instruction CPUID (hidden_avx512.cpp). So a processor with AVX-512 takes the place of one without.
llama-server chooses its instructions when it is built, so it must be built for AVX2.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import torch

from ostinato.benchmarks.machine.probes import LoadMeter, basic_conditions, read_bandwidth
from ostinato.benchmarks.peers.driver_commands import driver_commands
from ostinato.benchmarks.peers.driver_loop import CACHE_GIB
from ostinato.benchmarks.peers.limited_processor import hiding_library, preloading
from ostinato.benchmarks.peers.peer_table import print_comparison
from ostinato.benchmarks.report.json_file import write_json
from ostinato.benchmarks.workload.workload import Part, WorkItem, standard_workload

__all__ = ("Engine", "measure_part")

_FOLDER = Path(__file__).parent
_PARTS = ("decode", "ttft", "offline", "prefix")
_UNITS = {
    **dict.fromkeys(("decode", "offline", "prefix", "repeat"), "tok/s"),
    "ttft": "ms",
}
_PERIOD, _PERIODS, _REPEAT_TOKENS = 32, 4, 256  # of `repeat`: its prompt and output
# prompts of `ttft` in a round; several, because one takes only a tenth of a second
_NUM_PROMPTS = 5
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class _Ended(BaseException):
    """One of `_SIGNALS` arrived."""

    def __init__(self, number: int) -> None:
        super().__init__(f"ended by {signal.Signals(number).name}")
        self.exit_code = 128 + number


class Engine:
    """One engine's process, stopped between its turns. The constructor starts it."""

    def __init__(self, name: str, command: list[str], environment: dict[str, str]) -> None:
        self.name = name
        self.ready_s = 0.0  # how long it took to load
        self.peak_rss_mib = 0.0
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=_FOLDER,
            env=environment,
            start_new_session=True,  # ctrl-C ends this program, which then ends the engines
        )

    def wait_until_loaded(self) -> None:
        """Wait until the engine can run parts.

        Raises:
            RuntimeError: the process ended or answered with an error; its log is on standard error.
        """
        self.ready_s = self._read()["ready_s"]
        self._signal(signal.SIGSTOP)

    def run(self, part: Part) -> float:
        """Seconds until all output tokens of a part's requests were generated.

        Raises:
            RuntimeError: as `wait_until_loaded`.
        """
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


def _rounds(
    engines: list[Engine], parts: list[str], warmup: int, rounds: int
) -> Iterator[list[dict[str, Any]]]:
    """The results of each round that counts, as soon as it is complete."""
    for number in range(warmup + rounds):
        began = time.monotonic()
        results = [
            {"round": number - warmup} | _turn(engine, part, number)
            for part in parts
            for engine in engines
        ]
        seconds = time.monotonic() - began
        left = warmup + rounds - number - 1
        remaining = f"; about {left * seconds:.0f} s remain" if left else ""
        name = f"round {number - warmup + 1} of {rounds}" if number >= warmup else "a warm-up round"
        _show("")
        print(f"{name} took {seconds:.0f} s{remaining}", file=sys.stderr, flush=True)
        if number >= warmup:
            yield results


def _turn(engine: Engine, part: str, number: int) -> dict[str, Any]:
    bandwidth = read_bandwidth(torch.device("cpu"))
    load = LoadMeter()
    value = measure_part(engine, part, number)
    _show(f"round {number + 1}: {part} of {engine.name}: {value:.1f} {_UNITS[part]}")
    return {
        "part": part,
        "engine": engine.name,
        "value": value,
        "unit": _UNITS[part],
        "read_gb_s": bandwidth,
        "other_cpu": load.stop(),
    }


@contextmanager
def _busy_processes(count: int) -> Iterator[None]:
    command = [sys.executable, "-c", "while True: pass"]
    processes: list[subprocess.Popen[bytes]] = []
    try:
        processes.extend(subprocess.Popen(command) for _ in range(count))
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def _end(number: int, _frame: object) -> None:
    _ignore_signals()
    raise _Ended(number)


@contextmanager
def _delayed_signals() -> Iterator[None]:
    """A context in which `_SIGNALS` wait for its end."""
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _ignore_signals() -> None:
    """Do this before the engines are ended, which a signal must not interrupt."""
    for each in _SIGNALS:
        signal.signal(each, signal.SIG_IGN)


def _record(
    options: argparse.Namespace, engines: list[Engine], rounds: list[list[dict[str, Any]]]
) -> dict[str, Any]:
    """The record of the complete rounds."""
    return {
        "conditions": _conditions(options, engines),
        "rounds": {"asked": options.rounds, "complete": len(rounds)},
        "results": [result for results in rounds for result in results],
    }


def _conditions(options: argparse.Namespace, engines: list[Engine]) -> dict[str, Any]:
    return {
        **basic_conditions(),
        "model": Path(options.model).resolve().name,
        "dtype": options.dtype,
        "threads": options.threads,
        "busy_processes": options.busy,
        "isa": options.isa,
        "ready_s": {engine.name: engine.ready_s for engine in engines},
        "peak_rss_mib": {engine.name: engine.peak_rss_mib for engine in engines},
    }


def _show(text: str) -> None:
    if sys.stderr.isatty():
        sys.stderr.write(f"\r\x1b[K{text}")
        sys.stderr.flush()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m ostinato.benchmarks.peers",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", help="checkpoint directory, the same for all")
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
    parser.add_argument(
        "--stored",
        action="append",
        default=[],
        help="NAME=CHECKPOINT, or with overrides NAME=CHECKPOINT,KEY=VALUE,...; repeatable",
    )
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
    parser.add_argument(
        "--isa", choices=("avx2",), help="hide newer instruction sets from all engines"
    )
    parser.add_argument("--overrides", nargs="+", default=[], help="configuration of this engine")
    parser.add_argument("--json", type=Path, help="write every single figure to this file")
    parser.add_argument("--show", type=Path, help="print the table of such a file; measure nothing")
    return parser


def main(arguments: list[str]) -> int:
    """Compare what the command line names; see --help.

    Returns:
        The exit code: 0, or 128 plus the number of the signal that ended the run.
    """
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.show is not None:
        print_comparison(json.loads(options.show.read_text(encoding="utf-8")))
        return 0
    if options.model is None:
        parser.error("--model is missing: name the checkpoint directory")
    engines: list[Engine] = []
    rounds: list[list[dict[str, Any]]] = []
    for number in _SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup ignores SIGHUP
            signal.signal(number, _end)
    try:
        _load(options, engines)
        with _busy_processes(options.busy):
            for results in _rounds(engines, options.parts, options.warmup, options.rounds):
                with _delayed_signals():  # so that the file has the rounds of the table
                    rounds.append(results)
                    if options.json is not None:
                        write_json(_record(options, engines, rounds), options.json)
    except _Ended as ended:
        _show("")
        print(ended, file=sys.stderr)
        return ended.exit_code
    finally:  # also if an engine fails
        _ignore_signals()
        for engine in engines:
            engine.close()
        _show("")
        if rounds:
            print_comparison(_record(options, engines, rounds))
    return 0


def _load(options: argparse.Namespace, engines: list[Engine]) -> None:
    """Start the engines one after the other, and append each as soon as it has a process."""
    variables = {
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{options.threads - 1}",
        "VLLM_CPU_KVCACHE_SPACE": str(CACHE_GIB),
        "HF_HUB_OFFLINE": "1",
    }
    hiding = "" if options.isa is None else str(hiding_library())
    for name, command in driver_commands(options).items():
        _show(f"loading {name}")
        preload = options.vllm_preload if name.startswith("vllm") else ""
        engine = Engine(name, command, preloading(variables, hiding, preload))
        engines.append(engine)
        engine.wait_until_loaded()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
