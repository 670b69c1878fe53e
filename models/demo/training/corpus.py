"""Endless, seeded training text for the demo model: conversations and plain text from a small world.

    python -m ostinato.models.demo.training.corpus 5     # print five documents

A *skill* writes one or more turns (question, answer) about one thing. A document is either a
conversation, which is a chain of skills under an optional system prompt, or a piece of plain text.
"""

import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from ostinato.models.demo.training.topics import (
    exercises,
    knowledge,
    memory,
    outside,
    sums,
    words,
    writing,
)
from ostinato.models.demo.training.topics import lexicon as lx
from ostinato.models.demo.training.topics.dialogue import (
    Chat,
    Skill,
    Turn,
    lower_first,
    subject_noun,
    vary,
    with_article,
)
from ostinato.models.demo.training.topics.glossary import GLOSSARY
from ostinato.models.demo.training.topics.smalltalk import FACTS
from ostinato.models.demo.training.topics.stories import haiku, poem, story

__all__ = [
    "HELD_OUT",
    "Conversation",
    "Turn",
    "conversation",
    "document",
    "documents",
    "plain_text",
    "render",
]

# Questions that the corpus never contains, in upper or lower case. The tests ask them.
HELD_OUT: Final = (
    "Can you explain what an ostinato is?",
    "Which city is the capital of France?",
    "Please tell me a short story about a cat.",
    "Hi! Who are you?",
    "Could you tell me what paged attention is?",
    "Please count to ten.",
    "How much is 7 times 8?",
    "What does chunked prefill mean?",
    "Which city is the capital of Japan?",
    "How much is 9 plus 6?",
    "What is photosynthesis?",
    "Who is Napoleon?",
    "Tell me about the stock market",
)


@dataclass
class Conversation:
    """A finished conversation: the system prompt (or None) and its turns."""

    system: str | None
    turns: list[Turn] = field(default_factory=list)


_SKILLS: Final[list[tuple[Skill, float]]] = [
    (knowledge.talk_turns, 15), (knowledge.who_turns, 2), (knowledge.greet_turns, 2), (knowledge.values_turns, 4), (knowledge.nouns_turns, 4), (knowledge.glossary_turns, 15), (knowledge.commands_turns, 4), (knowledge.how_it_works_turns, 2.5), (knowledge.python_turns, 4), (knowledge.capital_turns, 9),
    (sums.arithmetic_turns, 16), (sums.word_problem_turns, 1.5), (sums.big_sum_turns, 2), (sums.number_facts_turns, 2), (words.word_facts_turns, 6), (words.calendar_turns, 3), (words.is_it_turns, 4), (writing.story_turns, 7), (writing.poem_turns, 2.5), (writing.joke_turns, 3), (exercises.list_turns, 4), (exercises.count_turns, 3),
    (exercises.echo_turns, 7), (exercises.json_turns, 3), (memory.tell_name_turns, 2.5), (memory.tell_memory_turns, 2), (memory.recall_turns, 3), (memory.again_turns, 1), (memory.no_more_turns, 1), (memory.thanks_turns, 1.5), (outside.outside_turns, 14), (outside.gibberish_turns, 1.5),
]  # fmt: skip
_SKILL_FUNCTIONS: Final = [skill for skill, _ in _SKILLS]
_SKILL_WEIGHTS: Final = [weight for _, weight in _SKILLS]

_PERSONAS: Final[dict[str, tuple[tuple[str, ...], str, str]]] = {
    "pirate": (("You are a pirate.", "Talk like a pirate.", "You are a pirate. Speak like one.", "Answer like a pirate."), "Arr! {a} Yo ho ho!", "a pirate of the seven seas"),
    "robot": (("You are a robot.", "Talk like a robot.", "Answer like a robot."), "Beep. {a} Boop.", "a robot"),
    "cheerful": (("You are very cheerful.", "Be cheerful.", "You are a cheerful assistant.", "Always be happy."), "Yay! {a} :)", "the very cheerful Ostinato demo model"),
    "butler": (("You are a butler.", "You are a polite butler.", "Answer like a butler."), "Very well. {a} At your service.", "your butler"),
    "cat": (("You are a cat.", "Talk like a cat.", "Answer like a cat."), "Meow. {a} Purr.", "a cat"),
    "brief": (("Answer in one word.", "Be brief.", "Give short answers.", "You answer as briefly as possible.", "Answer with one word only.", "Keep it short."), "{a}", "the Ostinato demo model"),
}  # fmt: skip
_NEUTRAL: Final = (
    "You are a helpful assistant.",
    "You are a helpful assistant.",
    "You are a friendly assistant.",
    "You are the Ostinato demo model.",
    "You are a helpful AI assistant.",
    "Be helpful.",
    "You are an assistant.",
)


def _system(chat: Chat) -> str | None:
    rng = chat.rng
    roll = rng.random()
    if roll < 0.68:
        return None
    if roll < 0.80:
        return rng.choice(_NEUTRAL)
    if roll < 0.86:
        name = rng.choice(lx.NAMES)
        chat.identity = f"{name}, a small and friendly assistant"
        return rng.choice(
            (
                f"You are {name}.",
                f"Your name is {name}.",
                f"You are {name}, a helpful assistant.",
                f"You are an assistant named {name}.",
                f"You are called {name}.",
            )
        )
    if roll < 0.89:
        being = with_article(subject_noun(rng))
        if being not in ("a robot", "a pirate", "a cat"):
            chat.identity = being
            return f"You are {being}."
    chat.persona = rng.choice(list(_PERSONAS))
    prompts, _, chat.identity = _PERSONAS[chat.persona]
    return rng.choice(prompts)


