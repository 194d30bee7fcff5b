"""File URLs, below one folder only. Blocks while it reads: not for an event loop's thread."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from urllib.parse import unquote, urlsplit

from retinue.errors import InvalidInput

__all__ = ["File", "find"]


@dataclass(frozen=True)
class File:
    """A file of ``size`` bytes before its reading; ``read`` gives them, or ``InvalidInput``."""

    size: int
    read: Callable[[], bytes] = field(repr=False)


def find(url: str, *, root: Path | None, max_bytes: int) -> File:
    """Find the file that ``url`` names below ``root``; read nothing yet.

    ``InvalidInput`` if there is no ``root``, if the path leaves it once symbolic links are resolved (which
    tells nothing of what is there), and for what is missing, no regular file, or more than ``max_bytes``.
    """
    if root is None:
        raise InvalidInput("a file URL, which file_root does not allow")
    try:
        path = _path(url)
        inside = path is not None and path.is_relative_to(root.resolve())
        size = _size(path) if inside and path is not None else None
    except (OSError, ValueError, RuntimeError):  # RuntimeError: links in a circle, up to Python 3.12
        inside, path, size = True, None, None
    if not inside:
        raise InvalidInput("a file URL outside file_root")
    if path is None or size is None:
        raise InvalidInput("its file cannot be read")
    if size > max_bytes:
        raise InvalidInput(f"{size} bytes, more than max_image_bytes={max_bytes}")
    return File(size, partial(_read, path, size))


def _path(url: str) -> Path | None:
    """None for another machine's file."""
    parts = urlsplit(url)
    if parts.netloc.lower() not in ("", "localhost"):
        return None
    path = Path(unquote(parts.path, errors="strict"))
    return path.resolve() if path.is_absolute() else None


def _size(path: Path) -> int | None:
    found = path.stat()
    return found.st_size if stat.S_ISREG(found.st_mode) else None


def _read(path: Path, size: int) -> bytes:
    """At most ``size`` bytes, through no link that came since, and without waiting for a pipe's writer."""
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            return file.read(size)
    except OSError:
        pass
    raise InvalidInput("its file cannot be read")
