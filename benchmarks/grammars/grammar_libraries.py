"""Compares llguidance and xgrammar: coverage, compile time, mask time.

    python -m ostinato.benchmarks.grammars.grammar_libraries VOCABULARY [OUT.jsonl]

VOCABULARY is a `tekken.json` of Mistral (131,072 tokens as bytes). The program compiles each schema
of `grammar_schemas`. It measures the time of each compilation with the first mask, and the time of
a mask at every token of the schema's documents (tokenized greedily). It also checks whether valid
documents are accepted and invalid ones refused. A schema that the library does not support counts
as refused, not as wrong. xgrammar is not a dependency and must be installed.
"""

from __future__ import annotations

import base64
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from ostinato.benchmarks.grammars.grammar_schemas import SCHEMAS

__all__ = ("main",)

EOS, NUM_SPECIAL = 2, 1000


class Run(Protocol):
    """The state of a compiled schema while it reads one document."""

    def mask(self) -> None: ...
    def accept(self, token_id: int) -> bool: ...
    def may_end(self) -> bool: ...


class Library(Protocol):
    """One library with a vocabulary. `compile` raises ValueError for an unsupported schema."""

    name: str
    version: str

    def __init__(self, vocabulary: list[bytes]) -> None: ...
    def compile(self, schema: Any) -> Any: ...
    def begin(self, compiled: Any) -> Run: ...


class _LlguidanceRun:
    def __init__(self, matcher: Any, num_words: int) -> None:
        self._matcher = matcher
        self._bits = np.zeros(num_words, dtype=np.int32)

    def mask(self) -> None:
        self._matcher.unsafe_compute_mask_ptr(self._bits.ctypes.data, self._bits.nbytes)

    def accept(self, token_id: int) -> bool:
        return bool(self._matcher.consume_token(token_id))

    def may_end(self) -> bool:
        return bool(self._matcher.is_accepting())


