"""Measures the transcription of windows of audio, beside transformers and CTranslate2.

    pip install ctranslate2
    python -m ostinato.benchmarks.micro.model.transcription

The models have the sizes of Whisper's checkpoints and random weights. Each implementation encodes
windows of 30 seconds and writes the same number of tokens for each, the likeliest ones. Prepared
spectrograms are given to all, so decoding of files is not measured. In each round all are measured,
in a changing order. The ratio divides the seconds of the fastest other implementation by those of
this project. Without the package ctranslate2, only transformers is measured.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from rich import box
from rich.console import Console
from rich.table import Table
from tokenizers import AddedToken, Tokenizer, decoders, models

from ostinato import LLM, SamplingParams
from ostinato.benchmarks.machine.probes import LoadMeter, basic_conditions
from ostinato.benchmarks.report.json_file import write_json
from ostinato.benchmarks.report.statistics import bootstrap_ratio
from ostinato.conf.compose import load_config
from ostinato.runtime.types.audio import PromptAudio, audio_digest
from ostinato.runtime.types.request import Request

__all__ = ("SIZES", "measure", "write_model")

SIZES = {
    # hidden size, layers of the encoder and of the decoder, heads
    "tiny": (384, 4, 4, 6),
    "base": (512, 6, 6, 8),
    "small": (768, 12, 12, 12),
    "large-v3-turbo": (1280, 32, 4, 20),
}
_VOCABULARY, _END = 51865, 50257  # of the multilingual checkpoints
_NUM_TIMESTAMPS = 1501
_PROMPT = [50258, 50259, 50359, 50363]  # start, English, transcribe, no timestamps
_BINS, _FRAMES = 80, 3000
# CTranslate2 has no bfloat16 on CPUs. Its types: float32, and weights of 8 bits.
_CT2_TYPES = {"float32": "float32", "bfloat16": "float32", "int8": "int8_float32"}


def write_model(size: str, path: Path) -> None:
    """Write a random model with all files that an engine reads.

    Args:
        size: a key of `SIZES`.
        path: an empty directory.
    """
    width, encoder_layers, decoder_layers, heads = SIZES[size]
    config = transformers.WhisperConfig(
        vocab_size=_VOCABULARY,
        num_mel_bins=_BINS,
        d_model=width,
        encoder_layers=encoder_layers,
        decoder_layers=decoder_layers,
        encoder_attention_heads=heads,
        decoder_attention_heads=heads,
        encoder_ffn_dim=4 * width,
        decoder_ffn_dim=4 * width,
        decoder_start_token_id=_PROMPT[0],
        bos_token_id=_END,
        eos_token_id=_END,
        pad_token_id=_END,
    )
    torch.manual_seed(0)
    model = transformers.WhisperForConditionalGeneration(config)
    with torch.no_grad():
        # The end and timestamps never have the highest logit, so all write as many tokens.
        model.model.decoder.embed_tokens.weight[_END:] = 0.0
    names = [f"<|{number}|>" for number in range(_END, _VOCABULARY - _NUM_TIMESTAMPS)]
    names[:3] = ["<|endoftext|>", "<|startoftranscript|>", "<|en|>"]
    places = {50358: "translate", 50359: "transcribe", 50361: "startofprev", 50362: "nospeech"}
    for place, name in {**places, 50363: "notimestamps"}.items():
        names[place - _END] = f"<|{name}|>"
    names += [f"<|{0.02 * number:.2f}|>" for number in range(_NUM_TIMESTAMPS)]
    words = {f"w{number}": number for number in range(_END)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in names])
    model.generation_config = transformers.GenerationConfig(
        decoder_start_token_id=_PROMPT[0],
        eos_token_id=_END,
        pad_token_id=_END,
        is_multilingual=True,
        lang_to_id={"<|en|>": 50259},
        task_to_id={"transcribe": 50359, "translate": 50358},
        no_timestamps_token_id=50363,
        suppress_tokens=[],
        begin_suppress_tokens=[],
    )
    model.save_pretrained(path)
    tokenizer.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"})
    )
    transformers.WhisperFeatureExtractor(feature_size=_BINS).save_pretrained(path)


def measure(
    path: Path, dtype: str, windows: int, tokens: int, rounds: int, scratch: Path
) -> dict[str, Any]:
    """Seconds for some windows at once in every implementation.

    Args:
        path: a directory that `write_model` has filled.
        dtype: float32, bfloat16, or int8 for weights of 8 bits.
        windows: windows that are transcribed at once.
        tokens: tokens of each.
        rounds: how often all are measured.
        scratch: a directory for the model in the form of CTranslate2.
    """
    numbers = np.random.default_rng(0)
    features = numbers.uniform(-1.0, 1.0, (rounds + 1, windows, _BINS, _FRAMES)).astype(np.float32)
    with ExitStack() as stack:
        cases = {
            "own": _own(path, dtype, tokens, stack),
            "transformers": _reference(path, dtype, tokens),
        }
        if find_spec("ctranslate2") is not None:
            cases["CTranslate2"] = _ctranslate2(path, dtype, tokens, scratch)
        seconds: dict[str, list[float]] = {name: [] for name in cases}
        meter = LoadMeter().start()
        for number in range(rounds + 1):
            for case in list(cases)[:: -1 if number % 2 else 1]:
                begin = time.perf_counter()
                counts = cases[case](features[number])
                assert counts == [tokens] * windows, f"{case} wrote {counts} tokens, not {tokens}"
                if number:  # the first round warms up
                    seconds[case].append(time.perf_counter() - begin)
    best = min((case for case in cases if case != "own"), key=lambda case: min(seconds[case]))
    ratio, interval = bootstrap_ratio(seconds[best], seconds["own"])
    return {
        "seconds": seconds,
        "fastest_other": best,
        "ratio": ratio,
        "interval": list(interval),
        "other_programs": round(meter.stop(), 3),
    }


Run = Callable[[np.ndarray], list[int]]
"""Transcribes [windows, bins, frames]; returns the number of tokens of each window."""


def _own(path: Path, dtype: str, tokens: int, stack: ExitStack) -> Run:
    kind = "float32" if dtype == "int8" else dtype
    overrides = [f"model.dtype={kind}", "speculation.method=none", "graphs.bundle=false"]
    if dtype == "int8":
        overrides.append("model.quantization=int8")
    config = load_config(overrides, values={"model.path": str(path)})
    engine = stack.enter_context(LLM(config=config))._engine
    sampling = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)

    def run(features: np.ndarray) -> list[int]:
        for number, window in enumerate(features):
            data = window.tobytes()
            audio = PromptAudio(
                digest=audio_digest(_BINS, _FRAMES, data),
                num_bins=_BINS,
                num_frames=_FRAMES,
                features=data,
            )
            engine.add_request(
                Request(
                    request_id=str(number),
                    prompt_token_ids=_PROMPT,
                    sampling=sampling,
                    audio=audio,
                )
            )
        counts = [0] * len(features)
        while engine.has_work:
            for output in engine.step():
                counts[int(output.request_id)] += len(output.new_token_ids)
        return counts

    return run


def _reference(path: Path, dtype: str, tokens: int) -> Run:
    kind = torch.bfloat16 if dtype == "bfloat16" else torch.float32
    model = transformers.WhisperForConditionalGeneration.from_pretrained(path, dtype=kind).eval()

    @torch.inference_mode()
    def run(features: np.ndarray) -> list[int]:
        given = torch.from_numpy(features).to(kind)
        states = model.get_encoder()(given)
        prompt = torch.tensor([_PROMPT] * len(features))
        past, counts = None, 0
        for _ in range(tokens):  # `generate` would cut the windows and search languages
            out = model(encoder_outputs=states, decoder_input_ids=prompt, past_key_values=past)
            past, prompt = out.past_key_values, out.logits[:, -1:].argmax(-1)
            counts += 1
        return [counts] * len(features)

    return run


def _ctranslate2(path: Path, dtype: str, tokens: int, scratch: Path) -> Run:
    ctranslate2 = import_module("ctranslate2")  # no dependency of this project
    kind = _CT2_TYPES[dtype]
    folder = scratch / kind
    if not folder.exists():
        converter = ctranslate2.converters.TransformersConverter(str(path))
        converter.convert(str(folder), quantization=kind)
    model = ctranslate2.models.Whisper(
        str(folder),
        device="cpu",
        compute_type=kind,
        intra_threads=torch.get_num_threads(),
    )

    def run(features: np.ndarray) -> list[int]:
        results = model.generate(
            ctranslate2.StorageView.from_array(np.ascontiguousarray(features)),
            [_PROMPT] * len(features),
            beam_size=1,
            max_length=2 * tokens,  # it writes half as many
            suppress_blank=False,
            suppress_tokens=[],
        )
        return [len(result.sequences_ids[0]) for result in results]

    return run


def main(arguments: list[str]) -> None:
    """Measure what the command line names; see --help."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--sizes", nargs="+", default=["tiny", "base"], choices=SIZES)
    parser.add_argument("--dtypes", nargs="+", default=["float32", "int8"], choices=_CT2_TYPES)
    parser.add_argument("--windows", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write every run to this file")
    options = parser.parse_args(arguments)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    command = ["python", "-m", "ostinato.benchmarks.micro.model.transcription", *arguments]
    conditions = {
        **basic_conditions(),
        "command": shlex.join(command),
        "threads": torch.get_num_threads(),
        "transformers": transformers.__version__,
        "tokens": options.tokens,
    }
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    headings = ("Whisper", "weights", "windows", "own, s", "transformers, s", "CTranslate2, s")
    for heading in (*headings, "ratio", "95 %"):
        table.add_column(heading, justify="left" if heading == "Whisper" else "right")
    results: dict[str, dict[str, Any]] = {}
    for size in options.sizes:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "model"
            write_model(size, path)
            for dtype in options.dtypes:
                for windows in options.windows:
                    print(f"{size}, {dtype}, {windows} windows", file=sys.stderr)
                    found = measure(
                        path, dtype, windows, options.tokens, options.rounds, Path(folder)
                    )
                    results[f"{size}, {dtype}, {windows}"] = found
                    if options.json is not None:  # a run that is ended early keeps what it has
                        write_json({"conditions": conditions, "results": results}, options.json)
                    seconds = found["seconds"]
                    times = [
                        f"{statistics.median(seconds[case]):.2f}" if case in seconds else "-"
                        for case in ("own", "transformers", "CTranslate2")
                    ]
                    low, high = found["interval"]
                    spread = f"{low:.2f} to {high:.2f}"
                    table.add_row(
                        size, dtype, str(windows), *times, f"{found['ratio']:.2f}", spread
                    )
    console = Console(width=110, highlight=False)
    console.print(json.dumps(conditions, indent=1), markup=False)
    console.print(table)


if __name__ == "__main__":
    main(sys.argv[1:])
