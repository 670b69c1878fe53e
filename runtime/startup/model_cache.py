"""A cache of one loaded model, for engines that one process builds one after the other.

A sweep over scheduler settings builds several engines with the same weights. Parts that depend on
these settings (buffers, KV cache, captured buckets, step costs) are built for each engine.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from ostinato.graphs.compiler.compile import Binder
from ostinato.models.base import LanguageModel

__all__ = ("LoadedModel", "LoadedModelCache")


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model with its weights in their final form."""

    model: LanguageModel
    bind: Binder | None  # binds its compiled program to its weights; None = it runs eagerly


class LoadedModelCache:
    """Keeps one model; engines that share it must not run at the same time."""

    def __init__(self) -> None:
        self._key: Hashable = None
        self._model: LoadedModel | None = None
        self.num_reused = 0  # engines that got the stored model

    def get(self, key: Hashable) -> LoadedModel | None:
        """The model that was stored under this key, or None. Drops a model under another key."""
        if self._model is None or self._key != key:
            self._model = None
            return None
        self.num_reused += 1
        return self._model

    def put(self, key: Hashable, model: LoadedModel) -> None:
        """Keep a loaded model."""
        self._key, self._model = key, model
