"""Keeps a loaded model and its compiled program for the next engine in the same process.

A sweep over scheduler settings builds one engine after the other around the same weights. What
depends on those settings (buffers, cache, captured buckets, step costs) is made anew.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from ostinato.graphs.compile import Binder
from ostinato.models.base import LanguageModel

__all__ = ("KeptModel", "ModelShelf")


@dataclass(frozen=True, slots=True)
class KeptModel:
    """A model with its weights in their final form."""

    model: LanguageModel
    bind: Binder | None  # of its compiled program; None = it runs eagerly


class ModelShelf:
    """Room for one model; engines that share it must not run at the same time."""

    def __init__(self) -> None:
        self._key: Hashable = None
        self._kept: KeptModel | None = None
        self.num_reused = 0

    def find(self, key: Hashable) -> KeptModel | None:
        """The model that was kept under this key; another one is let go, to make room."""
        if self._kept is None or self._key != key:
            self._kept = None
            return None
        self.num_reused += 1
        return self._kept

    def keep(self, key: Hashable, kept: KeptModel) -> None:
        """Keep a model that has been loaded."""
        self._key, self._kept = key, kept
