"""How many tokens were restored since a prompt was shown otherwise than sent."""

import numpy as np
import pytest

from models.prompt.shapes import Outline
from server.diagnosis.account import EvaluatedTurn, Rendered, healed
from server.diagnosis.causes import Heal, Healed, HealKind
from server.diagnosis.prompt import prompt_of

MESSAGES = [{"role": role, "content": role} for role in ("system", "user", "assistant", "tool")]
PROMPT = prompt_of(MESSAGES)
# A message's text ends where the next one begins; the calls of message 2 are tokens 300 to 350.
REQUEST = Rendered(PROMPT, np.arange(400, dtype=np.int32), Outline((0, 100, 200, 300), ("s", "u", "a", "t")))
BEFORE = EvaluatedTurn(PROMPT, tokens=np.arange(350, dtype=np.int32), num_prompt_tokens=250)
LATER = EvaluatedTurn(PROMPT, tokens=np.arange(400, dtype=np.int32), num_prompt_tokens=400)


@pytest.mark.parametrize(
    ("heal", "before", "hit", "saved"),
    [
        (Heal(HealKind.CALLS, 2), BEFORE, 350, 50),
        (Heal(HealKind.CALLS, 2), BEFORE, 390, 50),
        (Heal(HealKind.CALLS, 2), BEFORE, 200, 0),
        (Heal(HealKind.CALLS, 2), LATER, 399, 0),
        (Heal(HealKind.CALLS, 2), None, 390, 90),
        (Heal(HealKind.GIT, 0, 80, is_new=True), BEFORE, 350, 270),
        (Heal(HealKind.GIT, 0, 80), BEFORE, 350, 0),
        (Heal(HealKind.SYSTEM, 1, 9999, is_new=True), None, 150, 150),
        (Heal(HealKind.COMPACTION, 0, is_new=True), BEFORE, 350, 350),
    ],
)
def test_what_was_restored_after_the_difference_is_saved(
    heal: Heal, before: EvaluatedTurn | None, hit: int, saved: int
) -> None:
    assert healed(before, REQUEST, [heal], hit) == Healed((heal.kind,), saved)


def test_the_first_difference_counts_and_a_prompt_without_messages_has_none() -> None:
    both = [Heal(HealKind.CALLS, 2), Heal(HealKind.GIT, 0, 80, is_new=True)]
    assert healed(BEFORE, REQUEST, both, 350) == Healed((HealKind.CALLS, HealKind.GIT), 270)
    assert healed(BEFORE, Rendered(PROMPT, REQUEST.tokens), both, 350).saved_tokens == 0
