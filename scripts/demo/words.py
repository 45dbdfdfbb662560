"""The words of the demo model's small world, and the rule that keeps some of them for evaluation.

Knows nothing of dialogues. Invariant: `is_held` is a pure function of the text (SHA-256 of its lower case), so
the split never depends on a seed, on the order of generation or on the Python version. Words that occur in
fixed answers and lists (`ALWAYS_TRAIN`) are never held; some of short lists always are (`ALWAYS_HELD`).
"""

import hashlib
import random
import re


def words(text: str) -> list[str]:
    """The words of `text`."""
    return text.split()


def phrases(text: str) -> list[str]:
    """The parts of `text` between semicolons, without line breaks."""
    return [part.strip() for part in text.replace("\n", " ").split(";")]


NAMES = words("""Ada Adam Aisha Alan Alba Alice Amir Amy Ana Andre Anna Anton Arthur Astrid Ava Bea Ben Bella
Bilal Bob Boris Bruno Carla Carlos Cem Chloe Clara Cora Dan Dana David Dina Diego Dora Edgar Eli Elif Ella Emil Emma
Erik Eva Farid Felix Fiona Flora Frank Freya Gina Greta Gus Hana Hannah Hans Hugo Ian Ida Igor Ines Iris Isaac Ivan
Jack Jan Jane Jasper Jin John Jonas Jude Julia Kai Karim Kate Kim Lara Lars Laura Lea Lena Leo Lily Lin Lisa Liam
Lola Louis Lucas Lucy Luna Maja Mara Marco Maria Mark Marta Mary Max Mei Mia Mila Milo Mina Mona Nadia Naomi Nico
Nina Noah Nora Olaf Olga Oliver Omar Otto Pablo Paula Pedro Peter Petra Quinn Rana Raul Rita Rob Rosa Ruth Ryan Sam
Sara Selma Sofia Stella Sven Tara Theo Tim Tina Tom Uma Vera Victor Viola Wanda Will Yara Yuki Zara Zoe""")

CITIES = words("""Paris London Berlin Rome Madrid Lisbon Vienna Prague Warsaw Athens Dublin Oslo Stockholm Helsinki
Copenhagen Amsterdam Brussels Zurich Geneva Milan Naples Turin Venice Florence Barcelona Seville Valencia Porto
Hamburg Munich Cologne Leipzig Dresden Bremen Lyon Nice Lille Tokyo Kyoto Osaka Seoul Beijing Shanghai Delhi Mumbai
Bangkok Hanoi Jakarta Manila Sydney Perth Auckland Cairo Lagos Nairobi Accra Tunis Dakar Boston Chicago Denver
Dallas Austin Seattle Portland Miami Toronto Montreal Vancouver Lima Quito Bogota Santiago Havana Istanbul Ankara
Tehran Baghdad Doha Dubai Riga Tallinn Vilnius Sofia Zagreb Belgrade Budapest Kyiv Krakow Bergen Malmo Turku Tampere
Basel Bern Graz Linz Salzburg Bilbao Granada Malaga Palermo Bologna Genoa Leeds York Bristol Oxford Cambridge
Glasgow Edinburgh Cork Galway Reykjavik Oakland Houston Phoenix Atlanta Detroit""")

COLOURS = words("""red blue green yellow orange purple pink brown black white grey gold silver violet turquoise
beige crimson indigo magenta maroon navy olive teal lavender coral mint amber scarlet ivory peach lilac bronze""")

PET_KINDS = words("""cat dog rabbit hamster parrot horse goldfish turtle mouse snake lizard canary pony goat duck
hedgehog ferret frog pig sheep chicken donkey tortoise rat budgie cow crab spider""")

PET_NAMES = words("""Milo Luna Rex Bella Coco Rocky Daisy Buddy Nala Simba Oscar Felix Lucky Pepper Ginger Shadow
Fluffy Spot Snowy Biscuit Cookie Peanut Pickle Waffle Mochi Biscotti Noodle Ziggy Tango Pixel Comet Rusty Teddy
Misty""")

JOBS = words("""baker teacher nurse doctor farmer pilot painter carpenter gardener driver lawyer librarian plumber
programmer designer writer singer dancer sailor cook tailor barber chemist mechanic engineer journalist dentist
waiter judge photographer translator builder""")

FOODS = words("""pizza pasta soup rice bread cheese salad sushi curry noodles pancakes potatoes tacos dumplings
lasagna waffles falafel hummus paella risotto ramen porridge omelette chocolate icecream couscous goulash""")

HOBBIES = words("""swimming reading running chess painting cooking hiking dancing singing gardening fishing skiing
sailing climbing knitting cycling photography pottery football tennis surfing yoga baking sewing skating archery""")

RELATIONS = words("""sister brother mother father friend boss teacher neighbour son daughter wife husband cousin
aunt uncle grandmother grandfather colleague coach partner dad mum girlfriend boyfriend niece nephew mom grandma
grandpa""")

