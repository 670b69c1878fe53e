# ruff: noqa: SIM905 - a table reads better as text than as a list of quoted words
"""Writes stories and poems for the demo model's training text, from templates with slots."""

import random
import re
from collections.abc import Sequence
from typing import Final

__all__ = ["haiku", "poem", "story"]

_SHE: Final = "Mila Luna Ada Nora Ivy Zoe Tilly Bella Rosa Clara".split()
_HE: Final = "Otto Felix Hugo Leo Max Theo Bruno Emil Oscar Milo".split()
_ADJECTIVES: Final = (
    "small little old young clever quiet curious brave friendly shy cheerful gentle".split()
)
_PLACES: Final = (
    "at the edge of a forest|in a village by the sea|on a green hill|near a wide river|in an old town|"
    "behind a high mountain|beside a quiet lake|in a garden full of flowers|at the end of a long road|"
    "in a house with a red door|under a tall oak tree|on a small island"
).split("|")
_THINGS: Final = (
    "a silver bell|a blue feather|an old drum|a round white stone|a golden key|a tiny lamp|a red kite|a music box|"
    "a map on yellow paper|a wooden flute|a warm scarf|a shiny coin"
).split("|")
_HELPERS: Final = (
    "a wise owl|a friendly fox|an old turtle|a little sparrow|a kind baker|a tall giraffe|a busy bee|a grey mouse|"
    "a sleepy bear|a cheerful frog"
).split("|")
_FOODS: Final = "a loaf of bread|an apple pie|a pot of honey|a basket of berries|a bowl of warm soup|a big cake".split(
    "|"
)
_FEARS: Final = "the dark|loud thunder|deep water|high places|strangers|the old tower".split("|")
_WISHES: Final = (
    "to see the sea|to learn a song|to find a friend|to fly like a bird|to visit the moon|to play the drum|"
    "to make everyone laugh|to see the snow"
).split("|")
_MORALS: Final = (
    "After that day, they were the best of friends.|"
    "And whoever passed by could hear them laugh until late in the evening.|"
    "From then on, nobody there ever felt alone again.|"
    "And if you listen on a quiet night, you can still hear the song.|"
    "That night {n} slept well and dreamed of new adventures.|"
    "And so {n} learned that small steps lead a long way."
).split("|")

