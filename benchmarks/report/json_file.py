"""Writes the JSON file of a benchmark."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

__all__ = ("write_json",)


def write_json(record: Mapping[str, Any], path: Path) -> None:
    """Write a record to a file, indented; its folder is created.

    The file is replaced in one step, so that a reader never finds half of it. It is also whole if
    the program is ended while it writes.

    Raises:
        OSError: the file or its folder cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.part")
    part.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    part.replace(path)
