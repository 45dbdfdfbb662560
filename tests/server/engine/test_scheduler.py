"""The scheduler's choices, one rule at a time."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from server.engine.request import GenerationRequest, Priority, Wait, WaitReason
from server.engine.scheduler import LOOKAHEAD, MAX_PASSES, MAX_WAITS, Phase, Scheduled, Scheduler, choose_to_wait

CHUNK = 16


class Turn(Scheduled):
    """A sequence of which only the scheduler knows."""

    def __init__(
        self,
        name: str,
        arrival: int,
        tokens: Sequence[int] | int,
        *,
        phase: Phase = Phase.WAITING,
        offset: int = 0,
        num_prompt: int | None = None,
        shares: bool = True,
        **fields: Any,
    ) -> None:
        """An int for `tokens` means so many tokens that nobody else has; those behind `num_prompt` are output."""
        values = [1000 * arrival + n for n in range(tokens)] if isinstance(tokens, int) else list(tokens)
        every = np.array(values, np.int32)
        super().__init__(GenerationRequest(name, every[:num_prompt], 1, cache_prompt=shares, **fields), arrival)
        self.queue(every)
        self.phase, self.offset = phase, offset

    def change(self, **fields: Any) -> None:
        self.request = replace(self.request, **fields)


def scheduler_with(*turns: Turn) -> Scheduler[Turn]:
    """Returns a scheduler that knows the turns."""
    scheduler = Scheduler[Turn](CHUNK)
    for one in turns:
        scheduler.add(one)
    return scheduler


def chosen(scheduler: Scheduler[Turn], max_tokens: int = CHUNK, **restorable: int) -> str | None:
    """Returns the name of the sequence that goes next."""
    choice = scheduler.choose_prefill(lambda one: restorable.get(one.request.request_id, 0), max_tokens)
    return None if choice is None else choice.request.request_id


def test_what_is_left_of_a_step_goes_to_whoever_is_next_or_to_nobody() -> None:
    scheduler = scheduler_with(Turn("a", 1, 10), Turn("b", 2, 3))
    assert chosen(scheduler, max_tokens=9) == "a"
    assert chosen(scheduler, max_tokens=8) is None, "somebody passed who came later"
    assert chosen(scheduler, max_tokens=5, a=4) == "a", "what can be restored is not evaluated"


def test_chunks_end_at_multiples_of_their_size_or_with_the_prompt_so_what_fits_is_known() -> None:
    scheduler = scheduler_with(Turn("a", 1, 100, phase=Phase.PREFILLING, offset=CHUNK + 10))
    assert chosen(scheduler, max_tokens=6) == "a"
    assert chosen(scheduler, max_tokens=5) is None
    scheduler = scheduler_with(Turn("a", 1, 100, phase=Phase.PREFILLING, offset=100 - 1 - CHUNK))
    assert chosen(scheduler, max_tokens=CHUNK) == "a"
    assert chosen(scheduler, max_tokens=CHUNK - 1) is None, "what is left at the end is one chunk"


def test_short_ones_pass_each_chunk_of_a_long_one_a_bounded_number_of_times() -> None:
    long = Turn("long", 1, 1000, phase=Phase.PREFILLING)
    scheduler = scheduler_with(long)
    for number in range(3 * MAX_PASSES):
        short = Turn(f"short{number}", 2 + number, CHUNK)
        scheduler.add(short)
        if number and number % MAX_PASSES == 0:
            assert chosen(scheduler) == "long"
            long.offset += CHUNK
        assert chosen(scheduler) == short.request.request_id
        scheduler.remove(short)


def test_what_is_restorable_makes_a_prompt_short() -> None:
    scheduler = scheduler_with(Turn("long", 1, 1000), Turn("warm", 2, 900))
    assert chosen(scheduler) == "long"
    assert chosen(scheduler, warm=890) == "warm"


def test_interactive_before_background_until_it_has_waited_enough() -> None:
    patient = Turn("patient", 1, 100, priority=Priority.BACKGROUND, phase=Phase.PREFILLING, offset=16)
    scheduler = scheduler_with(patient)
    for number in range(MAX_WAITS):
        other = Turn(f"i{number}", 2 + number, 100)
        scheduler.add(other)
        assert chosen(scheduler) == other.request.request_id
        scheduler.remove(other)
    scheduler.add(Turn("one more", 999, 100))
    assert chosen(scheduler) == "patient"


def test_a_stalled_scheduler_begins_nothing_new_until_something_ends() -> None:
    running, waiting = Turn("a", 1, 9, phase=Phase.DECODING), Turn("b", 2, 9)
    scheduler = scheduler_with(running, waiting)
    scheduler.is_stalled = True
    assert chosen(scheduler) is None
    scheduler.remove(running)
    assert chosen(scheduler) == "b"


class TestOneSession:
    prompt = tuple(range(40))

    def pair(
        self, phase: Phase = Phase.DECODING, *, session: str = "s", tail: Sequence[int] = (7, 8), **fields: Any
    ) -> Scheduler[Turn]:
        """Returns a request of session "s" in some phase, and a later one that adds `tail` to its prompt."""
        return scheduler_with(
            Turn("a", 1, self.prompt, session_id="s", phase=phase, offset=39, **fields),
            Turn("b", 2, [*self.prompt, *tail], session_id=session, **fields),
        )

    @pytest.mark.parametrize("phase", list(Phase))
    def test_what_goes_on_from_an_earlier_prompt_waits_for_its_end(self, phase: Phase) -> None:
        scheduler = self.pair(phase)
        assert chosen(scheduler, b=40) in (None, "a")
        scheduler.remove(scheduler.sequences["a"])
        assert chosen(scheduler, b=40) == "b"

    @pytest.mark.parametrize("tail", [(), (7,)])
    def test_another_message_after_the_same_history_runs_beside_it(self, tail: tuple[int, ...]) -> None:
        scheduler = scheduler_with(
            Turn("a", 1, [*self.prompt, 91, 92], session_id="s", phase=Phase.DECODING),
            Turn("b", 2, [*self.prompt, 81, *tail], session_id="s"),
        )
        assert chosen(scheduler, b=40) == "b"

    def test_the_same_prompt_again_runs_beside_it_for_there_is_no_answer_to_go_on_from(self) -> None:
        assert chosen(self.pair(tail=()), b=39) == "b"

    def test_an_earlier_request_never_waits_for_a_later_one(self) -> None:
        scheduler = scheduler_with(
            Turn("late", 2, self.prompt, session_id="s", phase=Phase.DECODING),
            Turn("early", 1, [*self.prompt, 92], session_id="s"),
        )
        assert chosen(scheduler) == "early"

    def test_one_that_is_replayed_is_waited_for_again_wherever_its_answer_leads(self) -> None:
        scheduler = self.pair()
        scheduler.remove(scheduler.sequences["a"])
        scheduler.add(Turn("a", 1, [*self.prompt, 55, 56], num_prompt=40, session_id="s"))
        assert chosen(scheduler) == "a"
        scheduler.sequences["a"].phase = Phase.DECODING
        assert chosen(scheduler) is None

    def test_an_interactive_turn_does_not_wait_for_a_background_request(self) -> None:
        scheduler = self.pair()
        scheduler.sequences["a"].change(priority=Priority.BACKGROUND)
        scheduler.remove(turn := scheduler.sequences["b"])
        scheduler.add(turn)
        assert chosen(scheduler) == "b"


class TestOnePrefix:
    shared = tuple(range(200))

    def pair(self, *, offset: int, **fields: object) -> Scheduler[Turn]:
        """Returns a prefill at `offset` of a shared prefix, and a later request on the same prefix."""
        return scheduler_with(
            Turn("a", 1, [*self.shared, *range(900, 1200)], phase=Phase.PREFILLING, offset=offset),
            Turn("b", 2, [*self.shared, 5], **fields),  # type: ignore[arg-type]
        )

    def test_the_second_waits_until_the_first_has_passed_it(self) -> None:
        assert chosen(self.pair(offset=0), b=0) == "a"
        assert chosen(self.pair(offset=184), b=184) == "b"  # nearly all there already: waiting would gain little
        assert chosen(self.pair(offset=200), b=200) == "b"

    def test_nobody_waits_across_namespaces_or_without_sharing(self) -> None:
        for fields in ({"namespace": "other"}, {"shares": False}):
            scheduler = self.pair(offset=0, **fields)
            scheduler.choose_prefill(lambda one: 0, CHUNK)
            waiting = [one.request.request_id for one in scheduler.in_phase(Phase.WAITING)]
            first = scheduler.sequences["a"]
            first.phase = Phase.DECODING
            assert waiting == ["b"] and chosen(scheduler) == "b"

    def test_nobody_is_asked_again_what_is_restorable_before_the_first_has_passed_it(self) -> None:
        scheduler = self.pair(offset=0)
        first, asked = scheduler.sequences["a"], []
        for offset in (0, 50, 150, 199, 200):
            first.offset = offset
            scheduler.choose_prefill(lambda one: asked.append(first.offset) or 0, CHUNK)  # type: ignore[func-returns-value]
        assert asked == [0, 200]

    def test_a_background_prefill_that_an_interactive_request_waits_for_goes_before_other_interactive_ones(
        self,
    ) -> None:
        scheduler = self.pair(offset=0)
        scheduler.sequences["a"].change(priority=Priority.BACKGROUND)
        scheduler.add(Turn("later", 3, 100))
        assert chosen(scheduler) == "a"
        scheduler.remove(scheduler.sequences["b"])
        assert chosen(scheduler) == "later"


class TestManyWaiting:
    """Requests that must wait do not keep from being seen those that could run."""

    prompt = tuple(range(100))

    def test_a_stranger_behind_one_sessions_turns_is_chosen_at_once(self) -> None:
        turns = [Turn(f"t{n}", n, [*self.prompt, *range(n)], session_id="s") for n in range(1, 42)]
        turns[0].phase = Phase.DECODING
        assert chosen(scheduler_with(*turns, Turn("stranger", 99, 9))) == "stranger"

    def test_a_stranger_behind_those_who_wait_for_one_prefix_is_chosen_at_once(self) -> None:
        first = Turn("first", 0, [*self.prompt, *range(900)], phase=Phase.PREFILLING)
        others = [Turn(f"o{n}", n, [*self.prompt, 1000 + n]) for n in range(1, 42)]
        assert chosen(scheduler_with(first, *others, Turn("stranger", 99, 9))) == "stranger"

    def test_a_background_request_grows_impatient_behind_a_window_full_of_interactive_ones(self) -> None:
        scheduler = scheduler_with(Turn("patient", 1, 9, priority=Priority.BACKGROUND))
        for number in range(LOOKAHEAD + MAX_WAITS):
            scheduler.add(Turn(f"i{number}", 2 + number, 9))
        for _ in range(MAX_WAITS):
            choice = scheduler.choose_prefill(lambda one: 0, CHUNK)
            assert choice is not None and choice.request.request_id != "patient"
            scheduler.remove(choice)
        assert chosen(scheduler) == "patient"


def test_a_request_whose_state_is_being_read_waits_only_while_others_run() -> None:
    loading, other = Turn("loading", 1, 9), Turn("other", 2, 9)
    loading.is_loading = True
    scheduler = scheduler_with(loading, other)
    assert chosen(scheduler) == "loading"
    other.phase = Phase.DECODING
    assert chosen(scheduler) is None
    loading.is_loading = False
    assert chosen(scheduler) == "loading"


def test_of_those_that_run_the_background_waits_first_and_then_the_youngest() -> None:
    oldest, young = Turn("a", 1, [1, 2]), Turn("b", 2, [1, 2])
    background = Turn("c", 0, [1, 2], priority=Priority.BACKGROUND)
    assert choose_to_wait([oldest, background, young]) is background
    assert choose_to_wait([young, oldest]) is young
    assert choose_to_wait([oldest]) is None and choose_to_wait([]) is None


def test_a_newcomer_does_not_pass_one_that_was_preempted_unless_it_ranks_before_it() -> None:
    preempted, newcomer = Turn("back", 1, 90, priority=Priority.BACKGROUND), Turn("new", 2, 5)
    preempted.is_preempted = True
    assert chosen(scheduler_with(preempted, newcomer)) == "new"
    newcomer.change(priority=Priority.BACKGROUND)
    assert chosen(scheduler_with(preempted, newcomer)) == "back"
    preempted.is_preempted = False
    assert chosen(scheduler_with(preempted, newcomer)) == "new", "a short one passes a long one"


def test_one_that_was_preempted_holds_up_nothing_that_it_waits_for_itself() -> None:
    history = list(range(20))
    earlier = Turn("earlier", 1, history, priority=Priority.BACKGROUND, session_id="s")
    later = Turn("later", 2, [*history, 7, 7], priority=Priority.BACKGROUND, session_id="s")
    later.is_preempted, later.num_passed = True, MAX_WAITS
    assert later.rank < earlier.rank
    assert chosen(scheduler_with(earlier, later)) == "earlier"


def test_a_wait_has_its_reason() -> None:
    common = list(range(400))
    running = Turn("first", 1, [*common, 1], phase=Phase.PREFILLING, offset=128)
    waiting = Turn("shares", 2, [*common, 2])
    later = Turn("goes-on", 4, [*common, 1, 5], session_id="s")
    running.change(session_id="s")
    loading = Turn("loading", 5, 40)
    scheduler = scheduler_with(running, waiting, later, loading, Turn("other", 6, 40))
    loading.is_loading = True
    assert chosen(scheduler) is not None
    waits = scheduler.waits(has_slot=True)
    assert waits["shares"] == Wait(WaitReason.BEGINNING, "first", 128, 400)
    assert waits["goes-on"] == Wait(WaitReason.ANSWER, "first")
    assert waits["loading"] == Wait(WaitReason.DISK) and waits["other"] == Wait(WaitReason.ORDER)
    assert "first" not in waits
    assert scheduler.waits(has_slot=False)["other"] == Wait(WaitReason.SLOT)
    scheduler.is_stalled = True
    assert scheduler.waits(has_slot=True)["other"] == Wait(WaitReason.MEMORY)
