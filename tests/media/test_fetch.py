"""Fetching: what origins may do to us (nothing), and which addresses a URL may lead to."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from importlib import metadata

import pytest
from aiohttp.abc import ResolveResult

from retinue.errors import InvalidInput
from retinue.media import MediaLoader, MediaPolicy
from retinue.media.fetch import ThreadResolver

from .origin import LIMIT_S, Origin, ok, picture, redirect, serving, sized
from .support import Names, loading, only, refusal, refused

MIB = 2**20
DEADLINE_S = 0.3  # where the deadline itself is tested


@pytest.fixture
async def origin() -> AsyncIterator[Origin]:
    async with serving() as origin:
        yield origin


@pytest.fixture
async def canary() -> AsyncIterator[Origin]:
    """Listens where nobody may connect to; another loopback address than the origin's."""
    async with serving("127.0.0.2") as canary:
        yield canary


# -- what an origin answers ----------------------------------------------------------------------------


async def test_a_picture_is_fetched_as_it_is(origin: Origin) -> None:
    async with loading() as loader:
        (image,) = await loader.load([origin.url("/ok")])
    assert image.data == picture()
    assert image.url == origin.url("/ok")


@pytest.mark.parametrize("path", ["/mislabelled", "/silly-encoding", "/relative", "/three"])
async def test_the_bytes_decide_and_legal_redirects_lead_to_them(origin: Origin, path: str) -> None:
    async with loading() as loader:
        (image,) = await loader.load([origin.url(path)])
    assert image.data == picture()


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("/nowhere", "its URL answered 404"),
        ("/403", "its URL answered 403"),
        ("/500", "its URL answered 500"),
        ("/206", "its URL answered 206"),
        ("/reset", "its URL gave no complete answer"),
        ("/no-http", "its URL gave no complete answer"),
        ("/lying-long", "its URL gave no complete answer"),
        ("/html", "not a picture of an accepted format (BMP, GIF, JPEG, PNG, TIFF, WEBP)"),
        ("/empty", "no picture: 0 bytes"),
        ("/gzip-bomb", "its URL answered compressed, though asked not to"),
        ("/too-long", "99999999999 bytes, more than max_image_bytes=1048576"),
        ("/endless", "more bytes than max_image_bytes=1048576"),
        ("/loop", "its URL redirects more than max_redirects=5 times"),
        ("/to-file", "its URL redirects to what is neither http nor https"),
        ("/to-nothing", "its URL names no host"),
        ("/to-garbage", "its URL is not a legal one"),
    ],
)
async def test_an_origins_fault_is_the_callers_and_says_what_he_may_know(
    origin: Origin, path: str, message: str
) -> None:
    async with loading(max_image_bytes=MIB) as loader:
        error = await refused(loader, [origin.url("/ok"), origin.url(path)])
    assert str(error) == f"image 2 of 2: {message}"
    assert error.position == 1
    assert "secret" not in str(error)
    assert error.__cause__ is error.__context__ is None  # nothing of the connection stays referenced


async def test_what_comes_after_the_content_length_is_never_part_of_the_picture(origin: Origin) -> None:
    async with loading() as loader:
        message = await asyncio.wait_for(refusal(loader, origin.url("/lying-short")), LIMIT_S)
        await origin.until(lambda: origin.open == 0)
    assert message.removeprefix("image 1 of 1: ") in (
        "truncated, corrupt or unsupported PNG data",
        "its URL gave no complete answer",  # if the surplus came along with it
    )


async def test_a_refused_connection_and_an_unknown_name_are_the_callers_fault(origin: Origin) -> None:
    async with serving() as gone:
        url = gone.url()
    async with loading(resolver=Names()) as loader:
        assert await refusal(loader, url) == "image 1 of 1: its URL could not be reached"
        assert await refusal(loader, origin.url(host="no.example")) == (
            "image 1 of 1: its URL could not be reached"
        )


async def test_a_failed_tls_handshake_is_the_callers_fault(origin: Origin) -> None:
    async with loading() as loader:
        assert await refusal(loader, origin.url(scheme="https")) == (
            "image 1 of 1: its URL could not be reached over TLS"
        )


