"""`OfflineTranscriber`: transcripts of whole files, with an engine in the same process."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

import msgspec

from ostinato.conf.sections.audio_schema import AudioConfig
from ostinato.models.audio.audio_spec import AudioSpec
from ostinato.runtime.audio.audio_inputs import AudioWindow, PreparedAudio
from ostinato.runtime.audio.offline_audio import AudioInput, audio_list, prepare_input
from ostinato.runtime.audio.segments import WindowTranscript, text_ids, transcript_segments
from ostinato.runtime.audio.transcript_prompt import (
    TranscriptTask,
    detection_prompt,
    encode_previous,
    find_language,
    probe_sampling,
    rules_of,
    transcript_prompt,
)
from ostinato.runtime.client.pooling import require_task
from ostinato.runtime.client.requests import resolve
from ostinato.runtime.errors import EngineError, InvalidRequestError
from ostinato.runtime.offline.offline_generation import OfflineGenerator
from ostinato.runtime.text.encoded_prompts import EncodedPrompt, PromptInputs
from ostinato.runtime.text.tokenizer import Tokenizer
from ostinato.runtime.types.engine_info import ServedTask
from ostinato.runtime.types.outputs import (
    CompletionOutput,
    FinishReason,
    Transcript,
    TranscriptionSegment,
)
from ostinato.runtime.types.params import SamplingParams

__all__ = ("OfflineTranscriber", "TranscriptSampling")

_TASKS = ("transcribe", "translate")


class TranscriptSampling(TypedDict, total=False):
    """The fields of `SamplingParams` that `LLM.transcribe` takes."""

    temperature: float
    top_p: float
    top_k: int
    min_p: float
    seed: int | None
    max_tokens: int | None  # of each window
    frequency_penalty: float
    presence_penalty: float
    repetition_penalty: float


class _Options(msgspec.Struct, frozen=True, kw_only=True):
    """What holds for all files of a call."""

    spec: AudioSpec
    tokenizer: Tokenizer
    task: TranscriptTask
    has_timestamps: bool
    previous_ids: list[int]
    sampling: SamplingParams


class _File(msgspec.Struct, kw_only=True):
    """A file while it is transcribed."""

    audio: PreparedAudio
    language: str | None  # None = not detected yet
    no_speech: dict[int, float] = {}  # window -> probability that it has no speech
    outputs: list[CompletionOutput] = []  # one for each window


class OfflineTranscriber:
    """Transcribes audio of any length, as `/v1/audio/transcriptions` does.

    Args:
        generator: runs prompts.
        inputs: has the tokenizer.
        config: the limits of audio.
    """

    def __init__(
        self, generator: OfflineGenerator, inputs: PromptInputs, config: AudioConfig
    ) -> None:
        self._generator = generator
        self._inputs = inputs
        self._config = config
        self._model = generator.model

    def transcribe(
        self,
        audio: AudioInput | Sequence[AudioInput],
        *,
        language: str | None,
        task: TranscriptTask,
        has_timestamps: bool,
        previous: str,
        sampling: Mapping[str, Any],
        use_progress: bool,
    ) -> list[Transcript]:
        """The transcript of each file.

        Args:
            audio: one file, or a list.
            language: the code or the English name of the spoken language; None = it is detected.
            task: write the spoken language, or English.
            has_timestamps: whether the transcripts have segments.
            previous: text that comes before each window; may be empty.
            sampling: the fields of `TranscriptSampling`.
            use_progress: show a progress bar.

        Raises:
            InvalidRequestError: the model does not transcribe, or an argument is refused; nothing
                was run.
            EngineError: the engine gave a window up.
        """
        require_task(self._model, ServedTask.transcribe)
        spec = self._model.audio
        assert spec is not None, "a model that transcribes takes audio"
        options = self._options(spec, task, has_timestamps, previous, sampling)
        code = None if language is None else find_language(language, spec)
        if not spec.languages:
            code = "en"
        # The prompts are equally long in every language.
        longest = self._prompt(options, code or next(iter(spec.languages)))
        resolve(longest, options.sampling, self._model)
        files = [
            _File(audio=prepare_input(one, spec, self._config, param=param), language=code)
            for param, one in _named(audio_list(audio))
        ]
        self._detect(files, options)
        self._run(files, options, use_progress)
        return [_transcript(file, options) for file in files]

    def _options(
        self,
        spec: AudioSpec,
        task: TranscriptTask,
        has_timestamps: bool,
        previous: str,
        sampling: Mapping[str, Any],
    ) -> _Options:
        if task not in _TASKS:
            raise InvalidRequestError(
                f"task={task!r} must be one of {', '.join(_TASKS)}", param="task"
            )
        tokenizer = self._inputs.tokenizer()
        return _Options(
            spec=spec,
            tokenizer=tokenizer,
            task=task,
            has_timestamps=has_timestamps,
            previous_ids=encode_previous(tokenizer, previous, spec, self._model.max_model_len),
            sampling=msgspec.structs.replace(
                _params(sampling, self._model.default_sampling),
                transcript=rules_of(spec, has_timestamps),
                logprobs=0 if has_timestamps else None,  # segments have their mean
            ),
        )

    def _prompt(self, options: _Options, language: str | None) -> list[int]:
        return transcript_prompt(
            options.spec,
            language=language,
            task=options.task,
            has_timestamps=options.has_timestamps,
            previous_ids=options.previous_ids,
            max_model_len=self._model.max_model_len,
        )

    def _detect(self, files: Sequence[_File], options: _Options) -> None:
        """Find the languages that are not known, each by a probe of the first window.

        A probe is a prompt of one token, <|startoftranscript|>. The model's next token is a
        language or <|nospeech|>.
        """
        spec = options.spec
        unknown = [file for file in files if file.language is None]
        if not unknown:
            return
        params = probe_sampling(spec, detects=True)
        prompts = [_probe(spec, file.audio.windows[0]) for file in unknown]
        codes = {token_id: code for code, token_id in spec.languages.items()}
        outputs = self._complete(prompts, [params] * len(prompts), use_progress=False)
        for file, output in zip(unknown, outputs, strict=True):
            file.language = codes[output.token_ids[0]]
            _note_probe(file, 0, output)

    def _run(self, files: Sequence[_File], options: _Options, use_progress: bool) -> None:
        """Run the windows of all files, and a probe beside each if segments are made."""
        spec = options.spec
        asks = options.has_timestamps and spec.no_speech_id is not None
        prompts: list[EncodedPrompt] = []
        params: list[SamplingParams] = []
        places: list[tuple[_File, int, bool]] = []  # file, window, whether it is a probe
        for file in files:
            token_ids = self._prompt(options, file.language)
            for index, window in enumerate(file.audio.windows):
                # Prompts of the same window are neighbours, so the engine encodes it once.
                if asks and index not in file.no_speech:
                    prompts.append(_probe(spec, window))
                    params.append(probe_sampling(spec, detects=False))
                    places.append((file, index, True))
                prompts.append(EncodedPrompt(token_ids=token_ids, audio=window.audio))
                params.append(options.sampling)
                places.append((file, index, False))
        outputs = self._complete(prompts, params, use_progress=use_progress)
        for (file, index, is_probe), output in zip(places, outputs, strict=True):
            if is_probe:
                _note_probe(file, index, output)
            else:
                file.outputs.append(output)

    def _complete(
        self,
        prompts: Sequence[EncodedPrompt],
        params: Sequence[SamplingParams],
        *,
        use_progress: bool,
    ) -> list[CompletionOutput]:
        adapters = [None] * len(prompts)
        answers = self._generator.generate(prompts, params, adapters, use_progress=use_progress)
        outputs = [answer.outputs[0] for answer in answers]
        if any(output.finish_reason is FinishReason.error for output in outputs):
            raise EngineError("the engine gave a window of the audio up; its log has the cause")
        return outputs


def _named(files: Sequence[AudioInput]) -> list[tuple[str, AudioInput]]:
    """The files with their names for errors."""
    if len(files) == 1:
        return [("audio", files[0])]
    return [(f"audio[{index}]", file) for index, file in enumerate(files)]


def _params(given: Mapping[str, Any], defaults: Mapping[str, Any]) -> SamplingParams:
    """Check the fields of `TranscriptSampling`, and add the model's defaults.

    As over HTTP, the temperature is 0 and `max_tokens` is all that fit, unless they are given.

    Raises:
        InvalidRequestError: a name is unknown, or a value is out of range.
    """
    names = TranscriptSampling.__annotations__
    for name in given:
        if name not in names:
            raise InvalidRequestError(
                f"{name} is not a parameter of transcribe; sampling has {', '.join(names)}",
                param=name,
                code="unknown_parameter",
            )
    try:
        return msgspec.convert(
            {**defaults, "temperature": 0.0, "max_tokens": None, **given}, SamplingParams
        )
    except msgspec.ValidationError as error:
        raise InvalidRequestError(str(error), param="sampling", code="invalid_value") from error


def _probe(spec: AudioSpec, window: AudioWindow) -> EncodedPrompt:
    return EncodedPrompt(token_ids=detection_prompt(spec), audio=window.audio)


def _note_probe(file: _File, index: int, output: CompletionOutput) -> None:
    if output.logprobs and output.logprobs[0].top_logprobs:
        file.no_speech[index] = math.exp(output.logprobs[0].top_logprobs[0])


def _transcript(file: _File, options: _Options) -> Transcript:
    spec, decode = options.spec, options.tokenizer.decode
    texts = [decode(text_ids(output.token_ids, spec)) for output in file.outputs]
    segments: list[TranscriptionSegment] | None = None
    if options.has_timestamps:
        windows = [
            WindowTranscript(
                token_ids=output.token_ids,
                logprobs=[entry.logprob for entry in output.logprobs or ()],
                begin_s=window.begin_s,
                end_s=window.end_s,
                temperature=options.sampling.temperature,
                no_speech_prob=file.no_speech.get(index, 0.0),
            )
            for index, (window, output) in enumerate(
                zip(file.audio.windows, file.outputs, strict=True)
            )
        ]
        segments = transcript_segments(windows, spec, decode)
    assert file.language is not None, "it is given or detected"
    return Transcript(
        text="".join(texts).strip(),
        language=file.language,
        duration=file.audio.seconds,
        segments=segments,
    )
