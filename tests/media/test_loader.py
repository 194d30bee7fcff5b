"""``MediaLoader.load``: all images or one error, nothing left behind, on any event loop."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import gc
import logging
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable

import pytest
import uvloop
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from retinue.errors import EncoderUnavailable, InvalidInput, Overloaded
from retinue.media import Image, MediaLoader, MediaPolicy

from .origin import LIMIT_S, Exchange, Origin, not_found, ok, picture, serving
from .support import Names, loading, refused


@pytest.fixture
async def origin() -> AsyncIterator[Origin]:
    async with serving() as origin:
        yield origin


def data_url(data: bytes = b"") -> str:
    return "data:image/png;base64," + base64.b64encode(data or picture()).decode()


# -- what comes back -----------------------------------------------------------------------------------


async def test_images_come_in_the_order_of_their_urls(origin: Origin) -> None:
    colours = ["red", "green", "blue"]

    def of(colour: str) -> Callable[[Exchange], asyncio.Future[None]]:
        return lambda exchange: asyncio.ensure_future(exchange.answer(picture(colour=colour)))

    origin.routes |= {f"/{colour}": of(colour) for colour in colours}
    urls = [origin.url("/red"), data_url(picture(colour="green")), origin.url("/blue")]
    async with loading() as loader:
        images = await loader.load(urls)
    assert [image.data for image in images] == [picture(colour=colour) for colour in colours]


async def test_no_urls_are_no_images() -> None:
    async with MediaLoader() as loader:
        assert await loader.load([]) == []


async def test_equal_urls_are_loaded_once(origin: Origin) -> None:
    held: list[int] = []
    data = data_url()
    async with loading() as loader:
        images = await loader.load([origin.url(), data, origin.url(), data], reserve=held.append)
    assert images[0] is images[2]
    assert images[1] is images[3]
    assert origin.requests["/ok"] == 1
    assert sum(held) == 2 * len(picture())


async def test_the_images_of_a_request_are_fetched_at_the_same_time(origin: Origin) -> None:
    """None is answered before all have asked."""

    async def together(exchange: Exchange) -> None:
        await origin.until(lambda: origin.requests["/together"] == 16)
        await ok(exchange)

    origin.routes["/together"] = together
    async with loading() as loader:
        await loader.load([f"{origin.url('/together')}#{number}" for number in range(16)])


async def test_too_many_images_are_refused_before_any_is_looked_at(origin: Origin) -> None:
    async with loading(max_images=4) as loader:
        await loader.load([origin.url("/ok")] * 4)
        connects = origin.connects
        error = await refused(loader, [*(f"{origin.url()}#{n}" for n in range(4)), "no URL"])
    assert str(error) == "5 images, more than max_images=4"
    assert error.position is None
    assert origin.connects == connects


async def test_the_bound_on_pixels_is_the_policys() -> None:
    """A 1-bit picture of 169 megapixels: a few KB, and half a gigabyte once decoded."""
    import io

    import PIL.Image

    file = io.BytesIO()
    PIL.Image.new("1", (13000, 13000)).save(file, "PNG")
    async with MediaLoader() as loader:
        error = await refused(loader, [data_url(), data_url(file.getvalue())])
    assert str(error) == "image 2 of 2: 13000x13000 pixels, more than max_pixels=67108864"


async def test_one_str_is_not_taken_for_its_characters() -> None:
    async with MediaLoader() as loader:
        with pytest.raises(TypeError, match="a sequence of URLs, got one str"):
            await loader.load(data_url())


# -- errors --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("", "''"),
        ("ftp://h/x.png", "'ftp://h/x.png'"),
        ("blob:https://h/1", "'blob:https://h/1'"),
        ("javascript:alert(1)", "'javascript:alert(1)'"),
        ("/relative.png", "'/relative.png'"),
        ("//host/x.png", "'//host/x.png'"),
        ("x" * 10**6, f"'{'x' * 30}'..."),
        ("\0\ud800", r"'\ud800'"),
    ],
)
async def test_what_is_no_accepted_url_is_shown_in_short(url: str, shown: str) -> None:
    async with MediaLoader() as loader:
        error = await refused(loader, [data_url(), url])
    assert str(error).startswith(f"image 2 of 2: {shown} is no data, http or https URL")
    assert error.position == 1


async def test_the_first_position_of_an_url_that_is_there_twice_is_named(origin: Origin) -> None:
    async with loading() as loader:
        error = await refused(loader, [origin.url(), origin.url("/x"), data_url(), origin.url("/x")])
    assert str(error) == "image 2 of 4: its URL answered 404"
    assert error.position == 1


async def test_the_first_failure_ends_the_others_and_their_connections(
    origin: Origin, caplog: pytest.LogCaptureFixture
) -> None:
    async def failing(exchange: Exchange) -> None:
        await origin.until(lambda: origin.requests["/drip"] == 3)
        await not_found(exchange)

    origin.routes["/failing"] = failing
    slow = [f"{origin.url('/drip')}#{number}" for number in range(3)]
    with caplog.at_level(logging.DEBUG, "asyncio"):
        async with loading(fetch_timeout_s=3600) as loader:
            before = asyncio.all_tasks()
            error = await asyncio.wait_for(refused(loader, [*slow, origin.url("/failing")]), LIMIT_S)
            assert str(error) == "image 4 of 4: its URL answered 404"
            since = map(repr, asyncio.all_tasks() - before)
            assert not [task for task in since if "MediaLoader" in task or "Fetcher" in task]
            await origin.until(lambda: origin.open <= 1, limit_s=1)  # the one that answered may be kept
            await loader.load([origin.url()])
        gc.collect()
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


async def test_who_leaves_takes_all_with_him(origin: Origin) -> None:
    async with loading(fetch_timeout_s=3600) as loader:
        load = asyncio.ensure_future(
            loader.load([origin.url("/silent"), origin.url("/drip"), data_url(), origin.url("/drip?2")])
        )
        await origin.until(lambda: origin.requests.total() == 3)
        load.cancel()
        with pytest.raises(asyncio.CancelledError):
            await load
        await origin.until(lambda: origin.open <= 1, limit_s=1)


async def test_failures_at_the_same_time_leave_none_unseen(
    origin: Origin, caplog: pytest.LogCaptureFixture
) -> None:
    async with loading() as loader:
        for _ in range(20):
            await refused(loader, [f"{origin.url('/x')}#{n}" for n in range(8)] + ["a", "b", "data:,"])
    gc.collect()
    assert caplog.records == []


async def test_who_leaves_as_an_image_fails_leaves_no_failure_unseen(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def leave(_: int) -> None:
        loads[0].cancel()
        raise Overloaded("no room", retry_after=1.0)

    async with MediaLoader() as loader:
        loads = [asyncio.ensure_future(loader.load([data_url(), data_url(b"other")], reserve=leave))]
        await asyncio.wait(loads)
        assert loads[0].cancelled()
        loads.clear()  # and with it all that its traceback holds
        gc.collect()
    assert caplog.records == []


# -- reserving -----------------------------------------------------------------------------------------


async def test_a_data_url_is_reserved_once_with_its_decoded_size() -> None:
    held: list[int] = []
    async with MediaLoader() as loader:
        await loader.load([data_url()], reserve=held.append)
    assert held == [len(picture())]


async def test_no_room_passes_through_unchanged_and_ends_the_others(origin: Origin) -> None:
    full = Overloaded("no room for images", retry_after=3.0)
    threads: set[threading.Thread] = set()

    def refuse(_: int) -> None:
        threads.add(threading.current_thread())
        raise full

    async with loading(fetch_timeout_s=3600) as loader:
        for url in (data_url(), origin.url("/drip")):
            with pytest.raises(Overloaded) as caught:
                await asyncio.wait_for(loader.load([origin.url("/silent"), url], reserve=refuse), LIMIT_S)
            assert caught.value is full
            await origin.until(lambda: origin.open == 0, limit_s=1)
    assert threads == {threading.current_thread()}


async def test_what_cannot_be_reserved_is_not_decoded() -> None:
    """Its characters are no base64, which only decoding it would tell."""

    def refuse(_: int) -> None:
        raise Overloaded("no room", retry_after=1.0)

    async with MediaLoader() as loader:
        with pytest.raises(Overloaded):
            await loader.load(["data:;base64,!!!!"], reserve=refuse)


# -- life ----------------------------------------------------------------------------------------------


def test_creating_a_loader_does_nothing() -> None:
    before = threading.active_count()
    MediaLoader()
    MediaLoader(MediaPolicy(max_images=1))
    assert threading.active_count() == before


def test_images_and_policies_need_none_of_the_loaders_libraries() -> None:
    program = """
