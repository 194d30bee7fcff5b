"""The door: who may come in, how many at once, for how long; and what it answers for those behind it."""

from __future__ import annotations

import asyncio

import pytest
from starlette.types import Receive, Scope, Send

from retinue.errors import EncoderFailed
from retinue.server.door import Door

from .asgi import Client, Mirror, answer, call

CHAT = "/v1/chat/completions"


class Parked:
    """An app whose requests wait inside until they are let go."""

    def __init__(self) -> None:
        self.inside = asyncio.Semaphore(0)
        self.let = asyncio.Event()
        self.cancelled = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.inside.release()
        try:
            await self.let.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        await answer(send, b"done")


# -- the key -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "status"),
    [
        (None, 401),
        ("Bearer sesame", 200),
        ("bearer sesame", 200),
        ("Bearer Sesame", 401),
        ("Bearer", 401),
        ("Basic sesame", 401),
        ("sesame", 401),
    ],
)
async def test_the_key_is_asked_for(given: str | None, status: int) -> None:
    behind = Mirror()
    headers = {} if given is None else {"Authorization": given}
    reply = await call(Door(behind, api_key="sesame"), CHAT, headers=headers)
    assert reply.status == status
    assert len(behind.scopes) == (status == 200)
    if status == 401:
        assert reply.headers["www-authenticate"] == "Bearer"
        assert reply.json()["error"]["type"] == "authentication_error"


@pytest.mark.parametrize("method", ["GET", "POST", "DELETE"])
async def test_the_key_guards_every_method(method: str) -> None:
    assert (await call(Door(Mirror(), api_key="sesame"), "/v1/models", method=method)).status == 401


async def test_without_a_key_everybody_may_enter() -> None:
    assert (await call(Door(Mirror()), CHAT)).status == 200


@pytest.mark.parametrize("path", ["/version", "/chat/completions", "//v1/chat/completions", "/invocations"])
async def test_the_key_guards_every_path_that_a_server_behind_may_know(path: str) -> None:
    assert (await call(Door(Mirror(), api_key="sesame"), path)).status == 401


# -- how many ------------------------------------------------------------------------------------------


async def test_one_request_too_many_is_refused_at_once_and_says_when_to_come_back() -> None:
    behind = Parked()
    door = Door(behind, max_concurrent_requests=2)
    waiting = [asyncio.create_task(call(door, CHAT)) for _ in range(2)]
    for _ in waiting:
        await behind.inside.acquire()
    refused = await call(door, CHAT)
    assert refused.status == 429
    assert int(refused.headers["retry-after"]) >= 1
    assert refused.json()["error"]["type"] == "rate_limit_error"
    assert (door.in_flight, door.rejected) == (2, 1)
    behind.let.set()
    assert [reply.status for reply in await asyncio.gather(*waiting)] == [200, 200]
    assert (await call(door, CHAT)).status == 200


@pytest.mark.parametrize("ending", ["answered", "raised", "cancelled"])
async def test_nothing_stays_counted_however_a_request_ends(ending: str) -> None:
    inside = asyncio.Event()
    counted: list[int] = []

    async def behind(scope: Scope, receive: Receive, send: Send) -> None:
        counted.append(door.in_flight)
        inside.set()
        if ending == "raised":
            raise RuntimeError("a fault")
        if ending == "cancelled":
            await asyncio.Event().wait()
        await answer(send, b"")

    door = Door(behind, max_concurrent_requests=1)
    task = asyncio.create_task(call(door, CHAT))
    await inside.wait()
    if ending == "cancelled":
        task.cancel()
    await asyncio.wait({task})
    assert counted == [1]
    assert door.in_flight == 0


async def test_reading_is_not_counted() -> None:
    behind = Parked()
    door = Door(behind, max_concurrent_requests=1)
    waiting = asyncio.create_task(call(door, CHAT))
    await behind.inside.acquire()
    reading = asyncio.create_task(call(door, "/v1/models", method="GET"))
    await behind.inside.acquire()
    behind.let.set()
    assert [(await waiting).status, (await reading).status] == [200, 200]


# -- how long ------------------------------------------------------------------------------------------


async def test_a_request_that_is_not_answered_in_time_gets_504_and_is_stopped() -> None:
    behind = Parked()
    reply = await call(Door(behind, request_timeout_s=0.01), CHAT)
    assert reply.status == 504
    assert "request_timeout_s=0.01" in reply.json()["error"]["message"]
    assert behind.cancelled == 1


async def test_an_answer_that_has_begun_may_take_its_time() -> None:
    began, late = asyncio.Event(), asyncio.Event()

    async def behind(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        began.set()
        await late.wait()
        await send({"type": "http.response.body", "body": b"late"})

    door = Door(behind, request_timeout_s=0.01)
    task = asyncio.create_task(call(door, CHAT))
    await began.wait()
    await asyncio.sleep(0.05)  # the deadline itself is the thing tested
    late.set()
    assert (await task).body == b"late"


async def test_who_answers_when_told_to_stop_keeps_that_answer() -> None:
    async def behind(scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            await answer(send, b"so far")

    assert (await call(Door(behind, request_timeout_s=0.01), CHAT)).body == b"so far"


# -- what nobody answered ------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [RuntimeError("/etc/secret"), EncoderFailed("/etc/secret")])
async def test_an_exception_is_a_500_without_our_internals(
    error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    async def behind(scope: Scope, receive: Receive, send: Send) -> None:
        raise error

    reply = await call(Door(behind), CHAT)
    assert reply.status == 500
    assert reply.json()["error"]["type"] == "server_error"
    assert b"secret" not in reply.body
    assert "/etc/secret" in caplog.text


async def test_an_exception_after_the_answer_began_breaks_the_connection() -> None:
    async def behind(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        raise RuntimeError("midway")

    client = Client(CHAT)
    with pytest.raises(RuntimeError, match="midway"):
        await client.call(Door(behind))
