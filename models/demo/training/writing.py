"""Skills that write: stories, poems, jokes, lists, counting, repeating, JSON."""

import json
from typing import Final

from ostinato.models.demo.training import lexicon as lx
from ostinato.models.demo.training.dialogue import (
    Chat,
    Turn,
    nonsense,
    phrase,
    subject_noun,
    upper_first,
    with_article,
)
from ostinato.models.demo.training.smalltalk import FACTS, JOKES, RIDDLES
from ostinato.models.demo.training.stories import haiku, poem, story

__all__ = [
    "count_turns",
    "echo_turns",
    "joke_turns",
    "json_turns",
    "list_turns",
    "poem_turns",
    "story_turns",
]

_STORY_ASKS: Final = (
    "Tell me a story about {x}.", "Tell me a story about {x}.", "Tell me a short story about {x}.", "Tell me a short story about {x}.", "Write a story about {x}.",
    "Can you tell me a story about {x}?", "A story about {x}, please.", "I want a story about {x}.", "Write a short story about {x}.", "Could you tell a story about {x}?",
    "Tell a tale about {x}.", "Make up a story about {x}.", "Do you know a story about {x}?", "Tell me a bedtime story about {x}.", "story about {x}",
    "Please write a short story about {x}.", "Give me a short story about {x}.", "Tell us a story about {x}.", "I would like a story about {x}.",
)  # fmt: skip
_LONG_STORY_ASKS: Final = (
    "Tell me a long story about {x}.",
    "Write a long story about {x}.",
    "I want a long story about {x}.",
    "Can you tell me a longer story about {x}?",
)
_NO_SUBJECT_ASKS: Final = (
    "Tell me a story.", "Tell me a short story.", "Tell a story", "I want to hear a story.", "Can you tell me a story?", "A story, please.", "Write a story.",
    "Tell me a bedtime story.", "Tell me a tale.", "A story", "Please tell me a story.", "Once upon a time",
)  # fmt: skip


def _asked_story(chat: Chat) -> tuple[str, str]:
    """What the story shall be about, in the words of the one who asks, and the story."""
    rng = chat.rng
    subject = subject_noun(rng)
    roll = rng.random()
    if roll < 0.55:
        return with_article(subject), chat.told(story(rng, subject, avoid=chat.said))
    if roll < 0.67:
        adjective = rng.choice(lx.STORY_ADJECTIVES)
        return with_article(f"{adjective} {subject}"), chat.told(
            story(rng, subject, adjective=adjective, avoid=chat.said)
        )
    if roll < 0.77:
        name = rng.choice(lx.NAMES) if rng.random() < 0.8 else nonsense(rng).title()
        text = chat.told(story(rng, subject, name=name, avoid=chat.said))
        return f"{with_article(subject)} {rng.choice(('named', 'called'))} {name}", text
    if roll < 0.84:
        friend = subject_noun(rng)
        if friend != subject:
            text = chat.told(story(rng, subject, friend=friend, avoid=chat.said))
            return f"{with_article(subject)} and {with_article(friend)}", text
    if roll < 0.90:
        noun = nonsense(rng) if rng.random() < 0.5 else rng.choice(lx.PLAIN_WORDS)
        return with_article(noun), chat.told(story(rng, noun, avoid=chat.said))
    topic = rng.choice(lx.STORY_TOPICS)
    return (
        topic,
        f"Here is a story, though it may not be about {topic}. {chat.told(story(rng, subject, avoid=chat.said))}",
    )


def story_turns(chat: Chat) -> list[Turn]:
    rng = chat.rng
    roll = rng.random()
    if roll < 0.12:
        turns = [
            Turn(
                rng.choice(_NO_SUBJECT_ASKS),
                chat.told(story(rng, subject_noun(rng), avoid=chat.said)),
            )
        ]
    elif roll < 0.20:
        subject = subject_noun(rng)
        turns = [
            Turn(
                rng.choice(_LONG_STORY_ASKS).format(x=with_article(subject)),
                chat.told(story(rng, subject, long=True, avoid=chat.said)),
            )
        ]
    else:
        about, text = _asked_story(chat)
        turns = [Turn(rng.choice(_STORY_ASKS).format(x=about), text)]
    while len(turns) < 4 and rng.random() < 0.25:
        if rng.random() < 0.5:
            turns.append(
                Turn(
                    rng.choice(
                        (
                            "Another one!",
                            "Tell me another one.",
                            "One more, please.",
                            "Another story, please.",
                            "Tell me a different story.",
                        )
                    ),
                    chat.told(story(rng, subject_noun(rng), avoid=chat.said)),
                )
            )
        else:
            about, text = _asked_story(chat)
            turns.append(
                Turn(
                    rng.choice(
                        (
                            "Now one about {x}.",
                            "And one about {x}?",
                            "Another one about {x}, please.",
                            "Tell me one about {x} too.",
                        )
                    ).format(x=about),
                    text,
                )
            )
    return turns


