"""Beam search, compared with `transformers` and with a search of all sequences.

Beams share the blocks of their common beginning.
"""

from __future__ import annotations

import itertools
import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from ostinato import LLM, SamplingParams
from ostinato.runtime.scheduling.sequences.beam_search import BeamSearch, num_candidates
from ostinato.runtime.types.outputs import BeamOutput, FinishReason, TokenLogprobs
from ostinato.runtime.types.request import Request
from tests.runtime.tiny import MODEL, VOCAB_SIZE, tiny_config

EOS = 1
ENDS = (EOS, 2)  # the end tokens of the model and of the demo model's tokenizer


def make_prompts(count: int) -> list[list[int]]:
    numbers = random.Random(5)
    return [
        [numbers.randrange(2, VOCAB_SIZE) for _ in range(numbers.randint(1, 40))]
        for _ in range(count)
    ]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model whose distributions are sharp enough for beams to diverge and to end."""
    torch.manual_seed(11)
    config = transformers.LlamaConfig(**{k: v for k, v in MODEL.items() if k != "architectures"})
    model = transformers.LlamaForCausalLM(config).float()
    with torch.no_grad():
        model.lm_head.weight.mul_(12.0)
        model.lm_head.weight[EOS].mul_(2.0)
    directory = tmp_path_factory.mktemp("beams")
    model.save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def peer(checkpoint: Path) -> Any:
    return transformers.LlamaForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()


def start(checkpoint: Path, *overrides: str, **values: object) -> LLM:
    config = tiny_config(
        "model.load_format=auto",
        f"model.tokenizer={Path(__file__).parents[3] / 'models' / 'demo'}",
        *overrides,
        model__path=str(checkpoint),
        model__config={},
        **values,
    )
    return LLM(config=config)


@pytest.fixture(scope="module")
def llm(checkpoint: Path) -> LLM:
    return start(checkpoint)


def params(width: int, n: int | None = None, **more: Any) -> SamplingParams:
    return SamplingParams(
        **{"use_beam_search": True, "n": n or width, "best_of": width, "max_tokens": 14, **more}
    )


def beams_of(llm: LLM, prompts: list[list[int]], sampling: SamplingParams) -> list[list[tuple]]:
    outputs = llm.generate(prompts, sampling, use_progress=False)
    return [[(one.token_ids, one.score) for one in output.outputs] for output in outputs]


def beams_of_peer(peer: Any, prompt: list[int], sampling: SamplingParams) -> list[tuple]:
    result = peer.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        do_sample=False,
        num_beams=sampling.num_candidates,
        num_return_sequences=sampling.n,
        max_new_tokens=sampling.max_tokens,
        min_new_tokens=sampling.min_tokens or None,
        length_penalty=sampling.length_penalty,
        early_stopping=sampling.early_stopping,
        eos_token_id=None if sampling.ignore_eos else list(ENDS),
        pad_token_id=0,
        renormalize_logits=True,
        return_dict_in_generate=True,
        output_scores=True,
    )
    beams = []
    for tokens, score in zip(
        result.sequences[:, len(prompt) :].tolist(), result.sequences_scores.tolist(), strict=True
    ):
        if not sampling.ignore_eos:
            end = next((place for place, token in enumerate(tokens) if token in ENDS), len(tokens))
            tokens = tokens[: end + 1]
        beams.append((tokens, score))
    return beams


@pytest.mark.parametrize(
    "sampling",
    [
        params(2),
        params(4),
        params(4, n=2),
        params(8, length_penalty=0.0),
        params(4, length_penalty=2.0),
        params(4, length_penalty=-1.0),
        params(4, early_stopping=True),
        params(4, early_stopping="never"),
        params(4, early_stopping="never", length_penalty=0.0),
        params(4, ignore_eos=True),
        params(3, min_tokens=6),
        params(5, max_tokens=1),
    ],
    ids=lambda sampling: str(
        {
            name: getattr(sampling, name)
            for name in ("best_of", "n", "length_penalty", "early_stopping", "ignore_eos")
        }
    ),
)
def test_the_sequences_and_scores_of_transformers(
    llm: LLM, peer: Any, sampling: SamplingParams
) -> None:
    prompts = make_prompts(6)
    for prompt, ours in zip(prompts, beams_of(llm, prompts, sampling), strict=True):
        theirs = beams_of_peer(peer, prompt, sampling)
        assert [tokens for tokens, _ in ours] == [tokens for tokens, _ in theirs]
        assert [score for _, score in ours] == pytest.approx(
            [score for _, score in theirs], abs=1e-4
        )
    assert llm.stats().num_free_blocks == llm.stats().num_blocks


def test_the_comparison_meets_what_it_is_for(llm: LLM) -> None:
    """Checks that some sequences end early and that some differ from greedy decoding."""
    prompts = make_prompts(6)
    beams = beams_of(llm, prompts, params(4))
    lengths = [len(tokens) for one in beams for tokens, _ in one]
    assert min(lengths) < 14
    assert max(lengths) == 14
    greedy = llm.generate(
        prompts, SamplingParams(temperature=0.0, max_tokens=14), use_progress=False
    )
    greedy_tokens = [output.outputs[0].token_ids for output in greedy]
    assert [one[0][0] for one in beams] != greedy_tokens
    assert [one[0][0] for one in beams_of(llm, prompts, params(1))] == greedy_tokens


@pytest.mark.parametrize(
    "overrides",
    [
        ("scheduler.max_num_batched_tokens=9",),
        ("scheduler.max_num_seqs=3",),
        ("scheduler.max_num_seqs=1",),
        ("cache.enable_prefix_caching=false", "scheduler.max_num_seqs=3"),
        ("cache.block_size=16",),
        ("graphs.mode=captured", "scheduler.overlap=true"),
        ("scheduler.overlap=true", "scheduler.max_num_seqs=3"),
    ],
    ids=str,
)
def test_rows_chunks_and_blocks_change_nothing(
    checkpoint: Path, llm: LLM, overrides: tuple[str, ...]
) -> None:
    other = start(checkpoint, *overrides)
    prompts = make_prompts(4)
    sampling = params(4, early_stopping="never")
    expected = beams_of(llm, prompts, sampling)
    assert [[tokens for tokens, _ in one] for one in beams_of(other, prompts, sampling)] == [
        [tokens for tokens, _ in one] for one in expected
    ]
    assert other.stats().num_free_blocks == other.stats().num_blocks
    assert not other.stats().late_compiles


def test_a_cache_that_is_too_small_changes_nothing(checkpoint: Path, llm: LLM) -> None:
    """Beams are preempted, recomputed, and wait for each other's blocks."""
    memory_gib = 9 * 8 * 2 * 2 * 2 * 16 * 4 / 2**30  # 8 usable blocks of 8 tokens
    tight = start(checkpoint, model__max_model_len=64, cache__memory_gib=memory_gib)
    assert tight.stats().num_blocks == 8
    prompts = [prompt[:30] for prompt in make_prompts(5)]
    sampling = params(6, max_tokens=20, length_penalty=0.5)
    assert beams_of(tight, prompts, sampling) == beams_of(llm, prompts, sampling)
    assert tight.stats().num_free_blocks == 8
    assert tight.stats().num_preemptions > 0


