"""Requests that hypothesis draws for tests of the scheduler."""

from __future__ import annotations

from hypothesis import strategies as st

from ostinato.runtime.types.audio import PromptAudio
from ostinato.runtime.types.images import PromptImage
from ostinato.runtime.types.params import SamplingParams
from ostinato.runtime.types.request import Request
from tests.runtime.simulated_device import EOS, VOCAB_SIZE

IMAGE_TOKENS = 5
AUDIO = [PromptAudio(digest=bytes([number]), num_bins=1, num_frames=1) for number in (1, 2)]

# Prompts are cut from a few stems, so that many share a beginning and some are equal.
STEMS = [
    [(7 * stem + position * position) % VOCAB_SIZE for position in range(28)] for stem in range(3)
]


@st.composite
def image_lists(draw: st.DrawFn, num_tokens: int) -> list[PromptImage]:
    """Images in a prompt of so many tokens, of up to IMAGE_TOKENS tokens each."""
    images, begin = [], draw(st.integers(0, 8))
    while begin < num_tokens and draw(st.booleans()):
        size = min(draw(st.integers(1, IMAGE_TOKENS)), num_tokens - begin)
        digest = draw(st.sampled_from([b"a" * 32, b"b" * 32]))
        images.append(PromptImage(digest=digest, begin=begin, num_tokens=size, height=1, width=1))
        begin += size + draw(st.integers(0, 9))
    return images


@st.composite
def requests(draw: st.DrawFn, request_id: str = "r") -> Request:
    stem = draw(st.sampled_from(STEMS))
    prompt = stem[: draw(st.integers(1, 24))] + draw(st.lists(st.integers(1, 3), max_size=3))
    max_tokens = draw(st.one_of(st.none(), st.integers(1, 12)))
    n = draw(st.integers(1, 3))
    beams = SamplingParams(
        use_beam_search=True,
        n=n,
        best_of=n + draw(st.integers(0, 2)),
        max_tokens=draw(st.integers(1, 8)),
        length_penalty=draw(st.sampled_from([0.0, 1.0, 2.0])),
        early_stopping=draw(st.sampled_from([True, False, "never"])),
        ignore_eos=draw(st.booleans()),
        prompt_logprobs=draw(st.sampled_from([None, None, 0])),
    )
    sampling = draw(st.sampled_from([None, None, None, beams])) or SamplingParams(
        max_tokens=max_tokens,
        min_tokens=draw(st.integers(0, min(3, max_tokens or 3))),
        ignore_eos=draw(st.booleans()),
        stop_token_ids=draw(st.sampled_from([(), (), (3,), (EOS, 5)])),
        prompt_logprobs=draw(st.sampled_from([None, None, None, 0])),
    )
    return Request(
        request_id=request_id,
        prompt_token_ids=prompt,
        sampling=sampling,
        eos_token_ids=(EOS,),
        priority=draw(st.integers(0, 2)),
        place=draw(st.sampled_from([0, 0, 0, 1, 2, 6])),
        cache_salt=draw(st.sampled_from(["", "", "salt"])),
        audio=draw(st.sampled_from([None, None, *AUDIO])),
        # Scores of prompts with images are refused before they are scheduled.
        images=draw(image_lists(len(prompt) if sampling.prompt_logprobs is None else 0)),
    )
