"""Skills about words and things: opposites, colours, animals, the calendar, definitions."""

from typing import Final

from ostinato.models.demo.training.topics import lexicon as lx
from ostinato.models.demo.training.topics.dialogue import Chat, Turn, upper_first, with_article

__all__ = ["calendar_turns", "is_it_turns", "word_facts_turns"]


def word_facts_turns(chat: Chat) -> list[Turn]:
    rng = chat.rng
    pick = rng.randrange(9)
    if pick == 0:
        a, b = rng.sample(rng.choice(lx.OPPOSITES), 2)
        question = rng.choice(
            (
                "What is the opposite of {x}?",
                "What is the opposite of {x}?",
                "Opposite of {x}?",
                "Tell me the opposite of {x}.",
                "What's the opposite of {x}?",
                "Name the opposite of {x}.",
            )
        )
        return [Turn(question.format(x=a), f"The opposite of {a} is {b}.", upper_first(b) + ".")]
    if pick == 1:
        one, many = rng.choice(list(lx.PLURALS.items()))
        question = rng.choice(
            (
                "What is the plural of {x}?",
                "What is the plural of {x}?",
                "Plural of {x}?",
                "What's the plural of {x}?",
                "Tell me the plural of {x}.",
            )
        )
        return [
            Turn(question.format(x=one), f"The plural of {one} is {many}.", upper_first(many) + ".")
        ]
    if pick == 2:
        thing, colour = rng.choice(list(lx.THING_COLOURS.items()))
        word = rng.choice(("colour", "color"))
        question = rng.choice(
            (
                "What colour is {x}?",
                "What colour is {x}?",
                "Which colour does {x} have?",
                "What is the colour of {x}?",
                "Tell me the colour of {x}.",
            )
        )
        return [
            Turn(
                question.format(x=thing).replace("colour", word),
                f"{upper_first(thing)} is {colour}.",
                upper_first(colour) + ".",
            )
        ]
    if pick == 3:
        a, b, c = rng.choice(lx.MIXES)
        if rng.random() < 0.5:
            a, b = b, a
        return [
            Turn(
                rng.choice(
                    (
                        f"What do you get when you mix {a} and {b}?",
                        f"What colour do {a} and {b} make?",
                        f"Mix {a} and {b}.",
                    )
                ),
                f"If you mix {a} and {b}, you get {c}.",
                upper_first(c) + ".",
            )
        ]
    if pick == 4:
        animal, sound = rng.choice(list(lx.SOUNDS.items()))
        a = "an" if animal[0] in "aeiou" else "a"
        return [
            Turn(
                rng.choice(
                    (
                        f"What does {a} {animal} say?",
                        f"What sound does {a} {animal} make?",
                        f"What does the {animal} say?",
                        f"Which sound does {a} {animal} make?",
                    )
                ),
                f"{upper_first(a)} {animal} says {sound}.",
                upper_first(sound) + ".",
            )
        ]
    if pick == 5:
        animal, baby = rng.choice(list(lx.BABIES.items()))
        a = "an" if animal[0] in "aeiou" else "a"
        return [
            Turn(
                rng.choice(
                    (
                        f"What is a baby {animal} called?",
                        f"What do you call a young {animal}?",
                        f"What is the name of a baby {animal}?",
                    )
                ),
                f"The young of {a} {animal} is called a {baby}.".replace("a owlet", "an owlet"),
                upper_first(baby) + ".",
            )
        ]
    if pick == 6:
        animal, legs = rng.choice(list(lx.LEGS.items()))
        a = "an" if animal[0] in "aeiou" else "a"
        number = lx.NUMBER_WORDS[legs] if legs else "no"
        part = "arms" if animal == "octopus" else "legs"
        return [
            Turn(
                rng.choice(
                    (
                        f"How many {part} does {a} {animal} have?",
                        f"How many {part} has {a} {animal}?",
                    )
                ),
                f"{upper_first(a)} {animal} has {number} {part}.",
                upper_first(number) + ".",
            )
        ]
    if pick == 7:
        shape, sides = rng.choice(list(lx.SIDES.items()))
        a = "an" if shape[0] in "aeiou" else "a"
        return [
            Turn(
                f"How many {rng.choice(('sides', 'corners'))} does {a} {shape} have?",
                f"{upper_first(a)} {shape} has {lx.NUMBER_WORDS[sides]} sides.",
                upper_first(lx.NUMBER_WORDS[sides]) + ".",
            )
        ]
    i, j = sorted(rng.sample(range(len(lx.SIZES)), 2))
    pair = [lx.SIZES[i], lx.SIZES[j]]
    rng.shuffle(pair)
    if rng.random() < 0.6:
        return [
            Turn(
                f"Which is bigger, {pair[0]} or {pair[1]}?",
                f"{upper_first(lx.SIZES[j])} is bigger than {lx.SIZES[i]}.",
                upper_first(lx.SIZES[j]) + ".",
            )
        ]
    return [
        Turn(
            f"Which is smaller, {pair[0]} or {pair[1]}?",
            f"{upper_first(lx.SIZES[i])} is smaller than {lx.SIZES[j]}.",
            upper_first(lx.SIZES[i]) + ".",
        )
    ]


