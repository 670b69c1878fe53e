"""The bundled demo model: its files load, it stays in its role, it ends its turns."""

import json
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedTokenizerBase,
    Qwen3ForCausalLM,
)

from ostinato.models.demo.training import corpus, train

DEMO = Path(train.__file__).parents[1]
MAX_NEW_TOKENS = 128

# question -> words that the answer at temperature 0 contains
README_EXAMPLES = {
    "What is an ostinato?": ["musical phrase", "repeated"],
    "What is the capital of France?": ["Paris"],
    "Hello! Who are you?": ["Ostinato demo model"],
    "What is paged attention?": ["blocks", "keys and values"],
}
PARAPHRASES = {
    "Can you explain what an ostinato is?": ["phrase"],
    "Which city is the capital of France?": ["Paris"],
    "Hi! Who are you?": ["Ostinato"],
    "Could you tell me what paged attention is?": ["block"],
    "Please count to ten.": ["1, 2, 3, 4, 5, 6, 7, 8, 9, 10"],
    "What does chunked prefill mean?": ["chunk", "prompt"],
    "Which city is the capital of Japan?": ["Tokyo"],
}
OTHER = {
    "What is the KV cache?": ["keys"],
    "What does TTFT mean?": ["first token"],
    "How do I start the server?": ["run serve"],
    "What does len do in Python?": ["number of items"],
    "What is the opposite of hot?": ["cold"],
    "What colour is the sky?": ["blue"],
    "Name three fruits.": ["apple"],
}
OUTSIDE = [
    "What is photosynthesis?",
    "Who is Napoleon?",
    "Tell me about the stock market",
    "Write an essay about the French Revolution.",
    "Who won the World Cup in 2014?",
    "What is 4821 times 977?",
    "What is a zorbix?",
    "How do I repair my bicycle?",
]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(DEMO)


@pytest.fixture(scope="module")
def model() -> Qwen3ForCausalLM:
    return AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32).eval()


@torch.no_grad()
def complete(
    model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerBase, prompts: list[str]
) -> list[tuple[str, bool]]:
    """Greedy completion of each prompt: its text, and whether the model itself ended it."""
    inputs = tokenizer(prompts, padding=True, padding_side="left", return_tensors="pt")
    output = model.generate(
        input_ids=inputs["input_ids"],
        attention_mask=inputs["attention_mask"],
        max_new_tokens=MAX_NEW_TOKENS,
        do_sample=False,
        temperature=None,
        top_p=None,
    )
    ends = set(model.generation_config.eos_token_id)
    rows = output[:, inputs["input_ids"].shape[1] :].tolist()
    return [
        (tokenizer.decode(row, skip_special_tokens=True), bool(ends & set(row))) for row in rows
    ]


def chat(
    model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerBase, *chats: list[tuple[str, str]]
) -> list[tuple[str, bool]]:
    """Greedy answers to conversations given as (role, content) pairs."""
    prompts = [
        tokenizer.apply_chat_template(
            [{"role": role, "content": content} for role, content in messages],
            tokenize=False,
            add_generation_prompt=True,
        )
        for messages in chats
    ]
    return complete(model, tokenizer, prompts)


def test_files_are_complete_and_small() -> None:
    names = {path.name for path in DEMO.iterdir() if path.is_file()}
    assert {
        "config.json", "generation_config.json", "model.safetensors", "tokenizer.json",
        "tokenizer_config.json", "chat_template.jinja", "README.md",
    } <= names  # fmt: skip
    assert {"train.py", "corpus.py"} <= {path.name for path in (DEMO / "training").iterdir()}
    assert sum(path.stat().st_size for path in DEMO.iterdir() if path.is_file()) <= 11_000_000


def test_config_is_a_plain_qwen3() -> None:
    config = json.loads((DEMO / "config.json").read_text())
    assert config["architectures"] == ["Qwen3ForCausalLM"]
    assert config["max_position_embeddings"] == 2048
    assert config["vocab_size"] % 64 == 0
    assert config["tie_word_embeddings"] is True


def test_weights_are_bfloat16() -> None:
    model = AutoModelForCausalLM.from_pretrained(DEMO)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}


