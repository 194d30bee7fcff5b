"""A network without names: what the fuzzers make up is looked up nowhere."""

from __future__ import annotations

import socket
from typing import Any

import pytest

__all__ = ["without_names"]


def without_names(patch: pytest.MonkeyPatch) -> None:
    """Let the system know ``localhost`` and addresses, and no other name."""
    look_up = socket.getaddrinfo

    def known(host: Any, *arguments: Any, **options: Any) -> Any:
        name = str(host).rstrip(".").lower()
        if name != "localhost":
            options["flags"] = options.get("flags", 0) | socket.AI_NUMERICHOST
        return look_up(host, *arguments, **options)

    patch.setattr(socket, "getaddrinfo", known)
