"""What an edge of the prefix tree holds, in people's words: whose it is, and which messages of theirs.

The words are those of conversations that the server still knows: their last turns, and what is being answered now.
"""

import itertools
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from cache.types import TokenArray
from cache.views import Traced
from server.api.activity import Activity
from server.diagnosis.account import EDGE_TOKENS, Conversations, EvaluatedTurn
from server.diagnosis.causes import TOOLS
from server.diagnosis.prompt import PLAIN, Part, Prompt

MAX_TURNS = 512
FEW_TOKENS = EDGE_TOKENS // 2
"""A message's header has about as many."""
MAX_TOLD = 3
"""Sessions told of one edge; the others are counted."""
MAX_CHARACTERS = 100
MAX_SEARCHED_TOKENS = 200_000
"""Tokens decoded for one search."""
TextOf = Callable[[Sequence[int]], str]


@dataclass(frozen=True)
class SessionName:
    """A session's id, and the beginnings of its first question and its last."""

    id: str
    title: str
    question: str

    @classmethod
    def of(cls, session_id: str | None, prompt: Prompt) -> "SessionName":
        """Names a session by a prompt of it."""
        asked = [part.text for part in prompt.parts if part.role in ("user", PLAIN) and part.text.strip()] or [""]
        return cls(session_id or "", beginning(asked[0]), beginning(asked[-1]))


@dataclass(frozen=True, eq=False)
class KnownTurn:
    """A prompt with its reply, as far as it is said: where messages begin, and their texts.

    Tools that a template shows after the system messages are a part of their own, without an index.
    """

    session: SessionName
    tokens: TokenArray
    parts: tuple[Part, ...] = ()
    starts: tuple[int, ...] = ()
    num_tools: int = 0

    @property
    def tools_at(self) -> int | None:
        """The place of the tools among the parts."""
        return next((place for place, part in enumerate(self.parts) if part.role == TOOLS), None)

    def index_of(self, place: int) -> int:
        """The message of a part."""
        return place - (self.tools_at is not None and place >= self.tools_at)

    def range_of(self, place: int) -> tuple[int, int]:
        """The tokens of a part."""
        return self.starts[place], self.starts[place + 1] if place + 1 < len(self.starts) else len(self.tokens)

    def places_in(self, start: int, stop: int) -> range:
        """The parts of which more lies in `[start, stop)` than the template's own few tokens, or the only one."""
        first = max(0, bisect_right(self.starts, start) - 1)
        end = max(first + 1, bisect_left(self.starts, stop))
        while end - first > 1 and self.range_of(first)[1] - start <= FEW_TOKENS:
            first += 1
        while end - first > 1 and stop - self.starts[end - 1] <= FEW_TOKENS:
            end -= 1
        return range(first, end)


def known_turn(session_id: str | None, turn: EvaluatedTurn) -> KnownTurn:
    """A turn; parts without an outline have no place."""
    prompt, session = turn.prompt, SessionName.of(session_id, turn.prompt)
    if not turn.outline.starts or len(turn.outline.starts) != len(prompt.parts):
        return KnownTurn(session, turn.tokens)
    placed, head = list(zip(turn.outline.starts, prompt.parts, strict=True)), prompt.num_head
    if prompt.tools and head < len(placed) and turn.head_tokens > placed[head][0] + FEW_TOKENS:
        # The template shows the tools after the system messages, where the outline has the next one begin.
        placed[head:head] = [(placed[head][0], Part(TOOLS, prompt.tools_text))]
        placed[head + 1] = turn.head_tokens, placed[head + 1][1]
    if turn.reply is not None:
        placed.append((turn.num_prompt_tokens, turn.reply))
    starts, parts = zip(*placed, strict=True)
    return KnownTurn(session, turn.tokens, parts, starts, len(prompt.tools))


def turns_known(conversations: Conversations, activity: Activity, namespace: str, model: str) -> list[KnownTurn]:
    """Running requests of a namespace and model, then its last turns, the latest first, then decisions."""
    own = (one for one in activity.open_requests(namespace) if one.model_id == model)
    answered = [known_turn(one.session_id, turn) for one in own if (turn := one.turn_so_far) is not None]
    ended = (known_turn(name.id, turn) for name, turn in conversations.turns_of(namespace, model))
    decided = [known_turn(None, turn) for *of, turn in activity.decided if of == [namespace, model]]
    return [*answered, *itertools.islice(ended, MAX_TURNS), *reversed(decided)]


