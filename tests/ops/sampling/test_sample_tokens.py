"""The C++ op that samples, against plain torch, on all instruction sets that run here."""

from __future__ import annotations

import math
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ostinato.ops.native import build
from ostinato.ops.native.build import find_compiler
from ostinato.ops.native.instruction_sets import instruction_set
from ostinato.ops.sampling import sample_rows as sampling
from ostinato.ops.sampling.sample_rows import RowSampling, SamplePath, sample_path, sample_rows
from tests.ops.kernel_checks import EACH_LEVEL, LEVELS, ops_of

CHECK = Path(__file__).with_name("sampling_check.cpp")


def kernel(isa: str) -> Callable[[Tensor, list[RowSampling]], list[int]]:
    assert hasattr(sampling, "__all__")  # its import defines the op
    op = ops_of("core", isa, sample="sample_tokens").sample

    def run(logits: Tensor, rows: list[RowSampling]) -> list[int]:
        return op(logits, torch.tensor(rows, dtype=torch.float64).t().contiguous()).tolist()

    return run


def row_sampling(
    uniform: float,
    vocabulary: int,
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
) -> RowSampling:
    limit = top_k or vocabulary
    path = sample_path(
        temperature=temperature, top_k=limit, top_p=top_p, min_p=min_p, vocab_size=vocabulary
    )
    return RowSampling(path, max(temperature, 1e-3), limit, top_p, min_p, uniform)


def plain(logits: Tensor, rows: list[RowSampling]) -> list[int]:
    inputs = sampling.SampleInputs(*torch.tensor(rows, dtype=torch.float64).t().contiguous())
    return sample_rows(logits, inputs, set(SamplePath)).tolist()


@pytest.mark.parametrize("isa", EACH_LEVEL)
@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    vocabulary=st.sampled_from([1, 5, 16, 255, 256, 600, 5000]),
    scale=st.sampled_from([0.1, 3.0, 30.0]),
    temperature=st.sampled_from([0.0, 0.3, 1.0, 2.0]),
    top_k=st.sampled_from([0, 1, 7, 50, 700]),
    top_p=st.sampled_from([1.0, 0.97, 0.5, 0.01]),
    min_p=st.sampled_from([0.0, 0.05, 0.9]),
)
def test_a_draw_is_that_of_plain_torch(
    isa: str,
    seed: int,
    vocabulary: int,
    scale: float,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
) -> None:
    """The op draws the token that plain torch draws from the same random number.

    A rounding error can decide between two tokens. So the token may also be one that plain torch
    draws from a number a little smaller or larger, or with slightly different filters.
    """
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(8, vocabulary + 3, generator=generator)[:, :vocabulary] * scale
    uniforms = torch.rand(8, generator=generator, dtype=torch.float64).tolist()
    top_k = top_k if top_k < vocabulary else 0

    def rows(shift: float, slack: float = 0.0) -> list[RowSampling]:
        return [
            row_sampling(
                min(max(u + shift, 0.0), 1 - 1e-9),
                vocabulary,
                temperature=temperature,
                top_k=top_k,
                top_p=min(1.0, max(1e-6, top_p + slack)) if top_p < 1.0 else 1.0,
                min_p=max(0.0, min_p - slack),
            )
            for u in uniforms
        ]

    drawn = kernel(isa)(logits, rows(0.0))
    near = [plain(logits, rows(s, slack)) for s in (0, -1e-5, 1e-5) for slack in (0, -1e-6, 1e-6)]
    for index, token in enumerate(drawn):
        assert token in {tokens[index] for tokens in near}


@pytest.mark.parametrize("isa", EACH_LEVEL)
@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    vocabulary=st.sampled_from([513, 700, 5000]),
    form=st.sampled_from(["flat", "equal", "ties", "peaks", "masked"]),
    top_p=st.sampled_from([0.0001, 0.3, 0.9, 0.95, 0.999, 0.999999]),
    min_p=st.sampled_from([0.0, 1e-4]),
)
def test_top_p_over_many_candidates_is_that_of_plain_torch(
    isa: str, seed: int, vocabulary: int, form: str, top_p: float, min_p: float
) -> None:
    """Like the test above, but the logits of the drawn tokens are compared instead of their ids.

    Plain torch may sort tokens with equal logits in another order.
    """
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(4, vocabulary, generator=generator) * 0.1
    if form == "equal":
        logits = torch.zeros(4, vocabulary)
    elif form == "ties":
        logits = (logits * 20).round() / 4
    elif form == "peaks":
        logits[:, :3] += 12.0
    elif form == "masked":
        logits[torch.rand(4, vocabulary, generator=generator) < 0.2] = -math.inf
    uniforms = torch.rand(4, generator=generator, dtype=torch.float64).tolist()

    def rows(shift: float, slack: float) -> list[RowSampling]:
        numbers = [min(max(u + shift, 0.0), 1 - 1e-9) for u in uniforms]
        share = min(1 - 1e-9, max(1e-6, top_p + slack))
        return [row_sampling(u, vocabulary, top_p=share, min_p=min_p) for u in numbers]

    drawn = kernel(isa)(logits, rows(0.0, 0.0))
    near = [plain(logits, rows(s, slack)) for s in (0, -1e-5, 1e-5) for slack in (0, -1e-6, 1e-6)]
    for index, token in enumerate(drawn):
        values = {float(logits[index, tokens[index]]) for tokens in near}
        assert float(logits[index, token]) in values


