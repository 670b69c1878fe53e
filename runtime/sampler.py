"""From logits to tokens, for the rows of a step: the per-row sampling state and the order of
operations.

Order: log-probabilities from the raw logits; logit bias; penalties; minimum length; temperature;
    top-k, top-p, min-p; one draw keyed by (seed, position).
"""

from __future__ import annotations

import torch
from torch import Tensor

from ostinato.ops.sampling import (
    apply_penalties,
    sample_filtered,
    sample_full,
    token_logprobs,
    uniform_number,
)
from ostinato.runtime.types import Request, SamplingParams, StepResult, TokenLogprobs

__all__ = ("Sampler",)


class _Row:
    """A running sequence's sampling state."""

    __slots__ = (
        "bias",
        "counts",
        "edits",
        "filtered",
        "in_prompt",
        "is_plain",
        "min_length",
        "params",
        "seed",
        "stop_ids",
    )

    def __init__(
        self, request: Request, output_token_ids: list[int], vocab_size: int, device: torch.device
    ) -> None:
        params = request.sampling
        self.params = params
        self.seed = params.seed or 0
        self.filtered = params.top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0
        self.min_length = len(request.prompt_token_ids) + params.min_tokens
        stop_ids = () if params.ignore_eos else request.eos_token_ids
        self.stop_ids = (
            torch.tensor([*stop_ids, *params.stop_token_ids], dtype=torch.int64, device=device)
            if params.min_tokens
            else None
        )
        self.bias = (
            (
                torch.tensor(list(params.logit_bias), dtype=torch.int64, device=device),
                torch.tensor(list(params.logit_bias.values()), dtype=torch.float32, device=device),
            )
            if params.logit_bias
            else None
        )
        self.counts: Tensor | None = None
        self.in_prompt: Tensor | None = None
        if _has_penalties(params):
            self.counts = torch.bincount(
                torch.tensor(output_token_ids, dtype=torch.int64), minlength=vocab_size
            ).to(device, torch.int32)
            self.in_prompt = torch.zeros(vocab_size, dtype=torch.bool, device=device)
            self.in_prompt[torch.tensor(request.prompt_token_ids, device=device)] = True
        self.edits = bool(params.logit_bias) or params.min_tokens > 0 or self.counts is not None
        self.is_plain = params.temperature == 0.0 and not self.edits and params.logprobs is None


def _has_penalties(params: SamplingParams) -> bool:
    return (
        params.repetition_penalty != 1.0
        or params.presence_penalty != 0.0
        or params.frequency_penalty != 0.0
    )


class Sampler:
    """Owns the sampling state of every row."""

    def __init__(self, *, max_num_seqs: int, vocab_size: int, device: torch.device) -> None:
        self._rows: list[_Row | None] = [None] * max_num_seqs
        self._vocab_size = vocab_size
        self._device = device

    def admit(self, row: int, request: Request, output_token_ids: list[int]) -> None:
        """A sequence takes the row; `output_token_ids` is not empty when it resumes."""
        self._rows[row] = _Row(request, output_token_ids, self._vocab_size, self._device)

    def sample(self, logits: Tensor, rows: list[int], positions: list[int]) -> StepResult:
        """Pick one token per row.

        Args:
            logits: [R, V] float32; changed in place.
            rows: the R rows.
            positions: where in its sequence each new token goes.
        """
        states = [self._state(row) for row in rows]
        if all(state.is_plain for state in states):
            return StepResult(logits.argmax(-1).tolist())  # waits for the device
        raw = logits.clone() if any(_asks_both(state) for state in states) else logits
        for index, state in enumerate(states):
            if state.edits:
                self._edit(logits[index], state, positions[index])
        token_ids = logits.argmax(-1)
        self._draw(logits, token_ids, states, positions)
        for index, state in enumerate(states):
            if state.counts is not None:
                # A slice, because indexing by one element would wait for the device.
                state.counts[token_ids[index : index + 1]] += 1
        logprobs = self._logprobs(raw, token_ids, states)
        return StepResult(token_ids.tolist(), logprobs)  # waits for the device

    def _state(self, row: int) -> _Row:
        state = self._rows[row]
        assert state is not None, f"row {row} is sampled before it was admitted"
        return state

    @staticmethod
    def _edit(logits: Tensor, state: _Row, position: int) -> None:
        if state.bias is not None:
            ids, values = state.bias
            logits[ids] += values
        if state.counts is not None and state.in_prompt is not None:
            apply_penalties(
                logits,
                state.counts,
                state.in_prompt,
                repetition=state.params.repetition_penalty,
                presence=state.params.presence_penalty,
                frequency=state.params.frequency_penalty,
            )
        if state.stop_ids is not None and position < state.min_length:
            logits[state.stop_ids] = float("-inf")

    def _draw(
        self, logits: Tensor, token_ids: Tensor, states: list[_Row], positions: list[int]
    ) -> None:
        """Overwrite the greedy choice of the rows with a temperature."""
        for filtered in (False, True):
            chosen = [
                index
                for index, state in enumerate(states)
                if state.params.temperature > 0.0 and state.filtered is filtered
            ]
            if not chosen:
                continue
            params = [states[index].params for index in chosen]
            where = torch.tensor(chosen, device=self._device)
            uniforms = self._column(
                [uniform_number(states[index].seed, positions[index]) for index in chosen]
            )
            # Smaller temperatures would overflow to infinity; they are greedy for all purposes.
            temperature = self._column([max(p.temperature, 1e-3) for p in params]).float()
            scaled = logits[where] / temperature[:, None]
            if filtered:
                top_k = [
                    p.top_k if 0 < p.top_k < self._vocab_size else self._vocab_size for p in params
                ]
                token_ids[where] = sample_filtered(
                    scaled,
                    uniforms,
                    torch.tensor(top_k, device=self._device),
                    self._column([p.top_p for p in params]),
                    self._column([p.min_p for p in params]),
                )
            else:
                token_ids[where] = sample_full(scaled, uniforms)

    def _column(self, values: list[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float64, device=self._device)

    @staticmethod
    def _logprobs(
        raw: Tensor, token_ids: Tensor, states: list[_Row]
    ) -> list[TokenLogprobs | None] | None:
        asking = [i for i, state in enumerate(states) if state.params.logprobs is not None]
        if not asking:
            return None
        top = max(states[i].params.logprobs or 0 for i in asking)
        where = torch.tensor(asking, device=raw.device)
        columns = token_logprobs(raw[where], token_ids[where], top)
        values, ranks, ids, tops = (column.tolist() for column in columns)
        result: list[TokenLogprobs | None] = [None] * len(states)
        for place, index in enumerate(asking):
            wanted = states[index].params.logprobs or 0
            result[index] = TokenLogprobs(
                values[place], ranks[place], ids[place][:wanted], tops[place][:wanted]
            )
        return result


def _asks_both(state: _Row) -> bool:
    """Log-probabilities come from the raw logits, so those must survive the edits."""
    return state.edits and state.params.logprobs is not None