async def test_the_request_names_the_product_and_nothing_else(
    origin: Origin, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.3:1")  # a proxy would dial what nobody has checked
    monkeypatch.setenv("http_proxy", "http://127.0.0.3:1")
    origin.routes["/cookie"] = redirect("/ok")
    async with loading(resolver=Names({"a.example": "127.0.0.1"})) as loader:
        for path in ("/cookie", "/ok"):
            await loader.load([origin.url(path, host="a.example")])
    assert origin.last_headers["user-agent"] == f"retinue/{metadata.version('retinue')}"
    assert origin.last_headers["accept-encoding"] == "identity"
    assert not {"cookie", "referer", "authorization"} & set(origin.last_headers)


async def test_a_url_is_sent_as_it_was_signed(origin: Origin) -> None:
    path = "/a%2Cb/~c%7Ed?X-Sig=%2B%2f%3D&e=a+b%20c,"
    origin.routes[path] = ok
    async with loading() as loader:
        await loader.load([origin.url(path)])
    assert origin.requests[path] == 1


async def test_what_needs_quoting_is_quoted(origin: Origin) -> None:
    origin.routes["/%C3%A4%20b"] = ok
    async with loading() as loader:
        await loader.load([origin.url("/ä b")])


async def test_connections_are_kept(origin: Origin) -> None:
    async with loading() as loader:
        for _ in range(3):
            await loader.load([origin.url()])
    assert (origin.requests["/ok"], origin.connects) == (3, 1)
    await origin.until(lambda: origin.open == 0)


# -- bounds --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunked", [False, True])
async def test_the_bound_on_bytes_is_exact(origin: Origin, chunked: bool) -> None:
    origin.routes["/at"] = sized(MIB, chunked=chunked)
    origin.routes["/above"] = sized(MIB + 1, chunked=chunked)
    async with loading(max_image_bytes=MIB) as loader:
        (image,) = await loader.load([origin.url("/at")])
        assert len(image.data) == MIB
        assert "max_image_bytes=1048576" in await refusal(loader, origin.url("/above"))


async def test_an_endless_body_is_left_at_the_bound(origin: Origin) -> None:
    held: list[int] = []
    async with loading(max_image_bytes=MIB) as loader:
        with pytest.raises(InvalidInput, match="more bytes than"):
            await loader.load([origin.url("/endless")], reserve=held.append)
        await origin.until(lambda: origin.open == 0)
    assert sum(held) <= MIB
    assert origin.sent < 16 * MIB  # the system's buffers hold some of it


async def test_a_content_length_above_the_bound_is_not_waited_for(origin: Origin) -> None:
    """The origin never sends a byte of it; only the deadline, far off, would end the wait."""
    held: list[int] = []
    async with loading(fetch_timeout_s=3600) as loader:
        with pytest.raises(InvalidInput, match="more than max_image_bytes"):
            await asyncio.wait_for(loader.load([origin.url("/too-long")], reserve=held.append), LIMIT_S)
    assert held == []


@pytest.mark.parametrize("path", ["/silent", "/drip"])
async def test_a_fetch_ends_by_its_deadline(origin: Origin, path: str) -> None:
    async with loading(fetch_timeout_s=DEADLINE_S) as loader:
        began = time.monotonic()
        assert await refusal(loader, origin.url(path)) == (
            "image 1 of 1: its URL did not finish within 0.3 s"
        )
        assert DEADLINE_S * 0.9 <= time.monotonic() - began < DEADLINE_S + 1
        await origin.until(lambda: origin.open == 0, limit_s=1)


async def test_the_deadline_spans_all_redirects(origin: Origin) -> None:
    """Each hop takes most of the time that one may take."""

    async def slowly(exchange: object) -> None:
        await asyncio.sleep(DEADLINE_S * 0.7)
        await redirect("/slow")(exchange)  # type: ignore[arg-type]

    origin.routes["/slow"] = slowly
    async with loading(fetch_timeout_s=DEADLINE_S) as loader:
        assert "did not finish within" in await refusal(loader, origin.url("/slow"))
    assert origin.requests["/slow"] == 2


async def test_the_deadline_spans_the_lookup(origin: Origin) -> None:
    class Stuck(Names):
        async def resolve(self, *_: object, **__: object) -> list[ResolveResult]:
            await asyncio.Event().wait()
            raise AssertionError

    async with loading(fetch_timeout_s=DEADLINE_S, resolver=Stuck()) as loader:
        assert "did not finish within" in await refusal(loader, origin.url(host="stuck.example"))


async def test_slow_origins_keep_nobody_from_a_fast_one(origin: Origin) -> None:
    """Eight requests' worth of connections that nothing comes from; no deadline is near."""
    stuck = [[f"{origin.url(path)}#{n}" for n in range(16)] for path in ("/silent", "/drip") * 4]
    async with loading(fetch_timeout_s=3600) as loader:
        loads = [asyncio.ensure_future(loader.load(urls)) for urls in stuck]
        await origin.until(lambda: origin.requests["/silent"] + origin.requests["/drip"] == 128)
        images = await asyncio.wait_for(loader.load([origin.url("/ok")]), LIMIT_S)
        assert images[0].size == (8, 6)
        for load in loads:
            load.cancel()
        await asyncio.gather(*loads, return_exceptions=True)


# -- where a URL may lead ------------------------------------------------------------------------------

LOOPBACK = [
    "127.0.0.1",
    "localhost",
    "LOCALHOST.",
    "LocalHost",
    "[::ffff:127.0.0.1]",
    "[::ffff:7f00:1]",
    "0.0.0.0",
    "0",
    "127.1",
    "2130706433",
    "0x7f000001",
    "0x7F.1",
    "0177.0.0.1",
    "127.0.0.1.",
    "example.com@127.0.0.1",
    "example.com:80@127.0.0.1",
    "\uff11\uff12\uff17.0.0.1",
    "\u2460\u2461\u2466.0.0.1",
    "127\u30020\u30020\u30021",
    "inside.example",
    "both.example",
]
INSIDE = [
    "[::1]",
    "[::]",
    "[64:ff9b::7f00:1]",
    "[2002:7f00:1::]",
    "127.255.255.254",
    "169.254.169.254",
    "10.0.0.1",
    "172.16.0.1",
    "192.168.0.1",
    "100.64.0.1",
    "224.0.0.1",
    "255.255.255.255",
    "[fc00::1]",
    "[fe80::1]",
    "[fe80::1%25lo]",
    "[ff02::1]",
    "metadata.google.internal",
]
INSIDE_NAMES = {
    "localhost": "127.0.0.1",
    "metadata.google.internal": "169.254.169.254",
    "inside.example": "::ffff:127.0.0.1 127.0.0.1",
    "both.example": "::1 127.0.0.1",
}


@pytest.mark.parametrize("host", LOOPBACK + INSIDE)
async def test_by_default_nothing_inside_is_connected_to(origin: Origin, host: str) -> None:
    async with MediaLoader(MediaPolicy(), resolver=Names(INSIDE_NAMES)) as loader:
        assert await refusal(loader, f"http://{host}:{origin.port}/ok") == (
            "image 1 of 1: its URL's host has no public address"
        )
        assert "image 1 of 1: its URL" in await refusal(loader, f"https://{host}:{origin.port}/ok")
    assert origin.connects == 0


async def test_a_name_that_is_not_there_reads_like_one_that_is_inside(origin: Origin) -> None:
    async with MediaLoader(MediaPolicy(), resolver=Names(INSIDE_NAMES)) as loader:
        messages = {await refusal(loader, f"http://{name}/") for name in ("none.example", "inside.example")}
    assert messages == {"image 1 of 1: its URL's host has no public address"}


@pytest.mark.parametrize("host", LOOPBACK)
async def test_the_opt_in_allows_every_spelling(origin: Origin, host: str) -> None:
    async with loading(resolver=Names(INSIDE_NAMES)) as loader:
        (image,) = await loader.load([f"http://{host}:{origin.port}/ok"])
    assert image.data == picture()


async def test_the_systems_own_lookup_is_checked_too(origin: Origin) -> None:
    async with MediaLoader() as loader:
        assert "no public address" in await refusal(loader, origin.url(host="localhost"))
    async with MediaLoader(MediaPolicy(allow_private_addresses=True)) as loader:
        await loader.load([origin.url(host="localhost")])
    assert origin.connects == 1


@pytest.mark.parametrize("name", ["a" * 64 + ".example", "a..example", "x" * 300, "no name.invalid", "a\0b"])
async def test_the_systems_lookup_has_one_kind_of_failure(name: str) -> None:
    with pytest.raises((OSError, ValueError), match=r"name|Name|resolution|null"):
        await ThreadResolver().resolve(name, 80)


async def test_a_redirect_leads_nowhere_that_a_url_may_not(origin: Origin, canary: Origin) -> None:
    async with loading(
        is_public=only("127.0.0.1"), resolver=Names({"inside.example": "127.0.0.2"})
    ) as loader:
        for location in (
            canary.url(),
            canary.url(host="inside.example"),
            f"//127.0.0.2:{canary.port}/ok",
            f"http://127.0.0.1@127.0.0.2:{canary.port}/ok",
            f"http://2130706434:{canary.port}/ok",
        ):
            origin.routes["/inside"] = redirect(location)
            assert await refusal(loader, origin.url("/inside")) == (
                "image 1 of 1: its URL's host has no public address"
            )
        origin.routes["/outside"] = redirect(origin.url("/ok"))
        await loader.load([origin.url("/outside")])
    assert (canary.connects, origin.requests["/inside"]) == (0, 5)


async def test_a_name_that_changes_its_mind_is_not_believed(origin: Origin, canary: Origin) -> None:
    """DNS rebinding: the address that was checked is the one that is dialled, at every lookup."""
    names = Names({"rebind.example": ["127.0.0.1", "127.0.0.2", "127.0.0.1 127.0.0.2", "127.0.0.2"]})
    async with loading(is_public=only("127.0.0.1"), resolver=names) as loader:
        origin.routes["/again"] = redirect(canary.url(host="rebind.example"))
        assert "no public address" in await refusal(loader, origin.url("/again", host="rebind.example"))
        for port in range(3):  # each port is looked up anew
            with pytest.raises(InvalidInput):
                await loader.load([f"http://rebind.example:{port + 1}/ok"])
    assert len(names.asked) == 5
    assert canary.connects == 0


async def test_of_several_addresses_only_the_public_are_dialled(origin: Origin) -> None:
    async with serving("127.0.0.2") as canary:
        origin.routes["/ok"] = ok
        names = Names({"both.example": "127.0.0.2 127.0.0.1"})
        async with loading(is_public=only("127.0.0.1"), resolver=names) as loader:
            await loader.load([origin.url(host="both.example")])
        assert (origin.connects, canary.connects) == (1, 0)


async def test_allowed_domains_bind_every_hop(origin: Origin) -> None:
    names = Names(dict.fromkeys(("a.example", "x.a.example", "b.example"), "127.0.0.1"))
    allowed = {"resolver": names, "allowed_domains": ("A.example",)}
    origin.routes["/away"] = redirect(origin.url(host="b.example"))
    origin.routes["/below"] = redirect(origin.url(host="x.a.example"))
    async with loading(**allowed) as loader:  # type: ignore[arg-type]
        await loader.load([origin.url(host="a.example"), origin.url("/below", host="A.EXAMPLE.")])
        for url in (origin.url(host="b.example"), origin.url(), origin.url("/away", host="a.example")):
            assert await refusal(loader, url) == "image 1 of 1: its URL's host is not among allowed_domains"
    assert "b.example" not in names.asked


async def test_allowed_domains_do_not_allow_private_addresses(origin: Origin) -> None:
    policy = MediaPolicy(allowed_domains=("a.example",))
    async with MediaLoader(policy, resolver=Names({"a.example": "127.0.0.1"})) as loader:
        assert "no public address" in await refusal(loader, origin.url(host="a.example"))
    assert origin.connects == 0


async def test_redirects_are_counted(origin: Origin) -> None:
    async with loading(max_redirects=2) as loader:
        assert "max_redirects=2" in await refusal(loader, origin.url("/three"))
        await loader.load([origin.url("/two")])
    async with loading(max_redirects=0) as loader:
        assert "max_redirects=0" in await refusal(loader, origin.url("/one"))
        await loader.load([origin.url()])
