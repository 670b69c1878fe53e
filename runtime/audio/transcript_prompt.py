"""The decoder's prompt of one window of audio, and the rules for its output.

The prompts are those of Whisper (arXiv:2212.04356, figure 1).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol

from ostinato.models.audio.audio_spec import AudioSpec
from ostinato.models.audio.languages import language_code
from ostinato.runtime.errors import InvalidRequestError
from ostinato.runtime.types.params import SamplingParams
from ostinato.runtime.types.transcript_rules import TranscriptRules

__all__ = (
    "PreviousEncoder",
    "TranscriptTask",
    "detection_prompt",
    "encode_previous",
    "find_language",
    "probe_sampling",
    "rules_after",
    "rules_of",
    "transcript_prompt",
)

TranscriptTask = Literal["transcribe", "translate"]
_ENGLISH = "en"


class PreviousEncoder(Protocol):
    """The part of a tokenizer that earlier text needs."""

    def encode_truncated(
        self, text: str, limit: int, *, side: Literal["left", "right"], add_special_tokens: bool
    ) -> list[int]:
        """At most `limit` token ids of a text; `side` is where tokens are cut off."""
        ...

    def token(self, token_id: int) -> str:
        """The text of a token, as the vocabulary has it."""
        ...


def transcript_prompt(
    spec: AudioSpec,
    *,
    language: str | None,
    task: TranscriptTask,
    has_timestamps: bool,
    previous_ids: Sequence[int],
    max_model_len: int,
) -> list[int]:
    """The tokens after which the decoder writes the text of a window.

    Args:
        spec: how the model takes audio.
        language: the code of the spoken language, such as "en". An English model also takes None.
        task: write the spoken language, or English.
        has_timestamps: whether the model writes timestamps.
        previous_ids: tokens of the text that comes before the window; may be empty. Whisper keeps
            the last `max_model_len // 2 - 1` of them. None are kept if the model has no
            <|startofprev|>.
        max_model_len: the length of the decoder's context in tokens.

    Raises:
        InvalidRequestError: the model does not know the language, or cannot translate.
    """
    prompt = list[int]()
    num_kept = min(len(previous_ids), max(0, max_model_len // 2 - 1))
    if num_kept and spec.start_of_previous_id is not None:
        prompt += [spec.start_of_previous_id, *previous_ids[-num_kept:]]
    prompt.append(spec.start_id)
    language_id = _language_id(spec, language)
    if language_id is not None:
        prompt.append(language_id)
    task_id = _task_id(spec, task)
    if task_id is not None:
        prompt.append(task_id)
    if not has_timestamps:
        prompt.append(spec.no_timestamps_id)
    return prompt


def detection_prompt(spec: AudioSpec) -> list[int]:
    """The prompt after which the next token is a language, or <|nospeech|>."""
    return [spec.start_id]


def probe_sampling(spec: AudioSpec, *, detects: bool) -> SamplingParams:
    """The parameters of `detection_prompt`: one token, and the log-probability of <|nospeech|>.

    Args:
        spec: how the model takes audio.
        detects: the token is the likeliest language, not the likeliest of all tokens.
    """
    reported = None if spec.no_speech_id is None else (spec.no_speech_id,)
    return SamplingParams(
        temperature=0.0,
        seed=0,
        max_tokens=1,
        ignore_eos=True,
        allowed_token_ids=tuple(spec.languages.values()) if detects else None,
        logprobs=None if reported is None else 1,
        logprob_token_ids=reported,
    )


def rules_of(spec: AudioSpec, has_timestamps: bool) -> TranscriptRules:
    """The rules for the output after a prompt of `transcript_prompt`.

    Without timestamps, the rules only suppress tokens, as in Whisper. So a model can still write a
    timestamp. Readers of the output must leave it out of the text (`text_ids`).
    """
    if not has_timestamps:
        return TranscriptRules(
            suppressed=spec.suppressed,
            suppressed_first=spec.suppressed_first,
            end_id=spec.end_id,
        )
    return TranscriptRules(
        suppressed=spec.suppressed,
        suppressed_first=spec.suppressed_first,
        end_id=spec.end_id,
        first_timestamp_id=spec.first_timestamp_id,
        no_timestamps_id=spec.no_timestamps_id,
        max_initial_timestamp=spec.max_initial_timestamp,
    )


def rules_after(spec: AudioSpec, prompt_token_ids: Sequence[int]) -> TranscriptRules | None:
    """The rules for the output after a prompt that the caller has written.

    None = the prompt does not end like one of `transcript_prompt`. So the model writes the language
    and the task itself, or continues a text.
    """
    last = prompt_token_ids[-1] if prompt_token_ids else None
    if last == spec.no_timestamps_id:
        return rules_of(spec, False)
    last_ids = (spec.transcribe_id, spec.translate_id) if spec.languages else (spec.start_id,)
    return rules_of(spec, True) if last is not None and last in last_ids else None


def find_language(given: str, spec: AudioSpec) -> str:
    """The code of a language that a caller names by its code or its English name.

    Raises:
        InvalidRequestError: the model does not have the language.
    """
    codes = list(spec.languages) or [_ENGLISH]
    # A checkpoint can have a language that Whisper does not have.
    code = given.strip() if given.strip() in codes else language_code(given.strip())
    if code in codes:
        return code
    raise InvalidRequestError(
        f"language={given[:40]!r} is not a language of this model; give one of"
        f" {', '.join(sorted(codes))}, or leave it out",
        param="language",
        code="invalid_value",
    )


def encode_previous(
    tokenizer: PreviousEncoder, text: str, spec: AudioSpec, max_model_len: int
) -> list[int]:
    """The last tokens of the text that comes before the audio; empty if it is only white space.

    Args:
        tokenizer: the model's.
        text: without special tokens.
        spec: how the model takes audio.
        max_model_len: the length of the decoder's context in tokens.

    Raises:
        InvalidRequestError: the model has no <|startofprev|>, or the text has a special token.
    """
    if not text.strip():
        return []
    if spec.start_of_previous_id is None:
        raise InvalidRequestError(
            "prompt is not supported: the model has no token <|startofprev|>; leave it out",
            param="prompt",
            code="unsupported_parameter",
        )
    token_ids = tokenizer.encode_truncated(
        f" {text.strip()}", max_model_len // 2, side="left", add_special_tokens=False
    )
    special = next((one for one in token_ids if one >= spec.end_id), None)
    if special is not None:
        raise InvalidRequestError(
            f"prompt contains the special token {tokenizer.token(special)!r}; send plain text",
            param="prompt",
            code="invalid_value",
        )
    return token_ids


def _language_id(spec: AudioSpec, language: str | None) -> int | None:
    """The token of a language; None for an English model.

    Raises:
        InvalidRequestError: the model does not know the language.
    """
    if spec.languages:
        assert language is not None, "the language is detected before the prompt is made"
        if language in spec.languages:
            return spec.languages[language]
        known = ", ".join(sorted(spec.languages))
    elif language in (None, "en"):
        return None
    else:
        known = "en"
    raise InvalidRequestError(
        f"language={language!r}: the model does not know this language; use one of these codes, "
        f"or leave the field out: {known}",
        param="language",
        code="invalid_value",
    )


def _task_id(spec: AudioSpec, task: TranscriptTask) -> int | None:
    """The token of a task; None if the model has only one task, which is to transcribe.

    Raises:
        InvalidRequestError: the model cannot translate.
    """
    if task == "transcribe":
        return spec.transcribe_id
    if spec.translate_id is None:
        raise InvalidRequestError(
            "the model cannot translate: its checkpoint has no token <|translate|>; write the "
            "spoken language, or use a multilingual model",
            param="model",
            code="unsupported_task",
        )
    return spec.translate_id
