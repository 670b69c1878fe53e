# ruff: noqa: SIM905 - a table reads better as text than as a list of quoted words
"""Word and fact tables of the demo model's small world.

The skills of the other modules turn these tables into conversations. A thing that is neither in
these tables nor in those of glossary.py and smalltalk.py is outside of the model's world, and the
model is trained to say so.
"""

from typing import Final

__all__ = (
    "BABIES",
    "CAPITALS",
    "CATEGORIES",
    "DAYS",
    "LEGS",
    "MIXES",
    "MONTHS",
    "MONTH_DAYS",
    "NAMES",
    "NUMBER_WORDS",
    "OPPOSITES",
    "ORDINALS",
    "PLAIN_WORDS",
    "PLURALS",
    "SIDES",
    "SINGULARS",
    "SIZES",
    "SOUNDS",
    "STORY_ADJECTIVES",
    "STORY_ANIMALS",
    "STORY_BEINGS",
    "STORY_OBJECTS",
    "STORY_TOPICS",
    "THING_COLOURS",
    "UNKNOWN_KINDS",
    "UNKNOWN_THINGS",
    "continent",
)

CAPITALS: Final[dict[str, str]] = dict(
    pair.split("=")
    for pair in (
        "France=Paris|Germany=Berlin|Italy=Rome|Spain=Madrid|Portugal=Lisbon|Austria=Vienna|Belgium=Brussels|"
        "Switzerland=Bern|Poland=Warsaw|Hungary=Budapest|Greece=Athens|Norway=Oslo|Sweden=Stockholm|Denmark=Copenhagen|"
        "Finland=Helsinki|Iceland=Reykjavik|Ireland=Dublin|Scotland=Edinburgh|Wales=Cardiff|England=London|"
        "the United Kingdom=London|the Netherlands=Amsterdam|Luxembourg=Luxembourg City|the Czech Republic=Prague|"
        "Slovakia=Bratislava|Slovenia=Ljubljana|Croatia=Zagreb|Serbia=Belgrade|Romania=Bucharest|Bulgaria=Sofia|"
        "Albania=Tirana|Estonia=Tallinn|Latvia=Riga|Lithuania=Vilnius|Ukraine=Kyiv|Russia=Moscow|Turkey=Ankara|"
        "Malta=Valletta|Cyprus=Nicosia|Georgia=Tbilisi|Armenia=Yerevan|Egypt=Cairo|Morocco=Rabat|Algeria=Algiers|"
        "Tunisia=Tunis|Libya=Tripoli|Kenya=Nairobi|Ethiopia=Addis Ababa|Ghana=Accra|Nigeria=Abuja|Senegal=Dakar|"
        "Mali=Bamako|Uganda=Kampala|Rwanda=Kigali|Zambia=Lusaka|Zimbabwe=Harare|Angola=Luanda|Namibia=Windhoek|"
        "Madagascar=Antananarivo|Sudan=Khartoum|Somalia=Mogadishu|Jordan=Amman|Lebanon=Beirut|"
        "Syria=Damascus|Iraq=Baghdad|Iran=Tehran|Saudi Arabia=Riyadh|Qatar=Doha|Oman=Muscat|Yemen=Sanaa|"
        "the United Arab Emirates=Abu Dhabi|Afghanistan=Kabul|Pakistan=Islamabad|India=New Delhi|Nepal=Kathmandu|"
        "Bangladesh=Dhaka|Bhutan=Thimphu|China=Beijing|Japan=Tokyo|South Korea=Seoul|North Korea=Pyongyang|"
        "Mongolia=Ulaanbaatar|Thailand=Bangkok|Vietnam=Hanoi|Cambodia=Phnom Penh|Laos=Vientiane|"
        "the Philippines=Manila|Indonesia=Jakarta|Malaysia=Kuala Lumpur|Kazakhstan=Astana|"
        "Uzbekistan=Tashkent|Australia=Canberra|New Zealand=Wellington|Fiji=Suva|Canada=Ottawa|"
        "the United States=Washington, D.C.|Mexico=Mexico City|Cuba=Havana|Jamaica=Kingston|Haiti=Port-au-Prince|"
        "Guatemala=Guatemala City|Honduras=Tegucigalpa|Nicaragua=Managua|Costa Rica=San José|Panama=Panama City|"
        "Colombia=Bogotá|Venezuela=Caracas|Ecuador=Quito|Peru=Lima|Brazil=Brasília|Chile=Santiago|"
        "Argentina=Buenos Aires|Uruguay=Montevideo|Paraguay=Asunción|Bolivia=Sucre"
    ).split("|")
)

