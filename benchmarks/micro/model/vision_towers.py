"""Measures vision towers: seconds of an image, beside transformers, and the longest unit of work.

    python -m ostinato.benchmarks.micro.model.vision_towers

The towers have the published sizes and random weights, and the number of layers that `--layers`
says. In each round both compute an image, in a changing order. The ratio divides the seconds of
transformers by those of this project. A unit is what the engine computes at once between steps, so
other requests wait at least for the longest unit.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from rich import box
from rich.console import Console
from rich.table import Table
from torch import Tensor

from ostinato.benchmarks.machine.probes import LoadMeter, basic_conditions
from ostinato.benchmarks.report.json_file import write_json
from ostinato.benchmarks.report.statistics import bootstrap_ratio
from ostinato.conf.schema import ModelSection
from ostinato.models.checkpoints.checkpoint import open_checkpoint
from ostinato.models.checkpoints.weights import init_dummy_weights
from ostinato.models.choose_weights import choose_weights
from ostinato.models.config.model_config import DTYPES
from ostinato.models.decoder import Decoder
from ostinato.models.registry import build_model, read_model_config
from ostinato.models.vision.image_spec import ImageSizing, ImageSpec
from ostinato.ops.native.library import load

__all__ = ("TOWERS", "Tower", "measure")

_UNIT_ROWS = 64  # patches of a unit, as an engine on a CPU has them
_IMAGE_TOKEN = 90
_TEXT = {
    "vocab_size": 100,
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
}
_ROPE = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]}


class Tower(NamedTuple):
    """A published tower, with the size of the image that it computes."""

    kind: str  # the class of transformers without `ForConditionalGeneration`
    settings: dict[str, Any]
    num_layers: str  # the key in `vision_config`
    patch_size: int
    merge_size: int
    edge: int  # pixels of the square image


TOWERS = {
    "LLaVA 1.5 (CLIP ViT-L/14-336)": Tower(
        "Llava",
        {
            "text_config": {**_TEXT, "model_type": "llama"},
            "vision_config": {
                "model_type": "clip_vision_model",
                "hidden_size": 1024,
                "intermediate_size": 4096,
                "num_attention_heads": 16,
                "image_size": 336,
                "patch_size": 14,
            },
            "vision_feature_layer": -1,
            "image_token_index": _IMAGE_TOKEN,
        },
        "num_hidden_layers",
        14,
        1,
        336,
    ),
    "Qwen2.5-VL": Tower(
        "Qwen2_5_VL",
        {
            "text_config": {**_TEXT, "rope_parameters": _ROPE},
            "vision_config": {
                "hidden_size": 1280,
                "intermediate_size": 3420,
                "num_heads": 16,
                "out_hidden_size": 256,
                "fullatt_block_indexes": [3],
            },
            "image_token_id": _IMAGE_TOKEN,
            "video_token_id": _IMAGE_TOKEN + 1,
            "vision_start_token_id": _IMAGE_TOKEN + 2,
            "vision_end_token_id": _IMAGE_TOKEN + 3,
        },
        "depth",
        14,
        2,
        448,
    ),
}


def measure(name: str, dtype: str, layers: int, rounds: int) -> dict[str, Any]:
    """Seconds of one image in both implementations.

    Args:
        name: a key of `TOWERS`.
        dtype: a key of `DTYPES`.
        layers: layers of the tower.
        rounds: how often both are measured.
    """
    tower = TOWERS[name]
    vision = {**tower.settings["vision_config"], tower.num_layers: layers}
    config = getattr(transformers, f"{tower.kind}Config")(
        **{**tower.settings, "vision_config": vision}
    )
    torch.manual_seed(0)
    shape = (tower.edge, tower.edge, 3)
    pixels = torch.randint(256, shape, dtype=torch.uint8)
    longest = [0.0]
    cases = {
        "own": _own(tower, config, pixels, dtype, longest),
        "transformers": _reference(tower, config, pixels, dtype),
    }
    seconds: dict[str, list[float]] = {name: [] for name in cases}
    meter = LoadMeter().start()
    for number in range(rounds + 1):
        for case in list(cases)[:: -1 if number % 2 else 1]:
            begin = time.perf_counter()
            cases[case]()
            if number:  # the first round warms up
                seconds[case].append(time.perf_counter() - begin)
            elif case == "own":
                longest[0] = 0.0
    ratio, interval = bootstrap_ratio(seconds["transformers"], seconds["own"])
    return {
        **seconds,
        "longest_unit_s": longest[0],
        "ratio": ratio,
        "interval": list(interval),
        "other_programs": round(meter.stop(), 3),
    }


def _own(
    tower: Tower, config: Any, pixels: Tensor, dtype: str, longest: list[float]
) -> Callable[[], None]:
    """Computes the image in units; raises `longest` to the seconds of the longest one."""
    hf_config = json.loads(config.to_json_string())
    hf_config["architectures"] = [f"{tower.kind}ForConditionalGeneration"]
    section = ModelSection(config=hf_config, dtype=dtype, load_format="dummy")  # pyright: ignore[reportArgumentType]
    checkpoint = open_checkpoint(section)
    device = torch.device("cpu")
    load("core")
    model = build_model(
        read_model_config(checkpoint),
        dtype=DTYPES[dtype],
        device=device,
        attention_backend="reference",
        weights=choose_weights(section, checkpoint, pack=True, device=device, dtype=DTYPES[dtype]),
        num_media_rows=4096,
    )
    init_dummy_weights(model, 0)
    assert isinstance(model, Decoder), "models with a tower are decoders"
    assert model.vision is not None, "the model has room for images"
    encode = model.vision.encode
    is_fixed = tower.kind == "Llava"
    spec = ImageSpec(
        sizing=ImageSizing.fixed if is_fixed else ImageSizing.dynamic,
        placeholder_id=_IMAGE_TOKEN,
        placeholder="",
        marked_placeholder="",
        mean=(0.5, 0.5, 0.5),
        std=(0.5, 0.5, 0.5),
        patch_size=tower.patch_size,
        merge_size=tower.merge_size,
    )

    @torch.inference_mode()
    def run() -> None:
        units = encode(pixels, spec, _UNIT_ROWS)
        while True:
            begin = time.perf_counter()
            ended = next(units, units) is units
            longest[0] = max(longest[0], time.perf_counter() - begin)
            if ended:
                return

    return run


def _reference(tower: Tower, config: Any, pixels: Tensor, dtype: str) -> Callable[[], None]:
    """Computes the image with transformers, from pixels that are scaled already."""
    model = getattr(transformers, f"{tower.kind}Model")(config).to(DTYPES[dtype]).eval()
    scaled = ((pixels.float() / 255 - 0.5) / 0.5).to(DTYPES[dtype])
    if tower.kind == "Llava":
        given = {"pixel_values": scaled.permute(2, 0, 1)[None]}
    else:
        side = tower.edge // tower.patch_size
        patches = scaled.new_zeros(side * side, 3 * 2 * tower.patch_size**2)
        given = {"pixel_values": patches, "image_grid_thw": torch.tensor([[1, side, side]])}

    @torch.inference_mode()
    def run() -> None:
        model.get_image_features(**given)

    return run


def main(arguments: list[str]) -> None:
    """Measure what the command line names; see --help."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"], choices=DTYPES)
    parser.add_argument("--layers", type=int, default=6, help="layers of each tower")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write every run to this file")
    options = parser.parse_args(arguments)
    transformers.logging.set_verbosity_error()
    command = ["python", "-m", "ostinato.benchmarks.micro.model.vision_towers", *arguments]
    conditions = {
        **basic_conditions(),
        "command": shlex.join(command),
        "threads": torch.get_num_threads(),
        "transformers": transformers.__version__,
        "layers": options.layers,
    }
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("tower")
    for heading in ("dtype", "own, ms", "transformers, ms", "ratio", "95 %", "longest unit, ms"):
        table.add_column(heading, justify="right")
    results: dict[str, dict[str, Any]] = {}
    for name, tower in TOWERS.items():
        for dtype in options.dtypes:
            print(f"{name}, {dtype}", file=sys.stderr)
            found = measure(name, dtype, options.layers, options.rounds)
            results[f"{name}, {dtype}"] = found
            times = [f"{1e3 * statistics.median(found[c]):.0f}" for c in ("own", "transformers")]
            low, high = found["interval"]
            spread = f"{low:.2f} to {high:.2f}"
            unit = f"{1e3 * found['longest_unit_s']:.0f}"
            label = f"{name}, {tower.edge} x {tower.edge}"
            table.add_row(label, dtype, *times, f"{found['ratio']:.2f}", spread, unit)
    console = Console(width=120, highlight=False)
    console.print(json.dumps(conditions, indent=1), markup=False)
    console.print(table)
    if options.json is not None:
        write_json({"conditions": conditions, "results": results}, options.json)


if __name__ == "__main__":
    main(sys.argv[1:])
