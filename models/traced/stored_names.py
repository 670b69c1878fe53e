"""The names of a traced model's tensors in checkpoints.

transformers renames tensors and stacks experts while it loads a checkpoint. Its list of these
changes is applied in reverse here: from the names of the loaded model to those of the checkpoint.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from torch import Tensor

from ostinato.models.base import CheckpointLayout
from ostinato.models.traced.graph_parts import TENSORS
from ostinato.models.traced.model_trace import ModelTrace

__all__ = ("checkpoint_layout",)

_EXPERTS = re.compile(r".*experts\.\*\.(\w+)\.weight\$?")


def checkpoint_layout(
    trace: ModelTrace,
    merged: Mapping[str, tuple[str, ...]],
    row_orders: Mapping[str, Tensor],
    *,
    is_tied: bool,
) -> CheckpointLayout:
    """How stored names differ from those of the traced model.

    Args:
        trace: the traced run.
        merged: this project's merged modules -> the modules that each stacks.
        row_orders: names of this project's modules, or of parts of merged ones -> the order of
            their rows.
        is_tied: the output head is the embedding.

    Raises:
        ValueError: transformers changes names or tensors in a way that has no rule here.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming

    model = trace.model
    layers = trace.layers[0].rpartition(".")[0]
    renamed = [
        ("traced_begin.", ""),
        ("traced_finish.", ""),
        ("traced_head.", ""),
        (f"{TENSORS}.", ""),
        (".matrix.", "."),
        (".traced_layer.", "."),
        ("layers.", f"{layers}."),
    ]
    experts: dict[str, tuple[str, ...]] = {}
    renamings = []
    for change in get_model_conversion_mapping(model, add_legacy=False):
        sources = [pattern.replace("\\", "") for pattern in change.source_patterns]
        if isinstance(change, WeightConverter):
            target = change.target_patterns[0].rpartition(".")[2]
            parts = [_EXPERTS.fullmatch(source) for source in sources]
            if target not in ("gate_up_proj", "down_proj") or not all(parts):
                raise ValueError(
                    f"tensors are converted to {change.target_patterns[0]} when loaded"
                )
            experts[target] = tuple(part[1] for part in parts if part)
        elif isinstance(change, WeightRenaming):
            renamings += list(zip(change.target_patterns, sources, strict=False))
    for ours, theirs in ((ours, theirs.removeprefix("^")) for ours, theirs in reversed(renamings)):
        if not re.fullmatch(r"[\w.]+", ours + theirs):
            raise ValueError(f"tensors are renamed by the pattern {theirs!r} when loaded")
        renamed.append((ours, theirs))
    ignored = [r"rotary_emb\.inv_freq$", *(model._keys_to_ignore_on_load_unexpected or ())]
    embedding = next(
        name for name, module in model.named_modules() if module is model.get_input_embeddings()
    )
    head = next(
        name for name, module in model.named_modules() if module is model.get_output_embeddings()
    )
    stacks = {_last(name): tuple(map(_last, parts)) for name, parts in merged.items()}
    gate_up = experts.get("gate_up_proj")
    if gate_up:
        stacks["gate_up_proj"] = gate_up
    if "down_proj" in experts and experts["down_proj"] != ("down_proj",):
        renamed.append(("down_proj", experts["down_proj"][0]))
    return CheckpointLayout(
        prefixes=(),
        head=f"{head}.weight",
        embedding=f"{embedding}.weight",
        renamed=tuple(renamed),
        merged=tuple(stacks.items()),
        row_orders=tuple(row_orders.items()),
        stacked=() if gate_up else ("experts.gate_up_proj", "experts.down_proj"),
        ignored=tuple(ignored),
    )


def _last(name: str) -> str:
    """The last part of a module's name."""
    return name.rpartition(".")[2]
