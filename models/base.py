"""The interface of models: layers, decoders, encoders, and how checkpoints name weights."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from ostinato.models.config.hf_fields import HFConfig
from ostinato.models.config.model_config import ModelConfig
from ostinato.models.kv_cache import KVCache
from ostinato.models.sharding import ONLY_STAGE, Stage
from ostinato.models.step_tensors import ForwardBatch, StepInputs, StepTensors

__all__ = (
    "AuxStates",
    "CausalLM",
    "CheckpointLayout",
    "DecoderLayer",
    "EncoderModel",
    "FewRows",
    "LanguageModel",
)


_ONE_EXPERT = re.compile(r"\.experts\.[0-9]+\.")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CheckpointLayout:
    """How a checkpoint's tensor names, shapes and row orders differ from a model's own."""

    # Prefixes that are dropped from stored names, one after the other. A checkpoint has the first.
    prefixes: tuple[str, ...] = ("model.",)
    unprefixed: tuple[str, ...] = ()  # beginnings of names before which the prefix is optional
    # (beginning of a stored name after the prefixes, what other checkpoints have in its place)
    aliases: tuple[tuple[str, str], ...] = ()
    head: str = "lm_head.weight"
    embedding: str = "embed_tokens.weight"  # with tied weights, a stored head must equal it
    renamed: tuple[tuple[str, str], ...] = ()  # (part of our name, its counterpart in stored names)
    # (our module, the modules that it stacks); a name that is there several times has several of
    # our module's outputs
    merged: tuple[tuple[str, tuple[str, ...]], ...] = ()
    transposed: tuple[str, ...] = ()  # our modules whose weight is stored as [in, out]
    # Our modules whose weight is stored as [out, in], or as [in, out] if its shape says so.
    either_way: tuple[str, ...] = ()
    # (our module, or one of the modules that it stacks; its row order, see
    # models/checkpoints/row_orders.py)
    row_orders: tuple[tuple[str, Tensor], ...] = ()
    stacked: tuple[str, ...] = ()  # our modules whose experts are stored as one tensor
    can_be_apart: bool = False  # other checkpoints store the experts of `stacked` one by one
    # Ends of the names of tensors that a checkpoint need not have. Missing ones are zero.
    zeros: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()  # regular expressions for names of tensors that are not used
    tower: tuple[str, ...] = ()  # likewise, if the model is built without its tower

    def of_checkpoint(self, names: Iterable[str]) -> CheckpointLayout:
        """The layout of a checkpoint that has tensors or modules of these names."""
        if not self.can_be_apart:
            return self
        # Layers that are not used may store their experts in the other way.
        apart = (name for name in names if _ONE_EXPERT.search(name))
        if all(any(re.search(one, name) for one in self.ignored) for name in apart):
            return self
        return replace(self, stacked=())

    def without(self, *patterns: str) -> CheckpointLayout:
        """The same layout, with further tensors that are not used."""
        return replace(self, ignored=self.ignored + patterns)


class AuxStates:
    """Keeps hidden states of a model's step for a head that drafts from them.

    Args:
        layers: for an EAGLE-3 head, the layers whose input is kept: indices in `model.layers`.
        has_final: the final hidden states are kept, for a next-token layer (MTP). The caller of the
            model (graphs/capture.py) puts them into `states`. The model then computes them for all
            tokens of every step.
        num_earlier: in a pipeline, the number of states that earlier stages keep. The previous
            stage sends them with its hidden states.

    Attributes:
        states: the hidden states of the last step: one [T, D] for each of the layers, those of
            earlier stages first; with `has_final` only the final hidden states, [T, D].
    """

    def __init__(
        self, layers: Collection[int], *, has_final: bool = False, num_earlier: int = 0
    ) -> None:
        self.layers = frozenset(layers)
        self.has_final = has_final
        self.num_earlier = num_earlier
        self.states: list[Tensor] = []

    def begin(self) -> None:
        """Drop the states of the previous step."""
        self.states = []

    def see(self, layer: int, hidden: Tensor) -> None:
        """Keep the hidden state that enters a layer, if the layer is one of `layers`."""
        if layer in self.layers:
            self.states.append(hidden)


class FewRows(nn.Module):
    """A layer in few kernels, for small steps on a GPU."""

    @property
    def most_tokens(self) -> int:
        """Tokens of the largest step that it is used for."""
        raise NotImplementedError


class DecoderLayer(nn.Module):
    """One layer: the unit that is compiled once and called at every depth.

    An encoder's layers store no keys and values: their caches have no elements.
    """

    def forward(
        self,
        hidden: Tensor,
        step: StepInputs,
        k_cache: Tensor,
        v_cache: Tensor,
        rows: Tensor | None = None,
    ) -> Tensor:
        """hidden [T, D] -> hidden [T, D]; writes this step's K and V into the layer's cache.

        With `rows` [R] the result has only those tokens: [R, D]. The last layer of a model gets the
        rows that will be sampled; a prompt's other tokens need only their K and V.
        """
        raise NotImplementedError

    def static_key(self) -> tuple[Any, ...]:
        """Everything that the traced program depends on besides tensors.

        Layers with equal keys share one program.
        """
        raise NotImplementedError

    def few_rows(self) -> FewRows | None:
        """A module that computes the layer in fewer kernels, or None if there is no such module.

        It has the same arguments, result and parameters as this module. It only makes views,
        selects rows and calls ops of this package.
        """
        return None


class LanguageModel(nn.Module):
    """Tokens to hidden states, in three parts so that its layers can be compiled once.

    Without `aux`, `forward` only calls begin, every layer and finish. So the whole-model graph and
    the layer-by-layer form are the same program.
    """

    checkpoint_layout: CheckpointLayout = CheckpointLayout()  # may depend on the configuration
    # The layout of a GGUF file after models/gguf/gguf_tensors.py has undone its conversion. None =
    # the same as `checkpoint_layout`.
    gguf_layout: CheckpointLayout | None = None
    # Without `tie_word_embeddings` in config.json, the output head is tied to the embedding unless
    # the checkpoint has one.
    head_by_checkpoint: bool = False
    # The inputs of a step. A family with further tensors has a subclass of this table.
    step_tensors: type[StepTensors[Any]] = StepTensors

    layers: nn.ModuleList  # its modules are DecoderLayer
    stage: Stage = ONLY_STAGE  # the pipeline stage that `layers` belongs to

    @classmethod
    def read_config(
        cls, hf_config: HFConfig, generation_config: HFConfig | None = None
    ) -> ModelConfig:
        """The hyperparameters of a checkpoint of this family.

        A key that would change the model's output is either honoured, or refused with an error that
        names it.

        Args:
            hf_config: the parsed config.json.
            generation_config: the parsed generation_config.json; its end-of-sequence ids take
                precedence.

        Raises:
            ValueError: a key is missing, or has a value that is not supported; the text names it.
        """
        raise NotImplementedError

    def begin(self, batch: ForwardBatch) -> tuple[Tensor, StepInputs]:
        """Embeddings [T, D] and the step inputs that all layers share."""
        raise NotImplementedError

    def finish(self, hidden: Tensor) -> Tensor:
        """The final norm: [R, D] -> [R, D].

        A stage before the last has no final norm. It sends [T, D] to the next stage.
        """
        raise NotImplementedError

    def forward(
        self, batch: ForwardBatch, kv_cache: KVCache, aux: AuxStates | None = None
    ) -> Tensor:
        """[T] tokens -> final hidden states [R, D] of `logits_indices`; writes K and V of all T.

        A stage before the last returns the [T, D] that it sends on. Gives `aux` the hidden state
        that enters each layer.
        """
        hidden, step = self.begin(batch)
        last = len(self.layers) - 1 if self.stage.is_last else None
        for index, (layer, (k_cache, v_cache)) in enumerate(
            zip(self.layers, kv_cache, strict=True)
        ):
            if aux is not None:
                aux.see(index, hidden)
            rows = batch.logits_indices if index == last else None
            hidden = layer(hidden, step, k_cache, v_cache, rows)
        return self.finish(hidden)

    @property
    def logits_group(self) -> Tensor | None:
        """[1] int64, the handle of the group in shared memory whose ranks divide the vocabulary.

        None = this rank computes all logits or none, or the ranks exchange values in another way.
        """
        return None


class CausalLM(LanguageModel):
    """A decoder-only language model: a token sees the tokens before it, through the KV cache."""

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """[R, D] final hidden states -> [R, vocab_size] float32 logits, on every rank."""
        raise NotImplementedError

    def step_logits(self, hidden: Tensor) -> Tensor:
        """[R, D] final hidden states -> the logits from which the tokens of a step are drawn.

        With `logits_group` these are the [R, vocab_size / ranks] of this rank, because rank 0 alone
        knows which logits are needed (ops/parallel/divided_draws.py). Otherwise `compute_logits`.
        """
        return self.compute_logits(hidden)


class EncoderModel(LanguageModel):
    """Every token sees its whole sequence. One step computes all tokens of a sequence.

    So there is no KV cache.

    A token of segment s (the second text of a pair is segment 1) has the id
    `token id + s * vocab_size`. The API makes these ids, and the embedding takes them apart.
    """

    def classify(self, pooled: Tensor) -> Tensor:
        """[S, D] first-token hidden states of S sequences -> [S, num_labels] float32 logits.

        Only models with a classification head implement it.
        """
        raise NotImplementedError