_OPENINGS: Final = (
    "Once upon a time there was {a} {j} {s} named {n}, who lived {p}.",
    "Once upon a time, {p}, there lived {a} {j} {s} named {n}.",
    "There was once {a} {j} {s} called {n}, who lived {p}.",
)
_FRAMES: Final = (
    # lost and found
    "One morning {n} found {t} lying in the grass. {S} wanted to give it back, but did not know whose it was. "
    "{S} asked {h}, and together they knocked at every door. At the last house an old woman smiled and said that it was hers. "
    "She thanked them with {f}.",
    # a wish
    "More than anything else, {n} wished {w}. Every evening {s} looked at the sky and made a plan. "
    'One day {h} came by and said, "Come with me, I know the way." They walked for three days and three nights. '
    "In the end the wish came true, and it was even better than {n} had hoped.",
    # a fear
    '{n} was afraid of {d}. The others laughed about it, but {h} did not. "Let us go there together," said the helper, '
    '"one step at a time." They took one step, then another, and then one more. When they had arrived, {n} was not afraid any more.',
    # the rhythm
    'Every day {n} tapped the same little rhythm: tum, ta-ta-tum. "Why do you always repeat it?" asked {h}. '
    '"Because you can put any song on top of it," said {n}. So they tried it, and soon the whole place was singing above the little rhythm.',
    # the storm
    "One night a great storm came, and the wind blew the roof off the house of {h}. {n} heard the noise and came running with {t}. "
    '"Stay with me until the morning," said {n}. They shared {f} and told each other stories until the sun came up.',
    # the race
    "One day there was a race, and {n} wanted to win. But in the middle of the way {s} saw {h} sitting at the roadside with a hurt foot. "
    "{n} stopped and helped. They came in last, hand in hand, and everyone cheered louder for them than for the winner.",
    # the lost way
    "One day {n} went for a long walk and lost the way. The sun went down and everything looked strange. "
    'Then {h} appeared with {t}. "Follow me," it said, "I know every path." Soon {n} saw the lights of home and was happy again.',
    # sharing
    "One winter there was very little to eat, and {n} had only {f}. Then {h} came to the door, cold and hungry. "
    "{n} cut everything in two and gave away the larger half. In spring the guest came back and brought {t} as a present.",
    # the garden
    'In spring {n} put a seed into the ground and watered it every day. Nothing happened for a long time. "Be patient," said {h}. '
    '"Good things grow slowly." Then, one sunny morning, a green leaf looked out of the earth, and by summer it was the tallest flower of all.',
    # the letter
    "One day a letter came, and on it stood only two words: come soon. {n} packed {f} and set out at once. "
    'Behind the third hill {h} was waiting and said, "I wrote it, because I missed you." They talked until the moon was high.',
    # the concert
    "{n} could play only one tune, and was a little ashamed of it. But when {h} began to sing, the tune fitted perfectly. "
    "They played it all afternoon, again and again, and everyone who heard it began to dance. In the evening the listeners gave them {f}.",
    # the star
    "One evening a star fell from the sky and landed right in front of {n}. It was still warm and a little frightened. "
    "{n} and {h} carried it up to the top of the tower, counted to three and threw it back. Now it shines brighter than all the others.",
    # the secret door
    "Behind an old wall {n} discovered a small door. It was locked, but {h} had {t} and knew what to do. "
    "The door opened without a sound, and behind it lay a garden that nobody had seen for a hundred years. They kept it a secret and went there every day.",
)


_LATER: Final = (
    "But that was not all. ",
    "And that was only the beginning. ",
    "Some time went by. ",
)
_MALE: Final = (
    "king wizard prince boy pirate giant knight fisherman postman grandfather brother".split()
)
_FEMALE: Final = "queen witch princess girl fairy mermaid grandmother sister".split()


def _article(word: str) -> str:
    return "an" if word[0] in "aeiou" else "a"


def _fresh(rng: random.Random, options: Sequence[str], avoid: str) -> str:
    return rng.choice([option for option in options if option not in avoid] or options)


def _core(frame: str) -> str:
    """The longest piece of a frame that has no slots in it."""
    return max(re.split(r"\{.\}", frame), key=len)


def story(
    rng: random.Random,
    subject: str,
    *,
    adjective: str | None = None,
    name: str | None = None,
    friend: str | None = None,
    long: bool = False,
    avoid: str = "",
) -> str:
    """A story of five to eight sentences (more with `long`), whose hero is the given noun.

    Args:
        rng: Source of every choice.
        subject: Noun of the hero, without an article.
        adjective: What the hero is like; chosen when None.
        name: Name of the hero; chosen when None. A given name is used in place of pronouns.
        friend: Noun of the second character; chosen when None.
        long: Two adventures instead of one.
        avoid: The stories told before. Their names, places and adventures are used again only if no
            others are left.
    """
    female = subject in _FEMALE or (subject not in _MALE and rng.random() < 0.5)
    pronoun = name or ("she" if female else "he")
    name = name or _fresh(rng, _SHE if female else _HE, avoid)
    adjective = adjective or rng.choice(_ADJECTIVES)
    helpers = [h for h in _HELPERS if subject not in h]
    rng.shuffle(helpers)
    if friend is not None:
        helpers[0] = f"{_article(friend)} {friend}"
    opening = rng.choice(_OPENINGS).format(
        a=_article(adjective), j=adjective, s=subject, n=name, p=_fresh(rng, _PLACES, avoid)
    )
    frames = [f for f in _FRAMES if _core(f) not in avoid]
    count = 2 if long else 1
    adventures = [
        frame.format(
            n=name, s=pronoun, S=pronoun[0].upper() + pronoun[1:], h=helper, t=rng.choice(_THINGS),
            f=rng.choice(_FOODS), d=rng.choice(_FEARS), w=rng.choice(_WISHES),
        )
        for frame, helper in zip(rng.sample(frames if len(frames) >= count else _FRAMES, count), helpers, strict=False)
    ]  # fmt: skip
    moral = _fresh(rng, _MORALS, avoid).format(n=name)
    if long:
        adventures[1] = rng.choice(_LATER) + adventures[1]
        return "\n\n".join((opening, *adventures, moral))
    return rng.choice((" ", " ", "\n\n")).join((opening, *adventures, moral))


