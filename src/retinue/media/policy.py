"""What a request's images may be, and where they may come from."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path

import PIL.Image

from retinue.media.image import DEFAULT_MAX_PIXELS

__all__ = ["MediaPolicy"]

_HOST = re.compile(r"[a-z0-9_:]([a-z0-9_.:-]*[a-z0-9_:])?", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class MediaPolicy:
    """The limits on a request's images. The defaults are safe for clients that you do not trust."""

    max_image_bytes: int = 20 * 2**20
    """Encoded bytes of one image, after base64 and before its pixels."""

    max_image_pixels: int = DEFAULT_MAX_PIXELS
    """Width times height of one image; at most PIL.Image.MAX_IMAGE_PIXELS."""

    max_images: int = 16
    """Images of one request."""

    fetch_timeout_s: float = 10.0
    """Seconds that fetching one URL may take, from the name's lookup to the last byte, redirects included."""

    max_redirects: int = 5
    """Redirects that one URL may lead through; each is checked as the first URL is."""

    allowed_domains: tuple[str, ...] = ()
    """Hosts that http and https URLs may name, each with its subdomains; none given: any."""

    allow_private_addresses: bool = False
    """Connect to loopback, private, link-local and other addresses that are not public, too."""

    file_root: Path | None = None
    """Folder that file URLs may read from, symbolic links resolved; none given: file URLs are refused."""

    def __post_init__(self) -> None:
        self._check_at_least(1, "max_image_bytes", "max_image_pixels", "max_images")
        self._check_at_least(0, "max_redirects")
        bound = PIL.Image.MAX_IMAGE_PIXELS
        if bound is not None and self.max_image_pixels > bound:
            raise ValueError(
                f"max_image_pixels must be at most PIL.Image.MAX_IMAGE_PIXELS={bound}, "
                f"got {self.max_image_pixels}"
            )
        if not 0 < self.fetch_timeout_s < math.inf:
            raise ValueError(f"fetch_timeout_s must be finite and more than 0, got {self.fetch_timeout_s}")
        if isinstance(self.allowed_domains, str):
            raise ValueError(f"allowed_domains must be a tuple of host names, got {self.allowed_domains!r}")
        for domain in self.allowed_domains:
            if not _HOST.fullmatch(domain):
                raise ValueError(f"allowed_domains must be bare ASCII host names, got {domain!r}")
        if self.file_root is not None and not self.file_root.is_dir():
            raise ValueError(f"file_root must be a folder that exists, got {str(self.file_root)!r}")

    def _check_at_least(self, bound: int, *names: str) -> None:
        for name in names:
            if getattr(self, name) < bound:
                raise ValueError(f"{name} must be {bound} or more, got {getattr(self, name)}")