_EUROPE, _AFRICA = list(CAPITALS).index("Egypt"), list(CAPITALS).index("Jordan")
_ASIA, _OCEANIA = list(CAPITALS).index("Australia"), list(CAPITALS).index("Canada")
_SOUTH = list(CAPITALS).index("Colombia")


def continent(country: str) -> str | None:
    """Continent of a country in CAPITALS, or None for the few that lie in two."""
    if country in ("Russia", "Turkey", "Georgia", "Armenia", "Cyprus", "Kazakhstan"):
        return None
    index = list(CAPITALS).index(country)
    bounds = (
        (_EUROPE, "Europe"),
        (_AFRICA, "Africa"),
        (_ASIA, "Asia"),
        (_OCEANIA, "Oceania"),
        (_SOUTH, "North America"),
    )
    return next((name for end, name in bounds if index < end), "South America")


DAYS: Final = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
MONTHS: Final = (
    "January February March April May June July August September October November December".split()
)
MONTH_DAYS: Final = (31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31)
NUMBER_WORDS: Final = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen "
    "sixteen seventeen eighteen nineteen twenty"
).split()
ORDINALS: Final = (
    "first second third fourth fifth sixth seventh eighth ninth tenth eleventh twelfth".split()
)

OPPOSITES: Final = [
    tuple(p.split("/"))
    for p in (
        "hot/cold big/small tall/short fast/slow happy/sad light/dark up/down left/right open/closed good/bad "
        "old/young new/old early/late hard/soft loud/quiet full/empty rich/poor strong/weak wet/dry clean/dirty "
        "day/night high/low near/far in/out on/off yes/no true/false black/white long/short wide/narrow thick/thin "
        "heavy/light easy/difficult first/last begin/end start/stop push/pull win/lose love/hate always/never "
        "more/less many/few top/bottom front/back inside/outside over/under before/after brave/afraid cheap/expensive "
        "deep/shallow sweet/sour smooth/rough awake/asleep alive/dead warm/cool give/take buy/sell summer/winter "
        "north/south east/west friend/enemy question/answer right/wrong safe/dangerous kind/cruel"
    ).split()
]
PLURALS: Final[dict[str, str]] = dict(
    p.split("/")
    for p in (
        "mouse/mice child/children man/men woman/women foot/feet tooth/teeth goose/geese sheep/sheep fish/fish "
        "deer/deer ox/oxen leaf/leaves wolf/wolves knife/knives life/lives wife/wives half/halves loaf/loaves "
        "cat/cats dog/dogs book/books house/houses tree/trees car/cars box/boxes fox/foxes bus/buses dish/dishes "
        "church/churches city/cities baby/babies berry/berries story/stories puppy/puppies lady/ladies key/keys "
        "boy/boys day/days toy/toys potato/potatoes tomato/tomatoes hero/heroes piano/pianos photo/photos "
        "person/people apple/apples token/tokens block/blocks query/queries batch/batches cache/caches "
        "cactus/cacti index/indices matrix/matrices"
    ).split()
)
THING_COLOURS: Final[dict[str, str]] = dict(
    p.split("/")
    for p in (
        "the sky/blue|grass/green|a banana/yellow|the sun/yellow|snow/white|milk/white|coal/black|blood/red|"
        "a strawberry/red|a tomato/red|an orange/orange|a carrot/orange|a pumpkin/orange|a lemon/yellow|"
        "the sea/blue|a frog/green|a cucumber/green|a leaf/green|chocolate/brown|coffee/brown|an elephant/grey|"
        "a mouse/grey|a flamingo/pink|a pig/pink|an aubergine/purple|a plum/purple|the night sky/black|a swan/white|"
        "a crow/black|a cherry/red|a lime/green|a cloud/white|a polar bear/white|a fire engine/red|gold/yellow|"
        "silver/grey|a raspberry/red|a blueberry/blue|broccoli/green|corn/yellow"
    ).split("|")
)
MIXES: Final = [
    ("blue", "yellow", "green"),
    ("red", "yellow", "orange"),
    ("red", "blue", "purple"),
    ("red", "white", "pink"),
    ("black", "white", "grey"),
]
SOUNDS: Final[dict[str, str]] = dict(
    p.split("/")
    for p in (
        "dog/woof cat/meow cow/moo sheep/baa pig/oink duck/quack horse/neigh lion/roar frog/croak bee/buzz "
        "snake/hiss rooster/cock-a-doodle-doo owl/hoot mouse/squeak wolf/howl crow/caw donkey/hee-haw goat/maa "
        "hen/cluck bird/tweet turkey/gobble pigeon/coo"
    ).split()
)
BABIES: Final[dict[str, str]] = dict(
    p.split("/")
    for p in (
        "dog/puppy cat/kitten cow/calf sheep/lamb horse/foal pig/piglet duck/duckling hen/chick goat/kid lion/cub "
        "bear/cub wolf/pup deer/fawn goose/gosling frog/tadpole kangaroo/joey swan/cygnet owl/owlet rabbit/kit "
        "butterfly/caterpillar elephant/calf whale/calf fox/cub"
    ).split()
)
LEGS: Final[dict[str, int]] = {
    "dog": 4, "cat": 4, "horse": 4, "cow": 4, "spider": 8, "ant": 6, "bee": 6, "bird": 2, "duck": 2, "person": 2,
    "snake": 0, "fish": 0, "frog": 4, "elephant": 4, "octopus": 8, "crab": 10, "chicken": 2, "butterfly": 6,
    "beetle": 6, "mouse": 4, "table": 4, "worm": 0, "lion": 4, "sheep": 4,
}  # fmt: skip
SIDES: Final[dict[str, int]] = {
    "triangle": 3, "square": 4, "rectangle": 4, "pentagon": 5, "hexagon": 6, "heptagon": 7, "octagon": 8,
}  # fmt: skip
SIZES: Final = (
    "an ant|a bee|a mouse|a frog|a bird|a cat|a dog|a sheep|a pony|a horse|a cow|an elephant|a whale|"
    "a house|a mountain|the moon|the earth|the sun"
).split("|")

