"""What clients do that keeps their prompts from being reused: one row for each fault, as data.

A fault changes the body of each turn of a conversation that is otherwise as it should be. What it must be called,
where it is, and a word of the cure stand beside it.
"""

import copy
import json
import textwrap
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

from server.diagnosis.causes import Cause

Body: TypeAlias = dict[str, Any]
Apply: TypeAlias = Callable[[int, Body], list[Body]]

NUM_TURNS = 3
LASTING = 1
"""The turn from which on a lasting change is there."""
SYSTEM = "You are a kind and careful helper of a small shop. Answer in one line."
QUESTIONS = (
    "What is 12 plus 30? Only the sum, please.",
    "What is 7 plus 8? My list has seven apples.",
    "What is 21 plus 4? That is the last one of all.",
)
CALL = {
    "id": "call_1",
    "type": "function",
    "function": {"name": "weigh", "arguments": '{"item": "pear", "grams": 5}'},
}
SEED: list[Body] = [
    {"role": "user", "content": "Hello, a word about my shopping, please."},
    {"role": "assistant", "content": "<think>Shopping. Fine.</think>\n\nHello! Ask me, then."},
    {"role": "user", "content": "How heavy is a pear? You may weigh one."},
    {"role": "assistant", "content": "Let me weigh one now.", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "call_1", "content": "The pear weighs five grams."},
    {"role": "assistant", "content": "It weighs five grams, not\nmuch — at all.\n\nIt's a “small” one."},
]
"""What was said before: a reply with thoughts, a call of a tool, a reply of several lines."""


def tool(name: str, description: str, **extra: Any) -> Body:
    """Returns a tool as clients send it."""
    parameters = {"type": "object", "properties": {"item": {"type": "string"}}}
    return {
        "type": "function",
        "function": {"name": name, "description": description, "parameters": parameters, **extra},
    }


TOOLS = [tool("weigh", "Weighs an item of the shop on the scale."), tool("price", "Says what an item costs.")]


@dataclass(frozen=True)
class Fault:
    """A fault of a client, and what must be said of it."""

    name: str
    apply: Apply
    """Takes the turn, from 0, and its body; returns the bodies to send, of which the last is the turn's."""
    cause: Cause
    role: str | None
    """Of the message that is named; `tools` for the tools."""
    cure: str
    """A word of the advice."""
    index: int | None = None
    """The message that is named first; None where it is another in each turn."""
    may_be_hidden: bool = False
    """Whether a template may leave out what changed, so that nothing is lost."""
    also: Cause | None = None
    """A second cause that must be named too."""


def on_messages(change: Callable[[int, list[Body]], None]) -> Apply:
    """Returns a fault that changes the messages in place."""

    def apply(turn: int, body: Body) -> list[Body]:
        change(turn, body["messages"])
        return [body]

    return apply


def edited(index: int, change: Callable[[int, str], str], since: int = 0) -> Apply:
    """Returns a fault that changes the text of one message from a turn on."""

    def apply(turn: int, messages: list[Body]) -> None:
        if turn >= since:
            messages[index]["content"] = change(turn, messages[index]["content"])

    return on_messages(apply)


def spliced(start: int, stop: int, *messages: Body, since: int = LASTING) -> Apply:
    """Returns a fault that puts messages in place of others from a turn on."""

    def apply(turn: int, all_messages: list[Body]) -> None:
        if turn >= since:
            all_messages[start:stop] = copy.deepcopy(list(messages))

    return on_messages(apply)


def with_fields(change: Callable[[int], Body]) -> Apply:
    """Returns a fault that sets fields of the body."""
    return lambda turn, body: [{**body, **change(turn)}]


def in_latest(change: Callable[[int, str], str]) -> Apply:
    """Returns a fault that changes each newest message, and sends it as it was meant in later turns."""
    return edited(-1, change)


def on_replies(change: Callable[[str], str]) -> Apply:
    """Returns a fault that writes every reply of the server in another way."""

    def apply(_: int, messages: list[Body]) -> None:
        for message in messages[1 + len(SEED) :]:
            if message["role"] == "assistant":
                message["content"] = change(message["content"])

    return on_messages(apply)


def both(*faults: Apply) -> Apply:
    """Returns a fault that is several at once."""

    def apply(turn: int, body: Body) -> list[Body]:
        for fault in faults:
            (body,) = fault(turn, body)
        return [body]

    return apply


