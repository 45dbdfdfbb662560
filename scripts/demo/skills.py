"""What the demo model can do without tools: each skill adds one exchange, question and right answer, to a talk."""

import random

from scripts.demo.facts import FACTS, Fact
from scripts.demo.phrases import (
    BYWORDS,
    CANT_DO,
    FOREIGN,
    GIBBERISH_ANSWER,
    HELLO,
    INTRODUCTION,
    ONLY_ENGLISH,
    REFUSALS,
    SMALL_TALK,
    fill_refusal,
    rough,
)
from scripts.demo.server_facts import FRAMES, TOPICS
from scripts.demo.talk import IDENTITY, Talk
from scripts.demo.words import COMMON_WORDS, LISTS, NUMBER_WORDS, ORDERED_LISTS, phrases

SEVERAL = ("pet", "relation", "thing")
"""Facts of which there may be more than one: by their first field."""


def key_of(name: str, values: tuple[str, ...]) -> str:
    """Under which key of `Talk.facts` a fact stands."""
    return f"{name}/{values[0].lower()}" if name in SEVERAL else name


def fact_of(key: str) -> Fact:
    """The fact that stands under a key of `Talk.facts`."""
    return FACTS[key.split("/")[0]]


def told(talk: Talk, name: str) -> list[str]:
    """The keys under which a fact was told."""
    return [key for key in talk.facts if key.split("/")[0] == name]


def tell(talk: Talk, names: list[str] | None = None) -> list[str]:
    """The user tells one to three things about themselves (`names`, or any); returns their keys."""
    rng = talk.rng
    names = names or _choose_to_tell(talk)
    parts, answers, keys = [], [], []
    for name in names:
        fact = FACTS[name]
        text, surface = rough(rng, rng.choice(fact.tell), fact.draw(talk.values))
        values = tuple(surface.values())
        key = key_of(name, values)
        if key in keys:
            continue
        if rng.random() < (0.4 if key in talk.facts else 0.04):
            text = rng.choice(("Actually, ", "No, ", "Sorry, ", "oh and ", "by the way, ")) + text
        keys.append(key)
        talk.facts[key] = values
        talk.keys.append("value:" + values[-1].lower())
        parts.append(text)
        answers.append(fact.reply(fact.noted, values))
    talk.user(_join(rng, parts))
    talk.reply(" ".join(answers), "They tell me about themselves; I remember it.")
    return keys


def _choose_to_tell(talk: Talk) -> list[str]:
    rng = talk.rng
    correctable = [key for key in talk.facts if key in FACTS]
    if correctable and rng.random() < 0.15:
        return [rng.choice(correctable)]
    if rng.random() < 0.3:
        return [rng.choice(("relation", "relation", "pet", "pet", "thing"))] * rng.choice((1, 2, 2, 2, 3))
    return rng.sample(list(FACTS), rng.choices((1, 2, 3), (70, 24, 6))[0])


def _join(rng: random.Random, parts: list[str]) -> str:
    if rng.random() < 0.5 or not all(part[0].isalpha() for part in parts):
        return " ".join(part if part[-1] in ".!?" else part + "." for part in parts)
    return " and ".join([*(part.rstrip(".!") for part in parts[:-1]), parts[-1]])


def ask(talk: Talk, key: str | None = None) -> None:
    """The user asks for something told before (under `key`, or any), or never told."""
    rng, known = talk.rng, list(talk.facts)
    if key is None and (not known or rng.random() < 0.2):
        ask_unknown(talk)
        return
    if key is None:
        # Which of several is asked for is the harder question, hence the more frequent one.
        several = [key for key in known if "/" in key]
        key = rng.choice(several if len(several) > 1 and rng.random() < 0.5 else known)
        name = key.split("/")[0]
        if name in SEVERAL and rng.random() < 0.3:
            ask_unknown(talk, name)
            return
        if FACTS[name].generic and rng.random() < 0.3:
            ask_all(talk, name)
            return
    fact = fact_of(key)
    has_asked = bool(talk.messages) and talk.messages[-1]["role"] == "assistant"
    frames = fact.again if has_asked and rng.random() < 0.15 else fact.ask
    talk.say(rng.choice(frames), **dict(zip(fact.fields, talk.facts[key], strict=True)))
    talk.reply(fact.reply(fact.answer, talk.facts[key]), "They told me before: " + talk.facts[key][-1] + ".")