def test_beams_beside_other_requests(llm: LLM) -> None:
    prompts = make_prompts(4)
    plain = SamplingParams(temperature=1.0, seed=3, max_tokens=10, ignore_eos=True, logprobs=2)
    together = llm.generate(prompts, [params(3), plain, params(2, n=1), plain], use_progress=False)
    for index, sampling in enumerate([params(3), plain, params(2, n=1), plain]):
        (alone,) = llm.generate([prompts[index]], sampling, use_progress=False)
        assert alone.outputs == together[index].outputs


def test_beams_share_the_blocks_of_what_they_share(llm: LLM) -> None:
    """In the middle of a search, 8 beams share the 5 full blocks of their prompt."""
    prompt = make_prompts(20)[0][:1] * 41
    stream = llm.stream(prompt, params(8, ignore_eos=True, max_tokens=40))
    held = []
    step = llm._engine.step  # the engine's own loop, watched from outside

    def watched() -> list:
        result = step()
        stats = llm.stats()
        held.append(stats.num_blocks - stats.num_free_blocks)
        return result

    llm._engine.step = watched  # type: ignore[method-assign]
    try:
        outputs = list(stream)
    finally:
        llm._engine.step = step  # type: ignore[method-assign]
    assert len(outputs) == 8
    # All beams share 5 full blocks. A beam has at most 6 blocks of its own, for the prompt's last
    # token and 40 output tokens.
    assert max(held) <= 5 + 8 * 6
    assert max(held) > 5
    assert llm.stats().num_free_blocks == llm.stats().num_blocks


def test_limits_and_biases_hold_for_beams(llm: LLM) -> None:
    prompts = make_prompts(3)
    allowed = (5, 6, 7, 8, EOS)
    for one in beams_of(llm, prompts, params(4, allowed_token_ids=allowed, min_tokens=3)):
        for tokens, _ in one:
            assert set(tokens) <= set(allowed)
            assert len(tokens) >= 4 or EOS not in tokens
    biased = beams_of(llm, prompts, params(2, logit_bias={9: 100.0}, ignore_eos=True))
    assert all(one[0][0] == [9] * 14 for one in biased)


