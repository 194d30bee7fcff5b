"""Whatever a client sends as a chat, the answer is right or its own fault, and the server is as before."""

from __future__ import annotations

import itertools
import socket
from collections.abc import Iterator

import orjson
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from starlette.types import Message, Receive, Scope, Send

from retinue.demo.serving import demo_stack
from retinue.media import MediaPolicy
from retinue.server.limits import ServerLimits
from retinue.server.proxy import ProxyApp
from retinue.server.stack import Behind, Stack

from ..server.asgi import Client, Mirror, Reply
from ..server.backends import Tags
from ..server.serving import serving
from .bodies import chats, images_in
from .effort import LIMIT_S, effort
from .memory import within
from .names import without_names
from .served import CHAT, Asked, asked
from .tensors import damaged_tensors
from .urls import PICTURE, data_urls, forbidden_urls

pytestmark = pytest.mark.timeout(LIMIT_S)

MEDIA = MediaPolicy(max_image_pixels=2**20, fetch_timeout_s=5)
LIMITS = ServerLimits(client_embeds=True, max_body_bytes=2**20, max_pending_bytes=2**24)
# Of the largest bodies here: read, parsed, written anew, echoed; and four pictures decoded at once.
MOST_BYTES = 256 * 2**20

_listener = socket.create_server(("127.0.0.1", 0))
_listener.setblocking(False)
_GOOD = st.just(PICTURE)  # mostly, or one of many bad ones would hide what comes behind them
URLS = st.one_of(*[_GOOD] * 7, data_urls(), data_urls(), forbidden_urls(_listener.getsockname()[1]))
BODIES = chats(URLS, damaged_tensors())
ORDINARY = orjson.dumps(
    {
        "model": "demo",
        "messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": PICTURE}}]}],
        "max_tokens": 1,
    }
)


@pytest.fixture(autouse=True, scope="module")
def _nobody_comes_where_nobody_may() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        without_names(patch)
        yield
    with pytest.raises(BlockingIOError):
        _listener.accept()
    _listener.close()


class Echo(Mirror):
    """Answers with what it got, and keeps nothing."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await super().__call__(scope, receive, send)
        self.bodies.clear()
        self.scopes.clear()


def behind(app: Behind) -> Stack:
    return Stack(Tags(), "none", app, media=MEDIA, limits=LIMITS)


@pytest.fixture(scope="module")
def encoder() -> Iterator[Asked]:
    """The encoder in front of an echo."""
    with asked(behind(Behind(Echo()))) as server:
        yield server


@pytest.fixture(scope="module")
def proxy() -> Iterator[Asked]:
    """The encoder and the proxy, in front of an echo on a socket."""
    with serving(Echo()) as upstream:
        app = ProxyApp(upstream.url)
        with asked(behind(Behind(app, close=app.aclose))) as server:
            yield server


@pytest.fixture(scope="module")
def embedded() -> Iterator[Asked]:
    """The demo: its encoder, and its language model in this process."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with asked(demo_stack(media=MEDIA, limits=LIMITS)) as server:
        yield server
    torch.set_num_threads(threads)


def check(server: Asked, reply: Reply) -> None:
    """An answer, or an error that is the client's, as OpenAI's clients read it; and all is as before."""
    assert reply.status is not None
    assert reply.status < 500, reply.body
    if reply.status >= 400:
        error = reply.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert error["type"] == "invalid_request_error"
        assert len(reply.body) < 10_000
    assert server.chat(ORDINARY).status == 200


def asking(*fields: str) -> bytes:
    """The body of a request with a good image, and with ``fields``, whose quotes may be single ones."""
    image = f"{{'type':'image_url','image_url':'{PICTURE}'}}"
    messages = f"'messages':[{{'role':'user','content':[{image}]}}]"
    return ("{" + ",".join(["'model':'demo'", messages, *fields]) + "}").replace("'", '"').encode()


@pytest.mark.parametrize("name", ["encoder", "proxy", "embedded"])
@pytest.mark.parametrize(
    "body",
    [
        asking("'x':" + "[" * 300 + "]" * 300),  # a parser reads deeper than a writer writes
        asking("'x':" + "[" * 900 + "]" * 900, "'y':NaN"),
        asking("'\\ud800':1"),  # half a surrogate pair, which an error has to name
        asking("'" + "a" * 500_000 + "':1"),  # and a name that no answer should repeat
        asking("'max_tokens':" + "9" * 4300, "'user':NaN"),  # a digit more is no number in Python
        asking("'temperature':1" + "0" * 400, "'user':NaN"),  # an int that is no float
    ],
    ids=["deep", "deep, not a number", "surrogate", "long name", "many tokens", "hot"],
)
def test_what_once_was_a_fault_of_ours_is_the_clients(
    request: pytest.FixtureRequest, name: str, body: bytes
) -> None:
    server: Asked = request.getfixturevalue(name)
    check(server, server.chat(body))


@effort(400)
@given(body=BODIES)
def test_no_image_gets_past_the_encoder(encoder: Asked, body: bytes) -> None:
    with within(MOST_BYTES):
        reply = encoder.chat(body)
    if reply.status == 200:
        assert images_in(reply.body) == 0
    check(encoder, reply)


@effort(150)
@given(body=BODIES)
def test_the_proxy_passes_on_what_the_encoder_made_or_left_alone(proxy: Asked, body: bytes) -> None:
    reply = proxy.chat(body)
    if reply.status == 200:
        assert images_in(reply.body) == 0
    check(proxy, reply)


@effort(200)
@given(body=BODIES)
def test_the_embedded_decoder_answers_or_refuses(embedded: Asked, body: bytes) -> None:
    with within(MOST_BYTES):
        reply = embedded.chat(body)
    check(embedded, reply)


class Broken(Client):
    """A client that sends its body in pieces and leaves, maybe before its end."""

    def __init__(self, body: bytes, cuts: list[int], sends: int) -> None:
        super().__init__(CHAT)
        places = [0, *sorted(cut % (len(body) + 1) for cut in cuts), len(body)]
        pieces = [body[start:end] for start, end in itertools.pairwise(places)]
        self._pieces = [(piece, number < len(pieces)) for number, piece in enumerate(pieces, 1)][:sends]

    async def _receive(self) -> Message:
        if not self._pieces:
            return {"type": "http.disconnect"}
        body, more = self._pieces.pop(0)
        return {"type": "http.request", "body": body, "more_body": more}


@effort(150)
@given(body=BODIES, cuts=st.lists(st.integers(0, 2**16), max_size=4), sends=st.integers(0, 6))
def test_a_client_that_leaves_leaves_nothing(
    encoder: Asked, body: bytes, cuts: list[int], sends: int
) -> None:
    reply = encoder.ask(Broken(body, cuts, sends))
    assert reply.status is None or reply.status < 500
    assert encoder.chat(ORDINARY).status == 200