def ask_all(talk: Talk, name: str) -> None:
    """The user asks for all facts of one name, such as all pets."""
    fact, keys = FACTS[name], told(talk, name)
    talk.user(rough(talk.rng, talk.rng.choice(fact.generic), {})[0])
    talk.reply(" ".join(fact.reply(fact.answer, talk.facts[key]) for key in keys), "They told me before.")


def ask_unknown(talk: Talk, name: str | None = None) -> None:
    """The user asks for something that was never told (`name` told of another one, or any)."""
    name = name or talk.rng.choice([name for name in FACTS if not told(talk, name)] or ["name"])
    fact = FACTS[name]
    fields = fact.draw(talk.values)
    key = key_of(name, tuple(fields.values()))
    if key in talk.facts:
        ask(talk, key)
        return
    frames = fact.again if talk.messages and talk.rng.random() < 0.1 else fact.ask
    talk.say(talk.rng.choice(frames), **fields)
    talk.reply("You have not told me " + fact.missing.format(**fields) + ".", "They did not tell me.")


def guess(talk: Talk) -> None:
    """The user asks whether something told before is so; half of the time it is."""
    rng = talk.rng
    known = [name for name in talk.facts if fact_of(name).guess]
    if not known:
        ask_unknown(talk)
        return
    name = rng.choice(known)
    fact, (value,) = FACTS[name], talk.facts[name]
    other = fact.draw(talk.values)["v"]
    guessed = value if rng.random() < 0.5 else other.lower() if value.islower() else other
    talk.say(fact.guess, v=guessed)
    answer = fact.reply(fact.answer, (value,))
    is_right = guessed.lower() == value.lower()
    talk.reply(("Yes, y" if is_right else "No, y") + answer[1:], f"They told me: {value}.")


ALL_ASKED = phrases("""What do you know about me?;Tell me what you know about me.;what did i tell you;
Who am I and what do I like?;What have I told you so far?;Summarize what you know about me.;
what do you remember about me;tell me everything about me;what do you remember?;
Do you remember anything about me?""")


NOTHING_TOLD = "You have not told me anything about yourself."


def ask_everything(talk: Talk) -> None:
    """The user asks for all that they have told: up to four things, or none."""
    known = list(talk.facts)
    if len(known) > 4:
        ask(talk)
        return
    talk.say(talk.rng.choice(ALL_ASKED))
    talk.reply(" ".join(_answer(talk, key) for key in known) or NOTHING_TOLD, "They told me before.")


def ask_two(talk: Talk) -> None:
    """The user asks for two things at once, or for everything."""
    rng, known = talk.rng, list(talk.facts)
    if rng.random() < 0.2:
        ask_everything(talk)
        return
    if len(known) < 2:
        ask(talk)
        return
    keys = rng.sample(known, 2)
    talk.user(_both(rng, *(_question(talk, key) for key in keys)))
    talk.reply(" ".join(_answer(talk, key) for key in keys), "They told me before.")


def _question(talk: Talk, key: str) -> str:
    fact = fact_of(key)
    fields = dict(zip(fact.fields, talk.facts[key], strict=True))
    return rough(talk.rng, talk.rng.choice(fact.ask), fields)[0]


def _answer(talk: Talk, key: str) -> str:
    fact = fact_of(key)
    return fact.reply(fact.answer, talk.facts[key])


def _both(rng: random.Random, first: str, second: str) -> str:
    """Two questions as one message."""
    if rng.random() < 0.35:
        return (first if first[-1] in ".?!" else first + "?") + " " + second
    return (
        first.rstrip("?.!")
        + rng.choice((" and ", " and ", ", and ", ", ", " and also "))
        + second[0].lower()
        + second[1:]
    )


