"""Conversations that ask for an exercise: lists, counting, repeating a text, JSON objects."""

import json
from typing import Final

from ostinato.models.demo.training.topics import lexicon as lx
from ostinato.models.demo.training.topics.dialogue import (
    Chat,
    Turn,
    phrase,
    upper_first,
    with_article,
)

__all__ = [
    "count_turns",
    "echo_turns",
    "json_turns",
    "list_turns",
]


def list_turns(chat: Chat) -> list[Turn]:
    rng = chat.rng
    kind, words = rng.choice(list(lx.CATEGORIES.items()))
    # Only two orders, so that the model learns the list by heart and lists the right number of
    # items.
    words = words if rng.random() < 0.7 else words[::-1]
    if kind in lx.SINGULARS and rng.random() < 0.25:
        one = lx.SINGULARS[kind]
        word = words[0] if rng.random() < 0.6 else rng.choice(words)
        return [
            Turn(
                rng.choice(
                    (
                        "Name {x}.",
                        "Tell me {x}.",
                        "Give me {x}.",
                        "Can you name {x}?",
                        "Say the name of {x}.",
                    )
                ).format(x=one),
                f"{upper_first(word)}.",
                f"{upper_first(word)}.",
            )
        ]
    count = min(len(words), rng.choice((2, 3, 3, 3, 4, 5, 5, 6, 7, 8, 10)))
    number = lx.NUMBER_WORDS[count] if rng.random() < 0.7 else str(count)
    chosen = words[:count]
    if rng.random() < 0.45:
        question = rng.choice(
            (
                "List {n} {x}.",
                "Make a list of {n} {x}.",
                "Give me a list of {n} {x}.",
                "Write a list of {n} {x}.",
                "List {n} {x}, please.",
            )
        )
        answer = (
            "\n".join(f"- {w}" for w in chosen)
            if rng.random() < 0.7
            else "\n".join(f"{i}. {w}" for i, w in enumerate(chosen, 1))
        )
    else:
        question = rng.choice(
            (
                "Name {n} {x}.",
                "Name {n} {x}.",
                "Tell me {n} {x}.",
                "Give me {n} {x}.",
                "Can you name {n} {x}?",
                "Say {n} {x}.",
            )
        )
        answer = f"{upper_first(lx.NUMBER_WORDS[count])} {kind} are {', '.join(chosen[:-1])} and {chosen[-1]}."
    return [Turn(question.format(n=number, x=kind), answer)]


def count_turns(chat: Chat) -> list[Turn]:
    rng = chat.rng
    roll = rng.random()
    if roll < 0.55:
        n = rng.choice((3, 5, 10, 10, 10, 20, rng.randint(2, 30), rng.randint(2, 30)))
        if rng.random() < 0.05:
            n = rng.choice((50, 100))
        number = lx.NUMBER_WORDS[n] if n <= 20 and rng.random() < 0.6 else str(n)
        question = rng.choice(
            (
                "Count to {n}.",
                "Count to {n}.",
                "Count to {n}.",
                "Can you count to {n}?",
                "Count from 1 to {n}.",
                "Count from one to {n}.",
                "Count up to {n}.",
                "List the numbers from 1 to {n}.",
            )
        )
        return [Turn(question.format(n=number), ", ".join(str(i) for i in range(1, n + 1)) + ".")]
    if roll < 0.75:
        a = rng.randint(0, 20)
        b = a + rng.randint(2, 12)
        return [
            Turn(
                rng.choice(
                    (
                        f"Count from {a} to {b}.",
                        f"Count from {a} up to {b}.",
                        f"List the numbers from {a} to {b}.",
                    )
                ),
                ", ".join(str(i) for i in range(a, b + 1)) + ".",
            )
        ]
    if roll < 0.9:
        n = rng.choice((3, 5, 10, 10, rng.randint(2, 20)))
        number = lx.NUMBER_WORDS[n] if rng.random() < 0.5 else str(n)
        return [
            Turn(
                rng.choice(
                    ("Count down from {n}.", "Count backwards from {n}.", "Count from {n} to 1.")
                ).format(n=number),
                ", ".join(str(i) for i in range(n, 0, -1)) + ".",
            )
        ]
    step = rng.choice((2, 5, 10))
    name = {2: "twos", 5: "fives", 10: "tens"}[step]
    n = step * 10
    return [
        Turn(
            rng.choice(
                (
                    f"Count by {name}.",
                    f"Count in {name}.",
                    f"Count to {n} by {name}.",
                    f"Count to {n} in steps of {step}.",
                )
            ),
            ", ".join(str(i) for i in range(step, n + 1, step)) + ".",
        )
    ]