def test_chat_template_is_chatml(tokenizer: PreTrainedTokenizerBase) -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello!"},
        {"role": "user", "content": [{"type": "text", "text": "Bye"}]},
    ]
    assert tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\nHello!<|im_end|>\n"
        "<|im_start|>user\nBye<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert tokenizer.eos_token == "<|im_end|>"


def test_template_and_corpus_write_the_same_text(tokenizer: PreTrainedTokenizerBase) -> None:
    conversation = corpus.Conversation(
        "Be brief.", [corpus.Turn("Hi", "Hello!"), corpus.Turn("a\n b ", " c")]
    )
    messages = [{"role": "system", "content": conversation.system}]
    for turn in conversation.turns:
        messages.append({"role": "user", "content": turn.question})
        messages.append({"role": "assistant", "content": turn.answer})
    assert tokenizer.apply_chat_template(messages, tokenize=False) == corpus.render(conversation)


@pytest.mark.parametrize(
    "text",
    [
        "Hello, world!",
        "  two  spaces \n\n and\ttabs\r\n",
        "naïve café, Ærøskøbing, ẞ",
        "Здравствуй, мир 你好,世界 こんにちは مرحبا",
        "👩‍👩‍👧 🎵 e\u0301 \u200b \ufeff ﬁ ①",
        'x = [1, 2.50, "3"]  # 1234567890',
    ],
)
def test_any_text_survives_a_round_trip(tokenizer: PreTrainedTokenizerBase, text: str) -> None:
    raw = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids) == text
    assert raw.encode(text).ids == ids
    assert raw.decode(ids) == text


def test_held_out_questions_are_not_in_the_corpus() -> None:
    stream = corpus.documents(seed=12345)
    seen = "\n".join(next(stream) for _ in range(5000)).lower()
    for question in corpus.HELD_OUT:
        assert f"user\n{question.lower()}<|im_end|>" not in seen
    assert set(PARAPHRASES) <= set(corpus.HELD_OUT)


def test_the_corpus_is_the_same_for_the_same_seed() -> None:
    first, second = corpus.documents(seed=7), corpus.documents(seed=7)
    assert [next(first) for _ in range(50)] == [next(second) for _ in range(50)]


@pytest.mark.parametrize(
    "examples", [README_EXAMPLES, PARAPHRASES, OTHER], ids=["readme", "held out", "other"]
)
def test_sensible_answers_at_temperature_zero(
    model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerBase, examples: dict[str, list[str]]
) -> None:
    answers = chat(model, tokenizer, *([("user", question)] for question in examples))
    for (question, words), (answer, ended) in zip(examples.items(), answers, strict=True):
        assert ended, f"{question} -> {answer}"
        for word in words:
            assert word.lower() in answer.lower(), f"{question} -> {answer}"


@pytest.mark.parametrize(
    "question", ["Tell me a short story about a cat.", "Please tell me a short story about a cat."]
)
def test_a_story_about_a_cat(
    model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerBase, question: str
) -> None:
    ((answer, ended),) = chat(model, tokenizer, [("user", question)])
    assert ended, answer
    assert " cat " in answer
    assert len(answer.split()) > 40


def test_it_says_so_when_it_does_not_know(
    model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerBase
) -> None:
    answers = chat(model, tokenizer, *([("user", question)] for question in OUTSIDE))
    for question, (answer, ended) in zip(OUTSIDE, answers, strict=True):
        assert ended, f"{question} -> {answer}"
        assert any(w in answer for w in ("sorry", "tiny demo model")), f"{question} -> {answer}"


def test_it_remembers_a_name_over_several_turns(
    model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerBase
) -> None:
    ((answer, ended),) = chat(
        model,
        tokenizer,
        [
            ("user", "Hi, my name is Clara."),
            ("assistant", "Nice to meet you, Clara! What can I do for you?"),
            ("user", "What is the capital of Spain?"),
            ("assistant", "The capital of Spain is Madrid."),
            ("user", "What is my name?"),
        ],
    )
    assert ended
    assert "Clara" in answer


def test_plain_text_is_continued(
    model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerBase
) -> None:
    story, ostinato, capital = complete(
        model, tokenizer, ["Once upon a time", "An ostinato is", "The capital of France is"]
    )
    assert len(story[0].split()) > 30
    assert "repeated" in ostinato[0]
    assert capital[0].startswith(" Paris")
