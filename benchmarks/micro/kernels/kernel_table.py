"""Lists the resources of the Triton kernels of a layer: registers, spills, shared memory.

It compiles the kernels of common models ahead of time, so no GPU is needed. It prints a table and
writes it to docs/kernel-resources.md, in the section of the installed Triton version:

    python -m ostinato.benchmarks.micro.kernels.kernel_table
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from ostinato.benchmarks.machine.described_device import described_device
from ostinato.benchmarks.machine.kernel_resources import Resources, read_resources
from ostinato.ops.backends.triton_cache_write import rotary_write_kernel, write_kv_kernel
from ostinato.ops.backends.triton_kernels import attention_kernel
from ostinato.ops.backends.triton_tiles import (
    KernelShape,
    attention_constants,
    rotary_constants,
    write_constants,
)
from ostinato.ops.fused.fused_linear import TILE_ROWS
from ostinato.ops.fused.linear_tiles import choose_tile, linear_constants
from ostinato.ops.fused.triton_expert_kernels import down_kernel, gate_up_kernel, router_kernel
from ostinato.ops.fused.triton_fused_experts import experts_constants, router_constants
from ostinato.ops.fused.triton_fused_linear import fused_linear_kernel, scale_rows_kernel
from ostinato.ops.fused.triton_output_router import output_router_kernel, output_router_launch
from ostinato.ops.recurrent.triton_delta_rule import (
    delta_inputs_constants,
    delta_inputs_kernel,
    delta_norm_constants,
    delta_norm_kernel,
    delta_rule_constants,
    delta_rule_kernel,
)
from ostinato.ops.recurrent.triton_short_conv import short_conv_constants, short_conv_kernel
from ostinato.ops.recurrent.triton_state_space import (
    Sizes,
    space_inputs_constants,
    space_inputs_kernel,
    space_norm_constants,
    space_norm_kernel,
    state_space_constants,
    state_space_kernel,
)
from ostinato.ops.w8a8.round_rows import InputScales
from ostinato.ops.w8a8.triton_w8a8_linear import (
    Operands,
    w8a8_linear_kernel,
    w8a8_linear_launch,
)

__all__ = ("Variant", "compile_variant", "main", "render", "replace_section", "variants")

_CAPABILITY = 90
_SHARED_MEMORY_LIMIT = 227 * 1024  # bytes that one program of capability 9.0 may use
_LAUNCH_OPTIONS = ("num_warps", "num_stages", "enable_fp_fusion", "maxnreg", "launch_pdl")
_POINTERS = {
    "bfloat16": "*bf16",
    "float16": "*fp16",
    "float32": "*fp32",
    "fp8_e4m3": "*fp8e4nv",
    "int8": "*i8",
}
_METADATA = {
    "query_start_loc": "*i32",
    "seq_lens": "*i32",
    "block_table": "*i32",
    "slot_mapping": "*i64",
    "state_slots": "*i32",
    "taken": "*i32",
}
_COUNTS = (  # tensors of int32
    *("members", "counters", "counts", "slots_done", "arrivals", "visible_ends"),
)
_SINGLE_RESULTS = (  # of float32
    *("logits", "products", "routing_weights", "x_scales", "scales", "squares", "new_squares"),
    *("factors", "parts", "mixed", "outputs", "state", "a_log", "dt_bias", "skip"),
)
_STRIDES = ("x_stride", "residual_stride", "qkv_stride", "gates_stride")
_SINGLE = ("alibi_slopes", "sinks", "cos", "sin")  # tensors of float32
_ROWS = (
    *("out", "q", "k", "v", "qkv", "x", "normal", "inner", "scaled", "hidden"),
    *("qkvz", "gates", "bcx", "projected", "conv_weight", "conv_state"),
)
# Arguments that may be None, in which case the kernel leaves something out.
_WEIGHTS = ("q_weight", "k_weight", "bias", "norm_weight", "residual", "conv_bias")
_SUMS = ("scaled", "squares", "new_squares")
_OPTIONAL = (
    *(*_SINGLE, *_WEIGHTS, *_SUMS),
    *("counters", "hidden", "factors", "score_bias", "visible_ends"),
)
_MANY = 64  # sequences of a step that has the tile for many sequences


@dataclass(frozen=True, slots=True)
class Variant:
    """One kernel, specialised to a model."""

    model: str
    # few | short | long | write | rotate | scale | linear | router | experts | 8 bits | convolve |
    # recur | gated norm
    role: str
    dtype: str
    kernel: Any
    constants: Mapping[str, Any]
    cache_dtype: str = ""  # the KV cache's dtype; empty = `dtype`
    optional: tuple[str, ...] = ()  # the entries of `_OPTIONAL` that the model has

    @property
    def uses_tensor_cores(self) -> bool:
        is_product = self.role in ("few", "short", "long", "linear", "router", "experts", "8 bits")
        return is_product and self.dtype != "float32"


def variants() -> Iterator[Variant]:
    """The kernels that the table lists, of common models."""
    models = {
        "Llama-8B 32/8 heads, D128": (KernelShape(32, 8, 128, 16, 2, 1 << 17), 0, 0.0),
        "Qwen3-0.6B 16/8 heads, D128": (KernelShape(16, 8, 128, 16, 2, 1 << 15), 0, 0.0),
        "Qwen3-30B-A3B 32/4 heads, D128": (KernelShape(32, 4, 128, 16, 2, 1 << 15), 0, 0.0),
        "32/8 heads, D64": (KernelShape(32, 8, 64, 16, 2, 1 << 17), 0, 0.0),
        "window 4096, cap 50, D128": (KernelShape(32, 8, 128, 16, 2, 1 << 17), 4096, 50.0),
        "GPT-2 12/12 heads, D64": (KernelShape(12, 12, 64, 16, 2, 1 << 10), 0, 0.0),
        "32/32 heads, D80": (KernelShape(32, 32, 80, 16, 2, 1 << 12), 0, 0.0),
        "16/8 heads, D256": (KernelShape(16, 8, 256, 16, 2, 1 << 13), 0, 0.0),
        "71/1 heads, D64": (KernelShape(71, 1, 64, 16, 2, 1 << 11), 0, 0.0),
        "Llama 4 40/8 heads, D128, chunks": (KernelShape(40, 8, 128, 16, 2, 1 << 17), -8192, 0.0),
        "DeepSeek-V2-Lite 16/16 heads, D192, Dv128": (
            KernelShape(16, 16, 192, 16, 2, 1 << 17, value_dim=128),
            0,
            0.0,
        ),
    }
    for model, (shape, window, cap) in models.items():
        for cache_dtype in ("", "fp8_e4m3"):
            converting = replace(shape, converts_cache=cache_dtype != "", num_seqs=_MANY)
            launches = [("short", converting), ("long", converting)]
            if not cache_dtype:
                launches.insert(0, ("few", shape))
            for role, used in launches:
                constants = attention_constants(
                    used, window, cap, is_long=role == "long", early=True
                )
                yield Variant(model, role, "bfloat16", attention_kernel, constants, cache_dtype)
            write = write_constants(
                shape.num_heads,
                shape.num_kv_heads,
                shape.head_dim,
                shape.value_size,
                shape.block_size,
            )
            yield Variant(model, "write", "bfloat16", write_kv_kernel, write, cache_dtype)
    for head_dim in (128, 256):
        single = KernelShape(32, 8, head_dim, 16, 4, 1 << 17, _MANY)
        for is_long in (False, True):
            constants = attention_constants(single, 0, 0.0, is_long=is_long, early=True)
            role = "long" if is_long else "short"
            model = f"32/8 heads, D{head_dim}"
            yield Variant(model, role, "float32", attention_kernel, constants)
    per_head = {
        "gpt-oss 64/8 heads, D64, window 128, sinks": (64, 8, 64, 128, "sinks"),
        "64/8 heads, D128, sinks": (64, 8, 128, 0, "sinks"),
        "BLOOM-7B 32/32 heads, D128, ALiBi": (32, 32, 128, 0, "alibi_slopes"),
    }
    for model, (heads, kv_heads, head_dim, window, name) in per_head.items():
        shape = KernelShape(heads, kv_heads, head_dim, 16, 2, 1 << 17)
        for role, num_seqs in (("few", 1), ("short", _MANY), ("long", _MANY)):
            used = replace(shape, num_seqs=num_seqs)
            constants = attention_constants(used, window, 0.0, is_long=role == "long", early=True)
            yield Variant(model, role, "bfloat16", attention_kernel, constants, optional=(name,))

    yield from _rotations()
    yield from _products()
    yield from _experts()
    yield from _rounded()
    yield from _recurrent()


def _rotations() -> Iterator[Variant]:
    """The kernel before attention, with norms of heads and without."""
    rope, norms = ("cos", "sin"), ("q_weight", "k_weight")
    for model, heads, optional in (
        ("Llama-8B 32/8 heads, D128", 32, rope),
        ("Qwen3-0.6B 16/8 heads, D128", 16, (*rope, *norms)),
    ):
        for cache_dtype in ("", "fp8_e4m3"):
            constants = rotary_constants(heads, 8, 128, 64, 16, early=True)
            kernel = rotary_write_kernel
            yield Variant(model, "rotate", "bfloat16", kernel, constants, cache_dtype, optional)


def _products() -> Iterator[Variant]:
    """The four matrix products of a layer, for each tile of rows, and the norm before them."""
    norm = ("norm_weight",)
    for name, size, queries, keys, inner in (
        ("Llama-8B", 4096, 4096, 1024, 14336),
        ("Qwen3-0.6B", 1024, 2048, 1024, 3072),
    ):
        scale = {"K": size, "BLOCK": 1024, "CLEARED": 0, "EARLY": True, "launch_pdl": True}
        scale["num_warps"] = 4
        yield Variant(name, "scale", "bfloat16", scale_rows_kernel, scale, optional=(*_SUMS, *norm))
        for part, out_features, in_features, activation, optional in (
            ("QKV", queries + 2 * keys, size, "", ("squares",)),
            ("output", size, queries, "", ("residual", "scaled", "new_squares", *norm)),
            ("gate and up", inner, size, "silu", ("squares",)),
            ("down", size, inner, "", ("residual",)),
        ):
            for rows in TILE_ROWS:
                sizes = (out_features, in_features)
                tile = choose_tile(rows, *sizes, 2, is_gated=bool(activation))
                constants = linear_constants(tile, *sizes, activation, num_squares=128, early=True)
                model = f"{name} {part}, {rows} rows"
                kernel = fused_linear_kernel
                yield Variant(model, "linear", "bfloat16", kernel, constants, optional=optional)


def _experts() -> Iterator[Variant]:
    """The router and both expert kernels, for a small step and for one with larger tiles.

    In the small step, the output projection of the attention and the router are one kernel.
    """
    for model, size, inner, num_experts, top_k, rows in (
        ("Qwen3-30B-A3B", 2048, 768, 128, 8, 8),
        ("Mixtral-8x7B", 4096, 14336, 8, 2, 64),
    ):
        shared = {"SLOTS": top_k, "NUM_EXPERTS": num_experts}
        first, second = (
            experts_constants(rows * top_k, num_experts, depth, 2, is_gated=is_gated, early=True)
            for depth, is_gated in ((size, True), (inner, False))
        )
        down_tiles = -(-size // second["BLOCK_N"])
        router = router_constants(num_experts, size, top_k, 2, down_tiles, early=True)
        router |= {"SCORING": "softmax", "RENORMALIZE": True, "ROUNDS": True}
        gate_up = {"N": inner, "K": size, "ACTIVATION": "silu", **shared, **first}
        down = {"N": size, "K": inner, **shared, **second}
        norm, factors = ("norm_weight", "counters"), ()
        routing = ("router", "router", router_kernel, router, norm)
        if rows <= TILE_ROWS[0]:
            launch = output_router_launch(size, 4096, router, 2, torch.device("cpu"))
            factors = ("factors",)
            given = (*norm, *factors, "hidden", "scaled", "squares", "residual")
            part = "output and router"
            routing = (part, "router", output_router_kernel, launch.constants, given)
        for part, role, kernel, constants, optional in (
            routing,
            ("gate and up", "experts", gate_up_kernel, gate_up, factors),
            ("down", "experts", down_kernel, down, ("residual",)),
        ):
            name = f"{model} {part}, {rows} rows"
            yield Variant(name, role, "bfloat16", kernel, constants, optional=optional)


def _rounded() -> Iterator[Variant]:
    """Products of operands of 8 bits, for small, middle and large steps."""
    blocks, row = InputScales.group, InputScales.row
    for name, size, group, inputs, dtype, target in (
        ("DeepSeek-V3 output, blocks", (7168, 16384), 128, blocks, "fp8_e4m3", torch.float8_e4m3fn),
        ("Llama-8B output, rows", (4096, 4096), 4096, row, "fp8_e4m3", torch.float8_e4m3fn),
        ("Llama-8B output, W8A8", (4096, 4096), 4096, row, "int8", torch.int8),
    ):
        for rows in (16, 64, 256):
            constants = w8a8_linear_launch(Operands(*size, group, inputs, target), rows).constants
            kernel, optional = w8a8_linear_kernel, ("residual",)
            model = f"{name}, {rows} rows"
            yield Variant(model, "8 bits", dtype, kernel, constants, optional=optional)


def _recurrent() -> Iterator[Variant]:
    """The kernels of recurrent layers: gated delta net, short convolution and Mamba-2."""
    heads = (16, 32, 128, 128)
    sizes = Sizes(num_heads=48, head_dim=64, num_groups=1, state_size=128)
    steps = (0.0, float("inf"))
    factors, bias, norm = ("factors",), ("conv_bias",), ("norm_weight",)
    for model, role, kernel, constants, optional in (
        ("Qwen3.5-4B", "convolve", delta_inputs_kernel, delta_inputs_constants(*heads, 4), factors),
        ("Qwen3.5-4B", "recur", delta_rule_kernel, delta_rule_constants(*heads), factors),
        ("Qwen3.5-4B", "gated norm", delta_norm_kernel, delta_norm_constants(*heads, 1e-6), norm),
        ("LFM2-1.2B", "convolve", short_conv_kernel, short_conv_constants(2048, 3), ()),
        (
            *("Granite-4-tiny", "convolve", space_inputs_kernel),
            space_inputs_constants(sizes, 4, *steps),
            (*factors, *bias),
        ),
        ("Granite-4-tiny", "recur", state_space_kernel, state_space_constants(sizes), factors),
        (
            "Granite-4-tiny",
            "gated norm",
            space_norm_kernel,
            space_norm_constants(sizes, 1e-5),
            norm,
        ),
    ):
        yield Variant(model, role, "bfloat16", kernel, constants, optional=optional)


def compile_variant(variant: Variant) -> Resources:
    """Compile for capability 9.0 and read the assembler's report."""
    options = {name: n for name, n in variant.constants.items() if name in _LAUNCH_OPTIONS}
    constants: dict[str, Any] = {
        name: n for name, n in variant.constants.items() if name not in _LAUNCH_OPTIONS
    }
    for name in set(_OPTIONAL).intersection(variant.kernel.arg_names) - set(variant.optional):
        constants[name] = None
    signature: dict[str, str] = {}
    divisible: dict[tuple[int], list[list[Any]]] = {}
    for index, name in enumerate(variant.kernel.arg_names):
        signature[name] = "constexpr" if name in constants else _type_of(name, variant)
        # A launch makes the same assumptions: pointers to data and strides are multiples of 16. It
        # assumes nothing about metadata.
        is_data = signature[name].startswith("*") and name not in _METADATA
        if is_data or name in _STRIDES or name.endswith(("_stride_token", "_stride_head")):
            divisible[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(variant.kernel, signature, constexprs=constants, attrs=divisible)
    compiled: Any = triton.compile(
        source, target=GPUTarget("cuda", _CAPABILITY, 32), options=options
    )
    return read_resources(
        compiled.asm["ptx"], compiled.metadata.shared, int(options["num_warps"]), _CAPABILITY
    )


def _type_of(name: str, variant: Variant) -> str:
    if name in _METADATA:
        return _METADATA[name]
    if name.startswith("partial_") or name in (*_SINGLE, *_SINGLE_RESULTS):
        return "*fp32"
    if name in _COUNTS:
        return "*i32"
    if name in ("k_cache", "v_cache"):
        return _POINTERS[variant.cache_dtype or variant.dtype]
    if variant.role == "8 bits" and name in ("out", *_WEIGHTS):
        return _POINTERS["bfloat16"]
    if name in (*_WEIGHTS, *_ROWS, "weight", "router"):
        return _POINTERS[variant.dtype]
    return "fp32" if name in ("scale", "eps") else "i32"


def render(rows: list[tuple[Variant, Resources]]) -> str:
    """The table as Markdown."""
    lines = [
        "| model | kernel | type | cache | M × N | warps | registers | spills | shared KiB "
        "| tensor | copies | programs |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    device = described_device("h200")
    for variant, used in rows:
        constants = variant.constants
        tile = ""
        if "BLOCK_M" in constants:
            tile = f"{constants['BLOCK_M']} × {constants['BLOCK_N']}"
        cells = [
            variant.model,
            variant.role,
            variant.dtype,
            variant.cache_dtype,
            tile,
            constants["num_warps"],
            used.registers,
            used.spill_bytes,
            f"{used.shared_bytes / 1024:.1f}",
            used.num_wgmma + used.num_mma,
            used.num_copies,
            device.resident_programs(used.registers, used.shared_bytes, used.num_threads),
        ]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines) + "\n"


def replace_section(document: str, title: str, body: str) -> str:
    """`document` with the section `title` replaced or added; sections are sorted by title."""
    head, *sections = re.split(r"(?m)^(?=## )", document)
    kept = [section for section in sections if not section.startswith(title + "\n")]
    parts = [head, *sorted([*kept, f"{title}\n\n{body}"])]
    return "\n".join(part.rstrip("\n") + "\n" for part in parts)


def main() -> None:
    """Compile all variants, print the table, and write it to docs/kernel-resources.md."""
    rows = [(variant, compile_variant(variant)) for variant in variants()]
    table = render(rows)
    print(table)
    path = Path(__file__).parents[3] / "docs" / "kernel-resources.md"
    path.write_text(replace_section(path.read_text(), f"## Triton {triton.__version__}", table))
    worst = max(used.shared_bytes for _, used in rows)
    print(f"most shared memory: {worst / 1024:.1f} of {_SHARED_MEMORY_LIMIT // 1024} KiB")


if __name__ == "__main__":
    main()
