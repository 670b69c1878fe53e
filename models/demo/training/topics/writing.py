"""Conversations that ask for a text: stories, poems, jokes and riddles."""

from typing import Final

from ostinato.models.demo.training.topics import lexicon as lx
from ostinato.models.demo.training.topics.dialogue import (
    Chat,
    Turn,
    nonsense,
    subject_noun,
    upper_first,
    with_article,
)
from ostinato.models.demo.training.topics.smalltalk import FACTS, JOKES, RIDDLES
from ostinato.models.demo.training.topics.stories import haiku, poem, story

__all__ = [
    "joke_turns",
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
    """The subject of the story as the question names it, and the story."""
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
