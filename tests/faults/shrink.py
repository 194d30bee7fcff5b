"""A failing schedule, made short: what is left is needed for the failure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import MISSING, fields, replace
from typing import Any

from .schedule import Arrive, Event, Schedule


def shrink(schedule: Schedule, fails: Callable[[Schedule], bool]) -> Schedule:
    """The smallest schedule that is found to fail too, by taking things away while it does."""
    smallest = schedule
    while True:
        for candidate in _simpler(smallest):
            if fails(candidate):
                smallest = candidate
                break
        else:
            return smallest


def _simpler(schedule: Schedule) -> Iterator[Schedule]:
    """Schedules that are simpler by one thing, those that save most first."""
    setup, events = schedule
    size = len(events)
    while size:
        for start in range(0, len(events), size):
            yield Schedule(setup, [*events[:start], *events[start + size :]])
        size //= 2
    for simpler in _plainer(setup):
        yield Schedule(simpler, events)
    for place, event in enumerate(events):
        for one in _simpler_events(event):
            yield Schedule(setup, [*events[:place], one, *events[place + 1 :]])


def _simpler_events(event: Event) -> Iterator[Event]:
    if isinstance(event, Arrive):
        for words in _simpler_words(event.items.split()):
            yield replace(event, items=" ".join(words))
    yield from _plainer(event)


def _plainer(value: Any) -> Iterator[Any]:
    """A setup or an event with one option as it is by default."""
    for field in fields(value):
        if field.default is not MISSING and getattr(value, field.name) != field.default:
            yield replace(value, **{field.name: field.default})


def _simpler_words(words: Sequence[str]) -> Iterator[list[str]]:
    if len(words) > 1:
        for place in range(len(words)):
            yield [*words[:place], *words[place + 1 :]]
    for place, word in enumerate(words):
        digits = word[1:].rstrip("!?#~")
        sign = word[1 + len(digits) :]
        for simpler in (f"a{digits}{sign}", f"{word[0]}1{sign}", f"{word[0]}{digits}"):
            if simpler != word:
                yield [*words[:place], simpler, *words[place + 1 :]]
