"""The API key: nobody enters without it, by whatever path; and it is said nowhere."""

from __future__ import annotations

import asyncio
import logging
import subprocess
import sys
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from retinue.cli import Serve
from retinue.server.door import Door, bears_one_of
from retinue.server.proxy import ProxyApp
from retinue.server.serving import listening
from retinue.server.stack import Behind, Stack

from ..server.asgi import Client, Mirror, call
from ..server.backends import Tags
from ..server.proxying import Wire, dialling, upstream
from ..server.test_middleware import CHAT, chat, image
from .effort import LIMIT_S, effort
from .served import Asked, asked

pytestmark = pytest.mark.timeout(LIMIT_S)

KEY = "sesame-öffne-dich"  # not ASCII, as a header's value may be
SECRET = b"xyzzy-plugh-0123456789"


# -- who may enter -------------------------------------------------------------------------------------

TOKENS = st.binary(max_size=40) | st.sampled_from([KEY.encode(), KEY.encode()[:-1], KEY.encode("latin-1")])
SCHEMES = st.sampled_from([b"Bearer ", b"bearer ", b"BEARER  ", b"Basic ", b"", b"Bearer", b"\xff "])


@effort(500)
@given(scheme=SCHEMES, token=TOKENS)
def test_only_the_key_opens_whatever_bytes_are_sent(scheme: bytes, token: bytes) -> None:
    scope = {"type": "http", "headers": [(b"authorization", scheme + token)]}
    right = scheme.strip().lower() == b"bearer" and scheme.endswith(b" ") and token.strip() == KEY.encode()
    assert bears_one_of([KEY.encode()], scope) == right


class Locked:
    """A server with a key, and what got past it."""

    def __init__(self) -> None:
        self.behind, self.backend = Mirror(), Tags()
        self.stack = Stack(self.backend, "none", Behind(self.behind), api_key=KEY)


@pytest.fixture(scope="module")
def locked() -> Iterator[tuple[Locked, Asked]]:
    locked = Locked()
    with asked(locked.stack) as server:
        yield locked, server


PATHS = st.one_of(
    st.sampled_from(
        [
            CHAT,
            "//v1/chat/completions",
            "/V1/chat/completions",
            "/v1",
            "/x/../v1/chat/completions",
            "/x/chat/completions",
            "/chat/completions",
            "/invocations",
            "/tokenize",
            "/health/",
            "/ready/x",
            "/metrics?x",
            "",
        ]
    ),
    st.text(max_size=12).map("/{}".format),
)


@effort(200)
@given(path=PATHS, method=st.sampled_from(["POST", "GET", "PUT", "DELETE", "OPTIONS", "HEAD", "BREW"]))
def test_without_the_key_no_path_leads_to_the_encoder_or_behind(
    locked: tuple[Locked, Asked], path: str, method: str
) -> None:
    parts, server = locked
    if path not in ("/health", "/ready", "/metrics"):
        assert server.ask(Client(path, chat([image(1)]), method=method)).status == 401
    assert parts.backend.calls == []
    assert parts.behind.scopes == []


async def test_a_key_from_an_environment_of_any_bytes_is_those_bytes() -> None:
    door = Door(Mirror(), api_key=b"caf\xe9".decode("utf-8", "surrogateescape"))
    client = Client(CHAT)
    client.scope["headers"] = [(b"authorization", b"Bearer caf\xe9")]
    assert (await client.call(door)).status == 200
    assert (await call(door, CHAT, headers={"Authorization": "Bearer café"})).status == 401


@pytest.mark.parametrize("key", ["", " ", "sesame\n", " sesame"])
def test_a_key_that_opens_for_everybody_or_nobody_is_refused_at_once(key: str) -> None:
    with pytest.raises(ValueError, match="api_key is empty, or has white space at an end") as caught:
        Door(Mirror(), api_key=key)
    assert "sesame" not in str(caught.value)


# -- where it is said ----------------------------------------------------------------------------------


def with_key(head: bytes, body: bytes = b"", key: bytes = SECRET) -> bytes:
    length = b"Content-Length: %d\r\nConnection: close\r\n" % len(body)
    return head + b" HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer " + key + b"\r\n" + length + b"\r\n" + body


@pytest.fixture
def everything_logged(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """Every logger there is says all that it has to say."""
    caplog.set_level(1)
    with pytest.MonkeyPatch.context() as patch:
        for logger in [logging.getLogger(name) for name in list(logging.root.manager.loggerDict)]:
            patch.setattr(logger, "level", 1)
            patch.setattr(logger, "propagate", True)
            patch.setattr(logger, "disabled", False)
        logging.root.manager._clear_cache()  # type: ignore[attr-defined]  # of which levels are on
        yield caplog


async def test_the_key_is_in_no_log_no_answer_and_no_figure(
    everything_logged: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    asyncio.get_running_loop().set_debug(True)

    async def handle(wire: Wire) -> None:
        request = await wire.until(b"\r\n\r\n")
        if b"/v1/break" not in request:
            await wire.send(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\nok")

    said = b""
    async with upstream(handle) as url:
        proxy = ProxyApp(url)
        backend = Tags()
        stack = Stack(backend, "none", Behind(proxy, close=proxy.aclose), api_key=SECRET.decode())
        async with listening(stack) as at:
            requests = [
                with_key(b"POST /v1/chat/completions", chat([image(1)])),
                with_key(b"POST /v1/chat/completions", chat([{"type": "image_url", "image_url": "x"}])),
                with_key(b"POST /v1/chat/completions", b"{"),
                with_key(b"POST /v1/break", b"{}"),
                with_key(b"GET /v1/models"),
                with_key(b"GET /metrics"),
                with_key(b"GET /ready"),
                with_key(b"GET /v1/models", key=SECRET + b"\xff"),
                with_key(b"GET /v1/models", key=SECRET + b" " * 2**17),
                with_key(b"GET /v1/models", key=SECRET + b"\0"),
            ]
            for request in requests:
                said += await asked_at(at, request)
            backend.fault = RuntimeError("a fault")
            said += await asked_at(at, with_key(b"POST /v1/chat/completions", chat([image(2)])))
    assert b"200 OK" in said
    assert b"401" in said
    assert b"500" in said
    assert b"502" in said
    assert SECRET not in said
    out, err = capfd.readouterr()
    assert SECRET.decode() not in everything_logged.text + out + err
    assert "asyncio" in everything_logged.text  # so debugging was on


async def asked_at(url: str, request: bytes) -> bytes:
    async with dialling(int(url.rpartition(":")[2])) as wire:
        await wire.send(request)
        return await wire.rest()


def test_the_options_do_not_show_the_key() -> None:
    assert SECRET.decode() not in repr(Serve(demo=True, api_key=SECRET.decode()))


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["--demo", "--api-key", SECRET.decode(), "--encoder", "a:b"],
        ["--demo", "--api-key", SECRET.decode(), "--port", "x"],
    ],
    ids=["help", "contradiction", "wrong type"],
)
def test_the_command_does_not_show_the_key(arguments: list[str]) -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "retinue.cli", "serve", *arguments],
        capture_output=True,
        timeout=50,
        check=False,
        env={"RETINUE_API_KEY": SECRET.decode(), "PATH": "", "PYTHONPATH": ":".join(sys.path)},
    )
    assert ended.returncode == (0 if arguments == ["--help"] else 2)
    assert ended.stdout or ended.stderr
    assert SECRET not in ended.stdout + ended.stderr
