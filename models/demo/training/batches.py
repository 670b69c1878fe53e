"""The tokenizer of the demo model, and packed training batches from the generated corpus."""

import random
from collections.abc import Iterator
from typing import Final, NamedTuple

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from ostinato.models.demo.training.corpus import documents

__all__ = [
    "END_OF_TEXT",
    "IM_END",
    "IM_START",
    "MAX_POSITIONS",
    "VOCAB_SIZE",
    "Batch",
    "batches",
    "build_tokenizer",
    "drills",
]

END_OF_TEXT: Final = "<|endoftext|>"
IM_START: Final = "<|im_start|>"
IM_END: Final = "<|im_end|>"
# Splits a text into words, each with its leading space. Every digit is a word of its own, so a
# number always has the same tokens.
SPLIT: Final = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
VOCAB_SIZE: Final = 3072
MAX_POSITIONS: Final = 2048
# loss weight of tokens that are neither the assistant's words nor plain text
QUESTION_WEIGHT: Final = 0.1


class Batch(NamedTuple):
    """Packed rows of documents; T is the sequence length, R the number of rows."""

    input_ids: torch.Tensor  # [R, T] int64
    positions: torch.Tensor  # [R, T] int64
    targets: torch.Tensor  # [R, T] int64
    weights: torch.Tensor  # [R, T] float32


def build_tokenizer(num_documents: int = 40_000, seed: int = 1) -> Tokenizer:
    """A byte-level BPE tokenizer trained on the corpus; any Unicode text survives a round trip."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[END_OF_TEXT, IM_START, IM_END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    stream = documents(seed)
    tokenizer.train_from_iterator((next(stream) for _ in range(num_documents)), trainer)
    return tokenizer


def _row_weights(ids: list[int], im_start: int, im_end: int, assistant: int) -> list[float]:
    """Loss weight of every id as a target: 1 for assistant text and plain text, less elsewhere."""
    weights, inside, plain = [], False, bool(ids) and ids[0] != im_start
    for index, token in enumerate(ids):
        if token == im_start:
            inside = False
            weights.append(QUESTION_WEIGHT)
            continue
        weights.append(1.0 if inside or plain else QUESTION_WEIGHT)
        if index >= 2 and ids[index - 2] == im_start and ids[index - 1] == assistant:
            inside = True  # the newline after the role; the answer follows it
        elif token == im_end:
            inside = False
    return weights


def drills(*, rows: int, length: int, seed: int) -> Iterator[Batch]:
    """An endless stream of random tokens that repeat with a period: an ostinato.

    The next token follows only from what came one period before. So the model learns within two
    hundred steps to repeat earlier text. From the corpus alone it would learn this far more slowly,
    and would forget the name of a story's hero.
    """
    generator = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=generator)

    positions = torch.arange(length).expand(rows, length).contiguous()
    index = torch.arange(length + 1)
    while True:
        phrases = draw(3, VOCAB_SIZE, rows, length)
        periods = draw(4, 40, rows)
        matrix = torch.stack(
            [phrase[index % period] for phrase, period in zip(phrases, periods, strict=True)]
        )
        weights = (index[None, 1:] >= periods[:, None] + 1).float()
        yield Batch(matrix[:, :-1].contiguous(), positions, matrix[:, 1:].contiguous(), weights)


def batches(
    tokenizer: Tokenizer, *, rows: int, length: int, seed: int, long: bool = False
) -> Iterator[Batch]:
    """An endless stream of packed batches; every row begins at the beginning of a document.

    In three of ten rows the positions jump ahead at the beginning of a turn (without turns, at the
    beginning of the row). So the model learns distances up to MAX_POSITIONS, although the rows are
    shorter than that.
    """
    rng = random.Random(seed)
    stream = documents(seed + 1, long=long)
    end_of_text, im_start, im_end = (
        tokenizer.token_to_id(t) for t in (END_OF_TEXT, IM_START, IM_END)
    )
    (assistant,) = tokenizer.encode("assistant").ids
    while True:
        all_ids, all_weights, all_positions = [], [], []
        for _ in range(rows):
            ids: list[int] = []
            weights: list[float] = []
            while len(ids) <= length:
                document = tokenizer.encode(next(stream)).ids
                ids += [*document, end_of_text]
                weights += [*_row_weights(document, im_start, im_end, assistant), 1.0]
            positions = torch.arange(length)
            if rng.random() < 0.3:
                cut = rng.choice([i for i in range(length) if ids[i] == im_start] or [0])
                positions[cut:] += rng.randint(0, MAX_POSITIONS - length)
            all_ids.append(ids[: length + 1])
            all_weights.append(weights[1 : length + 1])
            all_positions.append(positions)
        matrix = torch.tensor(all_ids)
        yield Batch(
            matrix[:, :-1].contiguous(),
            torch.stack(all_positions),
            matrix[:, 1:].contiguous(),
            torch.tensor(all_weights),
        )
