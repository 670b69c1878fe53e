"""Reads how a model takes audio from the files of its checkpoint.

The facts are those of Whisper in transformers 5.24: which key has which effect, and which default.
This module imports no torch.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec

from ostinato.models.audio.audio_spec import AudioSpec
from ostinato.models.audio.languages import LANGUAGES
from ostinato.models.audio.mel_fields import read_mel_spec
from ostinato.models.config.hf_fields import HFConfig, read_integer
from ostinato.models.media.processor_fields import TokenId

__all__ = ("read_audio_spec",)

_ENGLISH_VOCABULARY = 51864  # tokens of the English checkpoints; all others have more


def read_audio_spec(
    path: Path,
    hf_config: HFConfig,
    generation_config: HFConfig | None,
    *,
    token_id: TokenId,
) -> AudioSpec:
    """Read how a model takes audio.

    The language and task that generation_config.json may state as defaults (`language`, `task`,
    `forced_decoder_ids`) have no effect, because every prompt states its own.

    Args:
        path: a directory with preprocessor_config.json, or with processor_config.json that has the
            key `feature_extractor`.
        hf_config: the parsed config.json.
        generation_config: the parsed generation_config.json. Without it, or if it is empty, its
            keys are read from config.json.
        token_id: gives the id of an added token's text; None if there is no such token.

    Raises:
        ValueError: a file is missing, or a key has a value that is not supported. The message
            names the file, the key and the value.
    """
    tokens = _Tokens(hf_config, generation_config or {}, token_id)
    num_states = read_integer(hf_config, "max_source_positions", default=1500)
    mel = read_mel_spec(
        path,
        num_positions=num_states,
        num_bins=read_integer(hf_config, "num_mel_bins", default=80),
    )
    first_timestamp_id = tokens.required("no_timestamps_token_id", "<|notimestamps|>") + 1
    tokens.check_timestamps(first_timestamp_id, num_states)
    languages, tasks = tokens.languages_and_tasks()
    return AudioSpec(
        **msgspec.structs.asdict(mel),
        start_id=tokens.required("decoder_start_token_id", "<|startoftranscript|>"),
        end_id=tokens.required("eos_token_id", "<|endoftext|>"),
        no_timestamps_id=first_timestamp_id - 1,
        first_timestamp_id=first_timestamp_id,
        languages=languages,
        transcribe_id=tasks.get("transcribe"),
        translate_id=tasks.get("translate"),
        start_of_previous_id=tokens.optional("prev_sot_token_id", "<|startofprev|>"),
        no_speech_id=tokens.named("<|nospeech|>", "<|nocaptions|>"),
        timestamp_step_s=mel.window_s / num_states,
        max_initial_timestamp=tokens.max_initial_timestamp(),
        suppressed=tokens.listed("suppress_tokens"),
        suppressed_first=tokens.listed("begin_suppress_tokens"),
    )


class _Tokens:
    """The tokens of prompts, from generation_config.json or the tokenizer.

    Args:
        hf_config: the parsed config.json.
        generation_config: the parsed generation_config.json; empty = there is none.
        token_id: gives the id of an added token's text.
    """

    def __init__(self, hf_config: HFConfig, generation_config: HFConfig, token_id: TokenId) -> None:
        self._config = hf_config
        self._generation = generation_config
        self._token_id = token_id
        self._vocab_size = read_integer(hf_config, "vocab_size", default=51865)

    def optional(self, key: str, text: str) -> int | None:
        """The token that a key states, else the added token with a text; None without both."""
        for source, fields in (
            ("generation_config.json", self._generation),
            ("config.json", self._config),
        ):
            value = fields.get(key)
            if isinstance(value, list) and len(value) == 1:
                value = value[0]
            if value is not None:
                return self._checked(value, f"{source}: {key}={json.dumps(fields[key])}")
        return self.named(text)

    def required(self, key: str, text: str) -> int:
        """Like `optional`, but an error names the key if there is no such token."""
        found = self.optional(key, text)
        if found is None:
            raise ValueError(
                f"generation_config.json: {key} is missing, and the tokenizer has no token {text}; "
                "copy both from the model's original repository"
            )
        return found

    def named(self, *texts: str) -> int | None:
        """The first added token that exists of those with the texts."""
        for text in texts:
            found = self._token_id(text)
            if found is not None:
                return self._checked(found, f"the tokenizer's token {text} has the id {found}, but")
        return None

    def listed(self, key: str) -> tuple[int, ...]:
        """The tokens in a list; null and a missing key are an empty list."""
        source, value = self._stated(key)
        if value is None:
            return ()
        what = f"{source}: {key}={json.dumps(value)[:200]}"
        if not isinstance(value, list):
            raise ValueError(f"{what} must be a list of token ids")  # noqa: TRY004
        return tuple(
            self._checked(token, f"{what} has {json.dumps(token)}, but") for token in value
        )

    def max_initial_timestamp(self) -> int | None:
        """Steps that the first timestamp can have at most; None = any."""
        source, value = self._stated("max_initial_timestamp_index")
        if value is not None and (type(value) is not int or value < 0):
            raise ValueError(
                f"{source}: max_initial_timestamp_index={json.dumps(value)} must be null or an "
                "integer of at least 0"
            )
        return value

    def check_timestamps(self, first_timestamp_id: int, num_states: int) -> None:
        """Check that there is a timestamp for each state of the encoder, and for the end."""
        if first_timestamp_id + num_states >= self._vocab_size:
            raise ValueError(
                f"config.json: vocab_size={self._vocab_size} has no room for {num_states + 1} "
                f"timestamps after <|notimestamps|>, which is token {first_timestamp_id - 1}; "
                "models without timestamps are not supported"
            )
        stated = self._token_id("<|0.00|>")
        if stated not in (None, first_timestamp_id):
            raise ValueError(
                f"the tokenizer's token <|0.00|> has the id {stated}, which must be one more than "
                f"no_timestamps_token_id={first_timestamp_id - 1}"
            )

    def languages_and_tasks(self) -> tuple[dict[str, int], dict[str, int]]:
        """Language code -> token and task -> token, which are empty for an English model."""
        source, stated = self._stated("is_multilingual")
        if stated is not None and not isinstance(stated, bool):
            raise ValueError(
                f"{source}: is_multilingual={json.dumps(stated)} must be true or false"
            )
        if not (self._vocab_size != _ENGLISH_VOCABULARY if stated is None else stated):
            return {}, {}
        languages = self._mapped("lang_to_id", tuple(f"<|{code}|>" for code in LANGUAGES))
        tasks = self._mapped("task_to_id", ("transcribe", "translate"))
        if not languages or "transcribe" not in tasks:
            raise ValueError(
                "generation_config.json: a model of several languages needs lang_to_id, and "
                "task_to_id with transcribe, or added tokens such as <|en|> and <|transcribe|>; "
                "set is_multilingual=false if the model has one language"
            )
        codes: dict[str, int] = {}
        for text, token in languages.items():
            code = text.removeprefix("<|").removesuffix("|>")
            if text != f"<|{code}|>" or not code:
                raise ValueError(
                    f"generation_config.json: lang_to_id has {json.dumps(text)}; keys must be "
                    "like <|en|>"
                )
            codes[code] = token
        return codes, tasks

    def _mapped(self, key: str, texts: tuple[str, ...]) -> dict[str, int]:
        """Text -> token, from a mapping that a key states, else from the added tokens."""
        source, stated = self._stated(key)
        if stated is None:
            found = {text: self.named(text if "|" in text else f"<|{text}|>") for text in texts}
            return {text: token for text, token in found.items() if token is not None}
        if not isinstance(stated, dict):
            raise ValueError(f"{source}: {key}={json.dumps(stated)} must map texts to token ids")  # noqa: TRY004
        return {
            text: self._checked(token, f"{source}: {key}.{text}={json.dumps(token)}")
            for text, token in stated.items()
        }

    def _stated(self, key: str) -> tuple[str, Any]:
        """The file that can state a key, and its value. transformers reads one file only."""
        if self._generation:
            return "generation_config.json", self._generation.get(key)
        return "config.json", self._config.get(key)

    def _checked(self, value: Any, what: str) -> int:
        if type(value) is not int or not 0 <= value < self._vocab_size:
            raise ValueError(
                f"{what} must be a token id below config.json: vocab_size={self._vocab_size}"
            )
        return value
