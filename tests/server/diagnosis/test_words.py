"""The kind of a change is told by the words that it falls into."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.texts import shared_length
from server.diagnosis.causes import Cause
from server.diagnosis.words import MAX_WORDS, classify_text, excerpt, find_changes, told_apart

UUIDS = ("2fec6ce7-1d24-4c3a-8f32-8f887b6b9fee", "28539b52-4569-4afe-802d-84510b521cf2")

CLOCKS = [
    ("It is 09:16 now", "It is 09:17 now"),
    ("It is 9:59", "It is 10:00"),
    ("at 11:59 am today", "at 11:59 pm today"),
    ("2026-11-22T09:16:01.250Z", "2026-11-22T09:16:02.000Z"),
    ("[2026-11-22 09:16:01+01:00]", "[2026-11-22 10:16:01+01:00]"),
    ("date: 2026-11-21.", "date: 2026-11-22."),
    ("6-11-22 09:18. Answer", "6-11-22 09:19. Answer"),
    ("Nov 21, 2026", "Nov 22, 2026"),
    ("Today is Saturday", "Today is Sunday"),
    ("on 30 November 2026", "on 1 December 2026"),
    ("in November of", "in December of"),
    ("21.11.2026", "22.11.2026"),
    ("11/21/26", "11/22/26"),
    ("last seen 3 minutes ago", "last seen 14 minutes ago"),
    ("now=1795311985", "now=1795311999"),
    ("now=1795311985902", "now=1795311999001"),
    ("Good morning", "Good evening"),
    ("am 21.11.2026.", "am 22.11.2026."),
    ("Sat 29", "Sun 30"),
    ("Sa., 28. Nov.", "So., 29. Nov."),
    ("Guten Morgen", "Guten Tag"),
    ("um 09.16 Uhr", "um 09.17 Uhr"),
    ("il est 9h16", "il est 9h17"),
    ("samedi 29 août", "dimanche 30 août"),
    ("a las 9, sábado", "a las 9, domingo"),
    ("29 de noviembre de 2026", "30 de noviembre de 2026"),
    ("ore 9.16", "ore 9.17"),
    ("sexta-feira", "sábado"),
    ("zaterdag", "zondag"),
    ("sobota", "niedziela"),
    ("29 ноября", "30 ноября"),
    ("вторник", "среда"),
    ("9時16分", "9時17分"),
    ("土曜日", "日曜日"),
    ("下午3:20", "下午3:21"),
    ("星期六", "星期日"),
    ("2026年11月29日", "2026年11月30日"),
    ("오전 9시", "오후 1시"),
    ("토요일", "일요일"),
    ("السبت", "الأحد"),
    ("up 1h 12m", "up 1h 13m"),
    ("up 45m", "up 46m"),
    ("vor 3 Minuten", "vor 4 Minuten"),
]
ADDRESSES = [
    ("http://127.0.0.1:49213/sse", "http://127.0.0.1:50122/sse"),
    ("localhost:5173", "localhost:5174"),
    ("at 192.168.1.5.", "at 192.168.1.9."),
    ("https://3f2a-81.example.app/x", "https://9b1c-81.example.app/x"),
    ("port 49213", "port 50122"),
    ("ws://[::1]:4921", "ws://[::1]:5012"),
]
COUNTERS = [
    ("Memory [49% — 1,085/2,200 chars]", "Memory [50% — 1,085/2,200 chars]"),
    ("used 1,085/2,200", "used 1,125/2,200"),
    ("Turn 9 of the talk", "Turn 10 of the talk"),
    ("spent $0.12.", "spent $0.19."),
    ("budget: $3.20 left", "budget: $2.95 left"),
    ("tokens=512;", "tokens=1024;"),
    ("step #3", "step #4"),
    ("5 out of 6", "4 out of 6"),
    ("12°C, wind 3 m/s", "13°C, wind 4 m/s"),
    ("at 48.8566, 2.3522", "at 48.8571, 2.3519"),
    ("1048576 tokens", "1048999 tokens"),
    ("shop.py:17", "shop.py:18"),
]
NONCES = [
    (f"id {UUIDS[0]}.", f"id {UUIDS[1]}."),
    ("cch=eb6c6;", "cch=0aaa9;"),
    ("commit 9f1c2ab done", "commit 03de44b done"),
    ("call_x8JQmV2bN4Lk", "call_Zt71pQrW9dSa"),
    ("key dGhpcyBpcyBhIHRlc3Q5", "key YW5vdGhlciB0ZXN0IDI3"),
    ("session: brave-otter", "session: quiet-heron"),
    ('"request_id": "abcd"', '"request_id": "wxyz"'),
    ("ref 839201774653", "ref 839201774699"),
    ("main@4f3e2d1", "main@deadbee"),
    ("v1.2.3-12-g4f3e2d1", "v1.2.3-12-ga81c09e"),
    ("on main/4f3e2d1", "on main/4810293"),
    ("<Shop at 0x7f3a1c2d>", "<Shop at 0x7f9b0e11>"),
    ("/var/run/tmpab12cd", "/var/run/tmpzz98qe"),
    ("/tmp/tmp.QwErTy/x", "/tmp/tmp.AsDfGh/x"),
    ("eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiJhbGlj", "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiJib2Ji"),
    ("a.png?date=20261129T091600Z&sig=9f1c2ab77e", "a.png?date=20261129T101600Z&sig=03de44b77e"),
]
EDITS = [
    ("You are a helpful assistant", "You are a title writer"),
    ("He lives in Paris", "He lives in Rome"),
    ("It is 09:16, sunny", "It is 09:16. rainy"),
    ("in 2026 we saw apples", "in 2026 we saw pears"),
    ("the deadbeef cafe", "the deadbeat cafe"),
    ("", "something"),
    ("more", ""),
]


@pytest.mark.parametrize(
    ("before", "after", "cause"),
    [
        (before, after, cause)
        for cause, pairs in (
            (Cause.CLOCK, CLOCKS),
            (Cause.COUNTER, COUNTERS),
            (Cause.NONCE, NONCES),
            (Cause.ADDRESS, ADDRESSES),
            (Cause.EDITED, EDITS),
        )
        for before, after in pairs
    ],
)
def test_a_change_is_told_from_its_words(before: str, after: str, cause: Cause) -> None:
    assert classify_text(before, after) is cause
    assert classify_text(after, before) is cause
    # What stands around it, at a distance, does not matter.
    around = "On 2026-01-01 at 12:00, 3 of 4 said: {} and 5 days later it ended."
    assert classify_text(around.format(f" {before} "), around.format(f" {after} ")) is cause


FORMS = [
    ("one  two\n", "one two", Cause.REFORMATTED),
    ('{"a": 1}', '{ "a": 1 }', Cause.REFORMATTED),
    ("It&#39;s 1 &lt; 2", "It's 1 < 2", Cause.ENCODED),
    ("caf\u00e9", "cafe\u0301", Cause.ENCODED),
    ("“so” he said", '"so" he said', Cause.ENCODED),
    ("I \u2764 tea", "I \u2764\ufe0f tea", Cause.ENCODED),
    ("so it is", "\u200fso it\u034f is", Cause.ENCODED),
    ("Examples:\n- a: 1\n- b: 2\nEnd.", "Examples:\n- c: 3\n- d: 4\nEnd.", Cause.EXAMPLES),
    ("Q: 1+1\nA: 2", "Q: 2+2\nA: 4", Cause.EXAMPLES),
    ("Notes:\n- likes tea\n- is 9", "Notes:\n- likes milk\n- lives here", Cause.EDITED),
    ('{"humidity": 5}', '{"temperature": 5}', Cause.EDITED),
]


@pytest.mark.parametrize(("before", "after", "cause"), FORMS)
def test_the_same_said_in_another_form_is_told_from_something_else(before: str, after: str, cause: Cause) -> None:
    (change,) = find_changes(before, after)
    assert change.cause is cause


@pytest.mark.parametrize("value", UUIDS)
def test_an_excerpt_shows_whole_words_wherever_it_is_cut(value: str) -> None:
    text = " ".join([value] * 20)
    for offset in range(len(text)):
        assert set(excerpt(text, offset).split()) == {value}


def test_the_same_words_in_another_order_are_reordered() -> None:
    (change,) = find_changes('{"b": 1, "a": [2, 3]}', '{"a": [2, 3], "b": 1}')
    assert change.cause is Cause.REORDERED


def test_every_kind_of_change_in_a_text_is_found_in_order() -> None:
    text = "Rules. " * 50 + "\nIt is {}.\nMemory [{}%]\nRequest: {}\n" + "More rules. " * 50 + "\nIt is {}."
    before, after = (text.format(f"09:1{n}", 49 + n, UUIDS[n], f"09:1{n}") for n in (0, 1))
    changes = find_changes(before, after)
    assert [change.cause for change in changes] == [Cause.CLOCK, Cause.COUNTER, Cause.NONCE]
    assert "09:10" in changes[0].before and "09:11" in changes[0].after
    assert "[49%]" in changes[1].before and "[50%]" in changes[1].after


def test_of_too_many_changes_the_first_is_told() -> None:
    before, after = (f"At 09:1{n} " + f"word{n} " * MAX_WORDS for n in (1, 2))
    assert [change.cause for change in find_changes(before, after)] == [Cause.CLOCK]


@given(st.text(alphabet='a1:-" %/T.\n', max_size=40), st.text(alphabet='a1:-" %/T.\n', max_size=40))
def test_any_two_texts_are_compared(before: str, after: str) -> None:
    changes = find_changes(before, after)
    assert bool(changes) == (before != after)
    if changes:
        assert before.find(changes[0].before) <= shared_length(before, after), "the first change comes first"


@given(st.text(alphabet="ab", max_size=9), st.text(alphabet="ab", max_size=9))
def test_the_shared_length_is_that_of_the_common_beginning(one: str, other: str) -> None:
    length = shared_length(one, other)
    assert one[:length] == other[:length]
    assert length in (len(one), len(other)) or one[length] != other[length]


@pytest.mark.parametrize(
    ("before", "after", "told"),
    [
        ("Hi there", "\ufeffHi there", ("Hi there", "\\ufeffHi there")),
        ("Question 1", "Ques\u200btion 1", ("Question 1", "Ques\\u200btion 1")),
        ("a caf\u00e9 here", "a cafe\u0301 here", ("a caf\\xe9 here", "a cafe\\u0301 here")),
        ("one word", "one  word", ("one␣word", "one␣␣word")),
        ("Be kind.", "Be kind. ", ("Be kind.", "Be kind.␣")),
        ("one\ntwo", "one\r\ntwo", ("one\ntwo", "one\\r\ntwo")),
        ("at 9", "at 10", ("at 9", "at 10")),
        ("I \u2764 tea", "I \u2764\ufe0f tea", ("I \u2764 tea", "I \u2764\\ufe0f tea")),
        ("to the left", "to \u200fthe left", ("to the left", "to \\u200fthe left")),
    ],
)
def test_a_difference_is_never_shown_as_two_texts_that_look_alike(before: str, after: str, told: object) -> None:
    assert told_apart(before, after) == told