def mixed_two(talk: Talk) -> None:
    """Two questions at once of which one at least is about the server."""
    rng = talk.rng
    first, one = _draw_server_question(talk)
    if talk.facts and rng.random() < 0.6:
        key = rng.choice(list(talk.facts))
        second, two = _question(talk, key), _answer(talk, key)
    else:
        second, two = _draw_server_question(talk)
    if one == two:
        talk.user(first)
        talk.reply(one, "A question about the server; I know this.")
        return
    if rng.random() < 0.5:
        first, one, second, two = second, two, first, one
    talk.user(_both(rng, first, second))
    talk.reply(f"{one} {two}", "Two questions; I answer both.")


LAST_SAID = phrases("""What did I just say?;what did i say;What was my last message?;Repeat what I said.;
say that again;What did I just tell you?;what was the last thing i said;repeat my last message;
Can you repeat what I just said?""")


def last_said(talk: Talk) -> None:
    """The user asks what they have just said."""
    texts = [message["content"] for message in talk.messages if message["role"] == "user"]
    if not texts or len(texts[-1]) > 120:
        tell(talk)
        return
    talk.user(rough(talk.rng, talk.rng.choice(LAST_SAID), {})[0])
    talk.reply(f"You said: {texts[-1]}", "I repeat their last message.")


def server_question(talk: Talk) -> None:
    """A question about the server, in a frame and a wording of this split."""
    text, answer = _draw_server_question(talk)
    talk.user(text)
    talk.reply(answer, "A question about the server; I know this.")


def _draw_server_question(talk: Talk) -> tuple[str, str]:
    """A question about the server, and its answer."""
    while True:
        topic = talk.rng.choice(TOPICS)
        frame, subject = talk.rng.choice(FRAMES[topic.kind]), talk.rng.choice(topic.subjects)
        if talk.belongs(f"server:{frame}|{subject}"):
            break
    # With the subject in place, so that it is misspelled and written in capitals as the rest is.
    return _capital(talk.rng, rough(talk.rng, frame.format(subject), {})[0]), topic.answer


def _capital(rng: random.Random, text: str) -> str:
    return text[0].upper() + text[1:] if rng.random() < 0.5 else text


COUNT_UP = phrases("""Count from {a} to {b}.;Please count from {a} to {b}.;Can you count from {a} to {b}?;
count up from {a} to {b};Say the numbers from {a} to {b}.;List the numbers from {a} to {b}.;
numbers from {a} to {b} please""")
COUNT_DOWN = phrases("""Count down from {a} to {b}.;Count backwards from {a} to {b}.;Count from {a} down to {b}.;
count from {a} to {b};Can you count backwards from {a} to {b}?;Count from {a} back to {b}.""")


BEYOND = "I stop at 100."
TOO_FAR = "I can only count up to 100."


COUNT_TO_ONE = phrases("""Count down from {a}.;count backwards from {a};countdown from {a};
Count backwards starting at {a}.;
can you count down from {a}?;do a countdown from {a}""")


def count_beyond(talk: Talk) -> None:
    """Counting further than 100: from near below it up to it, else it is said where counting ends."""
    rng = talk.rng
    while True:
        start = rng.choice((1, 1, rng.randrange(70, 101), rng.randrange(101, 2000)))
        stop = max(start, 100) + rng.choice((rng.randrange(1, 30), rng.randrange(30, 900), 10 ** rng.randrange(3, 7)))
        is_of_split = talk.held or all(map(talk.values.allowed, (str(start), str(stop))))
        if is_of_split and talk.belongs(f"count:{start}-{stop}/1"):
            break
    frames = COUNT_UP
    if start == 1 and rng.random() < 0.7:
        frames = phrases("Count to {b}.;count to {b} please;Can you count to {b}?;count up to {b};count till {b}")
    talk.say(rng.choice(frames), a=str(start), b=str(stop))
    if 70 <= start <= 100:
        counted = ", ".join(map(str, range(start, 101)))
        talk.reply(f"{counted}. {BEYOND}", "I count to 100 and say that I stop.")
    else:
        talk.reply(TOO_FAR, "That is further than I count.")


