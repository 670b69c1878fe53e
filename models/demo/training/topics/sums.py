"""Skills with numbers: sums, products, small word problems, and sums that the model refuses."""

import random
from typing import Final

from ostinato.models.demo.training.topics.dialogue import Chat, Turn, upper_first
from ostinato.models.demo.training.topics.smalltalk import DEFLECTIONS

__all__ = ["arithmetic_turns", "big_sum_turns", "number_facts_turns", "word_problem_turns"]


def _sum_parts(rng: random.Random) -> tuple[int, str, int, int]:
    kind = rng.random()
    if kind < 0.42:
        top = rng.choice((10, 20, 20))
        a, b = rng.randint(0, top), rng.randint(0, top)
        return a, "plus", b, a + b
    if kind < 0.60:
        a, b = rng.randint(0, 20), rng.randint(0, 20)
        if rng.random() < 0.85:
            a, b = max(a, b), min(a, b)
        return a, "minus", b, a - b
    if kind < 0.90:
        top = rng.choice((10, 10, 10, 12))
        a, b = rng.randint(1, top), rng.randint(1, top)
        return a, "times", b, a * b
    b, c = rng.randint(1, 10), rng.randint(1, 10)
    return b * c, "divided by", b, c


_SIGNS: Final = {"plus": "+", "minus": "-", "times": "*", "divided by": "/"}


def arithmetic_turns(chat: Chat) -> list[Turn]:
    rng = chat.rng
    turns: list[Turn] = []
    for index in range(rng.choice((1, 1, 2, 3))):
        a, word, b, result = _sum_parts(rng)
        sign = rng.choice(("x", "*", "*", "×")) if word == "times" else _SIGNS[word]
        plain = f"{a} {word} {b}"
        signed = rng.choice((f"{a} {sign} {b}", f"{a}{sign}{b}", f"{a} {sign} {b}"))
        if word == "times" and rng.random() < 0.1:
            plain = f"{a} multiplied by {b}"
        if index and rng.random() < 0.6:
            question = rng.choice(("And {p}?", "What about {p}?", "and {s}?", "Now {p}")).format(
                p=plain, s=signed
            )
        else:
            question = rng.choice((
                "What is {p}?", "What is {p}?", "What is {s}?", "{s}", "{s} =", "{s}?", "{p}", "{p}?", "Calculate {s}.", "What's {p}?",
                "Can you tell me what {p} is?", "Do you know what {p} is?", "Compute {s}", "What does {p} make?", "What is the result of {s}?",
                "What do you get for {s}?", "Tell me {p}.", "Solve {s}", "What is the value of {s}?",
            )).format(p=plain, s=signed)  # fmt: skip
            if word in ("plus", "times") and rng.random() < 0.15:
                question = rng.choice(
                    ("How much is {p}?", "How much is {s}?", "how much does {p} make?")
                ).format(p=plain, s=signed)
        turns.append(Turn(question, f"{a} {word} {b} is {result}.", f"{result}."))
    return turns


def big_sum_turns(chat: Chat) -> list[Turn]:
    rng = chat.rng
    top = 10 ** rng.choice((2, 2, 3, 4, 6))
    word = rng.choice(("plus", "minus", "times", "times", "divided by"))
    a, b = rng.randint(13 if word == "times" else 21, max(top, 60)), rng.randint(2, max(top, 60))
    if rng.random() < 0.5 and word in ("plus", "times"):
        a, b = b, a
    sign = _SIGNS[word]
    question = rng.choice((
        "What is {p}?", "What is {p}?", "What is {s}?", "{s}", "{s} =", "{s}?", "{p}", "Calculate {s}.", "What's {p}?", "How much is {p}?", "Compute {s}",
        "What is the square root of {a}?", "What is {a} squared?", "What is {a}% of {b}?", "What is {a} to the power of {b}?", "Is {a} a prime number?",
    )).format(a=a, b=b, p=f"{a} {word} {b}", s=rng.choice((f"{a} {sign} {b}", f"{a}{sign}{b}")))  # fmt: skip
    return [Turn(question, DEFLECTIONS["big_sum"][0])]