def test_stop_tokens_end_a_beam(llm: LLM) -> None:
    (plain,) = llm.generate([make_prompts(1)[0]], params(3, ignore_eos=True), use_progress=False)
    stop = plain.outputs[0].token_ids[4]
    sampling = params(3, stop_token_ids=(stop,), early_stopping=True, ignore_eos=True)
    (output,) = llm.generate([make_prompts(1)[0]], sampling, use_progress=False)
    ended = [one for one in output.outputs if one.finish_reason is FinishReason.stop]
    assert ended
    assert all(one.token_ids[-1] == one.stop_reason == stop for one in ended)


@pytest.mark.parametrize("count", [2, 20])
def test_logprobs_are_those_that_make_the_score(llm: LLM, count: int) -> None:
    """As many are reported as the request asks for, also if the search needs fewer."""
    sampling = params(3, logprobs=count, prompt_logprobs=0, length_penalty=1.0)
    prompt = make_prompts(1)[0]
    (output,) = llm.generate([prompt], sampling, use_progress=False)
    for one in output.outputs:
        assert one.logprobs is not None
        assert [len(entry.top_ids) for entry in one.logprobs] == [count] * len(one.token_ids)
        total = math.fsum(entry.logprob for entry in one.logprobs)
        assert one.score == pytest.approx(total / len(one.token_ids))
    assert len(output.prompt_logprobs or ()) == len(prompt) - 1


def brute_force(table: dict, width: int, length: int, penalty: float) -> list[tuple]:
    """The `width` best of all sequences that have `length` tokens or end earlier."""
    found = []
    for size in range(1, length + 1):
        for tokens in itertools.product(sorted(table[()]), repeat=size):
            if EOS in tokens[:-1] or (size < length and tokens[-1] != EOS):
                continue
            total = sum(table[tokens[:index]][token] for index, token in enumerate(tokens))
            found.append((list(tokens), total / size**penalty))
    return sorted(found, key=lambda one: -one[1])[:width]


@pytest.mark.parametrize("seed", range(8))
def test_a_wide_search_finds_the_best_of_all(seed: int) -> None:
    """Each possible sequence has its own beam, so the search must find the best ones."""
    numbers = random.Random(seed)
    vocabulary, length, width = [0, EOS, 2], 3, 27
    table: dict[tuple, dict[int, float]] = {}
    for size in range(length):
        for prefix in itertools.product(vocabulary, repeat=size):
            weights = [numbers.random() + 0.01 for _ in vocabulary]
            table[prefix] = {
                token: math.log(weight / sum(weights))
                for token, weight in zip(vocabulary, weights, strict=True)
            }
    sampling = params(width, n=5, max_tokens=length, early_stopping="never", length_penalty=0.7)
    request = Request(request_id="r", prompt_token_ids=[3], sampling=sampling, eos_token_ids=(EOS,))
    search = BeamSearch(request, length)
    while not search.is_done:
        for beam in search.beams:
            likeliest = sorted(table[tuple(beam.token_ids)].items(), key=lambda one: -one[1])
            ids, values = zip(*likeliest[: num_candidates(request)], strict=True)
            beam.candidates = TokenLogprobs(values[0], 1, list(ids), list(values))
        search.beams = [move.beam.continued(move) for move in search.advance()]
    found: list[BeamOutput] = search.results()
    expected = brute_force(table, 5, length, 0.7)
    assert [one.token_ids for one in found] == [tokens for tokens, _ in expected]
    assert [one.score for one in found] == pytest.approx([score for _, score in expected])


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"best_of": 1, "n": 2}, "best_of must be null or in [n=2, 128], got 1"),
        ({"length_penalty": 0.5}, "length_penalty must be 1.0 without use_beam_search=true"),
        ({"early_stopping": True}, "early_stopping must be False without use_beam_search=true"),
        ({"use_beam_search": True, "temperature": 0.7}, "temperature must be 1.0 or 0.0 with"),
        ({"use_beam_search": True, "stop": ("a",)}, "stop must be () with use_beam_search=true"),
        ({"use_beam_search": True, "early_stopping": "x"}, "true, false or 'never', got 'x'"),
        (
            {"use_beam_search": True, "stop_token_ids": tuple(range(129))},
            "stop_token_ids must be at most 128 tokens with use_beam_search=true, got '129 tokens'",
        ),
    ],
)
def test_what_does_not_go_together_is_refused(values: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError) as caught:
        SamplingParams(**values)
    assert text in str(caught.value)
