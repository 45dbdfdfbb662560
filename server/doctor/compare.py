"""What a request would evaluate although an earlier one of its session had it, told from the texts alone. Pure.

Like the server, it compares a request with the turn of the session that it goes on from, since one session may hold
several conversations. Tokens are estimated as characters / 4.
"""

from collections.abc import Sequence

from server.doctor.causes import Cause
from server.doctor.findings import Checkup, Loss, is_negligible
from server.doctor.parting import Words, find_parting
from server.doctor.recorded import Recorded

CHARACTERS_PER_TOKEN = 4
MAX_TIPS = 4
"""Conversations of one session that are kept in mind."""


def checkup_of(name: str, requests: Sequence[Recorded], tokens_per_second: float | None = None) -> Checkup:
    """Returns what is wrong with a conversation; with a speed of prefill, also in seconds."""
    visit = _Visit(tokens_per_second)
    for number, request in enumerate(requests, 1):
        visit.add(number, request)
    kept = sum(visit.kept) / len(visit.kept) if visit.kept else None
    return Checkup(name, len(requests), kept, tuple(sorted(visit.losses, key=lambda loss: loss.turn)))


class _Visit:
    """Goes through the requests of one session in their order."""

    def __init__(self, tokens_per_second: float | None) -> None:
        self.losses: list[Loss] = []
        self.kept: list[float] = []
        self._speed = tokens_per_second
        self._tips: list[tuple[int, Recorded]] = []
        self._asides: dict[int, Loss] = {}
        """Requests that go on from nothing, by turn: side requests if what was before goes on later."""

    def add(self, number: int, request: Recorded) -> None:
        """Compares a request with the tip that it goes on from, and makes it one."""
        tip = max(reversed(self._tips), key=lambda tip: request.num_repeated(tip[1]), default=None)
        if tip is None or request.num_repeated(tip[1]) == 0:
            self._note_aside(number, request)
            self._tips = [*self._tips, (number, request)][-MAX_TIPS:]
            return
        self._confirm_asides(since=tip[0])
        self._compare(number, tip[1], request)
        self._tips = [other for other in self._tips if other is not tip] + [(number, request)]

    def _note_aside(self, number: int, request: Recorded) -> None:
        partings = [find_parting(tip, request) for _, tip in self._tips]
        shared = max((parting.shared for parting in partings if parting is not None), default=None)
        if shared is not None and not is_negligible(None, (request.num_characters - shared) // CHARACTERS_PER_TOKEN):
            words = Words(Cause.SIDE_REQUEST, "", request.messages[-1].text)
            self._asides[number] = self._loss(number, words, "", request.num_characters - shared)

    def _confirm_asides(self, since: int) -> None:
        for number in [number for number in self._asides if number > since]:
            self.losses.append(self._asides.pop(number))

    def _compare(self, number: int, earlier: Recorded, request: Recorded) -> None:
        reach = min(earlier.num_characters, request.num_characters)
        parting = find_parting(earlier, request)
        shared = reach if parting is None else min(parting.shared, reach)
        self.kept.append(shared / earlier.num_characters if earlier.num_characters else 1.0)
        if parting is None or is_negligible(parting.role, (reach - shared) // CHARACTERS_PER_TOKEN):
            return
        for place, words in enumerate(parting.words):
            # Only the first change cost something; the others would have.
            characters = 0 if place else reach - shared
            self.losses.append(self._loss(number, words, parting.where, characters, is_hidden=place > 0))

    def _loss(self, number: int, words: Words, where: str, characters: int, *, is_hidden: bool = False) -> Loss:
        tokens = characters // CHARACTERS_PER_TOKEN
        seconds = tokens / self._speed if self._speed else None
        return Loss(number, words.cause, where, tokens, seconds, words.before, words.after, is_hidden)
