"""`LLM`: offline generation, with the engine in this process.

from ostinato import LLM, SamplingParams
llm = LLM()                                            # the bundled demo model
llm = LLM("path/or/hub-id", max_model_len=4096, dtype="bfloat16")
print(llm.generate("Once upon a time", SamplingParams(max_tokens=40))[0].outputs[0].text)
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Self, Unpack

import msgspec

from ostinato.conf.arguments.engine_arguments import argument_settings
from ostinato.conf.compose import load_config
from ostinato.conf.errors import ConfigError
from ostinato.conf.root import RunConfig
from ostinato.conf.sections.server_schema import ExecutorName, ParallelConfig
from ostinato.runtime.audio.offline_audio import AudioInput
from ostinato.runtime.audio.transcript_prompt import TranscriptTask
from ostinato.runtime.engine.step_observer import StepObserver
from ostinato.runtime.errors import InvalidRequestError
from ostinato.runtime.grammar.compiler import GrammarCompiler
from ostinato.runtime.media.prompt_media import MediaLimits
from ostinato.runtime.offline.offline_adapters import OfflineAdapters
from ostinato.runtime.offline.offline_generation import OfflineGenerator, require_generation
from ostinato.runtime.offline.offline_pooling import (
    OfflinePooler,
    Texts,
    default_pooling,
    text_pairs,
)
from ostinato.runtime.offline.offline_steps import OfflineSteps
from ostinato.runtime.offline.offline_transcripts import OfflineTranscriber, TranscriptSampling
from ostinato.runtime.speculation.proposer import Proposer
from ostinato.runtime.startup.build_engine import build_engine
from ostinato.runtime.startup.model_cache import LoadedModelCache
from ostinato.runtime.text.encoded_prompts import EncodedPrompt, PromptInputs
from ostinato.runtime.text.offline_prompts import DictPrompt, Prompt, Prompts, prompt_list
from ostinato.runtime.text.tokenizer import Tokenizer
from ostinato.runtime.types.adapters import LoRARequest
from ostinato.runtime.types.engine_info import EngineStats, ServedModel
from ostinato.runtime.types.outputs import (
    EmbeddingOutput,
    GenerationOutput,
    RequestOutput,
    Transcript,
)
from ostinato.runtime.types.params import PoolingParams, SamplingParams

__all__ = ("LLM",)

Message = dict[str, Any]
_LoRA = LoRARequest | Sequence[LoRARequest | None] | None


class LLM:
    """Generates text for prompts, also as a stream; embeds and scores texts. Not thread-safe.

    Its memory is freed by `close`, at the end of a `with` block, or when the object is deleted.
    """

    def __init__(
        self,
        model: str = "",
        *,
        overrides: Sequence[str] = (),
        config: RunConfig | None = None,
        report: Callable[[str, float | None], None] = lambda name, seconds: None,
        observer: StepObserver | None = None,
        model_cache: LoadedModelCache | None = None,
        proposer: Proposer | None = None,
        seed: int | None = None,
        **arguments: Any,
    ) -> None:
        """
        Args:
            model: a local directory, a GGUF file or a hub id. Empty = the model that `overrides`
                names. If `overrides` names none either, the bundled demo model.
            overrides: settings as on the command line, `scheduler.max_num_seqs=8`.
            config: a complete configuration, instead of `model`, `overrides` and `arguments`.
            report: called with each phase of the start: with None when it begins, and with its
                seconds when it has ended.
            observer: called with every step; None = a default observer that writes no file.
            model_cache: keeps the loaded model for the next engine of this process; one engine at
                a time uses it. None = the model is loaded and freed with the engine.
            proposer: replaces the drafter of `speculation.method`. A drafter does not change the
                distribution of the output (docs/speculation.md).
            seed: a request without a seed gets one from a generator that starts with this seed.
                None = such a request gets a random seed.
            arguments: vLLM's names of settings, such as `max_model_len=4096`
                (conf/arguments). An argument wins over the same setting in `overrides`.

        Raises:
            ConfigError: a setting is wrong, unknown or not supported, or is given beside `config`.
            StartupError: the engine cannot start.
        """
        settings = argument_settings({"model": model or None, **arguments})
        if config is None:
            config = load_config(overrides, values=settings)
        elif settings or overrides:
            given = ", ".join([*settings, *overrides])
            raise ConfigError(f"LLM takes config=... or settings ({given}), not both")
        _require_one_engine_here(config.parallel)
        self._engine = build_engine(config, report, observer, model_cache, proposer)
        self._request_ids = (f"offline-{number}" for number in itertools.count())
        self.model: ServedModel = self._engine.model
        self._grammars = GrammarCompiler(self.model)
        steps = OfflineSteps(self._engine)
        self._pooler = OfflinePooler(self.model, steps, self._request_ids)
        self._adapters = OfflineAdapters(self._engine, steps, config.lora)
        self.tokenizer: Tokenizer | None = (
            Tokenizer.from_path(self.model.tokenizer, chat_template_file=config.model.chat_template)
            if self.model.tokenizer
            else None
        )
        media = MediaLimits(config.images, config.video, config.audio)
        self._inputs = PromptInputs(self.model, self.tokenizer, media)
        self._generator = OfflineGenerator(
            self._engine,
            steps,
            self.tokenizer,
            self._request_ids,
            self._grammars,
            None if seed is None else random.Random(seed),
        )
        self._transcriber = OfflineTranscriber(self._generator, self._inputs, config.audio)
        self._adapters.load_configured()

    def generate(
        self,
        prompts: Prompts,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_progress: bool = True,
        lora_request: _LoRA = None,
    ) -> list[GenerationOutput]:
        """Complete prompts with continuous batching.

        Args:
            prompts: a text, token ids, `{"prompt": text}`, `{"prompt_token_ids": ids}`, or a list
                of them. A dictionary can have images and videos, `"multi_modal_data": {"image":
                images, "video": videos}` (docs/images.md, docs/video.md), or `{"audio": sounds}`.
                For a model that transcribes, it has `{"audio": (samples, sampling_rate)}`, at most
                one window (docs/audio.md).
            sampling_params: one for all prompts, or a list with one for each prompt; None = the
                model's defaults.
            use_progress: show a progress bar.
            lora_request: the adapter of all prompts, or a list with one for each prompt; None = the
                model alone. An adapter is loaded when it is first named.

        Returns:
            One output per prompt, in order.

        Raises:
            InvalidRequestError: a prompt, its parameters or its adapter cannot be served; nothing
                was run.
            HelperProcessError: no process could check a grammar; nothing was run.
            RankFailedError: a rank of the engine has ended or hangs, or an earlier step failed.
            KeyboardInterrupt: of a Ctrl-C, after the present step. The requests are dropped.
        """
        require_generation(self.model)
        many = [self._inputs.encode(prompt) for prompt in prompt_list(prompts)]
        return self._complete(many, sampling_params, lora_request, use_progress=use_progress)

    def _complete(
        self,
        many: list[EncodedPrompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        lora_request: _LoRA,
        *,
        use_progress: bool,
    ) -> list[GenerationOutput]:
        """Check the parameters, hold the adapters, and generate."""
        if sampling_params is None or isinstance(sampling_params, SamplingParams):
            params = [sampling_params or self.default_sampling()] * len(many)
        else:
            params = list(sampling_params)
        if len(params) != len(many):
            raise InvalidRequestError(
                f"the list sampling_params has length {len(params)}, and the list of prompts has "
                f"length {len(many)}; give a list of the same length, or one SamplingParams for "
                "all prompts",
                param="sampling_params",
            )
        with self._adapters.held(lora_request, len(many)) as adapters:
            return self._generator.generate(many, params, adapters, use_progress=use_progress)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | None = None,
        *,
        use_progress: bool = True,
        lora_request: _LoRA = None,
    ) -> list[GenerationOutput]:
        """Answer one conversation or a list of them; see `generate`.

        Args:
            messages: `[{"role": "user", "content": "Hello"}]`, or a list of such lists. A content
                can be a list of texts, images (docs/images.md), videos (docs/video.md) and audio
                (docs/audio.md).
        """
        require_generation(self.model)
        single = bool(messages) and isinstance(messages[0], dict)
        conversations: Any = [messages] if single else messages
        many = [self._inputs.render(conversation) for conversation in conversations]
        return self._complete(many, sampling_params, lora_request, use_progress=use_progress)

    def transcribe(
        self,
        audio: AudioInput | Sequence[AudioInput],
        *,
        language: str | None = None,
        task: TranscriptTask = "transcribe",
        timestamps: bool = False,
        prompt: str | None = None,
        use_progress: bool = True,
        **sampling: Unpack[TranscriptSampling],
    ) -> list[Transcript]:
        """The text of audio of any length. All windows of all files run in one batch.

        Args:
            audio: a path, the bytes of a file, `(samples, sampling_rate)`, or a list of these.
                Samples are [n], [n, channels] or [channels, n], floats or int16.
            language: the spoken language of all files, as a code such as "de" or an English name.
                None = the first window of each file decides.
            task: "transcribe" writes the spoken language, "translate" writes English.
            timestamps: whether the transcripts have segments with times.
            prompt: text that comes before each window: it shows spelling and style.
            use_progress: show a progress bar.
            sampling: `temperature` (0 unless given), `max_tokens` of a window (all that fit unless
                given), and the other names of `TranscriptSampling`.

        Returns:
            One transcript per file, in order.

        Raises:
            InvalidRequestError: the model does not transcribe, a file or an argument is refused, or
                the package that decodes files is missing; nothing was run.
            EngineError: the engine gave a window up.
            RankFailedError: a rank of the engine has ended or hangs.
        """
        return self._transcriber.transcribe(
            audio,
            language=language,
            task=task,
            has_timestamps=timestamps,
            previous=prompt or "",
            sampling=sampling,
            use_progress=use_progress,
        )

    def embed(
        self,
        prompts: Prompts,
        pooling: PoolingParams | None = None,
        *,
        lora_request: _LoRA = None,
    ) -> list[EmbeddingOutput]:
        """The embedding vector of each text.

        Args:
            prompts: as for `generate`.
            pooling: how the vector is made; None = the model's default pooling.
            lora_request: as for `generate`.

        Raises:
            InvalidRequestError: a text or its adapter cannot be served; nothing was run.
            RankFailedError: a rank of the engine has ended or hangs.
        """
        params = pooling or self.default_pooling()
        batch = [self._inputs.token_ids(prompt) for prompt in prompt_list(prompts)]
        with self._adapters.held(lora_request, len(batch)) as adapters:
            return self._pooler.embed(batch, params, adapters)

    def score(
        self, first: Texts, second: Texts, *, lora_request: LoRARequest | None = None
    ) -> list[float]:
        """How well each text of `second` fits its text of `first`.

        With a classification head the score is its output; the head must have one label. Without a
        head the score is the cosine of the two embeddings.

        Args:
            first: one text for all of `second`, or one for each; `{"prompt": text}` is a text too.
            second: a text or several.
            lora_request: the adapter of all texts; None = the model alone.

        Raises:
            InvalidRequestError: `second` is empty, `first` has neither one text nor as many as
                `second`, or a text or the adapter cannot be served.
            RankFailedError: a rank of the engine has ended or hangs.
        """
        pairs = text_pairs(first, second)
        with self._adapters.held(lora_request, 1) as [adapter]:
            return self._pooler.score(pairs, self._inputs.tokenizer(), adapter)

    def default_pooling(self, **changes: Any) -> PoolingParams:
        """The model's default pooling parameters with `changes` applied."""
        return default_pooling(self.model, **changes)

    def stream(
        self,
        prompt: Prompt | DictPrompt | Sequence[Message],
        sampling_params: SamplingParams | None = None,
        *,
        lora_request: LoRARequest | None = None,
    ) -> Iterator[RequestOutput]:
        """Yield the outputs of a prompt or conversation. Closing the iterator ends the request.

        Between two outputs, any method of this object may be called. Streams that are open at the
        same time run in one batch.

        Args:
            prompt: a prompt as for `generate`, or a conversation as for `chat`.
            sampling_params: None = the model's defaults.
            lora_request: the adapter; None = the model alone.

        Raises:
            InvalidRequestError: the prompt, its parameters or its adapter cannot be served.
            HelperProcessError: no process could check a grammar.
            RankFailedError: a rank of the engine has ended or hangs.
        """
        require_generation(self.model)
        is_chat = isinstance(prompt, Sequence) and bool(prompt) and isinstance(prompt[0], dict)
        if is_chat:
            encoded = self._inputs.render(prompt)  # type: ignore[arg-type]
        else:
            [one] = prompt_list(prompt)  # type: ignore[arg-type]
            encoded = self._inputs.encode(one)
        params = sampling_params or self.default_sampling()
        with self._adapters.held(lora_request, 1) as [adapter]:
            yield from self._generator.stream(encoded, params, adapter)

    def close(self) -> None:
        """Free the engine's memory, threads and files. No other method may be called afterwards."""
        self._grammars.close()
        self._engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def default_sampling(self, **changes: Any) -> SamplingParams:
        """The model's default parameters (generation_config.json) with `changes` applied."""
        return msgspec.convert({**self.model.default_sampling, **changes}, SamplingParams)

    def stats(self) -> EngineStats:
        """The engine's counters."""
        return self._engine.stats()

    def reset_prefix_cache(self) -> bool:
        """Forget all cached blocks. While a request runs: keep them and return False."""
        return self._engine.reset_prefix_cache()


def _require_one_engine_here(parallel: ParallelConfig) -> None:
    """Refuse settings that need engine processes.

    Raises:
        ConfigError: such a setting is set.
    """
    setting = f"parallel.data={parallel.data}" if parallel.data > 1 else ""
    if parallel.executor is ExecutorName.ray:
        setting = "parallel.executor=ray"
    if setting:
        raise ConfigError(
            f"{setting} needs engine processes, and LLM runs one engine in this process; use "
            "`run serve`, `run batch` or `AsyncEngine`"
        )