def beside(aside: Callable[[int], list[Body]], turns: tuple[int, ...] = (1,)) -> Apply:
    """Returns a fault that sends another request before some turns."""

    def apply(turn: int, body: Body) -> list[Body]:
        return [{**body, "messages": aside(turn)}, body] if turn in turns else [body]

    return apply


def with_a_long_head(fault: Apply) -> Apply:
    """Returns a fault of a conversation that is long enough for its loss to be worth telling."""

    def apply(turn: int, body: Body) -> list[Body]:
        head, *rest = body["messages"]
        return fault(turn, {**body, "messages": [{**head, "content": head["content"] * 3}, *rest]})

    return apply


def nonce(turn: int) -> str:
    """Returns a UUID, another one for each turn."""
    return str(uuid.UUID(int=(0xA5C3_91E7_44D2_8B6F << 64) * (turn + 1) % (1 << 128) + turn * 0x1234_5678_9ABC))


def merged(messages: list[Body]) -> Body:
    """Returns one message of the user with the texts of several."""
    return {"role": "user", "content": "\n\n".join(message["content"] for message in messages)}


def reordered_calls(turn: int, messages: list[Body]) -> None:
    """Writes the arguments of the call in another order of keys, from a turn on."""
    if turn >= LASTING:
        arguments = json.loads(CALL["function"]["arguments"])  # type: ignore[index]
        messages[4]["tool_calls"][0]["function"]["arguments"] = json.dumps(dict(reversed(arguments.items())))


def renamed_calls(turn: int, messages: list[Body]) -> None:
    """Gives the call another id in each turn."""
    messages[4]["tool_calls"][0]["id"] = messages[5]["tool_call_id"] = f"call_{turn}x"


def left_out(_: int, messages: list[Body]) -> None:
    """Sends none of the server's replies back."""
    messages[:] = [m for i, m in enumerate(messages) if i <= len(SEED) or m["role"] != "assistant"]


def late_note(turn: int, messages: list[Body]) -> None:
    """Keeps a message of the developer in the middle that holds the time."""
    messages.insert(4, {"role": "developer", "content": f"Note for you: the time is now 10:{20 + turn} in the shop."})


def calls_as_text(turn: int, messages: list[Body]) -> None:
    """Writes old calls into the text, as agents do for models that know no tools."""
    if turn >= LASTING:
        del messages[4]["tool_calls"]
        messages[4]["content"] += " [I called weigh with a pear and five grams.]"


def calls_with_defaults(turn: int, messages: list[Body]) -> None:
    """Sends a call as the tool took it, with arguments that the model did not give."""
    if turn >= LASTING:
        arguments = '{"item": "pear", "grams": 5, "unit": "gram"}'
        messages[4]["tool_calls"] = [{**CALL, "function": {"name": "weigh", "arguments": arguments}}]


def thoughts_in_a_field(turn: int, messages: list[Body]) -> None:
    """Sends the thoughts of a reply in their field, and later without."""
    thoughts, text = messages[2]["content"].removeprefix("<think>").split("</think>")
    messages[2]["content"] = text.strip()
    if turn < LASTING:
        messages[2]["reasoning_content"] = thoughts


NOTES = "Here is what the shop keeps: apples, pears, plums, soap, bread and five kinds of tea, all in tins. " * 8
RULES = "Answer with numbers only, never with a word, and give the sum of all items of the list before it. " * 8
COMPACTED: list[Body] = [
    {
        "role": "user",
        "content": "This session is being continued from a previous conversation that ran out of context. " + NOTES,
    },
    {"role": "assistant", "content": "Let us go on, then."},
]
"""As Claude Code begins after `/compact`."""
SKILLS = ("weighing: for fruit", "pricing: for all items", "wrapping: for presents", "counting: for the till")


def compacted(turn: int, messages: list[Body]) -> None:
    """Puts a summary in place of all that was said before the second question."""
    if turn >= LASTING:
        messages[1 : len(SEED) + 3] = copy.deepcopy(COMPACTED)


def joined_systems(turn: int, messages: list[Body]) -> None:
    """Sends two system messages at first, and one that holds both later."""
    rules = {"role": "system", "content": RULES}
    if turn < LASTING:
        messages.insert(1, rules)
    else:
        messages[0]["content"] += f"\n\n{RULES}"


def at_depth(depth: int) -> Apply:
    """Returns a fault that keeps a note so many messages before the end, as chats with characters do."""
    return on_messages(lambda _, messages: messages.insert(-depth, {"role": "system", "content": NOTES}))