def word_problem_turns(chat: Chat) -> list[Turn]:
    rng = chat.rng
    a, b = rng.randint(1, 10), rng.randint(1, 10)
    thing = rng.choice(
        (
            "apples",
            "pears",
            "books",
            "coins",
            "tokens",
            "cats",
            "cookies",
            "balls",
            "stones",
            "eggs",
        )
    )
    pick = rng.randrange(4)
    if pick == 0:
        question = rng.choice(
            (
                "I have {a} {t} and get {b} more. How many {t} do I have?",
                "I have {a} {t} and you give me {b} more. How many {t} do I have now?",
                "If I have {a} {t} and buy {b} more, how many do I have?",
            )
        )
        return [
            Turn(
                question.format(a=a, b=b, t=thing),
                f"{a} plus {b} is {a + b}, so you have {a + b} {thing}.",
                f"{a + b}.",
            )
        ]
    if pick == 1:
        a, b = max(a, b), min(a, b)
        question = rng.choice(
            (
                "I have {a} {t} and give away {b}. How many {t} are left?",
                "I have {a} {t} and lose {b}. How many {t} do I have?",
                "If I have {a} {t} and eat {b}, how many are left?",
            )
        )
        return [
            Turn(
                question.format(a=a, b=b, t=thing),
                f"{a} minus {b} is {a - b}, so you have {a - b} {thing} left.",
                f"{a - b}.",
            )
        ]
    if pick == 2:
        a, b, c = (rng.randint(1, 5) for _ in range(3))
        question = rng.choice(
            (
                "What is {a} plus {b} plus {c}?",
                "{a} + {b} + {c}",
                "What is {a} + {b} + {c}?",
                "{a}+{b}+{c}",
            )
        )
        return [
            Turn(
                question.format(a=a, b=b, c=c),
                f"{a} plus {b} plus {c} is {a + b + c}.",
                f"{a + b + c}.",
            )
        ]
    if rng.random() < 0.5:
        return [
            Turn(
                rng.choice((f"What is {a} divided by 0?", f"{a} / 0", f"{a}/0")),
                "Nobody can divide by zero, not even a large model.",
            )
        ]
    if a % (b + 1) == 0:
        return []
    return [
        Turn(
            rng.choice((f"What is {a} divided by {b + 1}?", f"{a} / {b + 1}")),
            "I am sorry, I only know divisions that come out even.",
        )
    ]


def number_facts_turns(chat: Chat) -> list[Turn]:
    rng = chat.rng
    n = rng.randint(0, 29)
    pick = rng.randrange(6)
    if pick == 0:
        return [
            Turn(
                rng.choice(
                    (
                        f"What comes after {n}?",
                        f"Which number comes after {n}?",
                        f"What number follows {n}?",
                    )
                ),
                f"After {n} comes {n + 1}.",
                f"{n + 1}.",
            )
        ]
    if pick == 1 and n:
        return [
            Turn(
                rng.choice((f"What comes before {n}?", f"Which number comes before {n}?")),
                f"Before {n} comes {n - 1}.",
                f"{n - 1}.",
            )
        ]
    if pick == 2:
        m = rng.choice([i for i in range(30) if i != n])
        return [
            Turn(
                rng.choice(
                    (
                        f"Which is larger, {n} or {m}?",
                        f"Which number is bigger, {n} or {m}?",
                        f"What is more, {n} or {m}?",
                    )
                ),
                f"{max(n, m)} is larger than {min(n, m)}.",
                f"{max(n, m)}.",
            )
        ]
    if pick == 3:
        kind = "even" if n % 2 == 0 else "odd"
        return [
            Turn(
                rng.choice((f"Is {n} even or odd?", f"Is {n} an even number?", f"Is {n} odd?")),
                f"{n} is an {kind} number.",
                upper_first(kind) + ".",
            )
        ]
    if pick == 4:
        half = rng.randint(1, 20)
        return [
            Turn(
                rng.choice((f"What is half of {2 * half}?", f"What is one half of {2 * half}?")),
                f"Half of {2 * half} is {half}.",
                f"{half}.",
            )
        ]
    return [
        Turn(
            rng.choice((f"What is twice {n}?", f"What is the double of {n}?", f"Double {n}")),
            f"Twice {n} is {2 * n}.",
            f"{2 * n}.",
        )
    ]
