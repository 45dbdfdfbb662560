"""Every prompt token is restored, new, or evaluated again for a reason that is named."""

from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from models.prompt.shapes import NO_OUTLINE
from server.diagnosis.account import Conversations, EvaluatedTurn, Rendered, declined, explain
from server.diagnosis.causes import TOOLS, Cause, MissReason, advice
from server.diagnosis.compare import Turn, find_changes_between
from server.diagnosis.prompt import Part, Prompt
from server.doctor.recorded import characters_of

PARTS = st.builds(Part, st.sampled_from(["system", "user", "assistant", "tool"]), st.text("ab :1", max_size=12))
PROMPTS = st.builds(
    Prompt,
    st.lists(PARTS, min_size=1, max_size=6).map(tuple),
    st.lists(st.sampled_from(['{"name": "a"}', '{"name": "b"}', '{"name": "a", "x": 1}']), max_size=2).map(tuple),
    st.sampled_from(["", "{}"]),
    st.sampled_from(["m", "m", "m", "n"]),
)


def rendered(prompt: Prompt) -> Rendered:
    return Rendered(prompt, characters_of(prompt), NO_OUTLINE)


def evaluated(prompt: Prompt, reply: Part | None) -> EvaluatedTurn:
    return EvaluatedTurn(
        prompt, reply, tokens=characters_of(prompt, reply), num_prompt_tokens=len(characters_of(prompt))
    )


@given(PROMPTS, st.none() | PARTS, PROMPTS, st.floats(0, 1), st.floats(0, 1))
def test_what_is_evaluated_is_new_or_has_a_reason(
    earlier: Prompt, reply: Part | None, later: Prompt, match_share: float, hit_share: float
) -> None:
    previous, request = evaluated(earlier, reply), rendered(later)
    length = len(request.tokens)
    match = int(match_share * (length - 1))
    hit = int(hit_share * match)
    reuse = explain(previous, request, match=match, hit=hit)
    reach = min(len(previous.tokens), length - 1)
    num_new = length - max(reach, hit)
    assert length - hit == num_new + reuse.lost_tokens
    assert reuse.lost_tokens == sum(miss.lost_tokens for miss in reuse.misses)
    assert (reuse.miss is None) == (reuse.lost_tokens == 0)
    assert all(miss.lost_tokens >= 0 for miss in reuse.misses)
    assert declined(previous, request).lost_tokens == reach


@given(PROMPTS, PARTS, PARTS)
def test_a_turn_that_only_adds_messages_loses_nothing(prompt: Prompt, reply: Part, question: Part) -> None:
    later = Prompt((*prompt.parts, reply, question), prompt.tools, prompt.arguments, prompt.model)
    previous, request = evaluated(prompt, reply), rendered(later)
    hit = min(len(previous.tokens), len(request.tokens) - 1)
    assert explain(previous, request, match=hit, hit=hit).misses == ()


def test_what_a_template_does_is_told_apart_from_what_the_client_did() -> None:
    prompt, reply = Prompt((Part("user", "a" * 50),)), Part("assistant", "b" * 50)
    previous = evaluated(prompt, reply)
    shown = np.concatenate([previous.tokens[:60], np.full(40, 7, np.int32)])
    request = Rendered(Prompt((*prompt.parts, reply, Part("user", "c"))), shown, NO_OUTLINE)
    reuse = explain(previous, request, match=60, hit=52)
    assert reuse.miss is not None
    assert reuse.miss.reason is MissReason.TEMPLATE
    # What was kept counts the reply too.
    assert reuse.kept == 52 / len(previous.tokens)


def test_of_missing_state_the_reason_is_what_the_cache_still_knew() -> None:
    prompt = Prompt((Part("user", "a" * 50),))
    previous = evaluated(prompt, None)
    request = rendered(Prompt((*prompt.parts, Part("assistant", "b"), Part("user", "c"))))
    for match, reason in ((52, MissReason.NO_RESTORE_POINT), (20, MissReason.EVICTED)):
        miss = explain(previous, request, match=max(match, len(previous.tokens) * (match > 50)), hit=10).miss
        assert miss is not None and miss.reason is reason


def test_the_last_tokens_of_an_answer_that_nobody_evaluated_yet_are_no_evicted_state() -> None:
    prompt, reply = Prompt((Part("user", "a" * 50),)), Part("assistant", "b" * 20)
    previous = evaluated(prompt, reply)
    request = rendered(Prompt((*prompt.parts, reply, Part("user", "c"))))
    num_known = len(previous.tokens)
    miss = explain(previous, request, match=num_known - 1, hit=num_known - 1).miss
    assert miss is not None and (miss.reason, miss.lost_tokens) == (MissReason.TEMPLATE, 1)
    cleared = explain(replace(previous, lost=Cause.CLEARED), request, match=num_known - 1, hit=num_known - 1).miss
    assert cleared is not None and cleared.reason is MissReason.CLEARED
    much = explain(previous, request, match=previous.num_prompt_tokens, hit=previous.num_prompt_tokens).miss
    assert much is not None and much.reason is MissReason.EVICTED


def test_what_was_known_but_not_restorable_is_told_of_a_first_request_too() -> None:
    request = rendered(Prompt((Part("user", "a" * 50),)))
    miss = explain(None, request, match=45, hit=5).miss
    assert miss is not None and (miss.reason, miss.lost_tokens) == (MissReason.NO_RESTORE_POINT, 40)
    assert explain(None, request, match=20, hit=5).lost_tokens == 0
    cold = explain(None, request, match=0, hit=0).miss
    assert cold is not None and cold.reason is MissReason.COLD


def test_conversations_are_bounded_in_bytes() -> None:
    conversations = Conversations(max_bytes=100_000)
    for number in range(50):
        prompt = Prompt((Part("user", f"{number} " * 1000),), namespace="n")
        name, previous = conversations.find(None, rendered(prompt), str(number))
        assert previous is None
        conversations.record(name, evaluated(prompt, None))
        assert conversations.num_bytes <= 100_000
    assert len(conversations._turns) > 1
    conversations.forget("n", name.id)
    assert conversations.find(None, rendered(prompt), "x")[1] is None


def test_every_cause_has_a_cure_of_one_sentence_at_every_place() -> None:
    for cause in Cause:
        for place in (None, TOOLS, "system", "user", "assistant", "tool"):
            text = advice(cause, place)
            assert text.endswith(".") and ". " not in text


def test_the_reason_of_an_edit_is_where_it_stands() -> None:
    parts = (
        Part("system", "Be kind."),
        Part("user", "How far?"),
        Part("assistant", "Not far at all."),
        Part("user", "?"),
    )
    earlier = Prompt(parts, ('{"name": "a"}',))
    reasons = []
    for place in range(3):
        edited = replace(parts[place], text=f"{parts[place].text} 09:16")
        later = replace(earlier, parts=(*parts[:place], edited, *parts[place + 1 :], Part("assistant", "x")))
        reasons += [miss.reason for miss in find_changes_between(Turn(earlier), later)]
    reasons += [
        miss.reason for miss in find_changes_between(Turn(earlier), replace(earlier, tools=('{"name": "b"}',)))
    ]
    assert reasons == [
        MissReason.SYSTEM_CHANGED,
        MissReason.MESSAGES_CHANGED,
        MissReason.REPLY_CHANGED,
        MissReason.TOOLS_CHANGED,
    ]
