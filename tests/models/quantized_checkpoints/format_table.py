"""Writes the table of stored formats in docs/quantization.md.

    python -m tests.models.quantized_checkpoints.format_table

The last column is measured: the error of the logits of a small random model through the
kernels of this machine, relative to transformers on the weights that the checkpoint stands for.
"""

from __future__ import annotations

import re
import tempfile
from pathlib import Path

from tests.models.quantized_checkpoints.writers import Form

__all__ = ("PAGE", "row_of", "rows_in")

PAGE = Path(__file__).parents[3] / "docs/quantization.md"
_BEGIN, _END = "<!-- formats: begin -->\n", "<!-- formats: end -->\n"
_HEAD = (
    "| format | bits | group | columns | zero points | kernel | error |\n"
    "|---|---|---|---|---|---|---|\n"
)
_NAMES = {
    "gptq": "GPTQ",
    "gptq_v2": "GPTQ, version 2",
    "awq": "AWQ, gemm",
    "pack_quantized": "compressed-tensors pack-quantized",
    "int_quantized": "compressed-tensors int-quantized",
    "float_quantized": "compressed-tensors float-quantized",
    "nvfp4_pack": "compressed-tensors nvfp4-pack-quantized",
    "fp8": "FP8",
    "modelopt": "ModelOpt",
    "mxfp4": "MXFP4 (gpt-oss)",
}
_FLOATS = ("float_quantized", "nvfp4_pack", "fp8", "modelopt", "mxfp4")


def row_of(form: Form) -> str:
    """A row without the measured column."""
    if form.method == "auto_round":
        name = f"AutoRound {form.settings['packing_format'].partition(':')[2]}"
    else:
        name = _NAMES[form.method]
    is_float = form.method in _FLOATS
    kernel = f"int{form.bits}"
    group = "a row" if form.group == -1 else str(form.group)
    if is_float:
        kernel = "float 8" if form.bits == 8 else "int4 by a table"
        if form.bits == 8:
            is_row = form.method == "float_quantized" and not form.settings
            block = f"{form.group} x {form.group}"
            group = block if form.group > 0 else "a row" if is_row else "the matrix"
    cells = (
        name,
        str(form.bits),
        group,
        "act-order" if form.act_order else "in order",
        "none" if form.symmetric else "yes",
        kernel,
    )
    return f"| {' | '.join(cells)} |"


def rows_in(text: str) -> list[str]:
    """The rows of the page without the measured column."""
    table = text[text.index(_BEGIN) + len(_BEGIN) : text.index(_END)].removeprefix(_HEAD)
    return [re.sub(r" [^|]+ \|$", "", line) for line in table.splitlines()]


def main() -> None:
    from tests.models.quantized_checkpoints.test_formats import FORMS, MXFP4, measure

    lines = []
    for form in (*FORMS, MXFP4):
        with tempfile.TemporaryDirectory() as scratch:
            lines.append(f"{row_of(form)} {measure(form, Path(scratch)):.1%} |\n")
    text = PAGE.read_text(encoding="utf-8")
    before, after = text[: text.index(_BEGIN)], text[text.index(_END) :]
    PAGE.write_text(f"{before}{_BEGIN}{_HEAD}{''.join(lines)}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
