"""Which paths name GGUF files, and the error of reading one.

The API process calls `is_gguf_path` for every model, so this module does not import NumPy.
"""

from __future__ import annotations

import re
from pathlib import Path

__all__ = ("GGUF_ENDING", "GGUFError", "is_gguf_path")

GGUF_ENDING = re.compile(r"(-\d{5}-of-\d{5})?\.gguf$")
"""The end of a file's name that does not belong to the name of its model."""


class GGUFError(ValueError):
    """A GGUF file cannot be read or is not supported; the message is one line."""


def is_gguf_path(path: str | Path) -> bool:
    """Whether a path names a GGUF file."""
    return str(path).endswith(".gguf")
