"""The judge of the chaos would notice: each kind of dishonesty is one to it."""

from __future__ import annotations

import random
from typing import Any

import pytest

from retinue.demo.run import pictures

from .faults import Call, Mark, Schedule
from .load import Site, Sure, Visit
from .upstream import Trouble
from .verdict import Answer, Asked, Circumstances, Look, judge, lies_about_readiness

CHAT = Asked(kind="chat", tag="1.1", says="42")
PROXIED = Asked(kind="chat", tag="1.1", says="42", through_proxy=True)
LOST_ITS_WAY = Asked(kind="no such path", status=404, through_proxy=True)
LIE = Asked(kind="lie", tag="1.1", status=400, says="image 2 of 3", param="messages[0].content[1].image_url")


def answer(status: int = 200, text: str = "", *, took_s: float = 1.0, **what: Any) -> Answer:
    return Answer(status=status, text=text, began_s=100.0, ended_s=100.0 + took_s, **what)


def error(
    message: str = "no", kind: str = "server_error", code: str = "encoder_failed", param: str | None = None
) -> dict[str, Any]:
    return {"message": message, "type": kind, "param": param, "code": code}


def during(**what: Any) -> Circumstances:
    return Circumstances(request_timeout_s=10.0, fetch_timeout_s=3.0, forward_timeout_s=4.0, **what)


ALONE = Call(("1.1", "1.1"), 100.1, 100.2, "raise")
TOGETHER = Call(("2.1", "1.1"), 100.1, 100.2, "raise", ("2.1",))
OTHER = Call(("2.1",), 99.1, 99.2, "raise", ("2.1",))
GOOD = Call(("2.1",), 99.1, 99.2)
BROKEN = Call(("2.1", "1.1"), 100.1, 100.2, "broken")
STUCK = Call(("2.1", "1.1"), 100.1, 106.1, "stuck")
STUCK_BEFORE = Call(("2.1",), 95.5, 101.5, "stuck")
LOST = Call(("2.1", "1.1"), 100.1, 100.2, "lost")
FLOOD = Trouble("flood", 99.0, 101.0)
AWAY = Trouble("killed", 90.0, 100.2)

OVERLOADED = error(kind="rate_limit_error", code="overloaded")
LATE = error("image 1 of 2: its URL did not finish", "invalid_request_error", "invalid_input")
INVALID = error("image 2 of 3: no", "invalid_request_error", "invalid_input", LIE.param)
UNREACHABLE = error(code="upstream_unreachable")


@pytest.mark.parametrize(
    ("asked", "came", "meanwhile"),
    [
        (CHAT, answer(text="42"), {}),
        (CHAT, answer(500, error=error()), {"calls": [ALONE]}),
        (CHAT, answer(500, error=error()), {"calls": [BROKEN]}),
        (CHAT, answer(500, error=error()), {"calls": [LOST, LOST]}),
        (CHAT, answer(500, error=error()), {"calls": [OTHER, OTHER, TOGETHER]}),
        (CHAT, answer(500, error=error()), {"calls": [TOGETHER, *[OTHER] * 3, *[GOOD] * 5]}),
        (CHAT, answer(400, error=LATE, took_s=3.1), {}),
        (CHAT, answer(429, error=OVERLOADED, retry_after="1"), {"floods": [FLOOD]}),
        (CHAT, answer(504, error=error(code="deadline_exceeded"), took_s=10.1), {}),
        (CHAT, answer(504, error=error(code="deadline_exceeded"), took_s=5.0), {"calls": [STUCK]}),
        (CHAT, answer(503, error=error(code="encoder_unavailable")), {"calls": [STUCK_BEFORE]}),
        (PROXIED, answer(502, error=UNREACHABLE), {"upstream": [AWAY]}),
        (PROXIED, answer(text="4", error=UNREACHABLE, whole=False), {"upstream": [AWAY]}),
        (PROXIED, answer(0, whole=False), {"upstream": [AWAY]}),
        (LOST_ITS_WAY, answer(404, whole=False), {"upstream": [AWAY]}),
        (LIE, answer(400, error=INVALID), {}),
    ],
)
def test_honest_answers_pass(asked: Asked, came: Answer, meanwhile: dict[str, Any]) -> None:
    assert judge(asked, came, during(**meanwhile)) == ""


