"""Any text is a URL that may be read, within its bound, or an ``InvalidInput``."""

from __future__ import annotations

import contextlib
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from retinue.errors import InvalidInput
from retinue.media import data_url, file_url
from retinue.media.addresses import canonical_host, is_public

from .effort import LIMIT_S, effort
from .urls import data_urls

pytestmark = pytest.mark.timeout(LIMIT_S)


@effort(400)
@given(url=data_urls(), most=st.sampled_from([0, 100, 2**20]))
def test_a_data_url_gives_what_it_says_and_no_more_than_was_reserved(url: str, most: int) -> None:
    reserved = data_url.size_bound(url)
    assert 0 <= reserved <= len(url)
    try:
        parsed = data_url.parse(url, max_bytes=most)
        data = parsed.read()
    except InvalidInput:
        return
    assert len(data) == parsed.size <= min(most, reserved)


SEGMENTS = st.lists(
    st.sampled_from(
        ["..", ".", "", "inside", "link", "%2e%2e", "%2F", "%00", "a" * 300, "é", "\ud800", "~", "%ff"]
    ),
    max_size=6,
)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("files")
    (folder / "secret").write_text("secret")
    root = folder / "root"
    root.mkdir()
    (root / "inside").write_text("inside")
    (root / "link").symlink_to(folder / "secret")
    return root


@effort(300)
@given(head=st.sampled_from(["file://", "file:", "FILE://localhost", "file://x"]), segments=SEGMENTS)
def test_a_file_url_never_leads_out_of_its_root(root: Path, head: str, segments: list[str]) -> None:
    for url in (head + "/".join([str(root), *segments]), head + "/" + "/".join(segments)):
        with contextlib.suppress(InvalidInput):
            assert file_url.find(url, root=root, max_bytes=100).read() == b"inside"


HOSTS = st.text(st.sampled_from("0123456789abcdefxX.:%[]-é１。\ud800 "), max_size=24)  # odd digits


@effort(300)
@given(host=HOSTS | st.ip_addresses().map(str))
def test_a_host_has_one_canonical_form_or_none(host: str) -> None:
    try:
        canonical = canonical_host(host)
    except ValueError:
        return
    assert canonical_host(canonical) == canonical
    last = canonical.removesuffix(".").rpartition(".")[2]
    if ":" in canonical or (last.isascii() and last.isdecimal()):
        assert str(ip_address(canonical)) == canonical


@effort(200)
@given(inner=st.ip_addresses(v=4), address=st.ip_addresses(v=6))
def test_an_address_is_public_only_if_what_it_embeds_is(inner: IPv4Address, address: IPv6Address) -> None:
    assert is_public(address) in (True, False)
    for prefix, shift in ((0xFFFF << 32, 0), (0x64FF9B << 96, 0), (0x2002 << 112, 80)):
        assert is_public(IPv6Address(prefix | int(inner) << shift)) == is_public(inner)
