"""Which addresses are public, and what the hosts of URLs mean."""

from __future__ import annotations

from ipaddress import IPv4Address, IPv6Address, ip_address

import pytest
from hypothesis import given
from hypothesis import strategies as st

from retinue.media.addresses import canonical_host, is_public, is_within

PRIVATE = [
    "0.0.0.0",
    "0.1.2.3",
    "10.0.0.1",
    "100.64.0.1",
    "100.100.100.200",
    "127.0.0.1",
    "127.255.255.254",
    "168.63.129.16",
    "169.254.169.254",
    "172.16.0.1",
    "172.31.255.255",
    "192.0.0.192",
    "192.0.2.1",
    "192.168.1.1",
    "198.18.0.1",
    "198.51.100.1",
    "203.0.113.1",
    "224.0.0.1",
    "239.255.255.255",
    "240.0.0.1",
    "255.255.255.255",
    "::",
    "::1",
    "::ffff:127.0.0.1",
    "::ffff:10.0.0.1",
    "::127.0.0.1",
    "64:ff9b::127.0.0.1",
    "64:ff9b::a00:1",
    "64:ff9b:1::1",
    "100::1",
    "2001::1",
    "2001:0:7f00:1::",
    "2001:db8::1",
    "2002:7f00:1::",
    "2002:a00:1::",
    "3fff::1",
    "4000::1",
    "fc00::1",
    "fd00:ec2::254",
    "fe80::1",
    "fe80::1%eth0",
    "fec0::1",
    "ff02::1",
]
PUBLIC = [
    "1.1.1.1",
    "8.8.8.8",
    "100.63.255.255",
    "100.128.0.0",
    "172.15.255.255",
    "172.32.0.0",
    "192.167.255.255",
    "223.255.255.255",
    "::ffff:8.8.8.8",
    "64:ff9b::808:808",
    "2002:808:808::",
    "2001:4860:4860::8888",
    "2606:4700::1111",
]


@pytest.mark.parametrize("address", PRIVATE)
def test_an_address_that_is_not_anybodys_is_not_public(address: str) -> None:
    assert not is_public(ip_address(address))


@pytest.mark.parametrize("address", PUBLIC)
def test_the_neighbours_of_private_networks_are_public(address: str) -> None:
    assert is_public(ip_address(address))


@given(st.ip_addresses(v=4))
def test_no_ipv4_address_is_public_that_the_standard_library_holds_for_private(address: IPv4Address) -> None:
    facts = "private", "loopback", "link_local", "multicast", "reserved", "unspecified"
    if is_public(address):
        assert not [fact for fact in facts if getattr(address, f"is_{fact}")]


@given(st.ip_addresses(v=4))
def test_an_embedded_ipv4_address_decides(inner: IPv4Address) -> None:
    for outer in (
        IPv6Address((0xFFFF << 32) | int(inner)),
        IPv6Address((0x2002 << 112) | (int(inner) << 80)),
        IPv6Address(int(IPv6Address("64:ff9b::")) | int(inner)),
    ):
        assert is_public(outer) == is_public(inner)


@pytest.mark.parametrize(
    ("host", "canonical"),
    [
        ("127.0.0.1", "127.0.0.1"),
        ("127.0.0.1.", "127.0.0.1"),
        ("2130706433", "127.0.0.1"),
        ("0x7f000001", "127.0.0.1"),
        ("0X7F000001", "127.0.0.1"),
        ("0177.0.0.1", "127.0.0.1"),
        ("127.1", "127.0.0.1"),
        ("0", "0.0.0.0"),
        ("::FFFF:127.0.0.1", str(ip_address("::ffff:127.0.0.1"))),
        ("EXAMPLE.com.", "example.com."),
        ("1.example", "1.example"),
    ],
)
def test_every_spelling_of_an_address_is_one(host: str, canonical: str) -> None:
    assert canonical_host(host) == canonical


@pytest.mark.parametrize("host", ["1.2.3.4.5", "256.1.1.1", "a.1", "08", "4294967296", "::1::"])
def test_a_name_cannot_end_in_a_number(host: str) -> None:
    with pytest.raises(ValueError, match=r"ends in a number|does not appear|Exactly|colon"):
        canonical_host(host)


@pytest.mark.parametrize(
    ("host", "within"),
    [
        ("a.example", True),
        ("a.example.", True),
        ("x.y.a.example", True),
        ("b.example", True),
        ("ba.example", False),
        ("example", False),
        ("a.example.evil", False),
        ("10.0.0.1", True),
        ("0.0.1", False),
    ],
)
def test_a_domain_covers_its_subdomains_and_no_lookalike(host: str, within: bool) -> None:
    assert is_within(host, ["A.example", "b.Example", "10.0.0.1"]) == within
