"""The names of GGUF files and of the files of split models, and the error of reading a GGUF file.

The API process calls `is_gguf_path` for every model, so this module does not import NumPy.
"""

from __future__ import annotations

import re
from pathlib import Path

__all__ = (
    "GGUF_ENDING",
    "GGUFError",
    "files_of_model",
    "find_gguf",
    "is_gguf_path",
    "split_files",
)

_SPLIT_NAME = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.DOTALL)

GGUF_ENDING = re.compile(r"(-\d{5}-of-\d{5})?\.gguf$")
"""The end of a file's name that does not belong to the name of its model."""


class GGUFError(ValueError):
    """A GGUF file cannot be read or is not supported; the message is one line."""


def is_gguf_path(path: str | Path) -> bool:
    """Whether a path names a GGUF file."""
    return str(path).endswith(".gguf")


def find_gguf(directory: Path) -> Path | None:
    """The first file of the only GGUF model in a directory; None when there is no GGUF file.

    Files `mmproj*` are ignored: they are projectors of images.

    Raises:
        GGUFError: there are several models; the text names them.
    """
    found: set[Path] = set()
    for file in sorted(directory.glob("*.gguf")):
        split = _SPLIT_NAME.fullmatch(file.name)
        first = f"{split['stem']}-00001-of-{split['count']}.gguf" if split else file.name
        if not file.name.startswith("mmproj"):
            found.add(directory / first)
    if len(found) > 1:
        names = ", ".join(sorted(file.name for file in found))
        raise GGUFError(f"{directory} has several GGUF models ({names}); name one of these files")
    return next(iter(found), None)


def split_files(name: str) -> list[str]:
    """All file names of the split model that `name` belongs to; `name` alone if it is not split."""
    split = _SPLIT_NAME.fullmatch(name)
    if split is None:
        return [name]
    count = int(split["count"])
    return [f"{split['stem']}-{n:05}-of-{count:05}.gguf" for n in range(1, count + 1)]


def files_of_model(path: Path) -> tuple[Path, ...]:
    """The files of the model that a file belongs to.

    Raises:
        GGUFError: a file of a split model is missing, or the number in the name is wrong.
    """
    files = tuple(path.with_name(name) for name in split_files(path.name))
    if files == (path,):
        return files
    if path not in files:
        raise GGUFError(f"{path}: the number in its name must be 1 to {len(files)}")
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise GGUFError(
            f"{path} is one of {len(files)} files; {path.parent} lacks "
            f"{', '.join(missing[:3])}{more}"
        )
    return files
