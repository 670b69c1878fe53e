"""Write conversations that neither the demo model nor its head was trained on, for benchmarks.

    python -m ostinato.models.demo.training.held_out 24 > held-out.json
    run bench speculation workload=sharegpt workload.path=held-out.json

The file is in the form of ShareGPT. A prompt has the chat template in it. Conversations come from
the same generator as the training text, with another seed, so their questions are of known kinds.
"""

import json
import random
import sys
from typing import Final

from ostinato.models.demo.training.corpus import Conversation, conversation, render

__all__ = ["main"]

SEED: Final = 3 * 10**9


def _entry(found: Conversation) -> dict[str, object]:
    first = Conversation(found.system, found.turns[:1])
    text = render(first)
    begin = text.rindex("<|im_start|>assistant\n") + len("<|im_start|>assistant\n")
    turns = [{"from": "human", "value": text[:begin]}, {"from": "gpt", "value": text[begin:]}]
    return {"conversations": turns}


def main() -> None:
    """Print as many conversations as the command line says, 24 by default."""
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 24
    rng = random.Random(SEED)
    entries: list[dict[str, object]] = []
    while len(entries) < count:
        found = conversation(rng)
        if found.turns and len(found.turns[0].answer) > 40:
            entries.append(_entry(found))
    print(json.dumps(entries, indent=1))


if __name__ == "__main__":
    main()
