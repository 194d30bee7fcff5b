"""A failing schedule becomes short, and prints as what can be pasted into a test."""

from __future__ import annotations

from . import schedule as names
from .schedule import Arrive, Close, Fault, Schedule, Setup, Step, enumerate_all, sample, specs_of
from .shrink import shrink


def test_what_is_not_needed_for_the_failure_is_taken_away() -> None:
    def fails(schedule: Schedule) -> bool:
        arrivals = [event for event in schedule.events if isinstance(event, Arrive)]
        poisoned = [event for event in arrivals if "!" in event.items]
        return bool(poisoned) and Close(drain=True) in schedule.events and schedule.setup.isolate is False

    seed = next(seed for seed in range(10_000) if fails(sample(seed)))
    setup, events = shrink(sample(seed), fails)
    assert setup == Setup(isolate=False)
    arrive, close = sorted(events, key=repr)
    assert isinstance(arrive, Arrive)
    assert (arrive.items, arrive.loop, arrive.bare, close) == ("a1!", 0, False, Close(drain=True))


def test_a_schedule_prints_as_python() -> None:
    for seed in range(50):
        schedule = sample(seed)
        pasted = eval(str(schedule), vars(names) | {"run": lambda setup, events: Schedule(setup, events)})
        assert pasted == schedule


def test_the_words_of_a_request_say_key_cost_and_fault() -> None:
    assert specs_of("a3 b12! a1?") == (
        ("a", 3, Fault.NONE),
        ("b", 12, Fault.POISON),
        ("a", 1, Fault.REFUSED),
    )


def test_all_words_of_an_alphabet_are_enumerated() -> None:
    words = list(enumerate_all([[Arrive(0, "a1")], [Step(), Step()]], 3))
    assert len(words) == 8
    assert words[0] == [Arrive(1, "a1"), Arrive(2, "a1"), Arrive(3, "a1")]
    assert words[-1] == [Step()] * 6
