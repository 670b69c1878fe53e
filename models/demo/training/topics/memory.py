"""Skills that depend on earlier turns: names and favourites, "say that again", "tell me more"."""

from typing import Final

from ostinato.models.demo.training.topics import lexicon as lx
from ostinato.models.demo.training.topics.dialogue import MORE, Chat, Turn, nonsense, upper_first
from ostinato.models.demo.training.topics.knowledge import (
    capital_turns,
    commands_turns,
    python_turns,
    values_turns,
)
from ostinato.models.demo.training.topics.smalltalk import DEFLECTIONS
from ostinato.models.demo.training.topics.words import is_it_turns, word_facts_turns

__all__ = [
    "again_turns",
    "no_more_turns",
    "recall_turns",
    "tell_memory_turns",
    "tell_name_turns",
    "thanks_turns",
]

_THANKS: Final = ("Thanks!", "Thank you!", "thanks", "Thank you very much!", "Great, thanks!")


def tell_name_turns(chat: Chat) -> list[Turn]:
    rng = chat.rng
    name = rng.choice(lx.NAMES) if rng.random() < 0.8 else nonsense(rng).title()
    chat.memory["name"] = name
    question = rng.choice(
        (
            "My name is {x}.",
            "My name is {x}",
            "I am {x}.",
            "I'm {x}.",
            "Hi, I am {x}.",
            "Hello, my name is {x}!",
            "Call me {x}.",
            "You can call me {x}.",
            "Hi, my name is {x}",
            "Hello! I'm {x}.",
            "they call me {x}",
        )
    )
    return [Turn(question.format(x=name), f"Nice to meet you, {name}! What can I do for you?")]


_MEMORIES: Final[dict[str, tuple[tuple[str, ...], tuple[str, ...], str, tuple[str, ...], str]]] = {
    "colour": (("My favourite colour is {x}.", "My favorite color is {x}.", "I like the colour {x} best."), tuple(lx.CATEGORIES["colours"]),
               "{X} is a lovely colour!", ("What is my favourite colour?", "What is my favorite color?", "Which colour do I like best?"), "Your favourite colour is {x}."),
    "city": (("I live in {x}.", "I am from {x}.", "I come from {x}.", "My home is {x}."), tuple(lx.CAPITALS.values())[:60],
             "How nice, {x} must be a lovely place!", ("Where do I live?", "Where am I from?", "Which city am I from?"), "You told me that it is {x}."),
    "pet": (("My cat is called {x}.", "My cat's name is {x}.", "I have a cat named {x}."), tuple(lx.NAMES),
            "{X} is a good name for a cat!", ("What is my cat called?", "What is the name of my cat?", "What's my cat's name?"), "Your cat is called {x}."),
    "dog": (("My dog is called {x}.", "My dog's name is {x}.", "I have a dog named {x}."), tuple(lx.NAMES),
            "{X} is a good name for a dog!", ("What is my dog called?", "What is the name of my dog?", "What's my dog's name?"), "Your dog is called {x}."),
    "age": (("I am {x} years old.", "I'm {x} years old.", "My age is {x}."), tuple(str(i) for i in range(6, 90)),
            "Then you have seen much more of the world than I have!", ("How old am I?", "What is my age?"), "You are {x} years old."),
    "instrument": (("I play the {x}.", "My instrument is the {x}.", "I am learning the {x}."), tuple(lx.CATEGORIES["instruments"]),
                   "The {x} is a wonderful instrument!", ("Which instrument do I play?", "What instrument do I play?"), "You play the {x}."),
    "food": (("My favourite food is {x}.", "I like {x} best.", "I love {x}."), ("pizza", "soup", "bread", "cake", "apples", "cheese", "rice", "pasta", "honey", "salad", "chocolate"),
             "{X} sounds good! I only eat tokens, though.", ("What is my favourite food?", "What do I like to eat?"), "You like {x}."),
}  # fmt: skip


def tell_memory_turns(chat: Chat) -> list[Turn]:
    key = chat.rng.choice(list(_MEMORIES))
    tell, values, reply, _, _ = _MEMORIES[key]
    value = chat.rng.choice(values)
    chat.memory[key] = value
    return [
        Turn(chat.rng.choice(tell).format(x=value), reply.format(x=value, X=upper_first(value)))
    ]


def recall_turns(chat: Chat) -> list[Turn]:
    rng = chat.rng
    known = list(chat.memory)
    key = rng.choice(known) if known and rng.random() < 0.85 else rng.choice(("name", *_MEMORIES))
    if key == "name":
        question = rng.choice(
            (
                "What is my name?",
                "What's my name?",
                "Do you remember my name?",
                "Who am I?",
                "Do you know my name?",
                "Can you tell me my name?",
                "Say my name",
            )
        )
        if key in chat.memory:
            return [Turn(question, f"Your name is {chat.memory[key]}.", f"{chat.memory[key]}.")]
        return [Turn(question, "You have not told me your name yet. What is it?")]
    _, _, _, ask, reply = _MEMORIES[key]
    if key in chat.memory:
        return [
            Turn(
                rng.choice(ask),
                reply.format(x=chat.memory[key]),
                upper_first(chat.memory[key]) + ".",
            )
        ]
    return [Turn(rng.choice(ask), "You have not told me that yet.")]


def again_turns(chat: Chat) -> list[Turn]:
    if chat.last_answer is None or len(chat.last_answer) > 200:
        return []
    return [
        Turn(
            chat.rng.choice(
                (
                    "Say that again.",
                    "Can you repeat that?",
                    "Repeat that, please.",
                    "What did you say?",
                    "Once more, please.",
                    "Repeat your answer.",
                )
            ),
            chat.last_answer,
        )
    ]


def no_more_turns(chat: Chat) -> list[Turn]:
    first = chat.rng.choice(
        (capital_turns, python_turns, values_turns, word_facts_turns, commands_turns, is_it_turns)
    )(chat)
    return [*first, Turn(chat.rng.choice(MORE), DEFLECTIONS["no_more"][0])]


def thanks_turns(chat: Chat) -> list[Turn]:
    return [Turn(chat.rng.choice(_THANKS), "You are welcome!")]
