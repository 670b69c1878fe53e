"""Prepares requests of `/v1/audio/transcriptions` and `/v1/audio/translations`, in forks."""

from __future__ import annotations

import msgspec

from ostinato.api.audio.form_fields import FILE, parse_form
from ostinato.api.audio.transcription_fields import ReadFields, ResponseFormat, read_fields
from ostinato.api.preparation.generation import Generation, check_model, make_generations
from ostinato.api.preparation.preparation import Arrival, Grant, Preparation
from ostinato.api.service.reply_state import new_id
from ostinato.models.audio.audio_spec import AudioSpec
from ostinato.runtime.audio.audio_inputs import AudioWindow, prepare_audio
from ostinato.runtime.audio.transcript_prompt import (
    TranscriptTask,
    encode_previous,
    find_language,
    rules_of,
    transcript_prompt,
)
from ostinato.runtime.client.pooling import require_task
from ostinato.runtime.errors import InvalidRequestError
from ostinato.runtime.types.engine_info import ServedTask

__all__ = (
    "FUNCTIONS",
    "PreparedTranscript",
    "prepare_transcription",
    "prepare_translation",
)

_WITH_TIMES = ("srt", "verbose_json", "vtt")


class PreparedTranscript(msgspec.Struct, frozen=True, kw_only=True):
    """A request with audio. Values that are equal for all windows are stored once."""

    model: str | None
    task: TranscriptTask
    # Of every window, without its audio. Its prompt is as long as the one in the spoken language.
    generation: Generation
    windows: list[AudioWindow]
    seconds: float  # of the whole audio
    language: str | None  # code of the spoken language; None = it is to be detected
    previous_ids: list[int]  # tokens of the field `prompt`
    response_format: ResponseFormat
    has_logprobs: bool  # the reply shows the log-probabilities of its tokens
    stream: bool

    @property
    def has_times(self) -> bool:
        """Whether the reply shows the times of segments."""
        return self.response_format in _WITH_TIMES

    @property
    def generations(self) -> list[Generation]:
        """One for each window, as if its language were known."""
        return [
            msgspec.structs.replace(self.generation, audio=window.audio) for window in self.windows
        ]


def prepare_transcription(
    preparation: Preparation, data: bytes, arrival: Arrival
) -> PreparedTranscript:
    """Prepare a request of `/v1/audio/transcriptions`.

    Raises:
        InvalidRequestError: the model takes no audio, or the form, a field or the file is refused.
        ForkNeededError: this process lacks `Grant.audio`.
    """
    return _prepare(preparation, data, arrival, "transcribe")


def prepare_translation(
    preparation: Preparation, data: bytes, arrival: Arrival
) -> PreparedTranscript:
    """Prepare a request of `/v1/audio/translations`; see `prepare_transcription`."""
    return _prepare(preparation, data, arrival, "translate")


FUNCTIONS = (prepare_transcription, prepare_translation)


def _prepare(
    preparation: Preparation, data: bytes, arrival: Arrival, task: TranscriptTask
) -> PreparedTranscript:
    model = preparation.model
    require_task(model, ServedTask.transcribe)
    preparation.require(Grant.audio)
    preparation.begin_body()
    form = parse_form(data, arrival.content_type)
    fields = read_fields(form)
    own = fields.own
    check_model(own.model, model, arrival.adapters)
    spec = model.audio
    assert spec is not None, "a model that transcribes takes audio"
    assert form.file is not None, "read_fields has checked it"
    _check_task(fields, spec, task, model.name)
    language = None if own.language is None else find_language(own.language, spec)
    previous_ids = _encode_prompt(preparation, own.prompt, spec)
    generation = _generation(preparation, fields, arrival, task, language, previous_ids)
    preparation.begin_audio(FILE)
    prepared = prepare_audio(form.file, spec, preparation.settings.audio, param=FILE)
    return PreparedTranscript(
        model=own.model,
        task=task,
        generation=generation,
        windows=list(prepared.windows),
        seconds=prepared.seconds,
        language=language,
        previous_ids=previous_ids,
        response_format=own.response_format,
        has_logprobs=bool(own.include),
        stream=own.stream,
    )


def _check_task(fields: ReadFields, spec: AudioSpec, task: TranscriptTask, name: str) -> None:
    if task == "transcribe":
        return
    if spec.translate_id is None:
        raise InvalidRequestError(
            f"{name} does not translate: it is a model for English only; use"
            " /v1/audio/transcriptions, or serve a multilingual model",
            param="model",
            code="unsupported_task",
        )
    if fields.own.include:
        raise InvalidRequestError(
            "include[]=logprobs is not supported for translations; leave it out",
            param="include[]",
            code="unsupported_parameter",
        )


def _encode_prompt(preparation: Preparation, text: str, spec: AudioSpec) -> list[int]:
    """The tokens of the field `prompt`, at most as many as a prompt can have."""
    tokenizer = preparation.encoder.tokenizer("prompt")
    if text.strip():
        preparation.begin_prompt("prompt")
    return encode_previous(tokenizer, text, spec, preparation.model.max_model_len)


def _generation(
    preparation: Preparation,
    fields: ReadFields,
    arrival: Arrival,
    task: TranscriptTask,
    language: str | None,
    previous_ids: list[int],
) -> Generation:
    """The parameters of all windows. Their prompts are equally long in every language."""
    model, own = preparation.model, fields.own
    assert model.audio is not None, "a model that transcribes takes audio"
    has_times = own.response_format in _WITH_TIMES
    prompt = transcript_prompt(
        model.audio,
        language=language or next(iter(model.audio.languages), None),
        task=task,
        has_timestamps=has_times,
        previous_ids=previous_ids,
        max_model_len=model.max_model_len,
    )
    sampling = fields.sampling
    if sampling.temperature is None:  # OpenAI's default of these endpoints
        sampling = msgspec.structs.replace(sampling, temperature=0.0)
    kind = "transcript" if task == "transcribe" else "translation"
    # The log-probabilities of the tokens are shown, or a segment shows their mean.
    needs_logprobs = own.include or own.response_format == "verbose_json"
    [generation] = make_generations(
        sampling,
        [prompt],
        preparation,
        request_id=new_id(kind, sampling.request_id, arrival.request_id),
        max_tokens=own.max_completion_tokens,
        reports={"logprobs": 0 if needs_logprobs else None, "prompt_logprobs": None},
        field_names={"max_tokens": "max_completion_tokens"},
    )
    rules = rules_of(model.audio, has_times)
    return msgspec.structs.replace(
        generation,
        sampling=msgspec.structs.replace(generation.sampling, transcript=rules),
    )
