"""Grades the demo model on prompts of the held split, greedily, and prints a table. Needs MLX alone.

Held means: every name, city, word, number of three or four digits and tool name in the prompt, every wording of a
question, pair of summands and range to count is one that `is_held` keeps from training. A text counts as correct only
if it is the expected one to the last character and ends by itself; a tool call, if its JSON says the same.
"""

import json
import random
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from scripts.demo import free_form
from scripts.demo import skills as skills
from scripts.demo import world as world
from scripts.demo.facts import FACTS
from scripts.demo.phrases import NEUTRAL_LINES
from scripts.demo.talk import Dialogue, Json, Talk
from scripts.demo.world import MIX

Answer = Callable[[Dialogue], str]
FREE_FORM = "free-form prompts"
TABLE = re.compile(r"^\| skill \|.*\n(?:\|.*\n)*", re.MULTILINE)


class Grade(NamedTuple):
    """How one skill went: prompts asked, answers right, share aimed at."""

    skill: str
    num_prompts: int
    num_correct: int
    target: float

    @property
    def share(self) -> float:
        """Right answers as a share of all."""
        return self.num_correct / self.num_prompts


def _opened(rng: random.Random, with_tools: bool, max_fillers: int = 3) -> Talk:
    """A talk of the held split that has already gone on for up to `max_fillers` exchanges."""
    talk = Talk(rng, held=True)
    if with_tools:
        world.bring_tools(talk)
    world.set_scene(talk, long=False)
    for _ in range(rng.randrange(max_fillers + 1)):
        world.take_turn(talk, MIX)
    return talk


def _recall(rng: random.Random) -> Dialogue:
    """Something told 3 to 8 exchanges ago, other things told and asked in between."""
    talk = Talk(rng, held=True)
    if rng.random() < 0.2:
        world.bring_tools(talk)
    world.set_scene(talk, long=False)
    fact = skills.tell(talk)
    target = rng.choice(fact)
    others = [name for name in FACTS if name not in {key.split("/")[0] for key in fact}]
    for _ in range(rng.randrange(3, 9) - 1):
        if rng.random() < 0.3:
            skills.tell(talk, [rng.choice(others)])
        else:
            world.take_turn(talk, {skill: weight for skill, weight in MIX.items() if skill is not skills.tell})
    skills.ask(talk, target)
    return talk.finish()


def _persona(rng: random.Random) -> Dialogue:
    """A persona line in the system prompt; then who are you, or anything else in the persona's manner."""
    talk = Talk(rng, held=True)
    lines = rng.sample(NEUTRAL_LINES, rng.randrange(3))
    lines.insert(rng.randrange(len(lines) + 1), world.persona_line(talk))
    talk.messages.append({"role": "system", "content": " ".join(lines)})
    for _ in range(rng.randrange(4)):
        world.take_turn(talk, MIX)
    if rng.random() < 0.6:
        skills.ask_identity(talk)
    else:
        rng.choice((skills.small_talk, skills.server_question, skills.tell))(talk)
    return talk.finish()


def _tool_call(rng: random.Random) -> Dialogue:
    talk = _opened(rng, with_tools=True)
    world.use_tool(talk)
    return talk.finish()


def _tool_result(rng: random.Random) -> Dialogue:
    talk = _opened(rng, with_tools=True)
    world.use_tool(talk)
    world.report_result(talk)
    return talk.finish()


def _plain(skill: Callable[[Talk], Any]) -> Callable[[random.Random], Dialogue]:
    def make(rng: random.Random) -> Dialogue:
        talk = _opened(rng, with_tools=rng.random() < 0.15)
        skill(talk)
        return talk.finish()

    return make


PROBES: dict[str, tuple[Callable[[random.Random], Dialogue], float]] = {
    "recall after 3 to 8 turns": (_recall, 0.95),
    "tool calls": (_tool_call, 0.95),
    "answers from tool results": (_tool_result, 0.9),
    "personas": (_persona, 0.9),
    "questions on the server": (_plain(skills.server_question), 0.9),
    "counting": (_plain(skills.count), 0.9),
    "adding": (_plain(skills.add), 0.9),
    "lists": (_plain(skills.make_list), 0.9),
    "repeating": (_plain(skills.repeat), 0.9),
    "never told": (_plain(skills.ask_unknown), 0.9),
    "refusing in one sentence": (_plain(skills.refuse), 0.9),
    "small talk": (_plain(skills.small_talk), 0.9),
}