THINGS = phrases("""password;code word;secret word;door code;room number;wifi password;meeting place;
name of my boat;name of my band;order number;train number;licence plate;locker number;project name;team name;
gate number;seat number;table number;ticket number;name of my street;name of the shop;magic word;name of my school;
name of my car;customer number;shelf number""")

PLAIN_WORDS = words("""apple river table window garden stone cloud candle bridge forest mountain ocean pencil paper
lamp mirror basket bottle button blanket chair clock door feather flower guitar hammer island jacket kettle ladder
lemon marble needle orchid pillow quilt ribbon saddle teapot umbrella valley wagon yarn zebra anchor barrel cactus
dragon engine falcon glacier harbor igloo jungle kite lantern meadow nectar onion pebble rocket sunset tunnel velvet
whistle banana cherry copper dolphin eagle fountain goblet honey ink jewel""")

SYLLABLE_STARTS = words("b br c ch d dr f fl g gr h j k kl l m n p pl qu r s sh sk st t th tr v w x y z")
SYLLABLE_MIDDLES = words("a e i o u ai ee ia oo ou")
SYLLABLE_ENDS = ["", "", "", "l", "m", "n", "nd", "r", "rk", "s", "sk", "t", "th", "x", "z", "v", "p"]

LISTS: dict[str, list[str]] = {
    "colours": words("red blue green yellow orange purple pink brown black white"),
    "animals": words("cat dog horse cow sheep lion tiger bear wolf fox"),
    "cities": words("Paris London Berlin Rome Madrid Vienna Oslo Tokyo Cairo Lima"),
    "fruits": words("apple banana cherry grape lemon mango orange peach pear plum"),
    "vegetables": words("carrot potato tomato onion pea bean leek cabbage spinach radish"),
    "countries": words("France Spain Italy Germany Japan Brazil Canada Egypt India Norway"),
    "planets": words("Mercury Venus Earth Mars Jupiter Saturn Uranus Neptune"),
    "days": words("Monday Tuesday Wednesday Thursday Friday Saturday Sunday"),
    "months": words("January February March April May June July August September October November December"),
    "seasons": words("spring summer autumn winter"),
    "letters": words("a b c d e f g h i j"),
    "drinks": words("water tea coffee milk juice cocoa lemonade"),
    "sports": words("football tennis hockey golf rugby boxing cycling rowing"),
    "instruments": words("piano guitar violin drum flute trumpet harp cello"),
    "birds": words("robin eagle owl crow swan duck parrot penguin"),
}
ORDERED_LISTS = ("planets", "days", "months", "seasons", "letters")

NUMBER_WORDS = words("""zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen
fifteen sixteen seventeen eighteen nineteen twenty""")

ALWAYS_TRAIN = {word.lower() for listed in LISTS.values() for word in listed} | {
    "100", "2026", "8080", "127", "256", "429", "404", "demo", "max", "sam", "horse", "cook", "sailor", "swimming",
      "rocket",
    "chocolate", "football", "tennis", "cycling", "noodles", "teacher", "doctor", "lawyer", "programmer", "boss",
    "bread", "pizza", "soup", "cheese", "chess", "ada", "piano", "guitar", "paper", "table", "bridge", "candle",
    "engine", "honey", "ocean", "mountain", "river", "flower", "garden", "clock", "chair", "reading", "driver",
    "sunset", "dragon", "running", "cooking", "writer", "black", "white", "gold", "silver", "orange", "pencil",
    "nurse", "baker", "farmer", "engineer", "rice", "salad", "pasta", "dancing", "singing", "gardening",
}  # fmt: skip

# The questions and answers of this world are written in these, so the tokenizer has pieces for them. A model copies
# a piece into a new word only if it has seen that piece in values too.
FRAME_WORDS = words("""able about again ahoy always amount answer appetit argument assistant back before begin
best book bullet button cache calculator check city clean clear close code coffee color company concise
conversation count custom decode describe device does done down each east eating empty every event exact explain
father favour fetch file food free friend from function give good have hear hello help here high hobby hold
honour hope house integer interest item job keep key know label language layer lease level light like live load
lose love lucky made make many mean member message milk mind minute model more most move music must name need
never new next night nine note number object office only open order paint parameter part people photo place play
please point port price private prompt proper query question refill remember repeat report request require
restaurant result ring robot rule say script search second secret self send sentence serve shop short show size
slot small some song sorry speed start state status store string sure system take talk target tell test text
thank that thing think three ticket time tiny title today token tool train turn type under use value very wall
want water way weather what when where which white who will without word work would write year yellow you your""")

COMMON_WORDS = words("""the a an and or but if then so because of to in on at by for with from up down out over under
again very not no yes it he she we they you I me him her us them my your his our their this that these those is are
was
were be been am do does did has have had can could will would should may might must one two three four five big small
old new good bad red blue green long short fast slow cat dog man woman child bird fish tree house car boat book day
night morning sun moon rain snow wind water fire food bread milk tea coffee work play go come run walk sit sat stand
eat ate drink sleep see saw hear heard say said tell told make made give gave take took get got like love want need
think know find found buy sell open close begin end where when why how what who which here there now later today
tomorrow yesterday always never often only also just about after before between into through price order people
friend mat hat box door key time place world thing word name song story game school street city country""")