class Llguidance:
    name = "llguidance"

    def __init__(self, vocabulary: list[bytes]) -> None:
        import llguidance

        ids = {token: index for index, token in enumerate(vocabulary) if index >= NUM_SPECIAL}
        longest = max(map(len, ids))

        class Tokens:
            eos_token_id, bos_token_id = EOS, None
            tokens = vocabulary
            special_token_ids = tuple(range(NUM_SPECIAL))

            def __call__(self, text: bytes) -> list[int]:
                return tokenize(text, ids, longest)

        self._library = llguidance
        self.version = llguidance.__version__
        self._tokenizer = llguidance.LLTokenizer(llguidance.TokenizerWrapper(Tokens()))
        self._num_words = -(-len(vocabulary) // 32)

    def compile(self, schema: Any) -> Any:
        text = json.dumps({"grammars": [{"json_schema": schema}]})
        matcher = self._library.LLMatcher(self._tokenizer, text, log_level=0)
        if matcher.is_error():
            raise ValueError(matcher.get_error())
        return matcher

    def begin(self, compiled: Any) -> Run:
        return _LlguidanceRun(compiled.deep_copy(), self._num_words)


class _XgrammarRun:
    def __init__(self, matcher: Any, bits: Any) -> None:
        self._matcher = matcher
        self._bits = bits

    def mask(self) -> None:
        self._matcher.fill_next_token_bitmask(self._bits)

    def accept(self, token_id: int) -> bool:
        return bool(self._matcher.accept_token(token_id))

    def may_end(self) -> bool:
        return bool(self._matcher.is_completed() or self._matcher.accept_token(EOS))


class Xgrammar:
    name = "xgrammar"

    def __init__(self, vocabulary: list[bytes]) -> None:
        import xgrammar  # pyright: ignore[reportMissingImports] - not a dependency

        self._library = xgrammar
        self.version = version("xgrammar")
        info = xgrammar.TokenizerInfo(
            vocabulary, vocab_type=xgrammar.VocabType.RAW, stop_token_ids=[EOS]
        )
        # One thread, as llguidance has, and no cache, so that everything is compiled.
        self._compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
        self._bits = xgrammar.allocate_token_bitmask(1, len(vocabulary))

    def compile(self, schema: Any) -> Any:
        try:
            return self._compiler.compile_json_schema(json.dumps(schema), strict_mode=False)
        except RuntimeError as error:
            raise ValueError(str(error)) from error

    def begin(self, compiled: Any) -> Run:
        return _XgrammarRun(self._library.GrammarMatcher(compiled), self._bits)


def read_vocabulary(file: Path) -> list[bytes]:
    """Token bytes by id: special tokens, then the tokens of the file."""
    data = json.loads(file.read_text(encoding="utf-8"))
    size = data["config"]["default_vocab_size"]
    special = [f"<SPECIAL_{index}>".encode() for index in range(NUM_SPECIAL)]
    return special + [
        base64.b64decode(token["token_bytes"]) for token in data["vocab"][: size - NUM_SPECIAL]
    ]


def tokenize(data: bytes, ids: dict[bytes, int], longest: int) -> list[int]:
    """Token ids of `data`, taking the longest token at every position."""
    found = []
    while data:
        size = next(n for n in range(min(longest, len(data)), 0, -1) if data[:n] in ids)
        found.append(ids[data[:size]])
        data = data[size:]
    return found


def measure(library: Library, ids: dict[bytes, int], longest: int) -> dict[str, Any]:
    """The figures of one library."""
    compiles, masks, verdicts = [], [], {}
    for case in SCHEMAS:
        begin = time.perf_counter()
        try:
            compiled = library.compile(case.schema)
            first = library.begin(compiled)
            first.mask()
        except ValueError as error:
            verdicts[case.name] = f"refused: {str(error).splitlines()[0][:80]}"
            continue
        compiles.append(time.perf_counter() - begin)
        wrong = []
        for documents, wanted in ((case.valid, True), (case.invalid, False)):
            for text in documents:
                run = library.begin(compiled)
                accepted = True
                for token_id in tokenize(text.encode(), ids, longest):
                    begin = time.perf_counter()
                    run.mask()
                    masks.append(time.perf_counter() - begin)
                    if not run.accept(token_id):
                        accepted = False
                        break
                if (accepted and run.may_end()) != wanted:
                    wrong.append(f"{'refuses' if wanted else 'accepts'} {text}")
        verdicts[case.name] = "; ".join(wrong) or "right"
    kinds = ["right", "refused", "wrong"]
    counts = dict.fromkeys(kinds, 0)
    for verdict in verdicts.values():
        counts[next((kind for kind in kinds[:2] if verdict.startswith(kind)), "wrong")] += 1
    return {
        "library": library.name,
        "version": library.version,
        "schemas": counts,
        "compile_ms": _spread(compiles, 1e3),
        "mask_us": _spread(masks, 1e6),
        "num_masks": len(masks),
        "verdicts": {name: text for name, text in verdicts.items() if text != "right"},
    }


def _spread(seconds: Sequence[float], scale: float) -> dict[str, float]:
    cuts = statistics.quantiles(seconds, n=100)
    named = {"median": cuts[49], "p90": cuts[89], "p99": cuts[98], "max": max(seconds)}
    return {name: round(value * scale, 2) for name, value in named.items()}


def import_seconds(name: str) -> float:
    """Seconds of the import in a new process, without those of an empty process."""

    def run(code: str) -> float:
        begin = time.perf_counter()
        subprocess.run([sys.executable, "-c", code], check=True)
        return time.perf_counter() - begin

    return round(min(run(f"import {name}") for _ in range(3)) - min(run("") for _ in range(3)), 2)


def main(vocabulary_file: str, out: str = "") -> int:
    """Measure both libraries; print one line of JSON for each."""
    vocabulary = read_vocabulary(Path(vocabulary_file))
    ids = {token: index for index, token in enumerate(vocabulary) if index >= NUM_SPECIAL}
    longest = max(map(len, ids))
    results = []
    for library in (Llguidance, Xgrammar):
        begin = time.perf_counter()
        made = library(vocabulary)
        setup = time.perf_counter() - begin
        measure(made, ids, longest)  # warm
        result = measure(made, ids, longest)
        result |= {"vocabulary_seconds": round(setup, 2), "vocabulary_size": len(vocabulary)}
        result["import_seconds"] = import_seconds(library.name)
        results.append(result)
        print(json.dumps(result))
    if out:
        Path(out).write_text("".join(json.dumps(result) + "\n" for result in results))
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
