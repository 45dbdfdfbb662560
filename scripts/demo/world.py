"""Dialogues of a small world, made from a seed: what the demo model is trained on and graded with.

This file holds the tools' turns, the system prompts and the mix; `demo_skills` the rest of what can be said.
Invariants: the same seed gives the same dialogue; a dialogue of the held split uses only values and combinations for
which `is_held` is true, one of the training split only the others (`Dialogue.keys` lists them for a test).
"""

import random
from collections.abc import Callable
from typing import Any

from scripts.demo import tools
from scripts.demo.facts import FACTS
from scripts.demo.phrases import FACT_LINES, NEUTRAL_LINES, ROLES, STYLES, TOPICS
from scripts.demo.skills import (
    add,
    ask,
    ask_all,
    ask_identity,
    ask_two,
    ask_unknown,
    count,
    gibberish,
    greet,
    guess,
    key_of,
    last_said,
    make_list,
    mixed_two,
    refuse,
    repeat,
    server_question,
    small_talk,
    tell,
    told,
)
from scripts.demo.talk import Dialogue, Json, Talk
from scripts.demo.words import phrases


def use_tool(talk: Talk) -> None:
    """The user wishes something that a tool can do; the assistant calls it, no more."""
    rng = talk.rng
    tool = rng.choice(talk.tools)
    wishes = [tools.wish(talk.values, tool)]
    surface = talk.say(wishes[0].frame, **wishes[0].values)
    surfaces = [surface]
    if tool.name in ("get_weather", "get_time", "get_price", "get_user") and rng.random() < 0.15:
        key = tool.parameters[0].name
        more = tools.wish(talk.values, tool).values[key]
        text = talk.messages[-1]["content"]
        talk.messages[-1]["content"] = text.replace(surface[key], f"{surface[key]} and {more}")
        surfaces.append({key: more})
    talk.keys.append("tool:" + tool.name)
    talk.keys.extend("value:" + value.lower() for value in surface.values())
    message: Json = {"role": "assistant", "content": "", "tool_calls": [tools.call(tool, s) for s in surfaces]}
    talk.answer(message, f"I call {tool.name}.")


def report_result(talk: Talk) -> None:
    """The tool's results come back and the assistant reports them."""
    calls = talk.messages[-1]["tool_calls"]
    tool = next(tool for tool in talk.tools if tool.name == calls[0]["function"]["name"])
    sentences = []
    for _ in calls:
        content, sentence = tools.result(talk.values, tool)
        talk.messages.append({"role": "tool", "content": content})
        sentences.append(sentence)
    talk.reply(" ".join(sentences), "I report the result.")


AT_HOME = phrases("""What is the weather where I live?;How is the weather at home?;weather at my place;
Is it raining where I live?""")


def weather_at_home(talk: Talk) -> None:
    """The argument of the call was told earlier: the city where the user lives."""
    city = talk.facts["city"][0]
    talk.say(talk.rng.choice(AT_HOME))
    weather = tools.KNOWN[0]
    call = tools.call(weather, {"city": city})
    talk.answer({"role": "assistant", "content": "", "tool_calls": [call]}, "I call get_weather.")


PERSONAS = phrases("""You are {n}, {s}.;You are {s} called {n}.;Your name is {n}. You talk like {s}.;
You are {n} the {bare}.;Your name is {n} and you are {s}.;Pretend to be {n}, {s}.;You are {s} named {n}.;
You are {n}, {s} from {city}.;You are {n}, {s} who loves {word}.;You are {n}, {s}. Stay in character.;
Act as {n}, {s}.""")
NAMELESS = phrases(
    """You are {s}.;Talk like {s}.;Act as {s}.;You talk like {s}.;Answer like {s}.;Pretend to be {s}."""
)
NAMED = phrases("""Your name is {n}.;You are {n}.;You are called {n}.;You are {n}, a helpful assistant.;
You are an assistant called {n}.""")
IN_ROLE = phrases("""You are {n}, {s}.;Your name is {n}. You are {s}.;You are {n}, {s}. Be helpful.""")
STARTS = phrases("""Start every answer with {w}.;Begin each answer with {w}.;Always start with the word {w}.""")
ENDS = phrases("""End every answer with {w}.;End each answer with the word {w}.;Always end with {w}.""")


def persona_line(talk: Talk) -> str:
    """A line that gives the assistant a name, a manner or a role; sets how it answers from now on."""
    rng, name = talk.rng, talk.values.name()
    choice = rng.random()
    if choice < 0.5:
        return _manner_line(talk, name)
    if choice > 0.8:
        return _byword_line(talk)
    talk.keys.append("value:" + name.lower())
    if choice < 0.65:
        talk.identity = f"I am {name}."
        return rng.choice(NAMED).format(n=name)
    role = rng.choice((*ROLES, f"a {talk.values.word()} seller", f"the assistant of {talk.values.invented()}"))
    talk.identity = f"I am {name}, {role}."
    return rng.choice(IN_ROLE).format(n=name, s=role)