def count(talk: Talk) -> None:
    """Counting up, down or in steps."""
    rng = talk.rng
    if not talk.held and rng.random() < 0.25:
        count_beyond(talk)
        return
    while True:
        step = rng.choices((1, -1, 2, 5, 10), (55, 30, 6, 4, 5))[0]
        length = rng.choice((2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 15, 20) if rng.random() < 0.97 else (30, 40, 50, 100))
        start = rng.choice((1, 1, rng.randrange(21), rng.randrange(100))) if step > 0 else rng.randrange(1, 101)
        if step == -1 and rng.random() < 0.25:
            start = length
        stop = start + step * (length - 1)
        if 0 <= stop <= 100 and talk.belongs(f"count:{start}-{stop}/{step}"):
            break
    frames = COUNT_UP if step > 0 else COUNT_DOWN
    if step == -1 and stop == 1 and rng.random() < 0.7:
        frames = COUNT_TO_ONE
    if step == 1 and start == 1 and rng.random() < 0.4:
        frames = phrases("Count to {b}.;count to {b} please;Can you count to {b}?;count up to {b}")
    in_words = max(start, stop) <= 20 and rng.random() < 0.15
    first, last = (NUMBER_WORDS[start], NUMBER_WORDS[stop]) if in_words else (str(start), str(stop))
    text, _ = rough(rng, rng.choice(frames), {"a": first, "b": last})
    if step > 1:
        text = text.rstrip(".?!") + rng.choice((" in steps of {}", " by {}s", " in {}s")).format(step)
    talk.user(text)
    numbers = range(start, stop + (1 if step > 0 else -1), step)
    talk.reply(", ".join(map(str, numbers)) + ".", f"I count from {start} to {stop}.")


SUMS = phrases("""What is {a} + {b}?;{a} + {b};{a}+{b};What is {a} plus {b}?;Add {a} and {b}.;What's {a}+{b}?;
{a} plus {b};How much is {a} plus {b}?;What is the sum of {a} and {b}?;{a} + {b} = ?;calculate {a} + {b};
Please add {b} to {a}.;Can you add {a} and {b}?;{a}+{b}=""")
DIFFERENCES = phrases("""What is {a} - {b}?;{a} - {b};{a}-{b};What is {a} minus {b}?;Subtract {b} from {a}.;
{a} minus {b}""")
PRODUCTS = phrases("""What is {a} x {b}?;{a} * {b};{a}*{b};What is {a} times {b}?;Multiply {a} by {b}.;
{a} times {b}""")


def add(talk: Talk) -> None:
    """The sum of two numbers below 50, or (in training) of larger ones, a difference or a product of small ones."""
    rng, choice = talk.rng, talk.rng.random()
    if choice > 0.8 and not talk.held:
        (_add_large if choice > 0.97 else _subtract_or_multiply)(talk)
        return
    while True:
        top = rng.choice((10, 20, 50) if talk.held else (10, 20, 50, 50, 100))
        a, b = rng.randrange(top), rng.randrange(top)
        if a + b <= 100 and talk.belongs(f"add:{min(a, b)}+{max(a, b)}"):
            break
    in_words = a <= 20 and b <= 20 and rng.random() < 0.12
    first, second = (NUMBER_WORDS[a], NUMBER_WORDS[b]) if in_words else (str(a), str(b))
    talk.say(rng.choice(SUMS), a=first, b=second)
    talk.reply(f"{a} + {b} = {a + b}.", f"I add {a} and {b}.")