@dataclass(kw_only=True)
class EdgeName:
    """Whose an edge is, and what it holds of the latest of them."""

    sessions: list[str] = field(default_factory=list)
    """Some of them."""
    num_sessions: int = 0
    first: int | None = None
    """The first message, from 0; None where messages have no place."""
    last: int | None = None
    role: str | None = None
    """The first message's, or `tools`."""
    tools: int = 0
    """The number of tools, if the edge holds them."""
    text: str = ""
    """The beginning of the last question, or else of the first message, that lies in the edge."""


def name_edges(turns: Sequence[KnownTurn], traced: Iterable[tuple[Traced, Traced]], tier: int) -> dict[int, EdgeName]:
    """Names of the edges in memory (`tier` 0) or on disk (1), by number."""
    names, owners = dict[int, EdgeName](), dict[int, dict[str, None]]()
    for turn, both in zip(turns, traced, strict=True):
        for number, start, stop in _own_edges(turn, both[tier]):
            if number not in names:
                names[number] = _name_of(turn, start, stop)
            owners.setdefault(number, {})[turn.session.id] = None
    for number, name in names.items():
        name.sessions, name.num_sessions = list(owners[number])[:MAX_TOLD], len(owners[number])
    return names


def _own_edges(turn: KnownTurn, traced: Traced) -> Iterator[tuple[int, int, int]]:
    """The turn's edges: not one that goes on with other tokens."""
    is_whole = len(turn.tokens) - traced.length <= EDGE_TOKENS
    return (edge for edge in traced.edges if is_whole or edge[2] <= traced.length)


def _name_of(turn: KnownTurn, start: int, stop: int) -> EdgeName:
    if not turn.starts:
        return EdgeName()
    places = turn.places_in(start, stop)
    nearly = range(start - FEW_TOKENS, stop + FEW_TOKENS + 1)
    whole = [place for place in places if all(end in nearly for end in turn.range_of(place))]
    asked = [place for place in whole if turn.parts[place].role == "user"]
    named = asked[-1] if asked else next(iter(whole), None)
    holds_tools = turn.tools_at in places if turn.tools_at is not None else turn.parts[places[0]].is_system
    return EdgeName(
        first=turn.index_of(places[0]),
        last=turn.index_of(places[-1]),
        role=turn.parts[places[0]].role,
        tools=turn.num_tools if holds_tools else 0,
        text="" if named is None or named == turn.tools_at else beginning(turn.parts[named].shown),
    )


def beginning(text: str) -> str:
    """A message's first words, after what agents put before a person's own."""
    own = text.rpartition("</system-reminder>")[2].strip() or text.strip()
    return own[:MAX_CHARACTERS]


def find_text(
    text: str, turns: Sequence[KnownTurn], traced: Iterable[tuple[Traced, Traced]], text_of: TextOf
) -> tuple[list[int], list[int], bool]:
    """Edges in memory and on disk in which a text begins, whatever its case; whether there may be more."""
    wanted, left = text.casefold(), MAX_SEARCHED_TOKENS
    found, seen = (set[int](), set[int]()), set[tuple[int, int, int]]()
    for turn, tier, number, start, stop in _pieces(wanted, turns, traced):
        if number in found[tier] or (tier, number, start) in seen:
            continue
        seen.add((tier, number, start))
        left -= stop - start
        if left < 0:
            return sorted(found[0]), sorted(found[1]), True
        shown = text_of(turn.tokens[start : stop + len(text)].tolist()).casefold()
        if 0 <= shown.find(wanted) < len(text_of(turn.tokens[start:stop].tolist())):
            found[tier].add(number)
    return sorted(found[0]), sorted(found[1]), False


def _pieces(
    wanted: str, turns: Sequence[KnownTurn], traced: Iterable[tuple[Traced, Traced]]
) -> Iterator[tuple[KnownTurn, int, int, int, int]]:
    """What edges hold of the messages with a text: turn, tier, number, and the range of tokens."""
    for turn, both in zip(turns, traced, strict=True):
        ranges = [turn.range_of(place) for place, part in enumerate(turn.parts) if wanted in part.shown.casefold()]
        edges = ((tier, *edge) for tier in (0, 1) for edge in _own_edges(turn, both[tier]))
        for (tier, number, *edge), (start, stop) in itertools.product(edges, ranges):
            if max(start, edge[0]) < min(stop, edge[1]):
                yield turn, tier, number, max(start, edge[0]), min(stop, edge[1])