def echo_turns(chat: Chat) -> list[Turn]:
    rng = chat.rng
    words = phrase(rng)
    roll = rng.random()
    if roll < 0.65:
        question = rng.choice(
            (
                "Say {x}",
                'Say "{x}".',
                "Repeat: {x}",
                "Repeat after me: {x}",
                "Please say {x}",
                "Say the words {x}",
                'Can you say "{x}"?',
                "Echo {x}",
                "Say this: {x}",
                'Write "{x}"',
                'Repeat "{x}"',
            )
        )
        return [Turn(question.format(x=words), upper_first(words) + ".")]
    if roll < 0.72:
        name = rng.choice(lx.NAMES)
        return [
            Turn(
                rng.choice(
                    (
                        f"Say hello to {name}.",
                        f"Say hi to {name}!",
                        f"Greet {name}.",
                        f"Please say hello to my friend {name}.",
                    )
                ),
                f"Hello, {name}! It is nice to meet you.",
            )
        ]
    word = rng.choice(lx.PLAIN_WORDS + lx.STORY_ANIMALS)
    if roll < 0.85:
        n = rng.randint(2, 5)
        return [
            Turn(
                rng.choice(
                    (
                        f"Say {word} {lx.NUMBER_WORDS[n]} times.",
                        f"Repeat {word} {lx.NUMBER_WORDS[n]} times.",
                        f"Write {word} {n} times.",
                    )
                ),
                upper_first(", ".join([word] * n)) + ".",
            )
        ]
    return [
        Turn(
            rng.choice(
                (
                    f"Spell {word}.",
                    f"How do you spell {word}?",
                    f"Spell the word {word}.",
                    f"Can you spell {word}?",
                )
            ),
            "-".join(word.upper()),
        )
    ]


_JSON: Final[dict[str, list[object]]] = {
    "name": ["Ada", "Otto", "Mila", "Hugo", "Clara"], "age": [36, 7, 42, 29, 12], "city": ["Paris", "Oslo", "Lima", "Rome"],
    "country": ["France", "Norway", "Peru", "Italy"], "colour": ["blue", "red", "green"], "color": ["blue", "red", "green"],
    "animal": ["cat", "owl", "fox"], "price": [5, 12, 20], "title": ["Bolero", "The River", "A Small Song"],
    "job": ["drummer", "baker", "teacher"], "active": [True, False], "id": [1, 2, 17], "fruit": ["apple", "pear", "plum"],
    "instrument": ["drum", "flute", "piano"], "size": ["small", "large"], "count": [3, 8, 10], "language": ["English", "Italian"],
    "year": [1928, 2001, 2020], "email": ["ada@example.com", "otto@example.com"], "tags": [["music", "rhythm"], ["small", "fast"]],
}  # fmt: skip


def json_turns(chat: Chat) -> list[Turn]:
    rng = chat.rng
    if rng.random() < 0.25:
        kind = rng.choice(("fruits", "colours", "animals", "cities", "countries", "trees", "birds"))
        n = rng.randint(2, 5)
        question = rng.choice(
            (
                f"Give me a JSON list of {lx.NUMBER_WORDS[n]} {kind}.",
                f"Write {lx.NUMBER_WORDS[n]} {kind} as a JSON array.",
                f"Return a JSON array with {n} {kind}.",
            )
        )
        return [Turn(question, json.dumps(lx.CATEGORIES[kind][:n]))]
    keys = rng.sample(list(_JSON), rng.choice((1, 2, 2, 2, 3, 3, 4)))
    if rng.random() < 0.3:
        keys = ["name", *[k for k in keys if k != "name"]]
    if rng.random() < 0.12:
        keys[-1] = rng.choice(lx.PLAIN_WORDS)
    spoken = [with_article(k) if k not in ("tags",) else k for k in keys]
    joined = spoken[0] if len(spoken) == 1 else ", ".join(spoken[:-1]) + " and " + spoken[-1]
    bare = keys[0] if len(keys) == 1 else ", ".join(keys[:-1]) + " and " + keys[-1]
    question = rng.choice((
        "Give me a JSON object with {j}.", "Give me a JSON object with {j}.", "Write a JSON object with {j}.", "Make a JSON object with {j}.", "JSON with {b}",
        "Return a JSON object with the keys {b}.", "Write JSON with the fields {b}.", "I need a JSON object with {j}.", "Create a small JSON object with {j}.",
    )).format(j=joined, b=bare)  # fmt: skip
    if rng.random() < 0.08:
        question, keys = (
            rng.choice(
                (
                    "Give me some JSON.",
                    "Write a JSON object.",
                    "Give me a JSON object.",
                    "Show me some JSON",
                )
            ),
            ["name", "age"],
        )
    return [
        Turn(
            question,
            json.dumps({k: rng.choice(_JSON[k][:2]) if k in _JSON else "example" for k in keys}),
        )
    ]
