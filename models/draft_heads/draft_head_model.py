"""The common part of the heads that draft for a model."""

from __future__ import annotations

import torch
from torch import Tensor

from ostinato.models.base import CausalLM
from ostinato.models.config.model_config import ModelConfig
from ostinato.models.decoder import Decoder
from ostinato.models.linear_layers import BuildOptions

__all__ = ("DraftHeadModel",)


class DraftHeadModel(CausalLM):
    """A head as a model of its own. `attach` gives it the embedding and the head of its target.

    Its input at position p is the token at p + 1 and [D] features of position p: hidden states of
    the target, or the head's own output.

    Attributes:
        outputs: [R, D] of the rows of the last step. The next tokens are drafted from them.
    """

    outputs: Tensor

    def __init__(self, config: ModelConfig, options: BuildOptions) -> None:
        super().__init__()
        self.config = config
        self._device, self._dtype = options.device, options.dtype
        # in a list, so that the target's parameters are not parameters of the head
        self._targets: list[Decoder] = []
        self._features: Tensor | None = None

    def attach(self, target: Decoder, max_num_tokens: int) -> None:
        """Take the target's embedding and head, and allocate the input of a step.

        Args:
            target: the model that the head drafts for.
            max_num_tokens: T of the largest step.

        Raises:
            ValueError: the head is for another vocabulary.
        """
        assert target.embed_tokens is not None, "the target is in one stage"
        size = self.config.hidden_size
        self._targets = [target]
        self._features = torch.zeros(max_num_tokens, size, dtype=self._dtype, device=self._device)

    def read_hidden(self, hidden: Tensor) -> None:
        """Set the input of the next step's tokens.

        Args:
            hidden: [T, size], the hidden states that the target gave to its `AuxStates`.
        """
        raise NotImplementedError

    def read_features(self, features: Tensor) -> None:
        """Set the features of the next step's tokens: [T, D], such as rows of `outputs`."""
        assert self._features is not None, "the head is attached to its target"
        self._features[: len(features)] = features

    def _target(self) -> Decoder | None:
        """The target; None until the head is attached. Programs are compiled before that."""
        return self._targets[0] if self._targets else None

    def _inputs(self, token_ids: Tensor) -> tuple[Tensor, Tensor]:
        """[T] token ids -> their embeddings and features, each [T, D]; zeros if not attached."""
        target, count = self._target(), len(token_ids)
        if target is None or target.embed_tokens is None or self._features is None:
            size = self.config.hidden_size
            zeros = torch.zeros(count, size, dtype=self._dtype, device=self._device)
            return zeros, zeros
        return target.embed_tokens(token_ids), self._features[:count]