def poem_turns(chat: Chat) -> list[Turn]:
    rng = chat.rng
    topic = rng.random() < 0.3
    subject = rng.choice(lx.STORY_TOPICS) if topic else subject_noun(rng)
    about = subject if topic else with_article(subject)
    if rng.random() < 0.5:
        question = rng.choice(
            (
                "Write a haiku about {x}.",
                "A haiku about {x}, please.",
                "Can you write a haiku about {x}?",
                "Give me a haiku about {x}.",
                "haiku about {x}",
            )
        )
        if rng.random() < 0.15:
            question = rng.choice(
                ("Write a haiku.", "Give me a haiku.", "Do you know a haiku?", "A haiku, please.")
            )
        return [
            Turn(
                question.format(x=about),
                chat.told(haiku(rng, subject, topic=topic, avoid=chat.said)),
            )
        ]
    question = rng.choice(
        (
            "Write a poem about {x}.",
            "Write a short poem about {x}.",
            "A poem about {x}, please.",
            "Can you write a poem about {x}?",
            "Write me a little poem about {x}.",
            "poem about {x}",
            "Make a rhyme about {x}.",
            "Write a song about {x}.",
        )
    )
    if rng.random() < 0.15:
        question = rng.choice(
            (
                "Write a poem.",
                "Tell me a poem.",
                "Do you know a poem?",
                "Write a short poem.",
                "A poem, please.",
            )
        )
    return [
        Turn(question.format(x=about), chat.told(poem(rng, subject, topic=topic, avoid=chat.said)))
    ]


def joke_turns(chat: Chat) -> list[Turn]:
    rng = chat.rng
    roll = rng.random()
    if roll < 0.5:
        turns = [
            Turn(
                rng.choice(
                    (
                        "Tell me a joke.",
                        "Tell me a joke",
                        "Do you know a joke?",
                        "Make me laugh.",
                        "A joke, please.",
                        "Say something funny.",
                        "Can you tell a joke?",
                        "joke",
                        "I want to hear a joke.",
                    )
                ),
                chat.told(chat.fresh(JOKES)),
            )
        ]
        while len(turns) < 5 and rng.random() < 0.4:
            turns.append(
                Turn(
                    rng.choice(
                        (
                            "Another one!",
                            "Tell me another one.",
                            "One more, please.",
                            "Another joke, please.",
                            "More jokes!",
                        )
                    ),
                    chat.told(chat.fresh(JOKES)),
                )
            )
        return turns
    if roll < 0.75:
        return [
            Turn(
                rng.choice(
                    (
                        "Tell me a fact.",
                        "Tell me a fun fact.",
                        "Do you know a fun fact?",
                        "Tell me something interesting.",
                        "Give me a fact.",
                        "A fun fact, please.",
                    )
                ),
                chat.told(chat.fresh(FACTS)),
            )
        ]
    riddle = chat.told(chat.fresh([question for question, _ in RIDDLES]))
    solution = dict(RIDDLES)[riddle]
    turns = [
        Turn(
            rng.choice(
                (
                    "Tell me a riddle.",
                    "Do you know a riddle?",
                    "A riddle, please.",
                    "Give me a riddle.",
                    "Ask me a riddle.",
                )
            ),
            riddle,
        )
    ]
    guess = rng.random()
    if guess < 0.4:
        turns.append(
            Turn(
                rng.choice(
                    (
                        "I don't know.",
                        "I give up.",
                        "What is the answer?",
                        "Tell me the answer.",
                        "no idea",
                        "What is it?",
                    )
                ),
                f"It is {solution}!",
            )
        )
    elif guess < 0.7:
        turns.append(
            Turn(
                rng.choice(
                    (
                        upper_first(solution),
                        f"Is it {solution}?",
                        f"It is {solution}!",
                        f"{solution}?",
                        solution.split()[-1],
                    )
                ),
                f"Yes, that is right! It is {solution}.",
            )
        )
    else:
        wrong = rng.choice(
            [s for _, s in RIDDLES if s != solution]
            + [with_article(rng.choice(lx.STORY_OBJECTS)) for _ in range(6)]
        )
        if wrong != solution:
            turns.append(
                Turn(
                    rng.choice((upper_first(wrong), f"Is it {wrong}?", f"{wrong}?")),
                    f"Not quite. It is {solution}!",
                )
            )
    return turns


def list_turns(chat: Chat) -> list[Turn]:
    rng = chat.rng
    kind, words = rng.choice(list(lx.CATEGORIES.items()))
    # Two fixed orders: a list that is known by heart does not lose count of itself.
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
