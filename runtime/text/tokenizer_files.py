"""The files of a tokenizer, read from a Hugging Face directory or a GGUF file."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from ostinato.models.gguf.gguf_paths import GGUFError, is_gguf_path
from ostinato.runtime.errors import StartupError

if TYPE_CHECKING:  # the API process imports these, and NumPy, for a GGUF file only
    from ostinato.models.gguf.gguf_file import GGUFFile

__all__ = ("TokenizerFiles",)


class _AddedToken(msgspec.Struct):
    """An entry of `added_tokens` in a tokenizer.json."""

    id: int
    content: str


class _AddedTokens(msgspec.Struct):
    """The part of a tokenizer.json that has the special tokens."""

    added_tokens: list[_AddedToken] = []


class _Model(msgspec.Struct):
    """The model of a tokenizer.json. Older files write the pair of a merge as one text."""

    merges: list[tuple[str, str] | str] = []


class _Merges(msgspec.Struct):
    """The part of a tokenizer.json that has the merges."""

    model: _Model = msgspec.field(default_factory=_Model)


class TokenizerFiles:
    """The contents of the files that a tokenizer is made from.

    Args:
        path: a directory or a GGUF file.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    def tokenizer_json(self) -> str | None:
        """The tokenizer.json; None if the directory has none.

        Raises:
            StartupError: the file cannot be read.
        """
        if not self._is_gguf:
            return self._tokenizer_file
        from ostinato.models.gguf.gguf_tokenizer import gguf_tokenizer_json

        try:
            return gguf_tokenizer_json(self._gguf)
        except GGUFError as error:
            raise StartupError(str(error)) from error

    def gguf_parts(self, *, has_merges: bool = True) -> dict[str, Any] | None:
        """The contents of the tokenizer.json of a GGUF file, if they are not stored as one text.

        Args:
            has_merges: False = without the merges, which take most of the time.

        Raises:
            StartupError: the file cannot be read.
        """
        if not self._is_gguf:
            return None
        from ostinato.models.gguf.gguf_tokenizer import gguf_tokenizer_parts, whole_tokenizer_json

        try:
            if whole_tokenizer_json(self._gguf) is not None:
                return None
            return gguf_tokenizer_parts(self._gguf, has_merges=has_merges)
        except GGUFError as error:
            raise StartupError(str(error)) from error

    def merges(self) -> list[tuple[str, str]]:
        """The merges of a BPE tokenizer, best first; [] if there is no tokenizer.json.

        Raises:
            StartupError: the file cannot be read.
            msgspec.DecodeError: the tokenizer.json has no such merges.
        """
        if not self._is_gguf:
            return _merges_of(self.tokenizer_json() or "{}")
        from ostinato.models.gguf.gguf_tokenizer import gguf_merges, whole_tokenizer_json

        try:
            whole = whole_tokenizer_json(self._gguf)
            return gguf_merges(self._gguf) if whole is None else _merges_of(whole)
        except GGUFError as error:
            raise StartupError(str(error)) from error

    @cached_property
    def config(self) -> dict[str, Any]:
        """The tokenizer_config.json; {} if there is none.

        Raises:
            StartupError: the file cannot be read.
        """
        if not self._is_gguf:
            return _read_json(self.path / "tokenizer_config.json")
        from ostinato.models.gguf.gguf_tokenizer import gguf_tokenizer_config

        try:
            return gguf_tokenizer_config(self._gguf)
        except GGUFError as error:
            raise StartupError(str(error)) from error

    @cached_property
    def special_tokens_map(self) -> dict[str, Any]:
        """The special_tokens_map.json of an older directory; {} if there is none.

        Raises:
            StartupError: the file cannot be read.
        """
        return {} if self._is_gguf else _read_json(self.path / "special_tokens_map.json")

    @cached_property
    def lowers_texts(self) -> bool:
        """Whether a directory of sentence-transformers says that texts become lower-case first.

        Raises:
            StartupError: the file cannot be read.
        """
        if self._is_gguf:
            return False
        return bool(_read_json(self.path / "sentence_bert_config.json").get("do_lower_case"))

    def eos_token_id(self) -> int | None:
        """The id of the end-of-sequence token that the directory names.

        None if it names none, or if that token is not among the added tokens. None for a GGUF file
        too, because the model's configuration has the id.

        Raises:
            StartupError: a file cannot be read.
        """
        if self._is_gguf:
            return None
        token = {**self.special_tokens_map, **self.config}.get("eos_token")
        text = token.get("content") if isinstance(token, dict) else token
        if not isinstance(text, str):
            return None
        return next((key for key, content in self._added_tokens() if content == text), None)

    def added_token(self, token_id: int) -> str | None:
        """The text of an added token of a directory; None if it has no such token.

        Raises:
            StartupError: a file cannot be read.
        """
        if self._is_gguf:
            return None
        return next((content for key, content in self._added_tokens() if key == token_id), None)

    def added_token_ids(self) -> dict[str, int]:
        """The text -> id of the added tokens of a directory; {} for a GGUF file.

        Raises:
            StartupError: a file cannot be read.
        """
        return {} if self._is_gguf else {content: key for key, content in self._added_tokens()}

    def _added_tokens(self) -> Iterator[tuple[int, str]]:
        """The ids and texts of the added tokens of a directory."""
        for token_id, entry in (self.config.get("added_tokens_decoder") or {}).items():
            yield int(token_id), str(entry.get("content"))
        try:  # the vocabulary is skipped, so this takes milliseconds
            found = msgspec.json.decode(self.tokenizer_json() or "{}", type=_AddedTokens)
        except msgspec.DecodeError:
            return  # loading the tokenizer reports the error
        yield from ((added.id, added.content) for added in found.added_tokens)

    def template_source(self, user_file: str) -> str | None:
        """The chat template: the user's file, else the model's template; None if there is none.

        If the model has a template of its own for conversations with tools, both are one text.

        Args:
            user_file: a Jinja file; "" = no file.

        Raises:
            StartupError: a file cannot be read, or the user's file does not exist.
        """
        if user_file:
            text = _read_text(Path(user_file))
            if text is None:
                raise StartupError(f"model.chat_template: there is no file {user_file}")
            return text
        named = self._templates()
        template, for_tools = named.get("default"), named.get("tool_use")
        if isinstance(template, str) and isinstance(for_tools, str):
            # The engine process reads these files too, and Jinja would lengthen its start.
            from ostinato.runtime.text.chat_template import with_tool_template

            return with_tool_template(template, for_tools)
        return template if isinstance(template, str) else None

    def _templates(self) -> dict[str, Any]:
        """The model's templates by name. A model with only one has `default`."""
        if not self._is_gguf:
            folder = "additional_chat_templates"
            files = {"default": "chat_template.jinja", "tool_use": f"{folder}/tool_use.jinja"}
            named = {name: _read_text(self.path / file) for name, file in files.items()}
            if named["default"] is not None:
                return named
        stated = self.config.get("chat_template")
        if stated is None and not self._is_gguf:
            stated = _read_json(self.path / "chat_template.json").get("chat_template")
        if not isinstance(stated, list):
            return {"default": stated}
        entries = [entry for entry in stated if isinstance(entry, dict)]
        return {entry.get("name", ""): entry.get("template") for entry in entries}

    @cached_property
    def _tokenizer_file(self) -> str | None:
        """The tokenizer.json of a directory. It is read once, so that it always fits `merges`."""
        return _read_text(self.path / "tokenizer.json")

    @property
    def _is_gguf(self) -> bool:
        return is_gguf_path(self.path)

    @cached_property
    def _gguf(self) -> GGUFFile:
        """The opened GGUF file. To read a vocabulary takes up to 0.1 s."""
        from ostinato.models.gguf.gguf_file import open_gguf

        try:
            return open_gguf(self.path)
        except GGUFError as error:
            raise StartupError(str(error)) from error


def _merges_of(text: str) -> list[tuple[str, str]]:
    """The merges in a tokenizer.json."""
    pairs: list[tuple[str, str]] = []
    for merge in msgspec.json.decode(text, type=_Merges).model.merges:
        if isinstance(merge, str):
            left, _, right = merge.partition(" ")
            merge = left, right
        pairs.append(merge)
    return pairs


def _read_json(file: Path) -> dict[str, Any]:
    """The JSON object in a file; {} if there is no such file."""
    text = _read_text(file)
    if text is None:
        return {}
    try:
        value = json.loads(text)
    except ValueError as error:
        raise StartupError(f"{file} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise StartupError(f"{file} must hold a JSON object, got {type(value).__name__}")
    return value


def _read_text(file: Path) -> str | None:
    """The text of a file; None if there is no such file."""
    try:
        return file.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except OSError as error:
        raise StartupError(f"{file} cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise StartupError(f"{file} is not UTF-8: {error}") from error