import sys
from retinue.media import Image, MediaPolicy
MediaPolicy()
print({"aiohttp", "yarl", "pybase64"} & set(sys.modules))
from retinue.media import MediaLoader
"""
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=30
    )
    assert ended.stdout == "set()\n"


async def test_a_closed_loader_is_unavailable_and_closes_again() -> None:
    loader = MediaLoader()
    await loader.aclose()
    await loader.aclose()
    for urls in ([], [data_url()]):
        with pytest.raises(EncoderUnavailable):
            await loader.load(urls)


async def test_closing_ends_the_loads_under_way_and_blames_no_caller(origin: Origin) -> None:
    class Stuck(Names):
        async def resolve(self, *_: object, **__: object) -> list[object]:  # type: ignore[override]
            looking.set()
            await asyncio.Event().wait()
            raise AssertionError

    looking = asyncio.Event()
    async with loading(fetch_timeout_s=3600, resolver=Stuck()) as loader:
        loads = [
            asyncio.ensure_future(loader.load([url]))
            for url in (origin.url("/silent"), origin.url("/drip"), "http://stuck.example/")
        ]
        await origin.until(lambda: origin.requests.total() == 2)
        await looking.wait()
        await loader.aclose()
        errors = await asyncio.wait_for(asyncio.gather(*loads, return_exceptions=True), LIMIT_S)
    assert [type(error) for error in errors] == [EncoderUnavailable] * 3


async def test_a_load_that_has_only_begun_when_the_loader_closes_opens_nothing(origin: Origin) -> None:
    async with loading() as loader:
        load = asyncio.ensure_future(loader.load([origin.url(), data_url()]))
        await asyncio.sleep(0)  # it has made its tasks, and none of them has run
        await loader.aclose()
        with pytest.raises(EncoderUnavailable):
            await load
    assert origin.connects == 0


async def test_closing_on_another_loop_than_the_connections_is_refused(origin: Origin) -> None:
    async with loading() as loader:
        await loader.load([origin.url()])
        with pytest.raises(RuntimeError, match="event loop of the first fetch"):
            await asyncio.to_thread(asyncio.run, loader.aclose())


async def test_a_stuck_lookup_does_not_keep_the_interpreter_from_its_end() -> None:
    program = """