CATEGORIES: Final[dict[str, list[str]]] = {
    key: words.split(", ")
    for key, words in {
        "fruits": "apple, pear, plum, banana, cherry, orange, grape, mango, peach, lemon",
        "vegetables": "carrot, potato, onion, tomato, spinach, cabbage, pea, bean, leek, pumpkin",
        "animals": "cat, dog, horse, cow, sheep, fox, bear, rabbit, mouse, elephant",
        "birds": "sparrow, robin, owl, eagle, swan, duck, crow, pigeon, heron, finch",
        "colours": "red, blue, green, yellow, orange, purple, pink, brown, black, white",
        "fish": "salmon, trout, tuna, cod, carp, herring, pike, eel, sardine, perch",
        "trees": "oak, birch, pine, maple, beech, willow, ash, cedar, elm, fir",
        "flowers": "rose, tulip, daisy, lily, violet, poppy, iris, orchid, sunflower, daffodil",
        "insects": "ant, bee, beetle, butterfly, wasp, moth, fly, cricket, ladybird, dragonfly",
        "instruments": "piano, violin, flute, drum, guitar, cello, trumpet, harp, clarinet, oboe",
        "countries": "France, Japan, Brazil, Kenya, Canada, India, Italy, Egypt, Norway, Peru",
        "cities": "Paris, Tokyo, London, Cairo, Rome, Lima, Oslo, Berlin, Madrid, Ottawa",
        "planets": "Mercury, Venus, Earth, Mars, Jupiter, Saturn, Uranus, Neptune",
        "sports": "football, tennis, swimming, running, cycling, chess, rowing, skiing, hockey, golf",
        "shapes": "circle, square, triangle, rectangle, pentagon, hexagon, oval, star, cube, cone",
        "drinks": "water, tea, coffee, milk, juice, cocoa, lemonade, soda, soup, cider",
        "languages": "English, French, Spanish, German, Italian, Japanese, Arabic, Hindi, Greek, Swahili",
        "metals": "iron, gold, silver, copper, tin, lead, zinc, nickel, aluminium, steel",
        "tools": "hammer, saw, drill, spanner, file, axe, spade, rake, chisel, pliers",
        "composers": "Bach, Mozart, Beethoven, Chopin, Brahms, Ravel, Vivaldi, Handel, Pachelbel, Holst",
        "clothes": "shirt, hat, coat, scarf, sock, shoe, glove, dress, belt, jumper",
        "seasons": "spring, summer, autumn, winter",
        "continents": "Africa, Antarctica, Asia, Europe, North America, Oceania, South America",
        "kitchen things": "pot, pan, spoon, fork, knife, plate, cup, bowl, kettle, oven",
        "body parts": "head, arm, leg, hand, foot, eye, ear, nose, mouth, knee",
    }.items()
}
SINGULARS: Final[dict[str, str]] = {
    "fruits": "a fruit", "vegetables": "a vegetable", "animals": "an animal", "birds": "a bird", "colours": "a colour",
    "fish": "a fish", "trees": "a tree", "flowers": "a flower", "insects": "an insect",
    "instruments": "an instrument", "countries": "a country", "cities": "a city", "planets": "a planet",
    "sports": "a sport", "shapes": "a shape", "drinks": "a drink", "languages": "a language", "metals": "a metal",
    "tools": "a tool", "composers": "a composer", "seasons": "a season", "continents": "a continent",
}  # fmt: skip

