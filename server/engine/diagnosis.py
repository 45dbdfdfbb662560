"""Why a prompt was not reused: pure comparison of a request with the last turn that it shares most with.

Knows no trie, only what it reported: how much of the prompt was found and how much was restored.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from cache.tokens import TokenArray, common_prefix_length
from models.prompt.outline import Outline
from server.engine.session_history import FinishedTurn

_CONTEXT_TOKENS = 12
"""Tokens shown on either side of a change."""
_SAMPLE_TOKENS = 16
_MIN_SAMPLE_TOKENS = 8
"""A sample of the new prompt is searched for in the earlier one; one shorter than this may occur there by chance."""

Detokenize = Callable[[TokenArray], str]
"""Turns tokens into text."""


class MissReason(StrEnum):
    """Why less was reused than the session's last turn could have given."""

    COLD = "cold"
    SYSTEM_CHANGED = "system_changed"
    TOOLS_CHANGED = "tools_changed"
    MESSAGES_CHANGED = "messages_changed"
    NO_RESTORE_POINT = "no_restore_point"
    EVICTED = "evicted"
    DISABLED = "disabled"


@dataclass(frozen=True)
class Miss:
    """One reason, and where the prompt began to differ from the turn before, if it did."""

    reason: MissReason
    message_index: int | None = None
    role: str | None = None
    token: int | None = None
    """Offset of the first token that differs, or that could not be restored."""
    before: str = ""
    """The earlier prompt's text around `token`."""
    after: str = ""
    """This prompt's text around `token`."""
    dropped_tokens: int = 0
    """Tokens of the earlier prompt that were removed there, if the text behind them follows unchanged; else 0."""
    is_reordered: bool = False
    """Whether the tools are those of the earlier prompt, written in another order."""


@dataclass(frozen=True)
class Reuse:
    """How much of a prompt was reused, and why not more."""

    match_tokens: int
    hit_tokens: int
    kept: float | None
    """Share of the session's previous prompt that was reused, 0 to 1; None without one."""
    miss: Miss | None
    lost_tokens: int = 0
    """Prompt tokens evaluated because of the miss; those beyond the previous prompt's length do not count."""


def diagnose(
    previous: FinishedTurn | None,
    tokens: TokenArray,
    outline: Outline,
    *,
    match: int,
    hit: int,
    detokenize: Detokenize,
) -> Reuse:
    """Explains the reuse of a prompt of which `match` tokens were found and `hit` restored."""
    if previous is None:
        return Reuse(match, hit, None, Miss(MissReason.COLD, token=hit) if hit == 0 else None)
    kept = min(hit, previous.num_prompt_tokens) / previous.num_prompt_tokens
    held = min(previous.num_prompt_tokens, len(previous.tokens), len(tokens))
    miss = _find_miss(previous, tokens, outline, held, match=match, hit=hit, detokenize=detokenize)
    return Reuse(match, hit, kept, miss, max(0, held - hit) if miss else 0)


def _find_miss(
    previous: FinishedTurn,
    tokens: TokenArray,
    outline: Outline,
    held: int,
    *,
    match: int,
    hit: int,
    detokenize: Detokenize,
) -> Miss | None:
    """Returns the cause that cost more tokens: a change of the text, or missing state before that change."""
    common = min(common_prefix_length(previous.tokens, tokens), len(tokens) - 1)
    prompt_end = previous.outline.prompt_end or previous.num_prompt_tokens
    is_changed = common < min(prompt_end, len(previous.tokens), len(tokens) - 1)
    if is_changed and held - common >= common - hit:
        return _change(previous, tokens, outline, common, detokenize)
    if hit < common:
        reason = MissReason.EVICTED if match < common else MissReason.NO_RESTORE_POINT
        return Miss(reason, *outline.message_at(hit), token=hit)
    return None


def _change(
    previous: FinishedTurn, tokens: TokenArray, outline: Outline, common: int, detokenize: Detokenize
) -> Miss:
    index, role = outline.message_at(common)
    reason, is_reordered = MissReason.MESSAGES_CHANGED, False
    if common < max(outline.head_end, previous.outline.head_end):
        tools_differ = outline.tools_digest != previous.outline.tools_digest
        reason = MissReason.TOOLS_CHANGED if tools_differ else MissReason.SYSTEM_CHANGED
        is_reordered = tools_differ and outline.tools_set_digest == previous.outline.tools_set_digest
    around = slice(max(0, common - _CONTEXT_TOKENS), common + _CONTEXT_TOKENS)
    before, after = detokenize(previous.tokens[around]), detokenize(tokens[around])
    dropped = _count_dropped(previous.tokens[common:], tokens[common : common + _SAMPLE_TOKENS])
    return Miss(reason, index, role, common, before, after, dropped, is_reordered)


def _count_dropped(earlier: TokenArray, sample: TokenArray) -> int:
    """Returns how far into `earlier` the sample begins; 0 if it is not there, or too short to tell."""
    if len(sample) < _MIN_SAMPLE_TOKENS:
        return 0
    places = np.arange(max(0, len(earlier) - len(sample) + 1))
    for number, token in enumerate(sample):
        places = places[earlier[places + number] == token]
    return int(places[0]) if len(places) else 0
