"""`EarlyTokenizer`: loads a model's tokenizer on a thread, while the engine process starts."""

from __future__ import annotations

import asyncio
from pathlib import Path

from ostinato.conf.environment import expand_user
from ostinato.conf.schema import ModelSection
from ostinato.models.gguf.gguf_paths import is_gguf_path
from ostinato.runtime.errors import StartupError
from ostinato.runtime.text.tokenizer import Tokenizer
from ostinato.runtime.text.tokenizer_files import TokenizerFiles

__all__ = ("EarlyTokenizer",)

_DEMO_MODEL = Path(__file__).parents[2] / "models" / "demo"


class EarlyTokenizer:
    """Loads one tokenizer. All methods run on one event loop.

    Args:
        model: names the model, its tokenizer and its chat template.
    """

    def __init__(self, model: ModelSection) -> None:
        self._template = model.chat_template
        self._path = _likely_path(model)
        self._loading: asyncio.Future[Tokenizer | StartupError] | None = None

    def check_template(self) -> None:
        """Read the file of `model.chat_template`, if one is set, before the engine loads a model.

        Raises:
            StartupError: it does not exist, or cannot be read.
        """
        if self._template:
            TokenizerFiles(self._path).template_source(self._template)

    def begin(self) -> None:
        """Begin to load the tokenizer of a local model. Does nothing for a model of a hub."""
        if self._path:
            loop = asyncio.get_running_loop()
            self._loading = loop.run_in_executor(None, self._load, self._path)

    async def get(self, path: str) -> Tokenizer | None:
        """The tokenizer that the engine names; None for an empty path.

        Args:
            path: directory or GGUF file of this tokenizer. It is loaded now unless `begin` began to
                load it.

        Raises:
            StartupError: the tokenizer cannot be loaded.
        """
        loading, self._loading = self._loading, None
        if not path:
            return None
        if loading is not None and path == self._path:
            found = await loading
        else:
            found = self._load(path)
        if isinstance(found, StartupError):
            raise found
        return found

    def _load(self, path: str) -> Tokenizer | StartupError:
        """The tokenizer, or the error, which `get` raises only if the engine names this path."""
        try:
            return Tokenizer.from_path(path, chat_template_file=self._template)
        except StartupError as error:
            return error


def _likely_path(model: ModelSection) -> str:
    """The directory or GGUF file that the engine will name; empty if it is not on this machine.

    The engine chooses by `resolve_path`. The result is wrong for a directory with a GGUF model: the
    engine then names another path.
    """
    name = model.tokenizer or model.path
    path = expand_user(name) if name else _DEMO_MODEL
    try:
        is_there = (path if is_gguf_path(path) else path / "tokenizer.json").is_file()
    except OSError:  # the directory cannot be read; the engine reports it
        is_there = False
    return str(path) if is_there else ""