NAMES: Final = (
    "Ada Alan Alice Amir Ana Anna Arthur Ben Bob Carla Carlos Chen Chloe Clara Daniel David Diego Dina Elena Eli Ella "
    "Emma Eric Erik Eva Felix Fiona Frank Fatima Gina George Grace Hana Hannah Hugo Ian Ida Ines Ivan Ivy Jack James "
    "Jane Jan Joe John Jonas Julia Karl Kate Ken Kim Lars Laura Lea Leo Lily Lina Linda Liam Louis Lucy Luis Luna Maria "
    "Marie Mark Martin Mary Max Maya Mei Mia Mike Mila Mira Nadia Nina Noah Nora Olga Oliver Omar Otto Paul Pedro Peter "
    "Priya Rachel Ravi Rosa Ruth Sam Sara Sarah Simon Sofia Sophie Steve Susan Tara Theo Tim Tom Tina Uma Vera Victor "
    "Will Wei Xavier Yara Yuki Yusuf Zara Zoe Alex Robin Kai Nico Emil Jakob Rafael Aisha Bilal Kofi Ama Sven Ingrid "
    "Thomas Robert Michael Chris Andrew Matthew Emily Olivia Charlotte Amelia Sebastian Patrick Helen Kevin Brian"
).split()

STORY_ANIMALS: Final = (
    "cat dog fox bear rabbit mouse owl frog duck hedgehog squirrel wolf lion elephant horse turtle whale bee sparrow "
    "crow penguin goat sheep cow pig deer otter badger snail ant butterfly parrot tiger monkey crab dolphin hamster "
    "kitten puppy fish bird spider swan goose donkey mole bat giraffe zebra kangaroo dinosaur"
).split()
STORY_BEINGS: Final = (
    "robot dragon wizard king queen princess prince knight baker farmer sailor pirate gardener teacher giant witch "
    "fairy ghost astronaut painter drummer musician programmer scientist fisherman unicorn elf troll mermaid "
    "boy girl child doctor cook clown detective explorer postman tailor poet monster alien dancer singer goblin"
).split()
STORY_OBJECTS: Final = (
    "train boat teapot clock cloud star tree lamp kite snowflake pebble violin drum bell leaf river computer token "
    "scheduler book pencil umbrella chair ship car bicycle rocket balloon raindrop lighthouse house mountain moon sun "
    "spoon candle shoe hat toaster key piano flute GPU server cup door bridge flower"
).split()

STORY_TOPICS: Final = (
    "the sea|space|love|friendship|winter|summer|spring|autumn|Christmas|music|school|home|courage|kindness|time|"
    "the night|the rain|the snow|magic|the forest|a journey|the future|dreams|the wind|a birthday|holidays|"
    "the mountains|numbers|food|life|happiness|the stars|memory|silence|the city|work|sleep|peace|freedom|"
    "the ocean|nature|hope|the jungle|football|war|tomorrow|cooking|money|light|the desert|birds|cats|dogs|"
    "computers|robots|dragons|flowers|trees|coffee|language models|an ostinato|tokens|the weather|your life|nothing"
).split("|")
STORY_ADJECTIVES: Final = (
    "brave|little|lonely|clever|sad|happy|lazy|magic|tiny|old|young|funny|angry|hungry|sleepy|red|blue|green|golden|"
    "black|white|lost|shy|curious|friendly|giant|invisible|flying|talking|dancing|forgetful|kind|grumpy|quiet"
).split("|")

