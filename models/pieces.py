"""Tokenizes long prompts piece by piece, remembering pieces, and gives generated text back as it was generated.

A tokenizer cuts its added tokens (`<|im_start|>` and its like) out of a text first and tokenizes what is between
them piece by piece. So a piece is tokenized once and remembered, and the next turn of a long conversation costs
only its new pieces. And since text does not determine tokens (a model may have said "Par" "is" where the tokenizer
says "Paris"), the ids of a generated reply are remembered as the ids of the piece it became: when a client sends
the reply back, the prompt continues with exactly the tokens whose state is cached.

Not every tokenizer works like this (some treat the first piece of a text differently), so `Pieces.fits` compares
piecewise with whole tokenization on samples, and a tokenizer that fails is not used piecewise.

What is remembered for one namespace is not known in another. Knows no templates and no requests. Any thread; the
memory is bounded and locked.
"""

import re
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

MAX_REMEMBERED_BYTES = 64 << 20
"""Text and token ids that are remembered at most."""

_SAMPLES = (
    "",
    " ",
    "\n",
    "Hello",
    " Hello",
    "Hello, world!\n",
    "user\nDas ist schön 🙂 12345 \t x\n\n",
    "  def f(x):\n    return x\n",
    "\n\n  ",
    "e\u0301 é 日本語",
)


@dataclass(frozen=True, eq=False)
class Piece:
    """Token ids of a piece of text, and for each the character offset in the piece where it ends at most."""

    ids: NDArray[np.int32]
    ends: NDArray[np.int64]

    @property
    def num_bytes(self) -> int:
        """What remembering it costs, roughly, without its text."""
        return self.ids.nbytes + self.ends.nbytes


class Pieces:
    """Piecewise tokenization by one fast tokenizer (of the `tokenizers` library), with a memory."""

    def __init__(self, backend: Any, added_tokens: Mapping[str, int]) -> None:
        """`backend` is borrowed; `added_tokens` maps the texts that it cuts out before anything else to their ids."""
        self._backend = backend
        self._added = dict(added_tokens)
        longest_first = sorted(self._added, key=len, reverse=True)
        self._border = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
        self._memory: OrderedDict[tuple[str, str], Piece] = OrderedDict()
        self._num_bytes = 0
        self._lock = threading.Lock()

    def fits(self) -> bool:
        """Whether the tokenizer cuts as assumed here, tried on texts with an added token before, between, after."""
        if not self._added:
            return False
        mark = next(iter(self._added))
        texts = [f"{a}{mark}{b}{mark}{mark}{c}" for a in _SAMPLES for b, c in pairwise(_SAMPLES)]
        return all(np.array_equal(self.tokenize(text).ids, self._encode(text).ids) for text in texts)

    def tokenize(self, text: str, namespace: str = "") -> Piece:
        """Returns the token ids of `text`, and where each ends, from remembered pieces where it can."""
        cuts = self._cut(text)
        return _joined(
            [self._piece(namespace, text[start:stop]) for start, stop in cuts], [start for start, _ in cuts]
        )

    def remember_reply(
        self,
        prompt: str,
        prompt_ids: NDArray[np.int32],
        reply: str,
        reply_ids: Sequence[int],
        namespace: str = "",
    ) -> None:
        """Remembers that `reply`, generated after `prompt`, was `reply_ids`, its end-of-turn token not included.

        Its first piece continues the last piece of the prompt. Nothing is remembered where the added tokens in text
        and ids disagree, as in a reply that was cut in the middle of a token.
        """
        texts = [reply[start:stop] for start, stop in self._cut(reply)]
        runs = self._runs(reply_ids)
        marks = [self._added.get(text) for text in texts]
        if marks != [run[0] if run[0] in self._added.values() else None for run in runs]:
            return
        opening = prompt[self._last_border(prompt) :]
        for text, run, mark in zip(texts, runs, marks, strict=True):
            if mark is None:
                self._remember(namespace, opening, prompt_ids, text, run)
            opening = ""

    def _remember(
        self, namespace: str, opening: str, prompt_ids: NDArray[np.int32], text: str, ids: Sequence[int]
    ) -> None:
        before = self._piece(namespace, opening) if opening else _joined([], [])
        if len(before.ids) and not np.array_equal(prompt_ids[-len(before.ids) :], before.ids):
            return
        # Where a generated token ends in the text is not known, so all are said to end where the piece does.
        ends = np.full(len(ids), len(opening) + len(text), np.int64)
        joined = Piece(np.concatenate([before.ids, np.array(ids, np.int32)]), np.concatenate([before.ends, ends]))
        self._keep((namespace, opening + text), joined)

    def _cut(self, text: str) -> list[tuple[int, int]]:
        """Returns the ranges of `text` that are tokenized apart: added tokens, and what is between them."""
        cuts: list[tuple[int, int]] = []
        position = 0
        for match in self._border.finditer(text):
            cuts += [(position, match.start()), match.span()]
            position = match.end()
        return [cut for cut in [*cuts, (position, len(text))] if cut[0] < cut[1]]

    def _runs(self, ids: Sequence[int]) -> list[list[int]]:
        """Returns `ids` cut before and after every added token."""
        added, runs = set(self._added.values()), list[list[int]]()
        for token in ids:
            if not runs or token in added or runs[-1][0] in added:
                runs.append([])
            runs[-1].append(token)
        return runs

    def _last_border(self, text: str) -> int:
        return max((match.end() for match in self._border.finditer(text)), default=0)

    def _piece(self, namespace: str, text: str) -> Piece:
        key = namespace, text
        with self._lock:
            known = self._memory.get(key)
            if known is not None:
                self._memory.move_to_end(key)
                return known
        piece = self._encode(text)
        self._keep(key, piece)
        return piece

    def _keep(self, key: tuple[str, str], piece: Piece) -> None:
        with self._lock:
            replaced = self._memory.pop(key, None)
            self._num_bytes += _cost(key, piece) - (_cost(key, replaced) if replaced else 0)
            self._memory[key] = piece
            while self._num_bytes > MAX_REMEMBERED_BYTES and self._memory:
                self._num_bytes -= _cost(*self._memory.popitem(last=False))

    def _encode(self, text: str) -> Piece:
        encoding = self._backend.encode(text, add_special_tokens=False)
        return Piece(np.array(encoding.ids, np.int32), token_ends(encoding.offsets, len(text)))


def token_ends(offsets: Sequence[tuple[int, int]], text_length: int) -> NDArray[np.int64]:
    """Returns an upper bound for where each token ends, ascending.

    Byte-level tokenizers may trim white space from the offsets they report, so a token can end later than
    stated, but never after the start of the next one; halves of one character report the same range.
    """
    spans = np.array(offsets, dtype=np.int64).reshape(-1, 2)
    next_starts = np.append(spans[1:, 0], text_length)
    ends: NDArray[np.int64] = np.maximum.accumulate(np.maximum(spans[:, 1], next_starts))
    return ends


def _joined(parts: Sequence[Piece], starts: Sequence[int]) -> Piece:
    if not parts:
        return Piece(np.empty(0, np.int32), np.empty(0, np.int64))
    ids = np.concatenate([part.ids for part in parts])
    ends = np.concatenate([part.ends + start for part, start in zip(parts, starts, strict=True)])
    return Piece(ids, ends)


def _cost(key: tuple[str, str], piece: Piece) -> int:
    return 2 * sum(map(len, key)) + piece.num_bytes + 200
