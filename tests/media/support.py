"""What the fetching and loading tests share: loaders for a loopback origin, names without a network."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from ipaddress import ip_address
from typing import Any

from aiohttp.abc import AbstractResolver, ResolveResult

from retinue.errors import InvalidInput
from retinue.media import MediaLoader, MediaPolicy
from retinue.media.addresses import Address


class Names(AbstractResolver):
    """Answers from a table; a list of answers is used up one by one, its last for ever."""

    def __init__(self, table: Mapping[str, str | list[str]] = {}) -> None:
        self._table = {name: [to] if isinstance(to, str) else list(to) for name, to in table.items()}
        self.asked: list[str] = []

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        self.asked.append(host)
        answers = self._table.get(host.removesuffix("."))
        if answers is None:
            raise socket.gaierror(socket.EAI_NONAME, "no such name")
        addresses = (answers.pop(0) if len(answers) > 1 else answers[0]).split()
        return [
            ResolveResult(hostname=host, host=to, port=port, family=family, proto=0, flags=0)
            for to in addresses
        ]

    async def close(self) -> None:
        pass


def only(*addresses: str) -> Callable[[Address], bool]:
    """These are public and no others."""
    public = {ip_address(address) for address in addresses}
    return lambda address: address in public


@contextlib.asynccontextmanager
async def loading(
    *,
    resolver: AbstractResolver | None = None,
    is_public: Callable[[Address], bool] | None = None,
    **options: Any,
) -> AsyncIterator[MediaLoader]:
    """A loader that reaches loopback, unless ``is_public`` says what it reaches."""
    policy = MediaPolicy(**{"allow_private_addresses": is_public is None} | options)
    chosen = {} if is_public is None else {"is_public": is_public}
    async with MediaLoader(policy, resolver=resolver or Names(), **chosen) as loader:
        yield loader


async def refusal(loader: MediaLoader, *urls: str) -> str:
    """Load ``urls``, which must fail; return the message."""
    error = await refused(loader, urls)
    return str(error)


async def refused(loader: MediaLoader, urls: Sequence[str]) -> InvalidInput:
    try:
        await loader.load(urls)
    except InvalidInput as error:
        return error
    raise AssertionError("loaded")