def probe(skill: str, number: int) -> Dialogue:
    """Prompt `number` of a skill: a dialogue of the held split whose last message is the expected answer."""
    return PROBES[skill][0](random.Random(f"held/{skill}/{number}"))


def is_correct(answer: str, dialogue: Dialogue) -> bool:
    """Whether `answer` is the dialogue's last message: text exactly, tool calls by their JSON."""
    expected = dialogue.messages[-1]
    if "tool_calls" not in expected:
        return bool(answer == expected["content"])
    try:
        calls = [json.loads(part.split("</tool_call>")[0]) for part in answer.split("<tool_call>")[1:]]
    except json.JSONDecodeError:
        return False
    return bool(calls == [call["function"] for call in expected["tool_calls"]])


def grade(answer: Answer, skill: str, num_prompts: int, show_failures: int = 0) -> Grade:
    """Asks `num_prompts` prompts of a skill."""
    correct = 0
    for number in range(num_prompts):
        dialogue = probe(skill, number)
        text = answer(dialogue)
        correct += is_correct(text, dialogue)
        if not is_correct(text, dialogue) and show_failures > 0:
            show_failures -= 1
            _show(skill, dialogue, text)
    return Grade(skill, num_prompts, correct, PROBES[skill][1])


def _show(skill: str, dialogue: Dialogue, text: str) -> None:
    expected = dialogue.messages[-1]
    print(f"--- {skill}: {dialogue.messages[-2]['content']!r}\n    said {text!r}")
    print(f"    not  {expected.get('tool_calls') or expected['content']!r}", flush=True)


def table(grades: list[Grade]) -> str:
    """The grades as a Markdown table."""
    lines = ["| skill | held-out prompts | correct | target |", "|---|---|---|---|"]
    lines += [f"| {g.skill} | {g.num_prompts} | {g.share:.1%} | {g.target:.0%} |" for g in grades]
    return "\n".join(lines)


def answerer(folder: Path, max_tokens: int = 500) -> Answer:
    """A function that answers a dialogue's last prompt greedily with the model in `folder`; "" if it never ends."""
    reply = replier(folder, max_tokens)
    return lambda dialogue: reply(dialogue.messages[:-1], dialogue.tools)


def replier(folder: Path, max_tokens: int = 500) -> Callable[..., str]:
    """A function that answers messages, and tools if there are some, as `answerer` does."""
    import mlx.core as mx

    from cache.layers.kinds import make_caches
    from models.mlx_lm_import import load_model, load_tokenizer

    model, _ = load_model(folder)
    tokenizer = load_tokenizer(folder)

    def reply(messages: list[Json], schemas: Sequence[Json] = ()) -> str:
        prompt = tokenizer.apply_chat_template(
            messages, tools=list(schemas) or None, add_generation_prompt=True, enable_thinking=False
        )
        cache = make_caches(model)
        tokens: list[int] = []
        logits = model(mx.array(prompt)[None], cache=cache)
        while len(tokens) < max_tokens:
            token = int(mx.argmax(logits[0, -1]).item())  # type: ignore[arg-type]
            if token in tokenizer.eos_token_ids:
                return str(tokenizer.decode(tokens))
            tokens.append(token)
            logits = model(mx.array([[token]]), cache=cache)
        return ""

    return reply


def evaluate(folder: Path, num_prompts: int, show_failures: int = 0, write_card: bool = False) -> list[Grade]:
    """Grades every skill and prints the table; with `write_card` it also replaces the table in the model's card."""
    answer = answerer(folder)
    grades = [grade(answer, skill, num_prompts, show_failures) for skill in PROBES]
    results = free_form.grade(replier(folder), free_form.read_prompts())
    print(free_form.summary(results, show_failures))
    free = Grade(FREE_FORM, len(results), sum(result.is_acceptable for result in results), 0.9)
    grades.append(free)
    print(table(grades))
    if write_card:
        card = folder / "README.md"
        card.write_text(TABLE.sub(table(grades) + "\n", card.read_text(), count=1))
    return grades