def _add_large(talk: Talk) -> None:
    a, b = str(talk.rng.randrange(100, 10000)), str(talk.rng.randrange(100, 10000))
    if talk.values.allowed(a) and talk.values.allowed(b):
        talk.say(talk.rng.choice(SUMS), a=a, b=b)
        talk.reply(CANT_DO, "These numbers are too large for me.")


def _subtract_or_multiply(talk: Talk) -> None:
    rng = talk.rng
    if rng.random() < 0.5:
        a = rng.randrange(1, 30)
        b = rng.randrange(a + 1)
        frames, sign, value = DIFFERENCES, "-", a - b
    else:
        a, b = rng.randrange(11), rng.randrange(11)
        frames, sign, value = PRODUCTS, "x", a * b
    talk.say(rng.choice(frames), a=str(a), b=str(b))
    talk.reply(f"{a} {sign} {b} = {value}.", f"I work out {a} {sign} {b}.")


LIST_FRAMES = phrases("""Name {n} {what}.;List {n} {what}.;Give me {n} {what}.;Tell me {n} {what}.;
{n} {what} please;Can you name {n} {what}?;What are {n} {what}?;I need {n} {what}.;write down {n} {what};
show me {n} {what};list me {n} {what};Please give me a list of {n} {what}.""")
SORTED = (" in alphabetical order", " sorted alphabetically", " alphabetically", " from a to z", ", sorted")


WHOLES = {
    "days": "days of the week",
    "months": "months of the year",
    "planets": "planets of the sun",
    "seasons": "seasons",
}


def make_list(talk: Talk) -> None:
    """The first few of a list, as it is, sorted, or as a bullet list."""
    rng = talk.rng
    while True:
        what = rng.choice(list(LISTS))
        n = rng.randrange(2, len(LISTS[what]) + 1)
        if what in ORDERED_LISTS and rng.random() < 0.4:
            n = len(LISTS[what])
        ordering = rng.choice(("", "bullets") if what in ORDERED_LISTS else ("", "", "sorted", "bullets"))
        frame = rng.choice(LIST_FRAMES)
        if talk.belongs(f"list:{what}/{n}/{ordering}/{frame}"):
            break
    items = LISTS[what][:n]
    number = NUMBER_WORDS[n] if rng.random() < 0.5 else str(n)
    if n == 5 and rng.random() < 0.4:
        number = "some"
    if n == len(LISTS[what]) and rng.random() < (0.7 if what in ORDERED_LISTS else 0.4):
        number = rng.choice(("all the", "the", "all"))
    plural = what if what in ("days", "months", "letters") or rng.random() < 0.9 else "names of " + what
    if what in WHOLES and rng.random() < 0.4:
        plural = WHOLES[what]
    text, _ = rough(rng, frame, {"n": number, "what": plural})
    if ordering == "sorted":
        text, items = text.rstrip(".?! ") + rng.choice(SORTED), sorted(items, key=str.lower)
    if ordering == "bullets":
        text = text.rstrip(".?! ") + rng.choice((" as a bullet list", " as bullet points", " with bullets"))
        talk.user(text)
        talk.reply("\n".join("- " + item for item in items), f"I list {n} {what}.")
        return
    talk.user(text)
    talk.reply(", ".join(items) + ".", f"I list {n} {what}.")


REPEATS = phrases("""Repeat after me: {x};repeat: {x};say: {x};please say {x};can you say {x};write: {x};
repeat exactly: {x};Say {x};Please repeat: {x};Repeat this: {x};say this: {x};Echo {x};
repeat {x}""")


def repeat(talk: Talk) -> None:
    """The user wants a few words repeated."""
    rng = talk.rng
    size = rng.choice((1, 2, 3, 4, 6, 8))
    words = [talk.values.word() if rng.random() < 0.8 else talk.values.number() for _ in range(size)]
    text = " ".join(words)
    if not talk.held and rng.random() < 0.5:
        text = sentence(talk)
    surface = talk.say(rng.choice(REPEATS), x=text)
    talk.reply(surface["x"], "I repeat the words.")


