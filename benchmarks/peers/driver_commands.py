"""Command lines of the drivers that run the engines of a comparison, one for each engine."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

__all__ = ("OURS", "driver_commands")

OURS = "ostinato"
_FOLDER = Path(__file__).parent
# The drafters of llama-server that need no model; {} = draft tokens. The first three look for
# matches of only 3 or 4 tokens, because longer ones are less frequent.
_NGRAM_TYPES = {
    "ngram-simple": "--spec-ngram-simple-size-n 3 --spec-ngram-simple-size-m {}",
    "ngram-map-k": "--spec-ngram-map-k-size-n 3 --spec-ngram-map-k-size-m {}",
    "ngram-mod": "--spec-ngram-mod-n-match 4 --spec-ngram-mod-n-min 1 --spec-ngram-mod-n-max {}",
    "ngram-cache": "--spec-draft-n-max {}",
}


def driver_commands(options: argparse.Namespace) -> dict[str, list[str]]:
    """{name of an engine: command line of its driver}."""
    model, tail = str(Path(options.model).resolve()), [options.dtype, str(options.threads)]

    def drive(python: str, script: str, *arguments: str) -> list[str]:
        return [python, str(_FOLDER / f"drive_{script}.py"), *arguments]

    plain = ["speculation.method=none", *options.overrides]
    ours = drive(sys.executable, "ostinato", model, *tail, *plain)
    commands = {} if options.only_quantized else {OURS: ours}
    drafts = [str(options.draft_tokens)] if options.drafts else []
    if drafts:
        more = ["speculation.method=auto", f"speculation.max_tokens={options.draft_tokens}"]
        commands[_named(OURS, "drafts")] = ours + more
    for quantized in options.quantized:
        kind, _, more = quantized.partition(":")
        overrides = [f"model.quantization={kind}", *filter(None, more.split(","))]
        commands[_named(OURS, kind)] = ours + overrides
    for stored in options.stored:
        name, _, rest = stored.partition("=")
        path, *overrides = rest.split(",")
        checkpoint = str(Path(path).resolve())
        own = drive(sys.executable, "ostinato", checkpoint, *tail, *plain, *overrides)
        commands[_named(OURS, name)] = own
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