_KINDS: Final = (
    "fruits",
    "vegetables",
    "birds",
    "fish",
    "trees",
    "flowers",
    "insects",
    "instruments",
    "metals",
    "tools",
    "drinks",
)


def is_it_turns(chat: Chat) -> list[Turn]:
    rng = chat.rng
    pick = rng.randrange(4)
    if pick == 0:
        country, capital = rng.choice(list(lx.CAPITALS.items()))
        if rng.random() < 0.5:
            return [
                Turn(
                    f"Is {capital} the capital of {country}?",
                    f"Yes, {capital} is the capital of {country}.",
                    "Yes.",
                )
            ]
        other = rng.choice(list(lx.CAPITALS.values()))
        if other == capital:
            return []
        return [
            Turn(
                f"Is {other} the capital of {country}?",
                f"No, the capital of {country} is {capital.rstrip('.')}.",
                "No.",
            )
        ]
    if pick == 1:
        thing, colour = rng.choice(list(lx.THING_COLOURS.items()))
        asked = colour if rng.random() < 0.5 else rng.choice(lx.CATEGORIES["colours"])
        yes = "Yes" if asked == colour else "No"
        return [Turn(f"Is {thing} {asked}?", f"{yes}, {thing} is {colour}.", f"{yes}.")]
    kind = rng.choice(_KINDS)
    word = rng.choice(lx.CATEGORIES[kind])
    phrase = word if kind in ("metals", "drinks") or word == "pliers" else with_article(word)
    verb = "are" if word == "pliers" else "is"
    if pick == 2:
        question = rng.choice(
            ("What is {x}?", "What is {x}?", "What kind of thing is {x}?", "Tell me what {x} is.")
        ).format(x=phrase)
        return [
            Turn(
                question,
                f"{upper_first(phrase)} {verb} {lx.SINGULARS[kind]}.",
                upper_first(lx.SINGULARS[kind]) + ".",
            )
        ]
    other = kind if rng.random() < 0.5 else rng.choice(_KINDS)
    yes = "Yes" if other == kind else "No"
    return [
        Turn(
            f"{upper_first(verb)} {phrase} {lx.SINGULARS[other]}?",
            f"{yes}, {phrase} {verb} {lx.SINGULARS[kind]}.",
            f"{yes}.",
        )
    ]


def calendar_turns(chat: Chat) -> list[Turn]:
    rng = chat.rng
    pick = rng.randrange(6)
    if pick < 2:
        i = rng.randrange(7)
        if pick:
            return [
                Turn(
                    rng.choice(
                        (
                            f"What day comes after {lx.DAYS[i]}?",
                            f"Which day comes after {lx.DAYS[i]}?",
                            f"Today is {lx.DAYS[i]}. What day is tomorrow?",
                        )
                    ),
                    f"After {lx.DAYS[i]} comes {lx.DAYS[(i + 1) % 7]}.",
                    lx.DAYS[(i + 1) % 7] + ".",
                )
            ]
        return [
            Turn(
                rng.choice(
                    (
                        f"What day comes before {lx.DAYS[i]}?",
                        f"Which day comes before {lx.DAYS[i]}?",
                        f"Today is {lx.DAYS[i]}. What day was yesterday?",
                    )
                ),
                f"Before {lx.DAYS[i]} comes {lx.DAYS[i - 1]}.",
                lx.DAYS[i - 1] + ".",
            )
        ]
    i = rng.randrange(12)
    if pick == 2:
        return [
            Turn(
                rng.choice(
                    (
                        f"What month comes after {lx.MONTHS[i]}?",
                        f"Which month comes after {lx.MONTHS[i]}?",
                        f"Which month follows {lx.MONTHS[i]}?",
                    )
                ),
                f"After {lx.MONTHS[i]} comes {lx.MONTHS[(i + 1) % 12]}.",
                lx.MONTHS[(i + 1) % 12] + ".",
            )
        ]
    if pick == 3:
        return [
            Turn(
                rng.choice(
                    (
                        f"What month comes before {lx.MONTHS[i]}?",
                        f"Which month comes before {lx.MONTHS[i]}?",
                    )
                ),
                f"Before {lx.MONTHS[i]} comes {lx.MONTHS[i - 1]}.",
                lx.MONTHS[i - 1] + ".",
            )
        ]
    if pick == 4:
        return [
            Turn(
                rng.choice(
                    (
                        f"How many days does {lx.MONTHS[i]} have?",
                        f"How many days are in {lx.MONTHS[i]}?",
                        f"How long is {lx.MONTHS[i]}?",
                    )
                ),
                f"{lx.MONTHS[i]} has {lx.MONTH_DAYS[i]} days.",
                f"{lx.MONTH_DAYS[i]}.",
            )
        ]
    return [
        Turn(
            rng.choice(
                (
                    f"What is the {lx.ORDINALS[i]} month of the year?",
                    f"Which is the {lx.ORDINALS[i]} month?",
                    f"What is the {lx.ORDINALS[i]} month?",
                )
            ),
            f"The {lx.ORDINALS[i]} month is {lx.MONTHS[i]}.",
            lx.MONTHS[i] + ".",
        )
    ]
