"""The parts of which conversations are made: turns, the state of a chat, and how people type."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from ostinato.models.demo.training.topics import lexicon as lx

__all__ = [
    "MORE",
    "WHAT_IS",
    "Chat",
    "Skill",
    "Turn",
    "lower_first",
    "nonsense",
    "phrase",
    "subject_noun",
    "upper_first",
    "vary",
    "with_article",
]


@dataclass
class Turn:
    """One question with its answer and, for some questions, a short form of the answer."""

    question: str
    answer: str
    short: str | None = None


@dataclass
class Chat:
    """The state of a conversation while it is written."""

    rng: random.Random
    persona: str | None = None
    identity: str | None = None
    memory: dict[str, str] = field(default_factory=dict)
    last_answer: str | None = None
    said: str = ""

    def fresh(self, options: Sequence[str]) -> str:
        """An option that is new to the chat, for requests such as "tell me another one".

        If the chat has had all options, any of them.
        """
        return self.rng.choice([o for o in options if o not in self.said] or options)

    def told(self, text: str) -> str:
        """Returns the text, and records that the chat has had it."""
        self.said += text + "\n"
        return text


Skill = Callable[[Chat], list[Turn]]

WHAT_IS: Final = (
    "What is {x}?", "What is {x}?", "What is {x}?", "What's {x}?", "Explain {x}.", "Explain {x} to me.", "Tell me about {x}.",
    "Can you explain {x}?", "Define {x}.", "Please explain {x}.", "Do you know what {x} is?", "What do you know about {x}?",
    "Describe {x}.", "I want to know about {x}.", "In simple words, what is {x}?", "{x}?", "What does {x} mean?",
    "Tell me what {x} is.", "Can you tell me about {x}?", "Could you explain {x}?", "Can you tell me what {x} is?",
    "Could you tell me about {x}?", "What exactly is {x}?", "How would you explain {x}?", "What is meant by {x}?",
    "I would like to know what {x} is.", "Give me a definition of {x}.", "So what is {x}?", "Can you define {x}?",
    "Could you describe {x}?", "Can you describe {x} to me?", "Do you know {x}?", "What can you tell me about {x}?",
)  # fmt: skip
MORE: Final = (
    "Tell me more.", "Tell me more", "More please", "Go on", "Can you say more?", "More details, please.", "Why does it matter?",
    "Please go on.", "Continue", "Could you explain more?", "And?", "What else?", "Say more about it", "More",
)  # fmt: skip
_PREFIXES: Final = (
    "please ",
    "hey, ",
    "so, ",
    "ok, ",
    "well, ",
    "now ",
    "and ",
    "hi, ",
    "hello, ",
    "um, ",
    "a question: ",
    "can you help me? ",
)


def upper_first(text: str) -> str:
    return text[:1].upper() + text[1:]


def lower_first(text: str) -> str:
    return (
        text if text[:2].strip("'").isupper() or text[:2] == "I " else text[:1].lower() + text[1:]
    )


def vary(rng: random.Random, question: str) -> str:
    """A question as people type it: with a greeting, in lower case, or with a typo."""
    text = question
    if rng.random() < 0.12:
        text = upper_first(rng.choice(_PREFIXES) + lower_first(text))
    elif rng.random() < 0.08:
        text = (
            rng.choice(
                ("Hello! ", "Hi! ", "Hi, ", "Thanks! ", "Good. ", "I have a question. ", "Okay. ")
            )
            + text
        )
    if rng.random() < 0.08 and text.endswith((".", "?")):
        text = text[:-1] + ", please" + text[-1]
    if rng.random() < 0.30:
        text = text.lower()
    if rng.random() < 0.25:
        text = text.rstrip(".?!")
    if rng.random() < 0.03:
        text = text.upper()
    if rng.random() < 0.05 and len(text) > 8:
        at = rng.randrange(2, len(text) - 1)
        text = rng.choice(
            (text[:at] + text[at + 1 :], text[:at] + text[at + 1] + text[at] + text[at + 2 :])
        )
    return text or question


def with_article(noun: str) -> str:
    return f"an {noun}" if noun[0] in "aeiou" else f"a {noun}"


def subject_noun(rng: random.Random) -> str:
    return rng.choice(
        rng.choice((lx.STORY_ANIMALS, lx.STORY_ANIMALS, lx.STORY_BEINGS, lx.STORY_OBJECTS))
    )


def nonsense(rng: random.Random) -> str:
    return "".join(
        rng.choice("bdfgklmnprstvz") + rng.choice("aeiou") for _ in range(rng.randint(1, 3))
    ) + rng.choice(("", "n", "r", "x", "st"))


def phrase(rng: random.Random) -> str:
    pool = rng.random()
    if pool < 0.25:
        return rng.choice(lx.PLAIN_WORDS)
    if pool < 0.4:
        return rng.choice((nonsense(rng), rng.choice(lx.NAMES), str(rng.randint(0, 999))))
    if pool < 0.5:
        return rng.choice(
            (
                "hello world",
                "I like music",
                "good morning, everyone",
                "the quick brown fox",
                "peace and quiet",
                "Ostinato is fast",
                "one two three",
                "to be or not to be",
                "long live the queen",
                "I am a tiny model",
            )
        )
    return " ".join(
        rng.choice(
            rng.choice(
                (lx.PLAIN_WORDS, lx.STORY_ANIMALS, lx.STORY_OBJECTS, lx.NAMES, lx.PLAIN_WORDS)
            )
        )
        for _ in range(rng.choice((2, 3, 4, 5, 6, 8, 12)))
    )