@pytest.mark.parametrize(
    ("asked", "came", "meanwhile"),
    [
        (CHAT, answer(text="43"), {"calls": [ALONE]}),
        (CHAT, answer(text="4", whole=False), {}),
        (CHAT, answer(0, whole=False), {"upstream": [AWAY]}),
        (CHAT, answer(500, error=error()), {}),
        (CHAT, answer(500, error=error()), {"calls": [OTHER, TOGETHER]}),
        (CHAT, answer(500, error=error()), {"calls": [TOGETHER, *[OTHER] * 2, *[GOOD] * 6]}),
        (CHAT, answer(500, error=error()), {"calls": [TOGETHER, *[OTHER] * 3, *[GOOD] * 4]}),
        (CHAT, answer(500, error=error()), {"calls": [LOST]}),
        (CHAT, answer(500, error=error()), {"calls": [Call(("1.1",), 100.1, 100.2)]}),
        (CHAT, answer(400, error=LATE, took_s=2.9), {}),
        (CHAT, answer(400, error=INVALID, took_s=9.0), {}),
        (CHAT, answer(500, error=error()), {"calls": [Call(("2.1",), 100.1, 100.2, "raise")]}),
        (CHAT, answer(500, error=error("raised by schedule")), {"calls": [ALONE]}),
        (CHAT, answer(500, error={"message": "no"}), {"calls": [ALONE]}),
        (CHAT, answer(500, error=None), {}),
        (CHAT, answer(503, error=error(code="encoder_unavailable")), {"calls": [ALONE]}),
        (CHAT, answer(503, error=error(code="encoder_unavailable")), {"calls": [STUCK]}),
        (CHAT, answer(504, error=error(code="deadline_exceeded"), took_s=5.0), {"calls": [STUCK_BEFORE]}),
        (CHAT, answer(429, error=OVERLOADED, retry_after="1"), {}),
        (CHAT, answer(429, error=OVERLOADED), {"floods": [FLOOD]}),
        (CHAT, answer(504, error=error(code="deadline_exceeded"), took_s=9.0), {}),
        (CHAT, answer(504, error=error(kind="invalid_request_error"), took_s=11.0), {}),
        (PROXIED, answer(502, error=UNREACHABLE), {}),
        (PROXIED, answer(text="7", error=UNREACHABLE, whole=False), {"upstream": [AWAY]}),
        (PROXIED, answer(text="43"), {"upstream": [AWAY]}),
        (PROXIED, answer(404, whole=False), {"upstream": [AWAY]}),
        (LOST_ITS_WAY, answer(404, whole=False), {}),
        (LIE, answer(text="42"), {}),
        (LIE, answer(400, error=INVALID | {"param": "messages[0].content[0].image_url"}), {}),
        (LIE, answer(400, error=INVALID | {"message": "image 1 of 3: no"}), {}),
        (LIE, answer(500, error=error()), {}),
    ],
)
def test_dishonest_answers_do_not(asked: Asked, came: Answer, meanwhile: dict[str, Any]) -> None:
    assert judge(asked, came, during(**meanwhile)) != ""


def look(ready: bool, at_s: float, reason: str | None = None) -> Look:
    body = {"ready": ready, "reason": ("" if ready else "why") if reason is None else reason}
    return Look(at_s, at_s + 0.1, 200 if ready else 503, body)


CALLS = [
    Call(("1.1",), 99.0, 100.0),
    Call(("1.1",), 104.0, 105.0, "raise"),
    Call(("1.1",), 119.0, 120.0),
    Call(("1.1",), 120.0, 126.0, "stuck"),
    Call(("1.1",), 126.0, 127.0, "lost"),
    Call(("1.1",), 128.0, 129.0),
]


@pytest.mark.parametrize(
    "honest",
    [
        look(True, 101),
        look(True, 109),
        look(True, 110.2),
        look(False, 112),
        look(False, 100.1),
        look(True, 123),
        look(False, 125),
        look(False, 127.5),
        look(True, 131),
    ],
)
def test_readiness_may_say_what_the_journal_bears_out(honest: Look) -> None:
    assert lies_about_readiness([honest], during(calls=CALLS)) == []


@pytest.mark.parametrize(
    "lie",
    [
        look(True, 112),
        look(True, 90),
        look(False, 105),
        look(False, 122),
        look(True, 125),
        look(False, 131),
        look(True, 101, "why"),
        look(False, 112, ""),
    ],
)
def test_readiness_may_not_say_anything_else(lie: Look) -> None:
    assert len(lies_about_readiness([lie], during(calls=CALLS))) == 1


def test_a_mark_is_found_where_it_was_put_and_nowhere_else() -> None:
    assert Mark.of(Mark("3.4", "nan").on(b"\x89PNG")) == Mark("3.4", "nan")
    assert Mark.of(b"\x89PNG") == Mark()


def test_no_picture_of_a_request_is_the_same_as_another() -> None:
    picture = pictures()[0]
    sure = Sure((picture, picture), "What number do the images spell?")
    visit = Visit(Site("http://127.0.0.1:1", through_proxy=False), random.Random(1), "1.1", sure)
    first, second = visit.marked()
    assert first != second
    assert (Mark.of(first).tag, Mark.of(second).tag) == ("1.1", "1.1")


def test_a_schedule_is_a_function_of_its_seed_and_keeps_to_its_rates() -> None:
    first, again, other = (Schedule(seed, {"raise": 0.2, "short": 0.1}) for seed in ("1", "1", "2"))
    drawn = [first.trouble(number) for number in range(2000)]
    assert drawn == [again.trouble(number) for number in range(2000)]
    assert drawn != [other.trouble(number) for number in range(2000)]
    assert 300 < drawn.count("raise") < 500
    assert 130 < drawn.count("short") < 270
