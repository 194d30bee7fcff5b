"""Which addresses are public, and what a URL's host says: pure, no lookup.

The tables follow IANA's special-purpose address registries (RFC 6890 and its updates). They are written
here because ``ipaddress.is_global`` differs between Python's patch releases and holds multicast for global.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Iterable
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address

__all__ = ["Address", "canonical_host", "is_public", "is_within"]

Address = IPv4Address | IPv6Address

_NOT_PUBLIC_4 = [
    IPv4Network(network)
    for network in (
        "0.0.0.0/8",  # this network; 0.0.0.0 reaches the machine itself
        "10.0.0.0/8",
        "100.64.0.0/10",  # behind a carrier's NAT, and one cloud's metadata
        "127.0.0.0/8",
        "168.63.129.16/32",  # a public number that is Azure's platform from within
        "169.254.0.0/16",  # link-local: most clouds' metadata
        "172.16.0.0/12",
        "192.0.0.0/24",  # protocol assignments, and another cloud's metadata
        "192.0.2.0/24",
        "192.88.99.0/24",
        "192.168.0.0/16",
        "198.18.0.0/15",
        "198.51.100.0/24",
        "203.0.113.0/24",
        "224.0.0.0/4",  # multicast
        "240.0.0.0/4",  # reserved, broadcast
    )
]
_GLOBAL_6 = IPv6Network("2000::/3")
_NOT_PUBLIC_6 = [
    IPv6Network(network)
    for network in (
        "2001::/23",  # protocol assignments, Teredo's tunnels among them
        "2001:db8::/32",
        "3fff::/20",
    )
]
_NAT64 = IPv6Network("64:ff9b::/96")

# The last label decides, as in browsers: a name cannot end in a number.
_NUMERIC = re.compile(r"(?:.*\.)?(?:[0-9]+|0x[0-9a-f]*)", re.DOTALL)


def is_public(address: Address) -> bool:
    """Whether ``address`` is anybody's to reach, judged by the IPv4 address inside where one is embedded."""
    if isinstance(address, IPv4Address):
        return not any(address in network for network in _NOT_PUBLIC_4)
    embedded = address.ipv4_mapped or address.sixtofour
    if address in _NAT64:
        embedded = IPv4Address(int(address) & 0xFFFFFFFF)
    if embedded is not None:
        return is_public(embedded)
    return address in _GLOBAL_6 and not any(address in network for network in _NOT_PUBLIC_6)


def canonical_host(host: str) -> str:
    """``host`` in lower case, and an IPv4 address as four decimal numbers, whatever its spelling.

    ``2130706433``, ``0x7f000001``, ``0177.0.0.1`` and ``127.1`` are all 127.0.0.1 to a resolver.
    ``ValueError`` for what ends in a number and is no address.
    """
    host = host.lower()
    if ":" in host:
        return str(ip_address(host))
    bare = host.removesuffix(".")
    if not _NUMERIC.fullmatch(bare):
        return host
    try:
        return socket.inet_ntoa(socket.inet_aton(bare))
    except OSError:
        raise ValueError("a host that ends in a number and is no address") from None


def is_within(host: str, domains: Iterable[str]) -> bool:
    """Whether canonical ``host`` is one of ``domains`` or a subdomain of one."""
    host = host.removesuffix(".")
    return any(host == domain or host.endswith(f".{domain}") for domain in map(str.lower, domains))