import asyncio, socket, threading
from retinue.media import MediaLoader, MediaPolicy

stuck = threading.Event()

def never(*_, **__):
    stuck.set()
    threading.Event().wait()

socket.getaddrinfo = never

async def main():
    async with MediaLoader(MediaPolicy(fetch_timeout_s=0.1)) as loader:
        try:
            await loader.load(["http://stuck.example/"])
        except ValueError as error:
            print(error, stuck.is_set())

asyncio.run(main())
"""
    ended = await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-W", "error", "-c", program],
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
    )
    assert (ended.stdout, ended.stderr) == (
        "image 1 of 1: its URL did not finish within 0.1 s True\n",
        "",
    )


# -- event loops ---------------------------------------------------------------------------------------


async def several(loader: MediaLoader, origin: Origin) -> list[Image]:
    loads = [loader.load([f"{origin.url()}#{n}", data_url(), origin.url()]) for n in range(5)]
    return [image for images in await asyncio.gather(*loads) for image in images]


async def test_any_number_of_event_loops_may_load_at_once(origin: Origin) -> None:
    """Four threads, asyncio's loop and uvloop's, each with three loops in turn that come and go."""

    def run(number: int) -> list[Image]:
        images = []
        for _ in range(3):
            loop = asyncio.new_event_loop() if number % 2 else uvloop.new_event_loop()
            try:
                images += loop.run_until_complete(several(loader, origin))
            finally:
                loop.close()
        return images

    async with loading() as loader:
        await loader.load([origin.url()])
        found = await asyncio.gather(*(asyncio.to_thread(run, number) for number in range(4)))
    assert [len(images) for images in found] == [45] * 4


async def test_the_first_loop_to_load_is_the_one_to_close(origin: Origin) -> None:
    home = uvloop.new_event_loop()
    loader = MediaLoader(MediaPolicy(allow_private_addresses=True))
    try:
        images = await asyncio.to_thread(home.run_until_complete, several(loader, origin))
        assert len(images) == 15
        await loader.load([origin.url()])  # from here, while the other loop is open
        await asyncio.to_thread(home.run_until_complete, loader.aclose())
    finally:
        home.close()


# -- any text at all -----------------------------------------------------------------------------------

STARTS = [
    "",
    "data:",
    "data:;base64,",
    "http:",
    "http://",
    "https://",
    "HTTP://[",
    "http://a@",
    "file:",
    "file://",
    "//",
]
LETTERS = st.characters() | st.sampled_from("/:@[]?#%.\\ \t\n\r\0\ud800\udfff0x")
TEXTS = st.builds(str.__add__, st.sampled_from(STARTS), st.text(LETTERS, max_size=30))


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(TEXTS, min_size=1, max_size=3))
def test_any_text_is_an_image_or_an_invalid_input(urls: list[str]) -> None:
    async def load() -> None:
        async with MediaLoader(resolver=Names(), is_public=lambda _: False) as loader:
            error = await refused(loader, urls)
        assert str(error).startswith("image ")
        assert error.position is not None
        assert len(str(error)) < 300

    asyncio.run(load())


@settings(max_examples=100, deadline=None)
@given(st.text(LETTERS, max_size=20).map(lambda text: text.encode("utf-8", "replace")))
def test_any_location_is_followed_or_an_invalid_input(location: bytes) -> None:
    """A Location is whatever bytes an origin sends."""

    async def load() -> None:
        async with serving() as origin:

            async def answer(exchange: Exchange) -> None:
                field = location.replace(b"\r", b"").replace(b"\n", b"")
                await exchange.send(
                    b"HTTP/1.1 302 Found\r\nContent-Length: 0\r\nLocation: " + field + b"\r\n\r\n"
                )

            origin.routes["/any"] = answer
            async with loading(is_public=lambda address: str(address) == "127.0.0.1") as loader:
                with contextlib.suppress(InvalidInput):
                    await loader.load([origin.url("/any")])

    asyncio.run(load())


async def test_the_tests_themselves_need_no_network() -> None:
    with pytest.raises(socket.gaierror):
        await Names().resolve("example.com")
