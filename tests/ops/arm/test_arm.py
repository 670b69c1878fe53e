"""The C++ kernels for 64-bit Arm on an emulated processor, against those of this machine.

No torch for Arm is needed: run_calls.cpp makes the calls through a CpuGraph. The tests need
Debian's packages g++-aarch64-linux-gnu and qemu-user.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from ostinato.ops import activation, attention, norm, quantized, rope
from ostinato.ops.linear import compressed_linear
from ostinato.ops.linear.compressed_linear import compress_linear_weight
from ostinato.ops.linear.packed_linear import pack_linear_weight
from ostinato.ops.logprobs import row_logprobs
from ostinato.ops.moe import routing
from ostinato.ops.native import build
from ostinato.ops.native.abi import DTYPE_CODES
from ostinato.ops.native.instruction_sets import instruction_set
from ostinato.ops.native.library import load
from tests.ops.attention_steps import CpuOrder, Shape, make_step
from tests.ops.recurrent.recurrent_problems import OPS, SequenceStep

_COMPILER, _EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"
# Their import registers the ops.
_OPS = (activation, attention, compressed_linear, norm, quantized, rope, row_logprobs, routing)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        shutil.which(_COMPILER) is None or shutil.which(_EMULATOR) is None,
        reason="needs g++-aarch64-linux-gnu and qemu-user (Debian packages)",
    ),
]


class Program(NamedTuple):
    """A library's kernels for Arm in an executable, and the ops of the same library here."""

    library: str
    path: Path

    def check(self, op: str, *arguments: object, tolerance: float = 1e-5) -> None:
        """Compare one call's results, and the tensors it was given, with those of this machine."""
        here = getattr(getattr(torch.ops, load(self.library, "portable").namespace), op).default
        given = [each.clone() if isinstance(each, Tensor) else each for each in arguments]
        results = here(*given)
        results: list[Tensor] = [results] if isinstance(results, Tensor) else list(results or ())
        tensors = [each for each in given if isinstance(each, Tensor)]
        there = self._run(op, here, arguments, results)
        for expected, actual in zip([*results, *tensors], there, strict=True):
            if expected.is_floating_point():
                rounding = 2.0**-7 if expected.dtype is torch.bfloat16 else 0.0
                torch.testing.assert_close(
                    actual, expected, rtol=tolerance + rounding, atol=tolerance * 10, equal_nan=True
                )
            else:
                assert torch.equal(actual, expected)

    def _run(
        self,
        op: str,
        here: torch._ops.OpOverload,
        arguments: tuple[object, ...],
        like: list[Tensor],
    ) -> list[Tensor]:
        data, lines, values = bytearray(), [], []
        schema = here._schema.arguments
        tensors = [each for each in arguments if isinstance(each, Tensor)]
        for each in tensors:
            assert each.is_contiguous()
            data += b"\0" * (-len(data) % 64)
            sizes = " ".join(map(str, each.shape))
            lines.append(f"tensor {DTYPE_CODES[each.dtype]} {len(data)} {sizes}")
            data += each.view(torch.uint8).numpy().tobytes() if each.dim() else bytes(each.item())
        number = 0
        for argument, value in zip(schema, arguments, strict=True):
            kind = str(argument.type)
            if isinstance(value, Tensor):
                values.append(f"slot {number}")
                number += 1
            elif value is None:
                values.append("none")
            elif kind == "float":
                values.append(f"number {value!r}")
            elif kind == "str":
                values.append(f"text {value}")
            else:
                values.append(f"integer {int(value)}")  # type: ignore[call-overload]
        sizes = " ".join(str(each.nbytes) for each in like)
        folder = self.path.parent
        (folder / "calls").write_text("\n".join([*lines, *values, f"call {op} {sizes}", ""]))
        (folder / "data").write_bytes(data)
        files = [str(folder / name) for name in ("calls", "data", "out")]
        done = subprocess.run(
            [_EMULATOR, "-cpu", "neoverse-n1", self.path, *files], capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        out, place, found = (folder / "out").read_bytes(), 0, []
        for each in [*like, *tensors]:
            part = torch.frombuffer(bytearray(out[place : place + each.nbytes]), dtype=each.dtype)
            found.append(part.view(each.shape))
            place += each.nbytes
        assert place == len(out)
        return found


def _compile(library: str, folder: Path) -> Program:
    include = (f"-I{build._SOURCE_DIR}", f"-I{build._torch_directory() / 'include'}")
    flags = (*build._FLAGS, *instruction_set("portable").flags, *include)
    sources = dict.fromkeys(name for unit in build.LIBRARIES[library] for name in unit)
    unit = folder / "unit.cpp"
    runner = Path(__file__).with_name("run_calls.cpp")
    names = [*(f"{name}.cpp" for name in sources), str(runner)]
    unit.write_text("".join(f'#include "{name}"\n' for name in names))
    objects = folder / "unit.o"
    subprocess.run([_COMPILER, *flags, "-c", unit, "-o", objects], check=True)
    wanted = subprocess.run(
        ["aarch64-linux-gnu-nm", "--undefined-only", "--format=just-symbols", objects],
        check=True,
        capture_output=True,
        text=True,
    ).stdout.split()
    # Stand-ins of torch's functions: those of dtypes return the codes, all others abort.
    codes = {f"aoti_torch_dtype_{str(each)[6:]}": code for each, code in DTYPE_CODES.items()}
    stand_in = folder / "torch.cpp"
    stand_in.write_text(
        "#include <cstdlib>\n"
        + "".join(
            f'extern "C" int {name}() {{ {f"return {codes[name]}" if name in codes else "std::abort()"}; }}\n'
            for name in wanted
            if name.startswith(("aoti_", "torch_"))
        )
    )
    path = folder / "run_calls"
    subprocess.run([_COMPILER, "-w", stand_in, objects, "-static", "-o", path], check=True)
    return Program(library, path)


@pytest.fixture(scope="module")
def core(tmp_path_factory: pytest.TempPathFactory) -> Program:
    return _compile("core", tmp_path_factory.mktemp("core"))


@pytest.fixture(scope="module")
def recurrent(tmp_path_factory: pytest.TempPathFactory) -> Program:
    return _compile("recurrent", tmp_path_factory.mktemp("recurrent"))


@pytest.fixture(scope="module")
def in_integers(tmp_path_factory: pytest.TempPathFactory) -> Program:
    return _compile("quantized", tmp_path_factory.mktemp("quantized"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_packed_linear(core: Program, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    weight, bias = torch.randn(72, 96).to(dtype), torch.randn(72).to(dtype)
    packed = pack_linear_weight(weight)
    core.check("pack_linear", torch.ones_like(packed), weight[:50], 20)
    core.check("packed_rows", packed, torch.tensor([3, 71, 0]), 72, 96)
    for rows in (1, 5, 70):
        x = torch.randn(rows, 96).to(dtype)
        residual = torch.randn(rows, 72).to(dtype)
        core.check("packed_linear", x, packed, bias, 72, True, None)
        core.check("packed_linear", x, packed, None, 72, False, residual)


def test_compressed_linear(core: Program) -> None:
    torch.manual_seed(0)
    weight = torch.randn(72, 96).bfloat16()
    weight[:32] *= torch.logspace(-30, 30, 96).bfloat16()  # too diverse to be compressed
    weight[70, 9] = 1e30  # an exception
    compressed = compress_linear_weight(weight)
    core.check("compress_linear", torch.ones_like(compressed[0]), weight, 0)
    core.check("compressed_rows", *compressed, torch.tensor([3, 70, 0]), 72, 96)
    for rows in (1, 5, 70):
        x = torch.randn(rows, 96).bfloat16()
        core.check("compressed_linear", x, *compressed, None, 72, True, None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("cache", [None, torch.int8])
def test_paged_attention(core: Program, dtype: torch.dtype, cache: torch.dtype | None) -> None:
    shape = Shape(num_heads=4, num_kv_heads=2, head_dim=32, dtype=dtype, cache_dtype=cache)
    step = make_step([(1, 70), (9, 9), (20, 50)], shape, 0)
    order = CpuOrder(step.k_cache)
    caches = (order.keys(step.k_cache), order.values(step.v_cache))
    extra = (0.17, 40, 12.0, torch.rand(4), torch.randn(4), "cpu")
    for options in ((0.17, 0, 0.0, None, None, "cpu"), extra):
        core.check("paged_attention", step.q, step.k, step.v, *caches, *step.metadata, *options)


def test_rows(core: Program) -> None:
    torch.manual_seed(0)
    for dtype in (torch.float32, torch.bfloat16):
        x, weight = torch.randn(7, 96).to(dtype), torch.randn(96).to(dtype)
        core.check("rms_norm", x, weight, 1e-6, x.flip(0).contiguous())
        core.check("layer_norm", x, weight, weight.flip(0).contiguous(), 1e-6)
        core.check("activation", x, "silu", True)
        core.check("activation", x, "gelu_tanh", False)
        heads, angles = torch.randn(7, 6, 16).to(dtype), torch.randn(7, 8)
        norms = torch.randn(2, 16).to(dtype)
        core.check("rotate_heads", heads, angles.cos(), angles.sin(), *norms, 4, 1e-6)
    core.check("row_logprobs", torch.randn(3, 500), torch.tensor([[1], [499], [7]]), 5)


def test_experts(core: Program) -> None:
    torch.manual_seed(0)
    core.check("route", torch.randn(9, 8), None, 2, "softmax", True, 1.0, 1, 1, 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("op", OPS)
def test_recurrent_ops(recurrent: Program, op: str, dtype: torch.dtype) -> None:
    sequences = [SequenceStep(70, 0, 1, 2, 9), SequenceStep(1, 3, 3), SequenceStep(1, 4, 5)]
    problem = OPS[op](74, 6, dtype=dtype).step(sequences)
    if op == "state_space":  # the text of infinity cannot be read there
        problem = problem.having(largest_step=9.0)
    values = [problem.arguments[name] for name in problem.names]
    recurrent.check(op, *(x.contiguous() if isinstance(x, Tensor) else x for x in values))


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_quantized_linear(in_integers: Program, bits: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    form = quantized.QuantFormat(bits, 32, bits == 8)
    weight = torch.randn(72, 96)
    in_integers.check("quantize_linear", weight, *form)
    stored = quantized.quantize_linear_weight(weight, form)
    in_integers.check("quantized_rows", stored, torch.tensor([3, 71]), 72, 96, True, *form)
    for rows in (1, 5, 70):
        x = torch.randn(rows, 96).to(dtype)
        in_integers.check("quantized_linear", x, stored, None, 72, True, None, None, *form)
