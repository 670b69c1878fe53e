"""Estimates step costs from a device's data sheet, for hardware that is not available.

    seconds = max(operations / rate, bytes / bandwidth) of layers + attention + fixed cost of a step

In a mixture of experts, a token is multiplied with the experts that it is routed to. A step reads
all experts that its tokens are routed to. Routing is assumed to be uniform and independent.

A recurrent layer reads and writes the states of each sequence once in a step, whatever the context.

An engine on several devices adds the time of exchanges between them: two sums over all ranks of a
stage in each layer (in two phases, each of one latency, as reduce-scatter and all-gather), and one
hand-off of hidden states between two stages. A step has the fixed cost once in each stage.

Rates and bandwidth are the shares of the peak that good kernels reach. A measured step-cost table
is better. The roofline model is that of Williams, Waterman and Patterson, "Roofline: an insightful
visual performance model for multicore architectures", CACM 2009. Peak rates are those of the
vendors' data sheets (dense, without sparsity), and so are the bandwidths of links. Latencies are
estimates. With the latency of NVLink, a sum of 0.5 MB over 2 to 8 H100 takes 7 to 11 us, as users
of custom kernels report (vllm-project/vllm#24111).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ostinato.conf.sections.tuning_schema import LinkName
from ostinato.runtime.costs.cost_table import CostTable
from ostinato.runtime.costs.step_limits import StepLimits

__all__ = (
    "ACCELERATORS",
    "LINKS",
    "ONE_DEVICE",
    "Accelerator",
    "Division",
    "Link",
    "ModelShape",
    "roofline_table",
)

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
class Link:
    """The connection of two devices."""

    gb_s: float  # in one direction
    latency_us: float  # time of a small message


LINKS = {
    LinkName.nvlink: Link(gb_s=450.0, latency_us=4.0),  # the fourth generation
    LinkName.pcie: Link(gb_s=64.0, latency_us=8.0),  # 5.0, 16 lanes
    LinkName.infiniband: Link(gb_s=50.0, latency_us=10.0),  # 400 Gb/s
    LinkName.ethernet: Link(gb_s=12.5, latency_us=40.0),  # 100 Gb/s
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Division:
    """How an engine's model is divided among devices."""

    tensor: int = 1  # ranks of each stage
    pipeline: int = 1  # stages
    link: Link = LINKS[LinkName.nvlink]  # between the ranks of a stage
    stage_link: Link = LINKS[LinkName.nvlink]  # between stages

    def sum_seconds(self, num_bytes: float) -> float:
        """Seconds of an all-reduce among the ranks of a stage."""
        if self.tensor == 1:
            return 0.0
        moved = 2 * (self.tensor - 1) / self.tensor * num_bytes
        return 2 * self.link.latency_us / 1e6 + moved / _reached(self.link)

    def hand_off_seconds(self, num_bytes: float) -> float:
        """Seconds of all hand-offs of hidden states of a step."""
        link = self.stage_link
        return (self.pipeline - 1) * (link.latency_us / 1e6 + num_bytes / _reached(link))


def _reached(link: Link) -> float:
    """The bytes per second that large messages reach."""
    return link.gb_s * 1e9 * _MEMORY_SHARE


ONE_DEVICE = Division()


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """The sizes of a model that determine a step's work."""

    # Parameters that one token is multiplied with: of the experts only its own, and without the
    # output layer.
    num_parameters: int
    num_logit_parameters: int  # parameters of the output layer; rows that sample use them
    weight_bytes: int  # bytes of all parameters of the layers and the output layer
    expert_bytes: int = 0  # bytes of the parameters of routed experts
    expert_share: float = 1.0  # the share of the experts that a token uses
    kv_bytes_per_token: int  # keys and values of all layers
    attention_width: int  # layers x query heads x head dimension
    # {window: layers that have it}, windows as `paged_attention` takes them. Empty = no layer has
    # a window.
    windows: dict[int, int] = field(default_factory=dict)
    state_bytes: int = 0  # states of a sequence in all recurrent layers
    state_operations: int = 0  # by one token, on all of these states
    num_layers: int = 0
    hidden_bytes: int = 0  # one token's hidden state, which ranks and stages exchange

    def read_bytes(self, tokens: int) -> float:
        """The bytes of weights that a step of `tokens` tokens reads."""
        return self.weight_bytes - self.expert_bytes * (1 - self.expert_share) ** tokens

    def seen(self, length: float) -> float:
        """Tokens of a context of `length` tokens that a layer sees, the mean over all layers."""
        windows = self.windows or {0: 1}
        total = sum(
            count * (min(length, abs(window)) if window else length)
            for window, count in windows.items()
        )
        return total / sum(windows.values())


def roofline_table(
    device: Accelerator,
    model: ModelShape,
    limits: StepLimits,
    max_model_len: int,
    division: Division = ONE_DEVICE,
) -> CostTable:
    """The step costs of a model on a device, or on several: the time through all stages.

    Args:
        device: the device's peak rates.
        model: the model's sizes.
        limits: the largest step.
        max_model_len: tokens of a sequence, at most.
        division: how the model is divided among devices of this kind.
    """
    # The rate of the ranks of one stage together, because the stages take turns.
    rate = division.tensor * device.tflops * 1e12 * _COMPUTE_SHARE
    bandwidth = division.tensor * device.bandwidth_gb_s * 1e9 * _MEMORY_SHARE

    def seconds(tokens: int, seqs: int, context: int) -> float:
        operations = 2.0 * (tokens * model.num_parameters + seqs * model.num_logit_parameters)
        layers = max(operations / rate, model.read_bytes(tokens) / bandwidth)
        # Each new token attends to its context and on average to half of the new tokens.
        length = model.seen(context + tokens / seqs / 2)
        read = seqs * (model.seen(context) + tokens / seqs) * model.kv_bytes_per_token
        read += 2 * seqs * model.state_bytes
        work = 4.0 * tokens * length * model.attention_width
        work += tokens * model.state_operations
        attention = max(work / rate, read / bandwidth)
        hidden = tokens * model.hidden_bytes
        exchanges = 2 * model.num_layers * division.sum_seconds(hidden)
        exchanges += division.hand_off_seconds(hidden)
        return layers + attention + exchanges + division.pipeline * device.step_us / 1e6

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