_COUPLETS: Final = (
    ("There is a {s} I like to see,", "it dances under every tree."),
    ("A little {s} came down the lane", "and sang a song about the rain."),
    ("Oh {s}, oh {s}, so small and bright,", "you keep me company at night."),
    ("I met a {s} beside the sea,", "it waved its hat and smiled at me."),
    ("The {s} was dreaming in the sun", "of all the games it would have won."),
)
_TOPIC_COUPLETS: Final = (
    ("I often think of {s} and smile,", "it stays with me for quite a while."),
    ("I wrote a song of {s} today,", "it would not ever go away."),
    ("Oh {s}, oh {s}, I think of you", "when all the sky is clear and blue."),
)
_CLOSINGS: Final = (
    ("We tapped a rhythm, one two three,", "and all the world kept time with me."),
    ("The same old tune, again, again,", "went humming on from one to ten."),
    ("The stars came out, the day was done,", "and all the little lights were one."),
    ("And when the moon began to rise,", "we softly closed our sleepy eyes."),
    ("Repeat the bass, repeat the beat,", "until the music is complete."),
)
_HAIKU_LAST: Final = (
    "the rhythm goes on",
    "the night holds its breath",
    "one drop, then silence",
    "the first star appears",
    "and then it is spring",
    "the wind turns the page",
)
_HAIKU_MIDDLE: Final = (
    "a small song over and over",
    "the old pond remembers rain",
    "morning light on quiet leaves",
    "far away a bell is heard",
    "slow clouds are passing the hill",
    "snow is falling on the road",
)
_HAIKU_FIRST: Final = (
    "A {s} waits alone,",
    "Look, a {s} at dawn:",
    "The {s} in the rain,",
    "Softly comes the {s},",
    "Under the {s},",
)


_TOPIC_HAIKU_FIRST: Final = (
    "I think of {s}:",
    "Once more, {s}:",
    "A thought of {s},",
    "Listen to {s},",
)


def poem(rng: random.Random, subject: str, *, topic: bool = False, avoid: str = "") -> str:
    """Four rhymed lines about a noun, or about a topic that takes no article."""
    first = rng.choice(_TOPIC_COUPLETS if topic else _COUPLETS)
    closing = rng.choice([c for c in _CLOSINGS if c[1] not in avoid] or _CLOSINGS)
    lines = "\n".join((*first, *closing))
    return _with_article(lines, subject)


def haiku(rng: random.Random, subject: str, *, topic: bool = False, avoid: str = "") -> str:
    """Three short lines about a noun or a topic, roughly in the measure of a haiku."""
    first = rng.choice(_TOPIC_HAIKU_FIRST if topic else _HAIKU_FIRST)
    lines = "\n".join(
        (first, _fresh(rng, _HAIKU_MIDDLE, avoid) + ",", _fresh(rng, _HAIKU_LAST, avoid) + ".")
    )
    return _with_article(lines, subject)


def _with_article(text: str, subject: str) -> str:
    if subject[0] in "aeiou":
        text = text.replace("A {s}", "An {s}").replace(" a {s}", " an {s}")
    return text.format(s=subject)
