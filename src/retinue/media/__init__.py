"""URLs and data URLs to verified ``Image`` objects.

Needs Pillow, and ``MediaLoader`` also aiohttp and pybase64: nothing that ``import retinue`` reaches is here.
"""

from typing import TYPE_CHECKING

from retinue.media.image import DEFAULT_MAX_PIXELS, FORMATS, Image
from retinue.media.policy import MediaPolicy

if TYPE_CHECKING:
    from retinue.media.loader import MediaLoader

__all__ = ["DEFAULT_MAX_PIXELS", "FORMATS", "Image", "MediaLoader", "MediaPolicy"]


def __getattr__(name: str) -> object:
    """Import ``MediaLoader`` when it is asked for: ``Image`` alone must not need its libraries."""
    if name == "MediaLoader":
        from retinue.media.loader import MediaLoader

        return MediaLoader
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
