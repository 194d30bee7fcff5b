"""URL or data URL to a verified ``Image``. Needs Pillow: nothing that ``import retinue`` reaches is here."""

from retinue.media.image import DEFAULT_MAX_PIXELS, FORMATS, Image

__all__ = ["DEFAULT_MAX_PIXELS", "FORMATS", "Image"]