def _manner_line(talk: Talk, name: str) -> str:
    rng = talk.rng
    bare = rng.choice(list(STYLES))
    style = ("an " if bare[0] in "aeiou" else "a ") + bare
    talk.before = STYLES[bare] + " "
    if rng.random() < 0.3:
        talk.identity = f"I am {style}."
        return rng.choice(NAMELESS).format(s=style)
    talk.identity = f"I am {name}, {style}."
    talk.keys.append("value:" + name.lower())
    frame = rng.choice(PERSONAS)
    return frame.format(n=name, s=style, bare=bare, city=talk.values.city(), word=talk.values.word())


def _byword_line(talk: Talk) -> str:
    word = talk.values.word()
    if talk.rng.random() < 0.5:
        talk.before = f"{word}! "
        return talk.rng.choice(STARTS).format(w=word)
    talk.after = f" {word}!"
    return talk.rng.choice(ENDS).format(w=word)


STRAY = phrases("""The {w} is next to the {x}.;Every {w} needs {t}.;If they ask about {t}, mention the {w}.;
See the {w} about {t}.;{t} and {u} belong to section {n}.;- {t}: {w} {x}""")


def _stray_line(talk: Talk) -> str:
    """A sentence that means nothing for the answers."""
    rng = talk.rng
    frame = rng.choice(STRAY)
    word, other, topics = talk.values.word(), talk.values.word(), rng.sample(TOPICS, 2)
    return frame.format(w=word, x=other, t=topics[0], u=topics[1], n=rng.randrange(1, 100))


def set_scene(talk: Talk, long: bool) -> None:
    """Writes the system message, if any: neutral lines, a persona line, a fact about the user, in any order."""
    rng = talk.rng
    if rng.random() < 0.35 and not long:
        return
    lines = rng.sample(NEUTRAL_LINES, rng.choice((0, 0, 1, 1, 2, 4, 8)) if not long else rng.randrange(8, 30))
    lines = [_stray_line(talk) if rng.random() < 0.25 else line for line in lines]
    if rng.random() < 0.6:
        lines.insert(rng.choice((0, 0, rng.randrange(len(lines) + 1))), persona_line(talk))
    if rng.random() < 0.25:
        name = rng.choice([name for name in FACT_LINES if name not in talk.facts])
        fields = FACTS[name].draw(talk.values)
        values = tuple(fields.values())
        talk.facts[key_of(name, values)] = values
        lines.insert(rng.randrange(len(lines) + 1), FACT_LINES[name].format(**fields))
    if lines:
        talk.messages.append({"role": "system", "content": " ".join(lines)})


Skill = Callable[[Talk], Any]
MIX: dict[Skill, int] = {
    tell: 30,
    ask: 60,
    ask_two: 6,
    mixed_two: 8,
    last_said: 2,
    guess: 3,
    server_question: 36,
    count: 14,
    add: 10,
    make_list: 8,
    repeat: 11,
    refuse: 28,
    gibberish: 3,
    small_talk: 20,
    ask_identity: 8,
}


def take_turn(talk: Talk, skills: dict[Skill, int]) -> None:
    """One exchange of a skill drawn by weight; a tool, where there are some, in a third of the turns."""
    rng = talk.rng
    if talk.tools and rng.random() < 0.4:
        has_weather = any(tool.name == "get_weather" for tool in talk.tools)
        if "city" in talk.facts and has_weather and rng.random() < 0.4:
            weather_at_home(talk)
        else:
            use_tool(talk)
        report_result(talk)
        return
    rng.choices(list(skills), list(skills.values()))[0](talk)


def bring_tools(talk: Talk) -> None:
    """Gives the dialogue a toolbox."""
    talk.tools = tools.toolbox(talk.values)
    talk.schemas = [tools.schema(tool, talk.rng) for tool in talk.tools]


def family_talk(talk: Talk, num_turns: int) -> None:
    """Several relatives, pets or things are told, then asked for, one by one: which is which is hard to learn."""
    name = talk.rng.choice(("relation", "relation", "pet", "pet", "thing"))
    for _ in range(talk.rng.choice((1, 2, 2))):
        tell(talk, [name] * talk.rng.choice((1, 2, 2, 3)))
    for _ in range(max(2, num_turns)):
        draw = talk.rng.random()
        if draw < 0.65:
            ask(talk, talk.rng.choice(told(talk, name)))
        elif draw < 0.85:
            ask_unknown(talk, name)
        elif FACTS[name].generic:
            ask_all(talk, name)


def training_dialogue(rng: random.Random, num_turns: int, long_system: bool = False) -> Dialogue:
    """A dialogue of the training split with `num_turns` exchanges of any skill."""
    talk = Talk(rng, held=False, thinking=rng.random() < 0.04)
    if rng.random() < 0.36:
        bring_tools(talk)
    set_scene(talk, long_system)
    if rng.random() < 0.1:
        greet(talk)
    elif rng.random() < 0.2:
        family_talk(talk, num_turns)
        return talk.finish()
    for _ in range(num_turns):
        take_turn(talk, MIX)
    return talk.finish()
