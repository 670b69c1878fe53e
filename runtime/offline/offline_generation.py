"""`OfflineGenerator`: completions of prompts, with an engine in the same process."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
)

from ostinato.runtime.client.completion import PromptCompletions
from ostinato.runtime.client.pooling import require_task
from ostinato.runtime.client.requests import (
    PreparedParts,
    bad_words_token_ids,
    make_requests,
    resolve,
)
from ostinato.runtime.grammar.compiler import GrammarCompiler
from ostinato.runtime.offline.offline_steps import OfflineSteps
from ostinato.runtime.text.encoded_prompts import EncodedPrompt
from ostinato.runtime.text.tokenizer import Tokenizer
from ostinato.runtime.types.adapters import ServedAdapter
from ostinato.runtime.types.engine_info import ServedModel, ServedTask
from ostinato.runtime.types.outputs import (
    CompletionOutput,
    FinishReason,
    GenerationOutput,
    RequestOutput,
    TokenLogprobs,
)
from ostinato.runtime.types.params import SamplingParams
from ostinato.runtime.types.request import Request

if TYPE_CHECKING:
    from ostinato.runtime.engine.engine import Engine

__all__ = ("OfflineGenerator", "require_generation")


def require_generation(model: ServedModel) -> None:
    """Raises InvalidRequestError if the model neither generates text nor transcribes audio."""
    if ServedTask.transcribe not in model.tasks:
        require_task(model, ServedTask.generate)


class OfflineGenerator:
    """Runs prompts until all have ended.

    Args:
        engine: runs the requests.
        steps: its steps.
        tokenizer: the model's; None = completions have token ids only.
        request_ids: ids of requests that the engine has not had.
        grammars: compiles constraints.
        seeds: gives the seeds of requests without one; None = their seeds are random.

    Attributes:
        model: the model of the engine.
        tokenizer: as given.
    """

    def __init__(
        self,
        engine: Engine,
        steps: OfflineSteps,
        tokenizer: Tokenizer | None,
        request_ids: Iterator[str],
        grammars: GrammarCompiler,
        seeds: random.Random | None,
    ) -> None:
        self._engine = engine
        self._steps = steps
        self._request_ids = request_ids
        self._grammars = grammars
        self._seeds = seeds
        self.model: ServedModel = engine.model
        self.tokenizer = tokenizer

    def generate(
        self,
        many: Sequence[EncodedPrompt],
        params: Sequence[SamplingParams],
        adapters: Sequence[ServedAdapter | None],
        *,
        use_progress: bool,
    ) -> list[GenerationOutput]:
        """The completions of each prompt.

        Args:
            many: the prompts.
            params: the parameters of each prompt.
            adapters: the adapter of each prompt; None = the model alone.
            use_progress: show a progress bar.

        Raises:
            InvalidRequestError: a prompt or its parameters cannot be served; nothing was run.
            HelperProcessError: no process could check a grammar; nothing was run.
            RankFailedError: a rank of the engine has ended or hangs.
        """
        batches = [
            self.make_requests(prompt, each, adapter)
            for prompt, each, adapter in zip(many, params, adapters, strict=True)
        ]
        collected: list[dict[int, _CompletionOutputs]] = [{} for _ in batches]
        console = Console(stderr=True)
        is_shown = use_progress and (console.is_terminal or console.is_jupyter)
        with Progress(
            TextColumn("generating"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[rate]}"),
            TimeRemainingColumn(),
            console=console,
            disable=not is_shown,
            transient=True,
        ) as progress:
            total = sum(each.n for each in params)
            task = progress.add_task("", total=total, rate="")
            num_tokens = 0
            for which, output in self._run(batches, params):
                collected[which].setdefault(output.index, _CompletionOutputs()).add(output)
                num_tokens += len(output.new_token_ids)
                if output.finish_reason is not None:
                    elapsed = progress.tasks[0].elapsed or 1e-9
                    progress.update(task, advance=1, rate=f"{num_tokens / elapsed:.0f} tokens/s")
        return [
            GenerationOutput(
                prompt=prompt.text,
                prompt_token_ids=batch[0].prompt_token_ids,
                outputs=[one.finish(index) for index, one in sorted(parts.items())],
                num_cached_tokens=max(one.num_cached for one in parts.values()),
                prompt_logprobs=parts[0].prompt_logprobs,
            )
            for prompt, batch, parts in zip(many, batches, collected, strict=True)
        ]

    def stream(
        self, prompt: EncodedPrompt, sampling: SamplingParams, adapter: ServedAdapter | None
    ) -> Iterator[RequestOutput]:
        """Yield the outputs of a prompt. Closing the iterator ends the request."""
        requests = self.make_requests(prompt, sampling, adapter)
        for _, output in self._run([requests], [sampling]):
            yield output

    def make_requests(
        self,
        prompt: EncodedPrompt,
        sampling: SamplingParams,
        adapter: ServedAdapter | None = None,
    ) -> list[Request]:
        """The engine's requests for a prompt.

        Raises:
            InvalidRequestError: the prompt or its parameters cannot be served.
            HelperProcessError: no process could check the grammar.
        """
        sampling = prompt.adjusted(sampling)
        if sampling.seed is None and self._seeds is not None:
            sampling = sampling.with_unchecked(seed=self._seeds.getrandbits(63))
        token_ids, sampling = resolve(prompt.token_ids, sampling, self.model)
        constraint = sampling.structured_outputs
        return make_requests(
            next(self._request_ids),
            token_ids,
            sampling,
            self.model,
            adapter=adapter,
            parts=PreparedParts(
                "" if constraint is None else self._grammars.compile(constraint),
                bad_words_token_ids(sampling.bad_words, self.tokenizer),
                images=prompt.images,
                audio=prompt.audio,
                sounds=prompt.sounds,
            ),
        )

    def _run(
        self, batches: Sequence[list[Request]], params: Sequence[SamplingParams]
    ) -> Iterator[tuple[int, RequestOutput]]:
        """Run requests until all have ended; yields (index of a prompt, its new output).

        Args:
            batches: the requests of each prompt.
            params: the parameters of each prompt.
        """
        answers = [
            PromptCompletions(batch, each, self.tokenizer)
            for batch, each in zip(batches, params, strict=True)
        ]
        which = {
            request_id: index
            for index, answer in enumerate(answers)
            for request_id in answer.unfinished_ids
        }
        with self._steps.running(list(itertools.chain(*batches))) as next_outputs:
            while which:
                for engine_output in next_outputs():
                    index = which.get(engine_output.request_id)
                    if index is None:
                        continue
                    before = answers[index].unfinished_ids
                    outputs = answers[index].process(engine_output)
                    for ended in set(before).difference(answers[index].unfinished_ids):
                        del which[ended]
                        self._engine.abort(ended)  # the engine does not look for stop strings
                    for output in outputs:
                        yield index, output


class _CompletionOutputs:
    """The outputs of one completion so far."""

    def __init__(self) -> None:
        self.text: list[str] = []
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprobs] = []
        self.num_cached = 0
        self.prompt_logprobs: list[TokenLogprobs] | None = None
        self.last: RequestOutput | None = None

    def add(self, output: RequestOutput) -> None:
        self.text.append(output.text_delta)
        self.token_ids += output.new_token_ids
        self.logprobs += output.logprobs or []
        self.num_cached = output.num_cached_tokens
        if output.prompt_logprobs is not None:
            self.prompt_logprobs = output.prompt_logprobs
        self.last = output

    def finish(self, index: int) -> CompletionOutput:
        assert self.last is not None, "every request ends with an output"
        return CompletionOutput(
            index=index,
            text="".join(self.text),
            token_ids=self.token_ids,
            finish_reason=self.last.finish_reason or FinishReason.abort,
            stop_reason=self.last.stop_reason,
            logprobs=self.logprobs or None,
            score=self.last.score,
        )