@pytest.fixture(scope="module")
def check_sampling(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int], list[int]]:
    """Compiles sampling_check.cpp for a level, runs it with a number of rows, reads the output."""
    headers = Path(build.__file__).parent
    root = Path(torch.__file__).parent
    folder = tmp_path_factory.mktemp("programs")

    def run(isa: str, num_rows: int) -> list[int]:
        program = folder / isa
        command = [
            *(find_compiler(), *build._FLAGS, *instruction_set(isa).flags),
            *(
                f"-I{headers}",
                f"-I{root / 'include'}",
                str(CHECK),
                *(str(headers / f"core/{name}.cpp") for name in ("install", "call", "thread_pool")),
            ),
            *(f"-L{root / 'lib'}", "-ltorch_cpu", f"-Wl,-rpath,{root / 'lib'}", "-o", str(program)),
        ]
        subprocess.run(command, check=True)
        done = subprocess.run(
            [program, "1", str(num_rows)], capture_output=True, text=True, check=True
        )
        return [int(word) for word in done.stdout.split()]

    return run


@pytest.mark.parametrize(
    ("isa", "num_rows"),
    [(LEVELS[0], 300), *(pytest.param(isa, 3000, marks=pytest.mark.slow) for isa in LEVELS)],
)
def test_selected_tokens_are_those_of_a_sorted_row(
    check_sampling: Callable[[str, int], list[int]], isa: str, num_rows: int
) -> None:
    """The C++ program draws from each row with selection and from the sorted row, and compares.

    Rows are flat or peaked, or have ties, clusters or impossible tokens; top-p is between 0 and 1.
    """
    rows, selected, wrong = check_sampling(isa, num_rows)
    assert rows == 4 * num_rows
    assert selected > rows // 2
    assert wrong == 0


@pytest.mark.parametrize("isa", EACH_LEVEL)
@pytest.mark.parametrize("vocabulary", [3, 300])
def test_frequencies_are_likelihoods(isa: str, vocabulary: int) -> None:
    generator = torch.Generator().manual_seed(1)
    row = torch.randn(vocabulary, generator=generator)
    count = 3000
    rows = [row_sampling((i + 0.5) / count, vocabulary, temperature=0.7) for i in range(count)]
    drawn = torch.tensor(kernel(isa)(row.repeat(count, 1), rows))
    shares = torch.bincount(drawn, minlength=vocabulary) / count
    assert torch.allclose(shares, (row / 0.7).softmax(-1), atol=2 / count)


@pytest.mark.parametrize("isa", EACH_LEVEL)
@pytest.mark.parametrize("filters", [{}, {"top_k": 2}, {"top_p": 0.9999}, {"min_p": 1e-6}])
def test_impossible_tokens_are_never_drawn(isa: str, filters: dict[str, float]) -> None:
    logits = torch.full((2, 500), -math.inf)
    logits[:, 77], logits[:, 444] = 0.0, -1.0
    ends = [row_sampling(u, 500, **filters) for u in (0.0, math.nextafter(1.0, 0.0))]  # type: ignore[arg-type]
    assert kernel(isa)(logits, ends) == ([77, 444])


@pytest.mark.parametrize("isa", EACH_LEVEL)
@pytest.mark.parametrize(
    "filters",
    [{}, {"top_k": 2}, {"top_k": 600}, {"top_p": 0.9}, {"min_p": 1e-6}, {"temperature": 0.0}],
)
def test_logits_that_are_not_numbers_are_never_drawn(isa: str, filters: dict[str, float]) -> None:
    logits = torch.zeros(3, 700)
    logits[0, 10:650] = math.nan
    logits[1] = math.nan
    logits[2, ::2] = math.nan
    rows = [row_sampling(u, 700, **filters) for u in (0.9, 0.5, 0.3)]  # type: ignore[arg-type]
    drawn = kernel(isa)(logits, rows)
    assert drawn[0] in {*range(10), *range(650, 700)}
    assert drawn[1] == 0  # no token is possible
    assert drawn[2] % 2 == 1


@pytest.mark.parametrize("isa", EACH_LEVEL)
def test_the_first_of_equal_logits_is_the_likeliest(isa: str) -> None:
    logits = torch.zeros(3, 700)
    logits[1, 40] = logits[1, 699] = 2.0
    logits[2] = -math.inf
    assert kernel(isa)(logits, [row_sampling(0.5, 700, temperature=0.0)] * 3) == [0, 40, 0]


@pytest.mark.parametrize("isa", EACH_LEVEL)
def test_a_row_does_not_depend_on_its_neighbours_or_threads(
    isa: str, set_threads: Callable[[int], None]
) -> None:
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(24, 4000, generator=generator)
    options: list[dict[str, float]] = [{}, {"top_k": 40}, {"top_p": 0.9}, {"temperature": 0.0}]
    rows = [row_sampling(i / 24, 4000, **options[i % 4]) for i in range(24)]  # type: ignore[arg-type]
    set_threads(2)
    together = kernel(isa)(logits, rows)
    set_threads(1)
    assert kernel(isa)(logits, rows) == together
    alone = [kernel(isa)(logits[i : i + 1], rows[i : i + 1])[0] for i in range(24)]
    assert alone == together
