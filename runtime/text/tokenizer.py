"""The tokenizer of a model, read from its `tokenizer.json`, with its chat template.

The module uses the `tokenizers` library. transformers takes seconds to import, so it is imported
only for a directory without `tokenizer.json`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, Self

import tokenizers

from ostinato.models.gguf.gguf_paths import is_gguf_path
from ostinato.runtime.errors import InvalidRequestError, StartupError
from ostinato.runtime.text.chat_template import ChatTemplate
from ostinato.runtime.text.text_bounds import TextCutter, max_token_characters
from ostinato.runtime.text.token_bytes import TokenPieces
from ostinato.runtime.text.tokenizer_files import TokenizerFiles

__all__ = ("Tokenizer", "load_backend", "tokenizer_facts")

_NAMED_SPECIAL_TOKENS = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)


class Tokenizer:
    """Text to token ids and back; make it with `from_path`.

    Safe to call from several threads at once.

    Args:
        backend: the loaded `tokenizers` tokenizer.
        special_tokens: the named special tokens (`bos_token`, `eos_token`, ...) that exist.
        chat_template: the chat template; None = the model has none.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        special_tokens: Mapping[str, str],
        chat_template: ChatTemplate | None,
    ) -> None:
        backend.no_truncation()
        backend.no_padding()
        # A token that is added again as a text would lose its own settings, such as whether white
        # space beside it is dropped.
        added = {token.content: token for token in backend.get_added_tokens_decoder().values()}
        named = [text for text in special_tokens.values() if backend.token_to_id(text) is not None]
        backend.add_special_tokens([added.get(text, text) for text in named])
        self._backend = backend
        self.special_tokens = dict(special_tokens)
        self.chat_template = chat_template
        self.special_token_ids = frozenset(
            token_id
            for token_id, token in backend.get_added_tokens_decoder().items()
            if token.special
        )
        self.pieces = TokenPieces.from_tokenizer(backend, self.special_token_ids)

    @classmethod
    def from_path(cls, path: str | Path, *, chat_template_file: str = "") -> Self:
        """Load the tokenizer of a Hugging Face model directory or of a GGUF file.

        Args:
            path: the directory or file. In a directory, `tokenizer_config.json`,
                `special_tokens_map.json` and the template files are optional.
            chat_template_file: a Jinja file that replaces the model's own template; "" = the
                model's own.

        Raises:
            StartupError: there is no tokenizer, a file cannot be read, or the chat template is not
                valid.
        """
        files = TokenizerFiles(path)
        special_tokens = _special_tokens({**files.special_tokens_map, **files.config})
        source = files.template_source(chat_template_file)
        template = None if source is None else ChatTemplate(source, special_tokens)
        return cls(load_backend(files), special_tokens, template)

    @property
    def vocab_size(self) -> int:
        """Number of ids that the tokenizer has, added tokens included."""
        return self._backend.get_vocab_size(with_added_tokens=True)

    def token_id(self, token: str) -> int | None:
        """The id of exactly this token, None when there is none."""
        return self._backend.token_to_id(token)

    def is_special(self, token: str) -> bool:
        """Whether this is a special token, which `skip_special_tokens` leaves out of a text."""
        return self.token_id(token) in self.special_token_ids

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`; special tokens written in it are recognised.

        Args:
            add_special_tokens: add the tokens that the model expects around a text (usually bos).
                False for the output of a chat template, which contains them already.
        """
        return self._backend.encode(text, add_special_tokens=add_special_tokens).ids

    def token_offsets(self, text: str, *, add_special_tokens: bool = True) -> list[tuple[int, int]]:
        """The characters [begin, end) of `text` that each token of `encode` stands for.

        Tokens that are parts of one character have the same range. Tokens that are added around the
        text have the range (0, 0).
        """
        return self._backend.encode(text, add_special_tokens=add_special_tokens).offsets

    @cached_property
    def max_token_characters(self) -> int | None:
        """The largest number of characters that one token stands for; None = no bound is known."""
        return max_token_characters(self._backend)

    def measure(self) -> None:
        """Compute the cached properties now, so that a later call does not wait for them."""
        _ = self.max_token_characters, self._cutter

    def encode_truncated(
        self, text: str, limit: int, *, side: Literal["left", "right"], add_special_tokens: bool
    ) -> list[int]:
        """The tokens of `encode`, special tokens included, cut to `limit`.

        Args:
            limit: tokens to keep, at least 1.
            side: where tokens are cut off.
        """
        encoding, _ = self._encode_part(text, limit, side, add_special_tokens=add_special_tokens)
        ids = encoding.ids
        return ids[:limit] if side == "right" else ids[-limit:]

    def offsets_truncated(
        self, text: str, limit: int, *, side: Literal["left", "right"], add_special_tokens: bool
    ) -> list[tuple[int, int]]:
        """The `token_offsets` of the tokens of `encode_truncated`."""
        # One token more is encoded and dropped. A cut can drop a space before the first token. The
        # tokenizer adds the space again, but the first token's offset would lack it.
        encoding, begin = self._encode_part(
            text, limit + 1, side, add_special_tokens=add_special_tokens
        )
        offsets = [
            (first, last) if is_around else (first + begin, last + begin)
            for (first, last), is_around in zip(
                encoding.offsets, encoding.special_tokens_mask, strict=True
            )
        ]
        return offsets[:limit] if side == "right" else offsets[-limit:]

    def _encode_part(
        self, text: str, limit: int, side: Literal["left", "right"], *, add_special_tokens: bool
    ) -> tuple[tokenizers.Encoding, int]:
        """Encode a part of a text that has the `limit` tokens to keep.

        Returns:
            The encoding, and the index of the part's first character in the text.
        """
        begin, end = self._cutter.window(text, limit, side)
        part = text if end - begin == len(text) else text[begin:end]
        return self._backend.encode(part, add_special_tokens=add_special_tokens), begin

    @cached_property
    def _cutter(self) -> TextCutter:
        return TextCutter(self._backend)

    def encode_pair(
        self,
        first: str,
        second: str,
        *,
        limit: int | None = None,
        side: Literal["left", "right"] = "right",
    ) -> tuple[list[int], list[int]]:
        """Encode two texts as one input, with special tokens around and between them.

        Args:
            limit: tokens of the whole input; special tokens are kept. The longer text is cut until
                both have the same length, then both are cut. If an odd number is left for two long
                texts, either may keep one token more. None = no limit.
            side: where tokens are cut off.

        Returns:
            Token ids, and the segment of each: 0 or 1.
        """
        if limit is None:
            one, other = (
                self._backend.encode(text, add_special_tokens=False) for text in (first, second)
            )
        else:
            room = max(0, limit - self._backend.num_special_tokens_to_add(is_pair=True))
            one, other = (
                self._encode_part(text, room, side, add_special_tokens=False)[0]
                for text in (first, second)
            )
            shorter, longer = (one, other) if len(one) <= len(other) else (other, one)
            kept = min(len(shorter), room // 2)
            shorter.truncate(kept, direction=side)
            longer.truncate(room - kept, direction=side)
        encoding = self._backend.post_process(one, other)
        return encoding.ids, encoding.type_ids

    def encode_at_most(
        self, text: str, limit: int, *, side: Literal["left", "right"], add_special_tokens: bool
    ) -> list[int]:
        """The tokens of `encode` cut to `limit`; special tokens around the text are kept.

        Args:
            side: where tokens are cut off.
        """
        if add_special_tokens:
            limit -= self._backend.num_special_tokens_to_add(is_pair=False)
        limit = max(0, limit)
        encoding, _ = self._encode_part(text, limit, side, add_special_tokens=False)
        encoding.truncate(limit, direction=side)
        return self._backend.post_process(encoding, add_special_tokens=add_special_tokens).ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of a whole sequence; ids that the tokenizer does not have add nothing."""
        return self._backend.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def token(self, token_id: int) -> str:
        """The token as the vocabulary spells it; empty for an unknown id."""
        return self._backend.id_to_token(token_id) or ""

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that one token stands for; they can be a part of a character."""
        if self.pieces is not None:
            return self.pieces.piece(token_id)
        return self.decode([token_id], skip_special_tokens=False).encode()

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        """Render a conversation; see `ChatTemplate.render`.

        The text contains the special tokens already, so encode it with `add_special_tokens=False`.

        Raises:
            InvalidRequestError: the model has no chat template, or it refuses the messages.
        """
        if self.chat_template is None:
            raise InvalidRequestError(
                "this model has no chat template, so it cannot chat: use /v1/completions, or start"
                " the server with model.chat_template=FILE",
                param="messages",
                code="no_chat_template",
            )
        return self.chat_template.render(
            messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            variables=variables,
            tools=tools,
        )


def tokenizer_facts(path: str | Path, tokenizer: Tokenizer) -> dict[str, Any]:
    """The configuration of a tokenizer for clients: tokenizer_config.json and the chat template.

    Raises:
        StartupError: tokenizer_config.json cannot be read.
    """
    config = TokenizerFiles(path).config
    template = tokenizer.chat_template
    return {
        **config,
        **tokenizer.special_tokens,
        "vocab_size": tokenizer.vocab_size,
        "chat_template": None if template is None else template.source,
    }


def load_backend(files: TokenizerFiles) -> tokenizers.Tokenizer:
    """The tokenizer of the `tokenizers` library.

    Raises:
        StartupError: there is no tokenizer, or a file cannot be read.
    """
    parts = files.gguf_parts()
    if parts is not None:
        try:
            return _assemble(parts)
        except Exception as error:  # the library's own type for any broken part
            raise StartupError(f"{files.path} cannot be read: {error}") from error
    text = files.tokenizer_json()
    if text is None:
        return _convert_with_transformers(files.path)
    try:
        made = tokenizers.Tokenizer.from_str(text)
    except Exception as error:  # the library's own type for any broken file
        where = files.path if is_gguf_path(files.path) else files.path / "tokenizer.json"
        raise StartupError(f"{where} cannot be read: {error}") from error
    if files.lowers_texts:
        steps = [tokenizers.normalizers.Lowercase()]
        own = made.normalizer
        made.normalizer = tokenizers.normalizers.Sequence(steps if own is None else [*steps, own])
    return made


def _assemble(parts: Mapping[str, Any]) -> tokenizers.Tokenizer:
    """The tokenizer of a tokenizer.json with a BPE model.

    The library takes twice as long to read the vocabulary and the merges from a text.
    """
    settings = parts["model"].items()
    model = {key: value for key, value in settings if key != "type" and value is not None}
    bare = {"added_tokens": [], "model": parts["model"] | {"vocab": {}, "merges": []}}
    shell = tokenizers.Tokenizer.from_str(json.dumps({**parts, **bare}))
    made = tokenizers.Tokenizer(tokenizers.models.BPE(**model))
    for name in ("normalizer", "pre_tokenizer", "post_processor", "decoder"):
        if parts[name] is not None:
            setattr(made, name, getattr(shell, name))
    added: list[dict[str, Any]] = parts["added_tokens"]
    made.add_tokens(
        [
            tokenizers.AddedToken(**{key: value for key, value in token.items() if key != "id"})
            for token in added
        ]
    )
    return made


def _convert_with_transformers(directory: Path) -> tokenizers.Tokenizer:
    """The tokenizer of an older directory: vocab.json and merges.txt, or a SentencePiece model."""
    if not directory.is_dir():
        raise StartupError(f"{directory} is not a directory: give model.tokenizer=DIRECTORY")
    from transformers import AutoTokenizer  # imported here because the import takes seconds

    try:
        tokenizer = AutoTokenizer.from_pretrained(directory)
    except Exception as error:  # transformers raises many types, and the remedy is the same
        raise StartupError(
            f"{directory} has no tokenizer.json and no tokenizer that can be converted"
            f" ({str(error).splitlines()[0]}): give model.tokenizer=DIRECTORY"
        ) from error
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise StartupError(
            f"{directory}: {type(tokenizer).__name__} cannot be converted to a tokenizer.json;"
            " give model.tokenizer=DIRECTORY with a converted one"
        )
    return backend


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Named special tokens; a token is written as a string or as an object with `content`."""
    tokens = {name: config.get(name) for name in _NAMED_SPECIAL_TOKENS}
    texts = {
        name: token.get("content") if isinstance(token, dict) else token
        for name, token in tokens.items()
    }
    return {name: text for name, text in texts.items() if isinstance(text, str)}
