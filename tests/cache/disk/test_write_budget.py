"""The bytes that may be written in a day: no change of the wall clock adds or takes any while the process runs."""

from cache.disk.index import DAY_SECONDS, WriteBudget, WriteDay


class Clocks:
    """A wall clock that can be set, and one that only goes forward."""

    def __init__(self) -> None:
        self.wall, self.elapsed = 1e9, 50.0

    def budget(self, bytes_per_day: int | None = 100, saved: WriteDay | None = None) -> WriteBudget:
        return WriteBudget(bytes_per_day, lambda: self.wall, lambda: self.elapsed, saved)

    def pass_seconds(self, seconds: float) -> None:
        self.wall += seconds
        self.elapsed += seconds


def test_a_day_begins_with_its_first_write_and_ends_after_24_hours() -> None:
    clocks = Clocks()
    budget = clocks.budget()
    clocks.pass_seconds(DAY_SECONDS / 2)
    budget.count(100)
    clocks.pass_seconds(DAY_SECONDS - 1)
    assert (budget.written_bytes, budget.allows(0), budget.allows(1)) == (100, True, False)
    clocks.pass_seconds(1)
    assert (budget.written_bytes, budget.allows(100), budget.allows(101)) == (0, True, False)


def test_without_a_limit_bytes_are_counted_all_the_same() -> None:
    budget = Clocks().budget(None)
    budget.count(10**15)
    assert budget.allows(10**15) and budget.written_bytes == 10**15


def test_setting_the_wall_clock_changes_nothing() -> None:
    for step in (-10 * DAY_SECONDS, -1.0, 10 * DAY_SECONDS):
        clocks = Clocks()
        budget = clocks.budget()
        budget.count(60)
        clocks.wall += step
        assert budget.written_bytes == 60
        budget.count(40)
        clocks.pass_seconds(DAY_SECONDS - 1)
        assert not budget.allows(1)
        clocks.pass_seconds(1)
        assert budget.allows(100)


def resumed(clocks: Clocks, saved: WriteDay) -> WriteBudget:
    """Returns the budget of another process, whose clock that only goes forward starts elsewhere."""
    clocks.elapsed = 7.0
    return clocks.budget(saved=saved)


def test_a_restart_goes_on_with_the_day() -> None:
    clocks = Clocks()
    budget = clocks.budget()
    budget.count(40)
    clocks.pass_seconds(1000)
    saved = budget.count(30)
    assert (saved.age_seconds, saved.num_bytes) == (1000, 70)
    clocks.pass_seconds(2000)
    again = resumed(clocks, saved)
    assert again.written_bytes == 70
    clocks.pass_seconds(DAY_SECONDS - 3001)
    assert not again.allows(31)
    clocks.pass_seconds(1)
    assert again.allows(100)
    clocks.pass_seconds(DAY_SECONDS)
    assert resumed(clocks, saved).written_bytes == 0, "the day ended while no process ran"


def test_a_wall_clock_that_went_back_before_a_restart_ends_the_day_later_but_not_never() -> None:
    clocks = Clocks()
    budget = clocks.budget()
    budget.count(50)
    clocks.pass_seconds(1000)
    saved = budget.count(50)
    clocks.wall -= 365 * DAY_SECONDS
    again = resumed(clocks, saved)
    assert not again.allows(1)
    clocks.pass_seconds(DAY_SECONDS - 1000)
    assert again.allows(100)


def test_what_was_not_written_after_all_is_given_back() -> None:
    budget = Clocks().budget()
    budget.count(90)
    budget.correct(-60)
    assert budget.written_bytes == 30
    budget.correct(-60)
    assert budget.written_bytes == 0, "an estimate of the day before"
