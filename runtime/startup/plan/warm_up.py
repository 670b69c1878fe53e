"""Which steps a start runs before the engine is ready, so that no kernel compiles afterwards."""

from __future__ import annotations

from collections.abc import Iterable

from ostinato.models.step_tensors import StepSizes

__all__ = ("cpu_steps", "gpu_steps")

# Enough for the kernels of several rows. A step of this size takes about as long as a step of one
# token, because it reads the same weights.
_SEVERAL_TOKENS = 8


def cpu_steps(most_tokens: int) -> tuple[StepSizes, ...]:
    """One step of several tokens, and one of a single token.

    Args:
        most_tokens: tokens of the engine's largest step.
    """
    return tuple(
        StepSizes(n, 1, 1) for n in sorted({min(_SEVERAL_TOKENS, most_tokens), 1}, reverse=True)
    )


def gpu_steps(
    tokens: Iterable[int], seqs: Iterable[int], most_tokens: int, most_seqs: int
) -> tuple[StepSizes, ...]:
    """Steps that together run each tile of each kernel.

    GPU kernels have tiles for numbers of tokens, of rows of logits and of sequences. The first
    steps have one sequence. The largest of them comes first, because Inductor tunes its kernels for
    the first shape. In the steps after them each sequence has one token. The last step is the
    largest of the engine.

    Args:
        tokens: numbers of tokens, one for each tile.
        seqs: numbers of sequences, and of rows of logits, one for each tile.
        most_tokens: tokens of the engine's largest step.
        most_seqs: the largest number of sequences of a step.
    """
    return (
        *(StepSizes(n, 1, 1) for n in sorted({min(n, most_tokens) for n in tokens}, reverse=True)),
        *(StepSizes(n, n, n) for n in sorted(seqs) if 1 < n <= min(most_seqs, most_tokens)),
        StepSizes(most_tokens, 1, 1),
    )
