"""The common part of the heads that draft for a model."""

from __future__ import annotations

import torch
from torch import Tensor

from ostinato.models.base import CausalLM
from ostinato.models.config.model_config import ModelConfig
from ostinato.models.decoder import Decoder
from ostinato.models.layers.linear_layers import BuildOptions
from ostinato.models.layers.vocabulary_layers import Embedding
from ostinato.models.sharding import Shard, Span, Stage

__all__ = ("DraftHeadModel", "shard_of_tables")


class DraftHeadModel(CausalLM):
    """A head as a model of its own. `attach` gives it the target's embedding and output head.

    Steps of a head run on one rank, without the other ranks of its target. So the embedding and the
    output head must be whole on this rank: those of the target, or copies of them.

    The head's input at position p is the token at p + 1 and [D] features of position p. These are
    computed from hidden states of the target, or are the head's own output.

    Attributes:
        outputs: [R, D], or more rows. The first R rows are the head's output in the last step, from
            which the next tokens are drafted. On a GPU all steps write them to the same memory.
    """

    outputs: Tensor

    def __init__(self, config: ModelConfig, options: BuildOptions) -> None:
        super().__init__()
        self.config = config
        self._device, self._dtype = options.device, options.dtype
        # in lists, so that the target's parameters are not parameters of the head
        self._embeddings: list[Embedding] = []
        self._scorers: list[Decoder] = []
        self._features: Tensor | None = None
        self._kept_outputs: Tensor | None = None  # only on a GPU

    def attach(self, target: Decoder, max_num_tokens: int, tables: Decoder | None = None) -> None:
        """Take the target's embedding and output head, and allocate the input of a step.

        Args:
            target: the part of the model on this rank.
            max_num_tokens: T of the largest step.
            tables: the copies that `shard_of_tables` describes, in a model without layers; None =
                the target has what the head needs.

        Raises:
            ValueError: the head can draft a token that the target does not have (see subclasses).
        """
        size = self.config.hidden_size
        embedding = None if tables is None else tables.embed_tokens
        embedding = embedding or target.embed_tokens
        assert embedding is not None, "the plan must have copies of what the target lacks"
        self._embeddings = [embedding]
        self._scorers = [target if tables is None or not tables.stage.is_last else tables]
        self._features = torch.zeros(max_num_tokens, size, dtype=self._dtype, device=self._device)
        if self._device.type != "cpu":
            self._kept_outputs = self.outputs = torch.zeros_like(self._features)

    def read_hidden(self, hidden: Tensor) -> None:
        """Set the input of the next step's tokens.

        Args:
            hidden: [T, n D], the n hidden states that the target gave to its `AuxStates`, side by
                side. D is the target's hidden size.
        """
        raise NotImplementedError

    def read_features(self, features: Tensor) -> None:
        """Set the features of the next step's tokens: [T, D], such as rows of `outputs`."""
        assert self._features is not None, "the head must be attached to its target"
        self._features[: len(features)] = features

    def _keep_outputs(self, hidden: Tensor) -> None:
        """Set `outputs` to [R, D].

        On a GPU they are copied: the next replay of any graph overwrites the memory of `hidden`.
        """
        if self._kept_outputs is None:
            self.outputs = hidden
        else:
            self._kept_outputs[: len(hidden)].copy_(hidden)

    def _inputs(self, token_ids: Tensor) -> tuple[Tensor, Tensor]:
        """[T] token ids -> their embeddings and features, each [T, D]; zeros if not attached.

        Programs are compiled before the head is attached.
        """
        count = len(token_ids)
        if not self._embeddings or self._features is None:
            size = self.config.hidden_size
            zeros = token_ids.new_zeros((count, size), dtype=self._dtype)
            return zeros, zeros
        return self._embeddings[0](token_ids), self._features[:count]

    def _target_logits(self, hidden: Tensor) -> Tensor:
        """[R, D] -> [R, vocab_size] float32, by the target's output head; zeros if not attached."""
        if not self._scorers:
            return hidden.new_zeros(len(hidden), self.config.vocab_size, dtype=torch.float32)
        return self._scorers[0].compute_logits(hidden)


def shard_of_tables(shard: Shard, config: ModelConfig, *, needs_logits: bool) -> Shard | None:
    """The target's tables that a head needs copies of.

    The head runs on rank 0, the leader, which may lack rows of these tables. A table that is the
    embedding and the output head is divided among tensor ranks. An output head is divided too. An
    embedding that is not the output head belongs to the first stage.

    Args:
        shard: the leader's part of the target.
        config: the target's configuration.
        needs_logits: the head uses the target's output head.

    Returns:
        A shard without layers: a first stage has the embedding, a last stage the output head, an
        only stage both. None if no copies are needed.
    """
    is_divided = not shard.vocabulary(config.vocab_size).is_whole
    has_embedding = not is_divided if config.tie_word_embeddings else shard.stage.is_first
    has_head = not (needs_logits and is_divided)
    if has_embedding and has_head:
        return None
    no_layers = Span(0, 0, config.num_layers)
    if has_head:
        return Shard(stage=Stage(0, 2, no_layers))
    return Shard(stage=Stage(1, 2, no_layers) if has_embedding else Stage(0, 1, no_layers))
