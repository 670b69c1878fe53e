"""Ostinato: an inference and serving engine for large language models around one compiled graph.

    from ostinato import LLM, SamplingParams

The public names load lazily: importing the package does not import torch.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ostinato.runtime.async_engine import AsyncEngine
    from ostinato.runtime.llm import LLM
    from ostinato.runtime.types.adapters import LoRARequest
    from ostinato.runtime.types.params import SamplingParams
    from ostinato.runtime.types.structured_outputs import StructuredOutputsParams

__version__ = "0.2.0"
__all__ = (
    "LLM",
    "AsyncEngine",
    "LoRARequest",
    "SamplingParams",
    "StructuredOutputsParams",
    "__version__",
)

# The repository's root folders are the package's subpackages. An installed package maps them
# through setuptools' package-dir; a plain checkout (no install) finds them here.
_ROOT = Path(__file__).resolve().parent.parent
if not (_ROOT / "ostinato" / "conf").is_dir() and (_ROOT / "conf" / "schema.py").is_file():
    __path__.append(str(_ROOT))

_PUBLIC = {
    "LLM": "ostinato.runtime.llm",
    "AsyncEngine": "ostinato.runtime.async_engine",
    "LoRARequest": "ostinato.runtime.types.adapters",
    "SamplingParams": "ostinato.runtime.types.params",
    "StructuredOutputsParams": "ostinato.runtime.types.structured_outputs",
}


def __getattr__(name: str) -> object:
    if name in _PUBLIC:
        return getattr(import_module(_PUBLIC[name]), name)
    known = ", ".join(__all__)
    raise AttributeError(f"module 'ostinato' has no attribute {name!r}; it has {known}")
