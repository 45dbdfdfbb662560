"""Serving scenarios that count cached tokens: interleaved conversations, and the nine steps of a chat's life.

Nothing here is timed. The system prompt is shared, the users' texts are not.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from scripts.bench.common import Report, Target
from scripts.bench.serving_client import Answer, Messages, ask
from scripts.bench.serving_prompts import PerfectCache, TextMaker, with_answer
from scripts.bench.serving_servers import OURS, PEER, Server, both

SYSTEM_TOKENS = 160
USER_TOKENS = 40
ANSWER_TOKENS = 24
NUM_CONVERSATIONS = 12
NUM_TURNS = 4
SHARE_TARGET = Target(0.95, is_ceiling=False)

MATRIX_MODELS = ("llama", "sliding", "qwen3_5", "gpt_oss")
NUM_REPEATS = 3
"""Cells in which the peer has some tokens more: an exact repeat where state is restored at points only.

A prompt's one point is before the tokens that ask for the answer. A second one at its very end costs reuse where
memory is short.
"""
STEPS = (
    "first turn",
    "second turn",
    "third turn",
    "second conversation, same system prompt",
    "its next turn",
    "back to the first conversation",
    "last message edited",
    "older message edited",
    "exact repeat",
)


@dataclass
class _Count:
    """Cached and prompt tokens of one server, and what a perfect cache would have had."""

    prompt: int = 0
    cached: int = 0
    ideal: int = 0
    perfect: PerfectCache = field(default_factory=PerfectCache)

    def add(self, messages: Messages, answer: Answer) -> None:
        self.ideal += self.perfect.cached_tokens(messages)
        self.perfect.remember(messages, answer.text)
        self.prompt += answer.prompt_tokens
        self.cached += answer.cached_tokens


async def interleaved(models: Path, work: Path) -> Report:
    """Twelve conversations of four turns, in turns, on one system prompt."""
    report = Report(
        f"Cached tokens: {NUM_CONVERSATIONS} conversations in turns, {NUM_TURNS} turns each, one system prompt",
        ("server", "prompt tokens", "cached", "share", "possible", "of what is possible"),
    )
    with both(models / "tiny", work) as servers:
        for server in servers:
            count = await _converse(server)
            of_ideal = count.cached / count.ideal
            report.rows.append(
                (
                    server.name,
                    str(count.prompt),
                    str(count.cached),
                    f"{count.cached / count.prompt:.1%}",
                    f"{count.ideal / count.prompt:.1%}",
                    f"{of_ideal:.1%}",
                )
            )
            report.figures[server.name] = {
                "prompt_tokens": count.prompt,
                "cached_tokens": count.cached,
                "possible_tokens": count.ideal,
            }
            if server.name == OURS:
                report.add_verdict("cached share of what unlimited memory allows", of_ideal, SHARE_TARGET)
    return report


async def _converse(server: Server) -> _Count:
    maker, count = TextMaker(1), _Count()
    system = maker.message(SYSTEM_TOKENS, "system")
    conversations: list[Sequence[dict[str, str]]] = [[system] for _ in range(NUM_CONVERSATIONS)]
    for _ in range(NUM_TURNS):
        for index, history in enumerate(conversations):
            messages = [*history, maker.message(USER_TOKENS)]
            answer = await ask(server, messages, max_tokens=ANSWER_TOKENS)
            count.add(messages, answer)
            conversations[index] = with_answer(messages, answer.text)
    return count


async def matrix(models: Path, work: Path) -> Report:
    """Nine steps on four kinds of layers: all but `NUM_REPEATS` must reuse at least what the peer reuses."""
    report = Report(
        f"Cached tokens per step, {OURS} / {PEER} (of the prompt)",
        ("step", *MATRIX_MODELS),
    )
    cells: dict[str, list[str]] = {step: [step] for step in STEPS}
    num_good = 0
    for name in MATRIX_MODELS:
        with both(models / name, work) as (ours, peer):
            counts = zip(await _nine_steps(ours), await _nine_steps(peer), strict=True)
        report.figures[name] = {}
        for step, (mine, theirs) in zip(STEPS, counts, strict=True):
            is_good = mine.cached_tokens >= theirs.cached_tokens
            num_good += is_good
            mark = "" if is_good else " !"
            cells[step].append(f"{mine.cached_tokens} / {theirs.cached_tokens} ({mine.prompt_tokens}){mark}")
            report.figures[name][step] = [mine.cached_tokens, theirs.cached_tokens, mine.prompt_tokens]
    report.rows = list(cells.values())
    target = float(len(STEPS) * len(MATRIX_MODELS) - NUM_REPEATS)
    report.add_verdict("cells with at least the peer's", num_good, Target(target, is_ceiling=False))
    return report


async def _nine_steps(server: Server) -> list[Answer]:
    maker, answers = TextMaker(2), list[Answer]()

    async def say(history: Messages, user: dict[str, str]) -> Sequence[dict[str, str]]:
        answers.append(await ask(server, [*history, user], max_tokens=ANSWER_TOKENS))
        return with_answer([*history, user], answers[-1].text)

    start = [maker.message(SYSTEM_TOKENS, "system")]
    first = await say(start, maker.message(USER_TOKENS))
    second = await say(first, maker.message(USER_TOKENS))
    third = await say(second, maker.message(USER_TOKENS))
    other = await say(start, maker.message(USER_TOKENS))
    await say(other, maker.message(USER_TOKENS))
    await say(third, maker.message(USER_TOKENS))
    await say(third, maker.message(USER_TOKENS))
    edit = maker.message(USER_TOKENS)
    await say(first, edit)
    await say(first, edit)
    return answers
