"""`Request`: one request, as sent to the engine process."""

from __future__ import annotations

import msgspec

from ostinato.runtime.types.audio import PromptAudio, PromptSound
from ostinato.runtime.types.images import PromptImage
from ostinato.runtime.types.params import PoolingParams, SamplingParams

__all__ = ("Request",)


class Request(msgspec.Struct, frozen=True, kw_only=True, array_like=True, gc=False):
    """One sequence to generate, one beam search, or (`pooling`) one text whose vector is computed.

    Each completion of a prompt, or each of its `best_of` candidates, is a request of its own. These
    requests share cached blocks.
    """

    request_id: str
    prompt_token_ids: list[int]
    sampling: SamplingParams
    eos_token_ids: tuple[int, ...] = ()
    arrival_time: float = 0.0  # seconds, monotonic clock of the sender
    priority: int = 0  # lower runs first under the priority policy
    # Index among the sequences of one HTTP request. The scheduler runs sequences of other requests
    # before sequences with a high index.
    place: int = 0
    cache_salt: str = ""  # requests share cached blocks only if their salts are equal
    bad_words_token_ids: list[list[int]] = []  # of `sampling.bad_words`; no entry is empty
    pooling: PoolingParams | None = None  # compute a vector; `sampling` is not read
    output_token_ids: list[int] = []  # output so far, from an engine that died; to be continued
    grammar: str = ""  # made from `sampling.structured_outputs`
    trace: bool = False  # the outputs carry timeline events
    # Names of other things that the keys and values depend on (an adapter, media). Requests share
    # cached blocks only if these names are equal.
    cache_keys: tuple[str, ...] = ()
    prediction_token_ids: list[int] = []  # the client's guess of the output (`prediction`)
    # A number that all sequences of one HTTP request share; 0 = no HTTP request. The scheduler uses
    # it to limit the time that one HTTP request takes from others.
    group: int = 0
    group_size: int = 1  # number of sequences of the HTTP request
    # The slot of the adapter that computes the request (`ServedAdapter.slot`); -1 = none. The
    # adapter's digest is one of `cache_keys`.
    adapter_slot: int = -1
    images: list[PromptImage] = []  # in the order of the prompt
    audio: PromptAudio | None = None  # what cross attention reads
    sounds: list[PromptSound] = []  # in the order of the prompt

    @property
    def media(self) -> list[PromptImage | PromptSound]:
        """What stands in the prompt besides text; a model takes images or sounds."""
        return [*self.images, *self.sounds]

    @property
    def encoded_inputs(self) -> list[PromptImage | PromptSound] | list[PromptAudio]:
        """What the encoder of the model must encode before the request can run."""
        return self.media if self.audio is None else [self.audio]

    @property
    def all_cache_keys(self) -> tuple[str, ...]:
        """`cache_keys`, and the digest of the audio."""
        if self.audio is None:
            return self.cache_keys
        return (*self.cache_keys, self.audio.digest.hex())

    def without_data(self) -> Request:
        """The same request without pixels and features."""
        return msgspec.structs.replace(
            self,
            images=[image.without_data() for image in self.images],
            audio=None if self.audio is None else self.audio.without_data(),
            sounds=[sound.without_data() for sound in self.sounds],
        )
