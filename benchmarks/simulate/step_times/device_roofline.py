"""Estimates step costs from a device's data sheet, for hardware that is not available.

    seconds = max(operations / rate, bytes / bandwidth) of layers + attention + fixed cost of a step

Of a mixture of experts, a token is multiplied with the experts that it is routed to, and a step
reads the experts that some token of it has. Routing counts as uniform and independent.
Rates and bandwidth are the shares of the peak that good kernels reach. A measured step-cost table
is better. The roofline model is that of Williams, Waterman and Patterson, "Roofline: an insightful
visual performance model for multicore architectures", CACM 2009. Peak rates are those of the
vendors' data sheets (dense, without sparsity).
"""

from __future__ import annotations

from dataclasses import dataclass

from ostinato.runtime.costs.cost_table import CostTable
from ostinato.runtime.costs.step_limits import StepLimits

__all__ = ("ACCELERATORS", "Accelerator", "ModelShape", "roofline_table")

_GIB = 1 << 30
_COMPUTE_SHARE, _MEMORY_SHARE = 0.7, 0.85  # shares of the peaks that large kernels reach


@dataclass(frozen=True, slots=True, kw_only=True)
class Accelerator:
    """One device."""

    tflops: float  # dense, 16-bit
    bandwidth_gb_s: float  # memory bandwidth
    memory_gib: float
    step_us: float = 250.0  # launching a captured graph, sampling, reading the tokens


ACCELERATORS = {
    "a10g": Accelerator(tflops=70.0, bandwidth_gb_s=600.0, memory_gib=24.0),
    "a100": Accelerator(tflops=312.0, bandwidth_gb_s=2039.0, memory_gib=80.0),
    "b200": Accelerator(tflops=2250.0, bandwidth_gb_s=8000.0, memory_gib=180.0),
    "h100": Accelerator(tflops=989.0, bandwidth_gb_s=3350.0, memory_gib=80.0),
    "h200": Accelerator(tflops=989.0, bandwidth_gb_s=4800.0, memory_gib=141.0),
    "l4": Accelerator(tflops=121.0, bandwidth_gb_s=300.0, memory_gib=24.0),
    "l40s": Accelerator(tflops=362.0, bandwidth_gb_s=864.0, memory_gib=48.0),
    "mi300x": Accelerator(tflops=1307.0, bandwidth_gb_s=5300.0, memory_gib=192.0),
    "rtx4090": Accelerator(tflops=165.0, bandwidth_gb_s=1008.0, memory_gib=24.0),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """The sizes of a model that determine a step's work."""

    # Multiplied with a token, the output layer excluded; of the experts, those of one token.
    num_parameters: int
    num_logit_parameters: int  # of the output layer, multiplied with every row that samples
    weight_bytes: int  # bytes of all parameters of the layers and the output layer
    expert_bytes: int = 0  # those of experts that tokens are routed to
    expert_share: float = 1.0  # of the experts, how many a token has
    kv_bytes_per_token: int  # keys and values of all layers
    attention_width: int  # layers x query heads x head dimension

    def read_bytes(self, tokens: int) -> float:
        """The bytes of weights that a step of so many tokens reads."""
        return self.weight_bytes - self.expert_bytes * (1 - self.expert_share) ** tokens


def roofline_table(
    device: Accelerator, model: ModelShape, limits: StepLimits, max_model_len: int
) -> CostTable:
    """The step costs of a model on a device.

    Args:
        device: the device's peak rates.
        model: the model's sizes.
        limits: the largest step.
        max_model_len: tokens of a sequence, at most.
    """
    rate = device.tflops * 1e12 * _COMPUTE_SHARE
    bandwidth = device.bandwidth_gb_s * 1e9 * _MEMORY_SHARE

    def seconds(tokens: int, seqs: int, context: int) -> float:
        operations = 2.0 * (tokens * model.num_parameters + seqs * model.num_logit_parameters)
        layers = max(operations / rate, model.read_bytes(tokens) / bandwidth)
        # Each new token attends to its context and on average to half of the new tokens.
        length = context + tokens / seqs / 2
        read = seqs * (context + tokens / seqs) * model.kv_bytes_per_token
        attention = max(4.0 * tokens * length * model.attention_width / rate, read / bandwidth)
        return layers + attention + device.step_us / 1e6

    tokens = _doubling(limits.max_num_batched_tokens)
    seqs = _doubling(limits.max_num_seqs)
    contexts = (0, *(size for size in (1024, 4096, 16384, 65536) if size < max_model_len))
    return CostTable.from_medians(
        tokens=tokens,
        seqs=seqs,
        contexts=contexts,
        seconds=[seconds(max(t, s), s, c) for t in tokens for s in seqs for c in contexts],
        decode=[seconds(s, s, c) for s in seqs for c in contexts],
    )


def _doubling(most: int) -> list[int]:
    return [*(1 << power for power in range(most.bit_length()) if 1 << power < most), most]