def before_the_newest(turn: int, messages: list[Body]) -> None:
    """Puts passages before the newest question, and takes them out again later."""
    for message in messages[1 + len(SEED) :: 2]:
        message["content"] += f" Here is my list: {RULES}"
    messages.insert(-1, {"role": "user", "content": f"{turn}: {NOTES}"})


def files_and_rules(turn: int, messages: list[Body]) -> None:
    """Puts files before the newest question and rules behind it, which are there no more in the next turn."""
    files = {"role": "user", "content": f"These are my files, version {turn}: {NOTES}"}
    asked = {"role": "user", "content": f"{messages[-1]['content']}\n\n{RULES}"}
    messages[-1:] = [files, {"role": "assistant", "content": "Ok, I change these only."}, asked]


def stamped(turn: int, messages: list[Body]) -> None:
    """Puts the time of this turn before each reply."""
    for message in messages[1:]:
        if message["role"] == "assistant":
            message["content"] = f"(1{turn}:05) {message['content']}"


def with_folder(turn: int) -> list[Body]:
    """The tools of an agent that says in them where it is."""
    return [tool("weigh", f"Weighs an item. It runs in /home/shop{'/till' * turn}."), TOOLS[1]]


def with_agents(turn: int) -> list[Body]:
    """Tools with a list of the agents that may be called, which grows."""
    agents = {"type": "string", "enum": ["clerk", "cook", "guard"][: turn + 1]}
    call = tool("ask", "Asks another agent.")
    call["function"]["parameters"]["properties"]["agent"] = agents
    return [call, *TOOLS]


PARALLEL = [{**CALL, "id": f"call_{place}"} for place in range(3)]
RESULTS = [
    {"role": "tool", "tool_call_id": f"call_{place}", "content": f"The {item} weighs {place + 4} grams."}
    for place, item in enumerate(("pear", "plum", "fig"))
]
TO_SUM_UP = {
    "role": "user",
    "content": "You are performing a CONTEXT CHECKPOINT COMPACTION. Create a handoff summary.",
}
TO_REVIEW = {"role": "user", "content": "Review the conversation above: what was learnt that is worth a note? " * 3}
PINNED = "Here is shop.py, pinned:\n```python\nLIMIT = {}\n\ndef price(n):\n    return n * 7\n```\nRead it."


def other_results(turn: int, messages: list[Body]) -> None:
    """Sends the results of parallel calls in another order, as they happened to end."""
    results = RESULTS[turn:] + RESULTS[:turn]
    messages[4:6] = copy.deepcopy([{**messages[4], "tool_calls": PARALLEL}, *results])


def with_examples(turn: int, messages: list[Body]) -> None:
    """Puts examples before the conversation, others in each turn."""
    for item, grams in (("plum", 3 + turn), ("fig", 9 + 5 * turn)):
        said = (("user", f"What do {grams} {item}s weigh?"), ("assistant", f"They weigh {grams * 4} grams."))
        messages[1:1] = [{"role": role, "content": text} for role, text in said]


def with_examples_in_system(turn: int, messages: list[Body]) -> None:
    """Lists the examples in the system message."""
    shown = "\n".join(f"- {number} plums weigh {number * 4} grams" for number in (3 + turn, 8 + 2 * turn))
    messages[0]["content"] += f"\n\n## Examples\n{shown}\n\nBe kind."


def told_as_text(turn: int, messages: list[Body]) -> None:
    """Sends all that was said as JSON in one message."""
    said = [{"role": messagel["role"], "content": messagel["content"]} for messagel in messages[1:]]
    messages[1:] = [{"role": "user", "content": f"Answer the last message of this chat. {json.dumps(said)}"}]


def sent_again(turn: int, messages: list[Body]) -> None:
    """Has the first message twice, as after a retry."""
    if turn >= LASTING:
        messages.insert(1, copy.deepcopy(messages[1]))


def at_the_end(change: Callable[[Body], Body]) -> Apply:
    """Returns what an agent asks once its task is done."""
    return lambda turn, body: [change(body) if turn == NUM_TURNS - 1 else {**body, "tools": TOOLS}]


REVERSED = [{key: tool[key] for key in reversed(tool)} for tool in TOOLS]
SCHEMA = "Weighs an item of\n  the shop on the\n  scale."
SUMMARY: Body = {"role": "user", "content": "Summary: they said hello, and a pear was weighed: five grams."}
TITLE = [
    {"role": "system", "content": "Write a title for a conversation. " * 12},
    {"role": "user", "content": "They talk about fruit, shops, scales and sums. " * 3},
]
OTHER = [
    {"role": "system", "content": SYSTEM},
    {"role": "user", "content": "Tell me about the sea and its many ships, if you please. " * 9},
]


