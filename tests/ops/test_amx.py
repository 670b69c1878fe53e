"""AMX tiles (ops/native/core/amx.h): the emulation and the processor give the same bits.

This holds for single products and for the kernels. On a processor without AMX the emulation is
compared only with the kernels of the instruction set below it, which give the same bits for
quantised weights, and with exact fractions.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from ostinato.ops import quantized
from ostinato.ops.backends.reference import BACKEND as REFERENCE
from ostinato.ops.native.build import find_compiler
from ostinato.ops.native.instruction_sets import (
    EMULATED,
    ISA_LEVELS,
    detect_isa,
    runnable_levels,
    why_no_tiles,
)
from ostinato.ops.quantized_reference import QuantFormat, pack_quantized_reference
from tests.ops.attention_steps import Shape, make_step, run
from tests.ops.kernel_checks import EACH_LEVEL, LEVELS, linear_problem, ops_of, packed_by
from tests.ops.level_backend import LevelBackend

CHECK = Path(__file__).with_name("amx_check.cpp")
HEADERS = Path(quantized.__file__).parent / "native"
HAS_AMX = "amx" in runnable_levels()
needs_amx = pytest.mark.skipif(not HAS_AMX, reason=f"no AMX here: {why_no_tiles()}")

Words = NDArray[np.uint16]
_HOSTILE = [
    0,
    0x8000,
    1,
    0x8001,
    0x7F,
    0x80,
    0x8080,
    0x7F80,
    0xFF80,
    0x7FC0,
    0x7F7F,
    0x3F80,
    0xBF80,
]
_SOURCES: dict[str, Callable[[np.random.Generator, int], Words]] = {
    # Each function draws `count` bfloat16 values.
    "any bits": lambda rng, count: rng.integers(0, 1 << 16, count).astype(np.uint16),
    "around one": lambda rng, count: _bfloat16(rng, count, 126, 129),
    "far apart": lambda rng, count: _bfloat16(rng, count, 40, 215),
    "products near the smallest normal": lambda rng, count: _bfloat16(rng, count, 55, 72),
    "hostile": lambda rng, count: rng.choice(np.array(_HOSTILE, np.uint16), count),
}


def _bfloat16(rng: np.random.Generator, count: int, first: int, last: int) -> Words:
    """Random numbers of any sign and fraction, with exponents in [first, last)."""
    sign, exponent = rng.integers(0, 2, count) << 15, rng.integers(first, last, count) << 7
    return (sign | exponent | rng.integers(0, 128, count)).astype(np.uint16)


@pytest.fixture(scope="module")
def multiply(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int, bytes], bytes]:
    """Runs problems in amx_check.cpp: mode 1 is the processor, mode 2 the emulation."""
    folder = tmp_path_factory.mktemp("amx")

    def run(mode: int, problems: bytes) -> bytes:
        program = folder / f"check-{mode}"
        if not program.exists():
            flags = ["-std=c++17", "-O2", "-ffp-contract=off", f"-I{HEADERS}", "-DOSTINATO_ISA=0"]
            command = [find_compiler(), *flags, f"-DOSTINATO_AMX={mode}", str(CHECK)]
            subprocess.run([*command, "-o", str(program)], check=True)
        return subprocess.run([program], input=problems, capture_output=True, check=True).stdout

    return run


def problem(rng: np.random.Generator, source: str) -> bytes:
    """Tiles of any number of rows and steps, and float32 sums that the products are added to."""
    header = np.array([0, rng.integers(1, 17), rng.integers(1, 17)], np.int32)
    draw = _SOURCES[source]
    factors = draw(rng, 1024)
    if source == "products near the smallest normal":
        sums = _bfloat16(rng, 256, 0, 4)
    else:
        sums = draw(rng, 256)
    low = rng.integers(0, 1 << 16, 256).astype(np.uint32)
    return header.tobytes() + factors.tobytes() + (sums.astype(np.uint32) << 16 | low).tobytes()


def assert_equal_bits(left: bytes, right: bytes) -> None:
    """Check that two arrays of float32 have the same bits; all NaNs count as equal."""
    a, b = np.frombuffer(left, np.uint32), np.frombuffer(right, np.uint32)
    both_nan = np.isnan(a.view(np.float32)) & np.isnan(b.view(np.float32))
    assert a.size == b.size > 0
    assert bool(((a == b) | both_nan).all())


@needs_amx
@pytest.mark.parametrize("source", _SOURCES)
def test_bfloat16_products_are_the_processors(
    multiply: Callable[[int, bytes], bytes], source: str
) -> None:
    rng = np.random.default_rng(len(source))
    problems = b"".join(problem(rng, source) for _ in range(300))
    assert_equal_bits(multiply(1, problems), multiply(2, problems))


@needs_amx
@pytest.mark.parametrize("kind", [1, 2], ids=["unsigned", "signed"])
def test_products_of_bytes_are_the_processors(
    multiply: Callable[[int, bytes], bytes], kind: int
) -> None:
    rng = np.random.default_rng(1)
    headers = [np.array([kind, *rng.integers(1, 17, 2)], np.int32).tobytes() for _ in range(300)]
    problems = b"".join(header + rng.bytes(3072) for header in headers)
    assert multiply(1, problems) == multiply(2, problems)


def _rounded(exact: Fraction) -> Fraction:
    """Rounded to 24 binary digits, ties to even, without a limit of exponents."""
    if exact == 0:
        return exact
    exponent = abs(exact.numerator).bit_length() - exact.denominator.bit_length()
    if abs(exact) < Fraction(2) ** exponent:
        exponent -= 1
    unit = Fraction(2) ** (exponent - 23)
    return round(exact / unit) * unit  # Python rounds halves to even


def _flushed(exact: Fraction) -> Fraction:
    near = _rounded(exact)
    return near if abs(near) >= Fraction(2) ** -126 else Fraction(0)


@pytest.mark.parametrize("source", ["around one", "products near the smallest normal"])
def test_the_emulation_is_what_the_manual_says(
    multiply: Callable[[int, bytes], bytes], source: str
) -> None:
    """Products of even and of odd k are summed apart. Each step rounds once, and subnormal numbers
    count as zeros.
    """
    rng = np.random.default_rng(7)
    data = problem(rng, source)
    _, rows, steps = np.frombuffer(data[:12], np.int32)
    result = np.frombuffer(multiply(2, data), np.float32).reshape(16, 16)

    def numbers(words: NDArray[Any]) -> list[list[Fraction]]:
        floats = words.view(np.float32).reshape(16, -1)
        return [[_flushed(Fraction(float(x))) for x in row] for row in floats]

    factors = np.frombuffer(data[12:2060], np.uint16).astype(np.uint32) << 16
    a, b = numbers(factors[:512]), numbers(factors[512:])
    c = numbers(np.frombuffer(data[2060:], np.uint32))
    for m in range(rows):
        for n in range(0, 16, 5):
            halves = [Fraction(0), Fraction(0)]
            for k in range(2 * steps):
                product = a[m][k] * b[k // 2][2 * n + k % 2]
                halves[k % 2] = _flushed(halves[k % 2] + product)
            total = _flushed(c[m][n] + _flushed(halves[0] + halves[1]))
            assert Fraction(float(result[m, n])) == total


EMULATION = LEVELS[-1]
TILED = [EACH_LEVEL[0], EACH_LEVEL[-1]] if HAS_AMX else [EACH_LEVEL[-1]]  # with matrix tiles


@needs_amx
@pytest.mark.slow  # the emulation takes half a minute to compile
@pytest.mark.parametrize("float32_output", [False, True])
@pytest.mark.parametrize("shape", [(33, 7), (96, 64), (100, 513), (65, 2101)], ids=str)
def test_a_linear_layer_has_the_emulations_bits(
    shape: tuple[int, int], float32_output: bool
) -> None:
    names = {"write": "pack_linear", "linear": "packed_linear"}
    real, emulated = (ops_of("core", level, **names) for level in ("amx", EMULATION))
    for rows in (1, 5, 16, 17, 40, 100):
        x, weight, bias = linear_problem(rows, *shape, torch.bfloat16)
        x[0, : min(shape[1], 40) : 3] = 1e-39  # subnormal
        packed = packed_by(real.write, weight)
        arguments = (packed, bias, shape[0], float32_output)
        assert torch.equal(real.linear(x, *arguments), emulated.linear(x, *arguments))


@needs_amx
@pytest.mark.slow  # the emulation takes half a minute to compile
@pytest.mark.parametrize("head_dim", [64, 72, 128])
@pytest.mark.parametrize("block_size", [8, 16])
@pytest.mark.parametrize("cache_dtype", [None, torch.int8], ids=["plain", "int8"])
def test_attention_has_the_emulations_bits(
    head_dim: int, block_size: int, cache_dtype: torch.dtype | None
) -> None:
    shape = Shape(
        head_dim=head_dim, block_size=block_size, dtype=torch.bfloat16, cache_dtype=cache_dtype
    )
    step = make_step([(1, 1), (1, 300), (70, 70), (33, 290)], shape)
    results = [run(LevelBackend(level), step, shape)[0] for level in ("amx", EMULATION)]
    assert torch.equal(*results)
    assert not bool(results[0].isnan().any())


@pytest.mark.parametrize("level", TILED)
@pytest.mark.parametrize(
    "more",
    [
        {"head_dim": 64},
        {"head_dim": 72, "value_dim": 24, "block_size": 8},
        {"head_dim": 40, "value_dim": 128, "block_size": 24, "sliding_window": 70},
        {"head_dim": 256, "num_heads": 40, "soft_cap": 5.0, "has_alibi": True, "has_sinks": True},
    ],
    ids=str,
)
def test_digits_round_less_than_bfloat16_does(level: str, more: dict[str, Any]) -> None:
    """Over a cache of 8 bits, queries and weights have 16 bits. So nearly all results are the exact
    ones, rounded to bfloat16. With weights in bfloat16 four of ten would not be.
    """
    shape = Shape(dtype=torch.bfloat16, cache_dtype=torch.int8, **more)
    step = make_step([(1, 1), (1, 300), (70, 70), (33, 290), (2, 1100)], shape)
    out, _, _ = run(LevelBackend(level), step, shape)
    wide = step._replace(q=step.q.float(), k=step.k.float(), v=step.v.float())
    exact, _, _ = run(REFERENCE, wide, replace(shape, dtype=torch.float32))
    assert float((out == exact.bfloat16()).float().mean()) > 0.93


@pytest.mark.parametrize("level", TILED)
def test_numbers_that_are_not_finite_stay_in_their_rows_over_bytes(level: str) -> None:
    shape = Shape(dtype=torch.bfloat16, cache_dtype=torch.int8, head_dim=64)
    step = make_step([(90, 290)], shape)
    expected, _, _ = run(LevelBackend(level), step, shape)
    q, v = step.q.clone(), step.v.clone()
    q[20, :, 3], q[21, :, 5] = torch.nan, torch.inf
    v[80] = torch.inf
    out, _, _ = run(LevelBackend(level), step._replace(q=q, v=v), shape)
    rows = [row for row in range(80) if row not in (20, 21)]
    assert torch.equal(out[rows], expected[rows])
    assert bool(out[[20, 21]].isnan().any(-1).all())


_TILED_FORMS = [
    QuantFormat(4, 32, True),
    QuantFormat(4, 32, False),
    QuantFormat(8, 32, True),
    QuantFormat(8, 32, False),
    QuantFormat(4, 16, True),
    QuantFormat(8, 128, True),
    QuantFormat(8, 64, False),
    QuantFormat(4, 256, False),
    QuantFormat(4, 32, False, "float16", "minimums"),
    QuantFormat(4, 32, True, "float32", "e2m1"),
]


def _packed(form: QuantFormat, out_features: int, in_features: int) -> Tensor:
    """Random integers of the form, with scales and zero points or minimums."""
    generator = torch.Generator().manual_seed(out_features + in_features)
    groups = -(-in_features // form.group_size)
    values = torch.randint(0, 1 << form.bits, (out_features, in_features), generator=generator)
    scales = torch.randn(out_features, groups, generator=generator)
    zeros = None
    if not form.symmetric:
        zeros = torch.randint(
            0, 1 << form.bits, (out_features, groups), generator=generator
        ).float()
    return pack_quantized_reference(values.to(torch.uint8), scales, zeros, *form)


@pytest.mark.parametrize("form", _TILED_FORMS, ids=str)
@pytest.mark.parametrize("shape", [(96, 1024), (100, 1000), (33, 70)], ids=str)
@pytest.mark.parametrize("level", TILED)
def test_tiles_of_bytes_have_the_bits_of_the_level_below(
    form: QuantFormat, shape: tuple[int, int], level: str
) -> None:
    """With 1 row no level uses tiles. Tiles take 32 rows at a time: 100 rows need several turns."""
    below = EMULATION.removeprefix("amx_on_")
    tiled, other = (
        ops_of("quantized", each, linear="quantized_linear").linear for each in (level, below)
    )
    packed = _packed(form, *shape)
    for rows in (1, 7, 8, 16, 33, 100):
        x, _, bias = linear_problem(rows, *shape, torch.bfloat16)
        x[rows // 2] = 0
        if rows > 1:
            x[1, 3] = torch.inf
        arguments = (packed, bias, shape[0], False, None, None, *form)
        result, expected = tiled(x, *arguments), other(x, *arguments)
        assert torch.equal(result.view(torch.int16), expected.view(torch.int16))


def test_the_levels_that_run_here_are_named(record_property: Callable[[str, object], None]) -> None:
    record_property("instruction_sets", ",".join(LEVELS))
    assert LEVELS[-1] in EMULATED
    assert LEVELS[-2] == "portable"
    assert LEVELS[0] == detect_isa()
    assert set(LEVELS[:-1]) <= set(ISA_LEVELS)


# Linux refuses tiles to a process whose signal stack is too small for the tile registers.
REFUSED = """
import ctypes, sys
class Stack(ctypes.Structure):
    _fields_ = [("address", ctypes.c_void_p), ("flags", ctypes.c_int), ("size", ctypes.c_size_t)]
memory = ctypes.create_string_buffer(4096)
stack = Stack(ctypes.addressof(memory), 0, 4096)
assert ctypes.CDLL(None).sigaltstack(ctypes.byref(stack), None) == 0
from ostinato.ops.native.instruction_sets import detect_isa, runnable_levels, why_no_tiles
print(detect_isa(), "amx" in runnable_levels(), why_no_tiles())
"""


@needs_amx
def test_tiles_that_linux_refuses_are_not_used() -> None:
    done = subprocess.run([sys.executable, "-c", REFUSED], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    level, has_amx, reason = done.stdout.split(maxsplit=2)
    assert level == "avx512bf16"
    assert has_amx == "False"
    assert reason.startswith("arch_prctl(ARCH_REQ_XCOMP_PERM) failed: ENOSPC")
