"""`OfflinePooler`: vectors and scores of texts, with an engine in the same process."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ostinato.runtime.client.pooling import (
    check_score_head,
    cosine,
    make_pairs,
    make_pooling_request,
    numbers,
    pair_token_ids,
)
from ostinato.runtime.offline.offline_steps import OfflineSteps
from ostinato.runtime.text.offline_prompts import TextPrompt, prompt_text
from ostinato.runtime.text.tokenizer import Tokenizer
from ostinato.runtime.types.adapters import ServedAdapter
from ostinato.runtime.types.engine_info import ServedModel, ServedTask
from ostinato.runtime.types.outputs import EmbeddingOutput, SequenceOutput
from ostinato.runtime.types.params import PoolingParams

__all__ = ("OfflinePooler", "Texts", "default_pooling", "text_pairs")

Texts = str | TextPrompt | Sequence[str | TextPrompt]


def default_pooling(model: ServedModel, **changes: Any) -> PoolingParams:
    """A model's default pooling parameters with `changes` applied."""
    return PoolingParams(**{"kind": model.pooling, "normalize": model.normalize, **changes})


def text_pairs(first: Texts, second: Texts) -> list[tuple[str, str]]:
    """The pairs of texts to score.

    Raises:
        InvalidRequestError: see `make_pairs`, or something else than a text is given.
    """
    return make_pairs(_as_texts(first), _as_texts(second))


def _as_texts(texts: Texts) -> list[str]:
    items = [texts] if isinstance(texts, str | Mapping) else texts
    return [prompt_text(item) for item in items]


class OfflinePooler:
    """Runs pooling requests until they have ended.

    Args:
        model: the model of the engine.
        steps: the engine's steps, which run the requests.
        request_ids: ids of requests that the engine has not had.
    """

    def __init__(
        self,
        model: ServedModel,
        steps: OfflineSteps,
        request_ids: Iterator[str],
    ) -> None:
        self._model = model
        self._steps = steps
        self._request_ids = request_ids

    def embed(
        self,
        batch: list[list[int]],
        params: PoolingParams,
        adapters: Sequence[ServedAdapter | None],
    ) -> list[EmbeddingOutput]:
        """The embedding of each text, given as its token ids.

        Args:
            batch: the token ids of each text.
            params: how the vectors are made.
            adapters: the adapter of each text; None = the model alone.
        """
        return [
            EmbeddingOutput(
                prompt_token_ids=token_ids,
                embedding=numbers(output.pooled or b""),
                num_cached_tokens=output.num_cached_tokens,
            )
            for token_ids, output in zip(batch, self._pool(batch, params, adapters), strict=True)
        ]

    def score(
        self,
        pairs: list[tuple[str, str]],
        tokenizer: Tokenizer,
        adapter: ServedAdapter | None,
    ) -> list[float]:
        """The score of each pair: the output of a classification head, or a cosine without one."""
        if ServedTask.classify in self._model.tasks:
            check_score_head(self._model)
            batch = [pair_token_ids(*tokenizer.encode_pair(a, b), self._model) for a, b in pairs]
            params = default_pooling(self._model, classify=True)
            outputs = self._pool(batch, params, [adapter] * len(batch), has_segments=True)
            return [numbers(output.pooled or b"")[0] for output in outputs]
        texts = list(dict.fromkeys(text for pair in pairs for text in pair))
        params = default_pooling(self._model, normalize=True)
        batch = [tokenizer.encode(text) for text in texts]
        outputs = self._pool(batch, params, [adapter] * len(batch))
        vectors = {text: one.pooled or b"" for text, one in zip(texts, outputs, strict=True)}
        return [cosine(vectors[a], vectors[b]) for a, b in pairs]

    def _pool(
        self,
        batch: list[list[int]],
        params: PoolingParams,
        adapters: Sequence[ServedAdapter | None],
        *,
        has_segments: bool = False,
    ) -> list[SequenceOutput]:
        requests = [
            make_pooling_request(
                next(self._request_ids),
                token_ids,
                params,
                self._model,
                has_segments=has_segments,
                adapter=adapter,
            )
            for token_ids, adapter in zip(batch, adapters, strict=True)
        ]
        ended: dict[str, SequenceOutput] = {}
        with self._steps.running(requests) as next_outputs:
            while len(ended) < len(requests):
                ended |= {output.request_id: output for output in next_outputs()}
        return [ended[request.request_id] for request in requests]