def tools_at(change: Callable[[int], Any]) -> Apply:
    """Returns a fault of the tools."""
    return with_fields(lambda turn: {"tools": change(turn)})


def since(later: Any) -> Callable[[int], Any]:
    """Returns the usual tools, and others from a turn on."""
    return lambda turn: later if turn >= LASTING else TOOLS


_BY_WHAT_IS_TOLD: dict[tuple[Any, ...], dict[str, Apply]] = {
    (Cause.CLOCK, "system", "newest", 0): {
        "clock in system": edited(0, lambda t, s: f"It is 09:{16 + t}. {s}"),
        "date in system": edited(0, lambda t, s: f"{s} Today: 2026-11-{20 + t}."),
        "greeting by the hour in system": edited(
            0, lambda t, s: f"Good {('morning', 'afternoon', 'evening')[t]}! {s}"
        ),
        "weekday of another language in system": edited(
            0, lambda t, s: f"Nous sommes {('samedi', 'dimanche', 'lundi')[t]}. {s}"
        ),
    },
    (Cause.COUNTER, "system", "figures", 0): {
        "counter in system": edited(0, lambda t, s: f"Turn {t}. {s}"),
        "percentage in system": edited(0, lambda t, s: f"[{49 + t}% full] {s}"),
    },
    (Cause.NONCE, "system", "header", 0): {
        "nonce in system": edited(0, lambda t, s: f"Request {nonce(t)}. {s}"),
        "trace in system": edited(0, lambda t, s: f"traceparent: 00-{nonce(t)[:8]}4bf92f35-01\n{s}"),
        "hash of git in system": edited(0, lambda t, s: f"On main@{('4f3e2d1', 'deadbee', '4810293')[t]}. {s}"),
        "temporary folder in system": edited(
            0, lambda t, s: f"Notes are in /var/run/tmp{('ab12cd', 'qwerty', 'zz98qe')[t]}. {s}"
        ),
    },
    (Cause.CLOCK, "system", "newest", 4): {"clock in late developer": on_messages(late_note)},
    (Cause.NONCE, "user", "first had"): {"nonce in last message": in_latest(lambda t, s: f"{s} [ref {nonce(t)}]")},
    (Cause.CLOCK, "user", "once"): {"clock in last message": in_latest(lambda t, s: f"(08:{10 + t}) {s}")},
    (Cause.COUNTER, "user", "once"): {
        "percentage in last message": in_latest(lambda t, s: f"[{40 + t}% full] {s}"),
        "cost in last message": in_latest(lambda t, s: f"{s}\nCost so far: $0.{17 + t}"),
    },
    (Cause.CLOCK, "tools", "descriptions"): {
        "clock in tools": tools_at(lambda t: [tool("weigh", f"Weighs an item. Opened at 10:{30 + t}."), TOOLS[1]])
    },
    (Cause.REORDERED, "tools", "order"): {"tools reordered": tools_at(since(TOOLS[::-1]))},
    (Cause.TOOLS, "tools", "same tools"): {
        "tool added": tools_at(since([*TOOLS, tool("wrap", "Wraps it.")])),
        "tool dropped": tools_at(since(TOOLS[:1])),
    },
    (Cause.REORDERED, "tools", "order", None, True): {"tool keys reordered": tools_at(since(REVERSED))},
    (Cause.REFORMATTED, "tools", "format"): {
        "schema reformatted": tools_at(since([tool("weigh", SCHEMA), TOOLS[1]]))
    },
    (Cause.TRIMMED, "user", "seldom", 1): {"history trimmed at the head": spliced(1, 3)},
    (Cause.TRIMMED, "user", "seldom", 3): {"history trimmed in the middle": spliced(3, 7)},
    (Cause.SUMMARISED, "user", "Sum up", 1): {"history summarised": spliced(1, 7, SUMMARY)},
    (Cause.REMOVED, "assistant", "where they are", 6): {"message deleted": spliced(6, 7)},
    (Cause.MERGED, "user", "by itself", 1): {"messages merged": spliced(1, 4, merged(SEED[:3]))},
    (Cause.INSERTED, "user", "end", 3): {
        "message inserted": spliced(3, 3, {"role": "user", "content": "I like tea."})
    },
    (Cause.EDITED, "user", "were", 1): {
        "old message edited": edited(1, lambda _, s: s.replace("shopping", "cooking"), LASTING)
    },
    (Cause.EDITED, "tool", "result", 5): {
        "tool result edited": edited(5, lambda _, s: s.replace("five", "nine"), LASTING),
        "tool result cleared": edited(5, lambda _, s: "[Old tool result content cleared]", LASTING),
        "error of a tool rewritten": edited(
            5, lambda t, s: f"Error {'-32603: ' * (t >= LASTING)}-32600: no such pear."
        ),
    },
    (Cause.REFORMATTED, "assistant", "stripped", 6): {
        "reply stripped": edited(6, lambda _, s: " ".join(s.split()), LASTING)
    },
    (Cause.REFORMATTED, "assistant", "wrapped", 6): {
        "reply wrapped": edited(6, lambda _, s: textwrap.fill(s, 12), LASTING)
    },
    (Cause.ENCODED, "assistant", "escaped", 6): {
        "reply encoded": edited(6, lambda _, s: s.replace("'", "&#39;"), LASTING)
    },
    (Cause.REPLY, "assistant", "back"): {
        "newest replies padded": on_replies(lambda s: f"  {s}\n\n."),
        "newest replies cut short": both(
            with_fields(lambda _: {"max_tokens": 32}), on_replies(lambda s: s[: len(s) // 4])
        ),
        "newest replies as HTML": on_replies(lambda s: f"<p>{s}</p>"),
    },
    (Cause.REPLY_LEFT_OUT, "assistant", "before the next"): {"replies left out": on_messages(left_out)},
    (Cause.THOUGHTS, "assistant", "thought", 2, True): {
        "thoughts removed": edited(2, lambda _, s: s.split("</think>")[1].strip(), LASTING),
        "thoughts in a field removed": on_messages(thoughts_in_a_field),
    },
    (Cause.REORDERED, "assistant", "arguments", 4, True): {
        "tool arguments written anew": on_messages(reordered_calls)
    },
    (Cause.CALL_IDS, "assistant", "ids", 4, True): {"tool ids renamed": on_messages(renamed_calls)},
    (Cause.EDITED, "system", "one", 0): {
        "system prompt switched": edited(0, lambda _, s: "Talk like a pirate at sea. " * 9, LASTING),
        "git status in system": edited(0, lambda t, s: f"{s}\nChanged files:{' till.py' * t} shop.py"),
        "entry of a lorebook in system": edited(0, lambda t, s: f"{s} {NOTES[: 98 * t]}"),
    },
    (Cause.TEMPLATE_ARGUMENTS, None, "kwargs", None, True): {
        "template arguments changed": with_fields(
            lambda t: {"chat_template_kwargs": {"enable_thinking": t < LASTING}}
        ),
        "effort changed": with_fields(lambda t: {"reasoning_effort": "low" if t >= LASTING else "high"}),
    },
    (Cause.REORDERED, "system", "order", 0): {
        "skills shuffled in system": edited(0, lambda t, s: "\n".join([s, *SKILLS[t:], *SKILLS[:t]]))
    },
    (Cause.EDITED, "tools", "descriptions"): {"folder in tools": tools_at(with_folder)},
    (Cause.EDITED, "tools", "schemas"): {"agents in a schema": tools_at(with_agents)},
    (Cause.NOTE, "user", "Leave"): {
        "rules after the newest message": in_latest(lambda _, s: f"{s}\n\n{RULES}"),
        "passages around the newest message": in_latest(
            lambda t, s: f"Answer from this, number {t}: {NOTES}\n\nQuestion: {s}"
        ),
        "passages before the newest message": on_messages(before_the_newest),
        "files before and rules after the newest message": on_messages(files_and_rules),
    },
    (Cause.COMPACTED, "user", "nothing to mend", 1): {
        "whole history summarised": with_a_long_head(on_messages(compacted))
    },
    (Cause.NOTE, "system", "Leave"): {"note at a depth": at_depth(3)},
    (Cause.ROLE, "system", "role", 3): {
        "role changed": on_messages(lambda t, m: m[3].update(role="system" if t >= LASTING else "user"))
    },
    (Cause.ROLE, "user", "role", 6): {
        "reply as the user's": on_messages(lambda t, m: m[6].update(role="user" if t >= LASTING else "assistant"))
    },
    (Cause.REMOVED, "system", "where they are", 0): {"system prompt left out": spliced(0, 1)},
    (Cause.MERGED, "system", "by itself", 0): {"system messages joined": on_messages(joined_systems)},
    (Cause.INSERTED, "assistant", "end", 1): {
        "welcome put in": spliced(1, 1, {"role": "assistant", "content": "Welcome to the shop!"})
    },
    (Cause.CLOCK, "assistant", "stamp", 2): {"replies stamped": on_messages(stamped)},
    (Cause.REPLY, "assistant", "back", 4): {
        "calls written as text": on_messages(calls_as_text),
        "calls with defaults filled in": on_messages(calls_with_defaults),
    },
    (Cause.REPLY, "assistant", "back", 6): {
        "reply cut short": edited(6, lambda _, s: f"{s[:32]}…", LASTING),
        "citations left out": edited(6, lambda t, s: s if t >= LASTING else s.replace("grams,", "grams [1],")),
    },
    (Cause.ENCODED, "user", "escaping", 3): {
        "quotes of a word processor": edited(
            3, lambda t, s: s + (" “Five”, says Ada’s list." if t >= LASTING else ' "Five", says Ada\'s list.')
        ),
        "zero-width space": edited(3, lambda _, s: s.replace("heavy", "heavy\u200b"), LASTING),
    },
    (Cause.REFORMATTED, "user", "line breaks", 1): {
        "line ends of Windows": edited(1, lambda t, s: s.replace(", ", ",\r\n" if t >= LASTING else ",\n"))
    },
    (Cause.ADDRESS, "system", "port", 0): {
        "port in system": edited(0, lambda t, s: f"Tools are at http://127.0.0.1:{49213 + 909 * t}/sse. {s}")
    },
    (Cause.EXAMPLES, "user", "once", 1): {"examples drawn anew": on_messages(with_examples)},
    (Cause.EXAMPLES, "system", "once", 0): {"examples in system": on_messages(with_examples_in_system)},
    (Cause.EDITED, "user", "exactly as they were", 1): {
        "figure in a pinned file": edited(1, lambda t, s: PINNED.format(5 + t))
    },
    (Cause.REORDERED, "tool", "order", 5): {"results in another order": on_messages(other_results)},
    (Cause.DUPLICATED, "user", "once", 2): {"first message twice": on_messages(sent_again)},
    (Cause.FLATTENED, "user", "as messages", 1): {"history as one text": on_messages(told_as_text)},
    (Cause.COMPACTION, "tools", "tool_choice"): {
        "compaction without tools": at_the_end(
            lambda body: {**body, "tools": [], "messages": [*body["messages"], TO_SUM_UP]}
        )
    },
    (Cause.FORKED, "user", "nothing to mend"): {
        "review at the end": at_the_end(
            lambda body: {**body, "tools": TOOLS, "messages": [*body["messages"][:-4], TO_REVIEW]}
        )
    },
    (Cause.SIDE_REQUEST, None, "titles"): {"title request": with_a_long_head(beside(lambda _: TITLE))},
    (Cause.SIDE_REQUEST, None, "their own"): {"two clients on one id": with_a_long_head(beside(lambda _: OTHER))},
    (Cause.CLOCK, "system", "newest", 0, False, Cause.TRIMMED): {
        "clock and trimmed history": both(spliced(1, 3), edited(0, lambda t, s: f"It is 09:{16 + t}. {s}"))
    },
}
"""Faults by what must be said of them, as a `Fault` has it. What the server lacks is in the tests beside."""
FAULTS = tuple(
    Fault(name, apply, *told) for told, faults in _BY_WHAT_IS_TOLD.items() for name, apply in faults.items()
)
NEED_A_NAME = frozenset({"title request", "two clients on one id", "whole history summarised"})
"""Faults of a session's name: without one, other conversations are other conversations."""


def turns_of(fault: Fault | None, ask: Callable[[Body], Body], num_turns: int = NUM_TURNS) -> list[Body]:
    """Holds a conversation with a fault, None for a good one; returns what was sent, as lines of a recording.

    `ask` sends a body and returns the answer.
    """
    lines, history = list[Body](), copy.deepcopy(SEED)
    for turn in range(num_turns):
        history.append({"role": "user", "content": QUESTIONS[turn % NUM_TURNS]})
        body: Body = {"messages": copy.deepcopy([{"role": "system", "content": SYSTEM}, *history])}
        for sent in fault.apply(turn, body) if fault is not None else [body]:
            answer = ask(sent)
            lines.append({"body": sent, "response": answer})
        message = answer["choices"][0]["message"]
        history.append({name: value for name, value in message.items() if value is not None})
    return lines
