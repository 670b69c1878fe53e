"""The sequences of the beam searches: one per beam, forked and dropped as the searches advance.

A beam whose candidates have arrived waits for the other beams of its search. Meanwhile it keeps its
row and blocks. If another sequence takes them, the beam's keys and values are computed again.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush

from ostinato.runtime.kv.kv_cache_manager import KVCacheManager
from ostinato.runtime.scheduling.sequences.beam_search import BeamSearch
from ostinato.runtime.scheduling.sequences.sequence import Sequence, SequenceStatus
from ostinato.runtime.scheduling.sequences.sequence_turns import level_of
from ostinato.runtime.types.outputs import SequenceOutput, TokenLogprobs

__all__ = ("BeamGroups", "is_parked")


def is_parked(sequence: Sequence) -> bool:
    """Whether a sequence is a beam that waits for the other beams of its search."""
    return sequence.beam is not None and sequence.beam.candidates is not None


class _Group:
    """One search and the sequences that compute its beams."""

    def __init__(self, search: BeamSearch, sequence: Sequence, max_model_len: int) -> None:
        self.search = search
        self.sequences = [sequence]  # one per beam, in the same order
        self.order = sequence.order
        self.max_model_len = max_model_len
        self.num_forks = 0
        self._num_places = 1
        self._free_places: list[int] = []  # heap
        self.prompt_logprobs: list[TokenLogprobs] | None = None

    def fork(self, parent: Sequence) -> Sequence:
        """A copy of `parent` at the first free place among the search's sequences.

        Sequences at high places run after the sequences of other requests (`Turns`).
        """
        self.num_forks += 1
        if self._free_places:
            place = heappop(self._free_places)
        else:
            place, self._num_places = self._num_places, self._num_places + 1
        rank, level, turn, *rest = self.order
        if parent.request.group:  # it belongs to an HTTP request
            level += level_of(place, parent.request.group_size)
        order = (rank, level, turn + place, *rest, self.num_forks)
        return parent.fork(order, self.max_model_len)

    def free_place(self, sequence: Sequence) -> None:
        """Free the place of a dropped sequence for the next fork."""
        heappush(self._free_places, sequence.order[2] - self.order[2])


class BeamGroups:
    """All beam searches of a scheduler.

    Args:
        cache: the KV cache manager.
        place: gives a forked sequence a row or queues it; does nothing for a running sequence.
        drop: ends a sequence without an output.
    """

    def __init__(
        self,
        cache: KVCacheManager,
        place: Callable[[Sequence], None],
        drop: Callable[[Sequence], None],
    ) -> None:
        self._cache = cache
        self._place = place
        self._drop = drop
        self._groups: dict[str, _Group] = {}  # by request id
        self._ready: list[_Group] = []

    def begin(self, sequence: Sequence, max_model_len: int) -> None:
        """Start the search of a new sequence's request."""
        request = sequence.request
        search = BeamSearch(request, sequence.max_num_tokens - sequence.num_prompt_tokens)
        sequence.beam = search.beams[0]
        self._groups[request.request_id] = _Group(search, sequence, max_model_len)

    def end(self, request_id: str) -> list[Sequence]:
        """Forget a search; returns its sequences, which the caller must end."""
        return self._groups.pop(request_id).sequences

    def take(self, sequence: Sequence, candidates: TokenLogprobs | None) -> None:
        """Store the candidates that a step found for a beam."""
        assert sequence.beam is not None, "a sequence of a beam search"
        assert candidates is not None, "the sampler reports the candidates of every beam"
        group = self._groups[sequence.request.request_id]
        sequence.beam.candidates = candidates
        if sequence.prompt_logprobs is not None:
            group.prompt_logprobs, sequence.prompt_logprobs = sequence.prompt_logprobs, None
        if sequence.status is SequenceStatus.preempted:
            sequence.status = SequenceStatus.parked  # its candidates have arrived: nothing to run
        if group.search.is_ready:
            self._ready.append(group)

    def advance(self) -> list[SequenceOutput]:
        """Advance every search whose candidates are complete; returns outputs of ended searches."""
        ready, self._ready = self._ready, []
        outputs = []
        for group in ready:
            if group.sequences[0].request.request_id not in self._groups:
                continue
            moves = group.search.advance()
            if group.search.is_done:
                outputs.append(self._finish(group))
                continue
            by_beam = {id(sequence.beam): sequence for sequence in group.sequences}
            children: list[Sequence] = []
            for move in moves:
                parent = by_beam[id(move.beam)]
                child = parent
                if parent in children:  # the first child took over the parent's sequence
                    child = group.fork(parent)
                    self._cache.fork(parent.block_table, child.block_table)
                    child.num_computed_tokens = parent.num_computed_tokens
                children.append(child)
            for sequence in group.sequences:
                if sequence not in children:
                    self._drop(sequence)
                    group.free_place(sequence)
            for move, child in zip(moves, children, strict=True):
                child.beam = move.beam.continued(move)
                child.token_ids.append(move.token_id)
                child.num_prefill_tokens = child.num_tokens
            group.sequences = children
            group.search.beams = [child.beam for child in children if child.beam is not None]
            for child in children:
                self._place(child)
        return outputs

    def _finish(self, group: _Group) -> SequenceOutput:
        first = group.sequences[0]
        beams = group.search.results()
        for sequence in self.end(first.request.request_id):
            self._drop(sequence)
        return SequenceOutput(
            first.request.request_id,
            [],
            beams[0].finish_reason,
            num_cached_tokens=first.num_cached_tokens or 0,
            prompt_logprobs=group.prompt_logprobs,
            beams=beams,
        )