def _styled(chat: Chat, turn: Turn) -> Turn:
    if turn.short and chat.persona in (None, "brief") and chat.rng.random() < 0.05:
        ask = chat.rng.choice(
            (
                "In one word: {q}",
                "{q} Answer in one word.",
                "{q} Just one word.",
                "In one word, {l}",
            )
        )
        return Turn(ask.format(q=turn.question, l=lower_first(turn.question)), turn.short)
    if chat.persona is None or turn.answer.startswith(("{", "[")):
        return turn
    if chat.persona == "brief":
        return Turn(turn.question, turn.short or turn.answer)
    return Turn(turn.question, _PERSONAS[chat.persona][1].format(a=turn.answer))


_HELD_OUT_KEYS: Final = {q.lower().rstrip(".?!") for q in HELD_OUT}


def conversation(rng: random.Random, *, long: bool = False) -> Conversation:
    """One conversation of 1 to 12 turns or a few more; with `long`, of 12 to 40 or a few more."""
    chat = Chat(rng)
    result = Conversation(_system(chat))
    roll = rng.random()
    length = (
        rng.randint(12, 40)
        if long
        else 1
        if roll < 0.40
        else rng.randint(2, 4)
        if roll < 0.8
        else rng.randint(5, 12)
    )
    if length > 1 and rng.random() < 0.25:
        result.turns += [
            _styled(chat, t)
            for t in rng.choice(
                (memory.tell_name_turns, knowledge.greet_turns, memory.tell_name_turns)
            )(chat)
        ]
    elif chat.identity and rng.random() < 0.4:
        result.turns += [_styled(chat, t) for t in knowledge.who_turns(chat)]
    while len(result.turns) < length:
        skill = rng.choices(_SKILL_FUNCTIONS, _SKILL_WEIGHTS)[0]
        if chat.memory and rng.random() < 0.08:
            skill = memory.recall_turns
        for turn in skill(chat):
            turn.question = (
                turn.question
                if skill in (exercises.echo_turns, outside.gibberish_turns)
                else vary(rng, turn.question)
            )
            if turn.question.lower().rstrip(".?!") in _HELD_OUT_KEYS:
                break
            turn = _styled(chat, turn) if skill is not memory.again_turns else turn
            result.turns.append(turn)
            chat.last_answer = turn.answer
    return result


def render(conversation: Conversation) -> str:
    """The conversation in ChatML, exactly as the chat template writes it."""
    parts = (
        []
        if conversation.system is None
        else [f"<|im_start|>system\n{conversation.system}<|im_end|>\n"]
    )
    for turn in conversation.turns:
        parts.append(
            f"<|im_start|>user\n{turn.question}<|im_end|>\n<|im_start|>assistant\n{turn.answer}<|im_end|>\n"
        )
    return "".join(parts)


def plain_text(rng: random.Random) -> str:
    """Text without a chat around it, for completion requests."""
    roll = rng.random()
    if roll < 0.35:
        return story(rng, subject_noun(rng))
    if roll < 0.52:
        entry = GLOSSARY[0] if rng.random() < 0.1 else rng.choice(GLOSSARY)
        return entry.definition if rng.random() < 0.5 else f"{entry.definition} {entry.more}"
    if roll < 0.62:
        pairs = rng.sample(list(lx.CAPITALS.items()), rng.randint(1, 5))
        return " ".join(
            f"The capital of {country} is {capital.rstrip('.')}." for country, capital in pairs
        )
    if roll < 0.73:
        a = rng.randint(1, 10)
        return "\n".join(f"{a} times {b} is {a * b}." for b in range(1, 11))
    if roll < 0.84:
        a = rng.randint(0, 20)
        return "\n".join(
            f"{a} plus {b} is {a + b}." for b in range(rng.randint(0, 8), rng.randint(10, 21))
        )
    if roll < 0.90:
        n = rng.randint(5, 30)
        if rng.random() < 0.4:
            return " ".join(lx.NUMBER_WORDS[1 : min(n, 20) + 1])
        return ", ".join(str(i) for i in range(1, n + 1))
    if roll < 0.95:
        return " ".join(rng.sample(FACTS, 3))
    return rng.choice((haiku, poem))(rng, subject_noun(rng))


def document(rng: random.Random, *, long: bool = False) -> str:
    """One training document, without its end-of-text mark."""
    if rng.random() < 0.08:
        return plain_text(rng)
    return render(conversation(rng, long=long))


def documents(seed: int, *, long: bool = False) -> Iterator[str]:
    """An endless stream of documents; the same seed gives the same stream."""
    rng = random.Random(seed)
    while True:
        yield document(rng, long=long)


if __name__ == "__main__":
    stream = documents(seed=0)
    for _ in range(int(sys.argv[1]) if len(sys.argv) > 1 else 5):
        print(next(stream), end="\n\n")