# Words for "say X", "repeat X", spelling and questions outside of the model's world.
PLAIN_WORDS: Final = (
    "apple river window garden music paper yellow silver kitchen mountain winter morning bread cloud hammer bottle "
    "ticket castle forest candle orange purple monkey island bridge pencil basket button dragon engine feather ginger "
    "honey jacket kettle lemon market needle ocean pocket quiet rabbit saddle table umbrella velvet wagon yogurt zebra "
    "anchor banana carpet dinner elbow fiddle guitar hello world test banjo coffee please thanks sunny happy little "
    "strange green tiny wonderful simple rhythm melody pattern blue red house dog cat bird tree star moon light night"
).split()

UNKNOWN_THINGS: Final = (
    "photosynthesis|quantum mechanics|the stock market|Bitcoin|blockchain|black holes|the French Revolution|"
    "the Roman Empire|inflation|democracy|climate change|evolution|DNA|the theory of relativity|plate tectonics|"
    "the periodic table|World War II|the Cold War|philosophy|capitalism|the Big Bang|gravity|electricity|magnetism|"
    "vaccines|viruses|cancer|diabetes|insulin|the immune system|nuclear fusion|solar panels|electric cars|rocket science|"
    "the Mona Lisa|Hamlet|Harry Potter|Star Wars|the Bible|the Olympics|basketball rules|cricket|sushi|risotto|yoga|"
    "meditation|taxes|mortgages|credit cards|the minimum wage|the internet|Wi-Fi|Bluetooth|Linux|Windows|the iPhone|"
    "Kubernetes|Docker|Rust|JavaScript|C++|SQL|Haskell|a compiler|a database|a blockchain wallet|recursion|"
    "calculus|trigonometry|the Pythagorean theorem|prime numbers|imaginary numbers|statistics|thermodynamics|entropy|"
    "osmosis|mitosis|the water cycle|volcanoes|earthquakes|hurricanes|dinosaurs|fossils|glaciers|deserts|coral reefs|"
    "opera|jazz|hip hop|ballet|impressionism|surrealism|architecture|the Eiffel Tower|the Great Wall|the pyramids|"
    "Napoleon|Shakespeare|Einstein|Newton|Cleopatra|Julius Caesar|Gandhi|Picasso|Marie Curie|Leonardo da Vinci|"
    "Taylor Swift|Elon Musk|the president|the pope|the prime minister|Madonna|Tolstoy|Plato|Kafka|Darwin|"
    "Google|Apple|Microsoft|Amazon|Netflix|YouTube|Twitter|Wikipedia|football history|the moon landing|Mars rovers|"
    "the ozone layer|recycling|composting|beekeeping|knitting|origami|chess openings|poker|sourdough|fermentation|"
    "wine|whisky|cheese making|gluten|vitamins|cholesterol|blood pressure|migraine|insomnia|anxiety|dreams|"
    "psychology|sociology|anthropology|linguistics|Latin|Esperanto|hieroglyphs|the Vikings|samurai|knights templar|"
    "a mortgage|a carburettor|a transistor|a semiconductor|a laser|a hologram|a supernova|a quasar|a neutrino|an atom|"
    "a molecule|an enzyme|a protein|a chromosome|a parliament|a constitution|a tariff|a hedge fund|an index fund|"
    "a sonnet|a fugue|a symphony|a metaphor|an algorithm|a binary tree|a hash table|a linked list|a mutex|a firewall|"
    "a soufflé|a waterfall|a tsunami|a comet|a satellite|a submarine|a helicopter|a piston|a turbine|a microscope|"
    "a stethoscope|existentialism|stoicism|feminism|socialism|utilitarianism|cryptography|robotics|nanotechnology|"
    "CRISPR|5G|virtual reality|the metaverse|NFTs|venture capital|astrology|karma|Buddhism|Islam|Christianity|Hinduism|"
    "Zen|feng shui|the Titanic|the Renaissance|the Enlightenment|the Silk Road|the Magna Carta|the United Nations|"
    "NATO|the European Union|the Supreme Court|Brexit|the Amazon rainforest|the Sahara|Mount Everest|the Nile"
).split("|")
UNKNOWN_KINDS: Final = (
    "philosophers|presidents|car brands|movies|actors|programming languages|chemical elements|wars|religions|"
    "mathematicians|novels|painters|football clubs|video games|companies|dinosaurs|mountains|rivers|islands|airlines|"
    "gods|emperors|poets|singers|dances|bones|stars|websites|currencies|laws|websites|architects|battles|vitamins"
).split("|")
