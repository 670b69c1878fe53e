"""`HFModelSource`: the config and the code version of a model that runs through transformers."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

__all__ = ("HFModelSource",)


@dataclass(frozen=True, slots=True)
class HFModelSource:
    """The config of a model and the version of its code; hashable.

    Its `repr` is part of the key of compiled programs.
    """

    config: str  # config.json as JSON text
    digest: str  # digest of the modelling code and of transformers' version

    @property
    def hf_config(self) -> dict[str, Any]:
        """The parsed config.json."""
        return json.loads(self.config)