def sentence(talk: Talk) -> str:
    """A sentence of plain, common and invented words, with the marks that people set."""
    rng = talk.rng
    words: list[str] = []
    for _ in range(rng.choice((2, 3, 4, 5, 6, 7, 9, 12))):
        draw = rng.random()
        if draw < 0.55:
            words.append(rng.choice(COMMON_WORDS))
        elif draw < 0.85:
            words.append(talk.values.word())
        else:
            words.append(talk.values.name() if draw < 0.93 else talk.values.number())
        if rng.random() < 0.06:
            words[-1] += ","
    text = " ".join(words).rstrip(",")
    text = text[0].upper() + text[1:] if rng.random() < 0.4 else text
    return text + rng.choice(("", "", "", ".", "!", "?"))


def refuse(talk: Talk) -> None:
    """The user wants something that a tiny model can't do; one sentence says so."""
    while True:
        frames, answer = talk.rng.choice(REFUSALS)
        frame = talk.rng.choice(frames)
        text, key = fill_refusal(talk.rng, frame, talk.values)
        if talk.belongs("refuse:" + key):
            break
    talk.user(rough(talk.rng, text, {})[0])
    talk.reply(answer, "I can't do this, and say so in one sentence.")


def gibberish(talk: Talk) -> None:
    """Words without sense, from one to many, or in another language."""
    rng = talk.rng
    if rng.random() < 0.25:
        talk.user(rng.choice(FOREIGN))
        talk.reply(ONLY_ENGLISH, "This is not English.")
        return
    size = rng.choice((1, 1, 2, 3, 4, 6, 9, 15, 30, 60))
    words = [talk.values.invented().lower() if rng.random() < 0.4 else talk.values.word() for _ in range(size)]
    talk.user(rough(rng, " ".join(words) + rng.choice(("", ".", "?", "!")), {})[0])
    talk.reply(GIBBERISH_ANSWER, "I don't understand this.")


def small_talk(talk: Talk) -> None:
    """Greetings, thanks and the like."""
    rng = talk.rng
    while True:
        phrases, answer = rng.choice(SMALL_TALK)
        phrase, lead, tail = rng.choice(phrases), rng.choice(BYWORDS[0]), rng.choice(BYWORDS[1])
        if not talk.held and rng.random() < 0.3:
            lead, tail = "", rng.choice(("", ".", "!"))
            break  # what everybody types first is never kept for evaluation
        if talk.belongs(f"talk:{lead}{phrase}{tail}") and (lead or tail not in ("", ".", "!")):
            break
    text, _ = rough(rng, phrase, {})
    if answer == HELLO and _is_introduced(talk):
        answer = INTRODUCTION
    talk.user(_capital(rng, f"{lead}{text.rstrip('.!') if tail else text}{tail}"))
    talk.reply(answer or talk.identity, "Small talk; I answer kindly.")


def greet(talk: Talk) -> None:
    """A greeting, as most talks begin."""
    rng = talk.rng
    greetings = next(phrases for phrases, answer in SMALL_TALK if answer == HELLO)
    text = rough(rng, rng.choice(greetings), {})[0]
    answer = INTRODUCTION if _is_introduced(talk) else HELLO
    talk.user(_capital(rng, text))
    talk.reply(answer, "A greeting.")


def _is_introduced(talk: Talk) -> bool:
    """Whether a greeting is answered by who speaks: the first thing said, to nobody else than the model itself."""
    return talk.is_first and talk.identity == IDENTITY and not (talk.before or talk.after)


def ask_identity(talk: Talk) -> None:
    """Who are you?"""
    phrases = next(phrases for phrases, answer in SMALL_TALK if not answer)
    while True:
        phrase, tail = talk.rng.choice(phrases), talk.rng.choice(BYWORDS[1])
        if talk.belongs(f"talk:{phrase}{tail}"):
            break
    talk.user(rough(talk.rng, phrase, {})[0] + tail)
    talk.reply(talk.identity, "They ask who I am.")
