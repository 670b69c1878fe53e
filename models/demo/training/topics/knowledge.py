"""Skills about the engine, serving, Python, everyday things and capitals; also small talk."""

from ostinato.models.demo.training.topics import lexicon as lx
from ostinato.models.demo.training.topics.dialogue import (
    MORE,
    WHAT_IS,
    Chat,
    Turn,
    nonsense,
    upper_first,
)
from ostinato.models.demo.training.topics.glossary import COMMANDS, GLOSSARY, HOW_IT_WORKS, PYTHON
from ostinato.models.demo.training.topics.smalltalk import DEFLECTIONS, NOUNS, TALK, VALUES

__all__ = [
    "capital_turns",
    "commands_turns",
    "glossary_turns",
    "greet_turns",
    "how_it_works_turns",
    "nouns_turns",
    "python_turns",
    "talk_turns",
    "values_turns",
    "who_turns",
]


def talk_turns(chat: Chat) -> list[Turn]:
    questions, answers = chat.rng.choice(TALK)
    if "Who are you?" in questions and chat.identity:
        return [Turn(chat.rng.choice(questions[:14]), f"I am {chat.identity}.")]
    answer = answers[0] if chat.rng.random() < 0.75 else chat.rng.choice(answers)
    return [Turn(chat.rng.choice(questions), answer)]


def who_turns(chat: Chat) -> list[Turn]:
    questions, answers = next(block for block in TALK if "Who are you?" in block[0])
    return [
        Turn(chat.rng.choice(questions), f"I am {chat.identity}." if chat.identity else answers[0])
    ]


def greet_turns(chat: Chat) -> list[Turn]:
    questions, answers = TALK[0]
    return [Turn(chat.rng.choice(questions), answers[0])]


def values_turns(chat: Chat) -> list[Turn]:
    questions, answers = chat.rng.choice(VALUES)
    return [Turn(chat.rng.choice(questions), answers[0])]


def glossary_turns(chat: Chat) -> list[Turn]:
    rng = chat.rng
    entry = (
        GLOSSARY[0]
        if rng.random() < 0.05
        else GLOSSARY[2]
        if rng.random() < 0.03
        else rng.choice(GLOSSARY)
    )
    name = entry.names[0] if rng.random() < 0.5 else rng.choice(entry.names)
    template = rng.choice(WHAT_IS)
    if template == "{x}?" or (template == "What does {x} mean?" and rng.random() < 0.7):
        name = name.removeprefix("a ").removeprefix("an ").removeprefix("the ")
    question = upper_first(template.format(x=name))
    roll = rng.random()
    if roll < 0.12:
        question = rng.choice((
            "Explain {x} in detail.", "Write a paragraph about {x}.", "Tell me everything about {x}.", "Give me a long answer: what is {x}?",
            "Explain {x} in a few sentences.", "Write a long text about {x}.", "I want a detailed explanation of {x}.",
        )).format(x=name)  # fmt: skip
        return [Turn(question, f"{entry.definition} {entry.more}")]
    turns = [Turn(question, entry.definition)]
    if roll < 0.35:
        turns.append(Turn(rng.choice(MORE), entry.more))
        if roll < 0.15:
            turns.append(Turn(rng.choice(MORE), DEFLECTIONS["no_more"][0]))
    return turns


def nouns_turns(chat: Chat) -> list[Turn]:
    rng = chat.rng
    noun, meaning = rng.choice(list(NOUNS.items()))
    question = rng.choice(WHAT_IS).format(x=noun)
    return [Turn(upper_first(question), f"{upper_first(noun)} is {meaning}.")]


def commands_turns(chat: Chat) -> list[Turn]:
    questions, answer = chat.rng.choice(COMMANDS)
    return [Turn(chat.rng.choice(questions), answer)]


def how_it_works_turns(chat: Chat) -> list[Turn]:
    questions, answer = chat.rng.choice(HOW_IT_WORKS)
    return [Turn(chat.rng.choice(questions), answer)]


def python_turns(chat: Chat) -> list[Turn]:
    name, does = chat.rng.choice(list(PYTHON.items()))
    question = chat.rng.choice((
        "What does {x} do in Python?", "What does {x} do in Python?", "What is {x} in Python?", "Explain {x} in Python.", "What does the Python function {x} do?",
        "In Python, what does {x} do?", "What does {x}() do?", "How does {x} work in Python?", "Python {x}?", "What is {x} used for in Python?",
    ))  # fmt: skip
    return [Turn(question.format(x=name), f"In Python, `{name}` {does}.")]


def capital_turns(chat: Chat) -> list[Turn]:
    rng = chat.rng
    country, capital = rng.choice(list(lx.CAPITALS.items()))
    roll = rng.random()
    if roll < 0.08:
        place = rng.choice(("Atlantis", "Narnia", "the moon", "Mars", "Texas", "California", "Bavaria", "Wonderland", "Middle-earth", "Europe", "Africa",
                            "Florida", "Quebec", "Siberia", "Kiribati", "Tuvalu", "Andorra", "Liechtenstein", "Gabon", "Togo", "Belize", "Suriname", nonsense(rng).title()))  # fmt: skip
        return [Turn(f"What is the capital of {place}?", DEFLECTIONS["capital"][0])]
    if roll < 0.2 and country != "England":
        question = rng.choice(
            (
                "{c} is the capital of which country?",
                "Which country has {c} as its capital?",
                "Where is {c}?",
                "What country is {c} in?",
                "Tell me about {c}.",
            )
        )
        return [
            Turn(
                question.format(c=capital),
                f"{capital} is the capital of {country}.",
                upper_first(country) + ".",
            )
        ]
    if roll < 0.3 and (where := lx.continent(country)):
        question = rng.choice(
            (
                "Where is {x}?",
                "On which continent is {x}?",
                "Which continent is {x} in?",
                "What continent is {x} in?",
            )
        )
        return [
            Turn(question.format(x=country), f"{upper_first(country)} is in {where}.", f"{where}.")
        ]
    question = rng.choice((
        "What is the capital of {x}?", "What is the capital of {x}?", "What is the capital of {x}?", "What's the capital of {x}?", "Name the capital of {x}.",
        "Tell me the capital of {x}.", "capital of {x}?", "Do you know the capital of {x}?", "What is {x}'s capital?", "Can you tell me the capital of {x}?",
        "What is the capital city of {x}?", "The capital of {x}?", "What city is the capital of {x}?", "Which is the capital of {x}?",
        "Which town is the capital of {x}?",
    ))  # fmt: skip
    turns = [
        Turn(
            question.format(x=country),
            f"The capital of {country} is {capital.rstrip('.')}.",
            capital.rstrip(".") + ".",
        )
    ]
    if rng.random() < 0.25:
        other, city = rng.choice(list(lx.CAPITALS.items()))
        turns.append(Turn(rng.choice(("And of {x}?", "And {x}?", "What about {x}?", "And what is the capital of {x}?")).format(x=other),
                          f"The capital of {other} is {city.rstrip('.')}.", city.rstrip(".") + "."))  # fmt: skip
    return turns
