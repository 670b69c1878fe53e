"""The parameters of a running sequence, by which its tokens are drawn and reported."""

from __future__ import annotations

import torch

from ostinato.ops.sampling.plain_sampling import uniform_number
from ostinato.ops.sampling.sample_rows import RowSampling, SamplePath, sample_path
from ostinato.runtime.sampling.grammar_rows import GrammarRow
from ostinato.runtime.sampling.token_logprobs import LogprobRequest
from ostinato.runtime.types.request import Request

__all__ = ("SampledRow",)

# Random numbers of a row that are computed at once. After a step of the model the first one takes
# four times as long as the next ones, because the weights have replaced Python's code in the
# processor's caches.
_NUMBERS_AT_ONCE = 8


class SampledRow:
    """The parameters by which a running sequence's tokens are drawn and reported."""

    __slots__ = (
        "_draw",
        "_first",
        "_uniforms",
        "grammar",
        "is_beam",
        "is_edited",
        "reported",
        "seed",
    )

    def __init__(
        self, request: Request, grammar: GrammarRow | None, vocab_size: int, device: torch.device
    ) -> None:
        params = request.sampling
        self.seed = params.seed or 0
        # If top-k is off (0), the draw chooses among all V tokens.
        top_k = params.top_k if 0 < params.top_k < vocab_size else vocab_size
        path = sample_path(
            temperature=params.temperature,
            top_k=top_k,
            top_p=params.top_p,
            min_p=params.min_p,
            vocab_size=vocab_size,
        )
        # Logits that are divided by a smaller temperature can overflow, so smaller temperatures
        # count as 0.001. A temperature of 0 is greedy and is not read.
        temperature = max(params.temperature, 1e-3)
        self._draw = RowSampling(path, temperature, top_k, params.top_p, params.min_p, 0.0)
        self._first = 0  # the position of the first of `_uniforms`
        self._uniforms: list[float] = []
        self.is_beam = params.use_beam_search
        self.is_edited = False  # whether logits processors can change its logits
        self.reported = LogprobRequest(request, device)
        self.grammar = grammar

    @property
    def mask(self) -> GrammarRow | None:
        """The state that masks the next token; None if no token is masked."""
        return None if self.grammar is None or self.grammar.is_free else self.grammar

    @property
    def changes_logits(self) -> bool:
        """Whether a logits processor or a mask can change its logits before the draw."""
        return self.is_edited or self.mask is not None

    def draw(self, position: int) -> RowSampling:
        """The parameters of the draw of the token at `position`."""
        path, temperature, top_k, top_p, min_p, _ = draw = self._draw
        if path is SamplePath.greedy:
            return draw  # it needs no random number
        index = position - self._first
        if not 0 <= index < len(self._uniforms):
            self._first, index = position, 0
            end = position + _NUMBERS_AT_ONCE
            self._uniforms = [uniform_number(self.seed, place) for place in range(position, end)]
        return RowSampling(path, temperature, top_k, top_p, min_p, self._uniforms[index])