BLENDED = [
    word.lower()
    for listed in (PLAIN_WORDS, NAMES, CITIES, JOBS, FOODS, HOBBIES, FRAME_WORDS, FRAME_WORDS)
    for word in listed
    if word.isalpha()
]

ALWAYS_HELD = words(
    """teal lilac crimson painter waiter ramen falafel archery knitting lantern pebble orchid falcon"""
)


def is_held(text: str, share: float = 0.1) -> bool:
    """True if `text` (case does not matter) is kept for evaluation;`share` of all texts are."""
    if text.lower() in ALWAYS_TRAIN:
        return False
    if text.lower() in ALWAYS_HELD:
        return True
    digest = hashlib.sha256(text.lower().encode()).digest()
    return int.from_bytes(digest[:4], "big") < share * 2**32


def held_words() -> set[str]:
    """Every listed value, in lower case, that only evaluation may use."""
    lists = [NAMES, CITIES, COLOURS, PET_KINDS, PET_NAMES, JOBS, FOODS, HOBBIES, PLAIN_WORDS]
    return {word.lower() for listed in lists for word in listed if is_held(word)}


def invented_word(rng: random.Random) -> str:
    """A capitalised word of two or three random syllables, such as `Plavork`."""
    count = rng.choice((1, 2, 2, 2, 3))
    parts = [
        rng.choice(SYLLABLE_STARTS) + rng.choice(SYLLABLE_MIDDLES) + rng.choice(SYLLABLE_ENDS) for _ in range(count)
    ]
    word = "".join(parts)
    if rng.random() < 0.04:
        word = word.replace(*rng.choice((("a", "ä"), ("o", "ö"), ("u", "ü"), ("e", "é"), ("a", "á"), ("i", "í"))), 1)
    return word.capitalize() if len(word) > 2 else invented_word(rng)


def blended_word(rng: random.Random) -> str:
    """A listed word or the beginning of one, and the end of another, such as `Lantber`.

    Invented syllables are spelled with few of the tokenizer's pieces; these are spelled like real words.
    """
    first, last = rng.choice(BLENDED), rng.choice(BLENDED)
    start = first if rng.random() < 0.4 else first[: rng.randrange(2, 6)]
    return (start + last[-rng.randrange(1, 6) :]).capitalize()


class Values:
    """Draws values of one split. Borrows `rng`;`held=True` yields values that training never shows."""

    def __init__(self, rng: random.Random, held: bool) -> None:
        self.rng = rng
        self.held = held

    def allowed(self, text: str) -> bool:
        """Whether `text` belongs to this split as a whole and in each of its words (single digits aside)."""
        parts = [word for word in re.findall(r"\w+", text) if len(word) > 2]
        if self.held:
            return is_held(text) and all(map(is_held, parts))
        return not is_held(text) and not any(map(is_held, parts))

    def pick(self, choices: list[str]) -> str:
        """One allowed word of the list."""
        return self.rng.choice([word for word in choices if self.allowed(word)])

    def pick_or_invent(self, choices: list[str]) -> str:
        """One allowed word of the list; in training sometimes one that no list has, in lower case.

        From the few words of a list alone, a model learns the words and not to copy what it is told.
        """
        if not self.held and self.rng.random() < 0.3:
            return self.invented().lower()
        return self.pick(choices)

    def invented(self) -> str:
        """An allowed word that no list has."""
        is_blended = not self.held and self.rng.random() < 0.65
        while True:
            word = blended_word(self.rng) if is_blended else invented_word(self.rng)
            if self.allowed(word):
                return word

    def name(self) -> str:
        """A first name, invented half of the time, and seldom one of two letters."""
        if not self.held and self.rng.random() < 0.03:
            return self.rng.choice("BDHJKLMNPRSTVWZ") + self.rng.choice("aeiouyo")
        return self.invented() if self.rng.random() < 0.5 else self.pick(NAMES)

    def city(self) -> str:
        """A city, invented in a third of the cases."""
        return self.invented() if self.rng.random() < 0.35 else self.pick(CITIES)

    def word(self) -> str:
        """A plain or invented word in lower case."""
        return self.invented().lower() if self.rng.random() < (0.5 if self.held else 0.7) else self.pick(PLAIN_WORDS)

    def colour(self) -> str:
        """A colour, sometimes invented."""
        chance = self.rng.random()
        if chance < (0.15 if self.held else 0.3):
            return self.invented().lower()
        return self.pick(COLOURS)

    def number(self) -> str:
        """A number of three or four digits, in training also shorter."""
        while True:
            digits = self.rng.choice((3, 4)) if self.held else self.rng.choice((1, 2, 3, 3, 4, 4))
            text = str(self.rng.randrange(10 ** (digits - 1), 10**digits))
            if self.allowed(text):
                return text

    def pet_name(self) -> str:
        """A name for an animal."""
        return self.invented() if self.rng.random() < 0.5 else self.pick(PET_NAMES)
