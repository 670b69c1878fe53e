"""Write one-turn conversations on which neither the demo model nor its head was trained.

    python -m ostinato.models.demo.training.held_out 24 > held-out.json
    run bench speculation workload=sharegpt workload.path=held-out.json

They are for benchmarks. The file is in the form of ShareGPT. The chat template is already applied
to the prompts. The conversations come from the generator of the training text, with another seed,
so they have the same kinds of questions.
"""

import json
import random
import sys
from typing import Final

from ostinato.models.demo.training.corpus import Conversation, conversation, render

__all__ = ["main", "questions"]

SEED: Final = 3 * 10**9


def questions(count: int, number: int = 0) -> list[str]:
    """The prompts of conversations, with the chat template, up to where the model answers.

    Args:
        count: the number of conversations.
        number: other numbers give other conversations.
    """
    return [prompt for prompt, _ in _conversations(count, SEED + number)]


def _conversations(count: int, seed: int) -> list[tuple[str, str]]:
    """Prompts and answers."""
    rng = random.Random(seed)
    pairs: list[tuple[str, str]] = []
    while len(pairs) < count:
        found = conversation(rng)
        if found.turns and len(found.turns[0].answer) > 40:
            text = render(Conversation(found.system, found.turns[:1]))
            begin = text.rindex("<|im_start|>assistant\n") + len("<|im_start|>assistant\n")
            pairs.append((text[:begin], text[begin:]))
    return pairs


def main() -> None:
    """Print conversations: as many as the command line says, 24 by default."""
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 24
    entries = [
        {"conversations": [{"from": "human", "value": prompt}, {"from": "gpt", "value": answer}]}
        for prompt, answer in _conversations(count, SEED)
    ]
    print(json.dumps(entries, indent=1))


if __name__ == "__main__":
    main()
