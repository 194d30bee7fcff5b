"""The encoder: a backend's contract and its asyncio driver. Standard library only."""

from retinue.encoder.backend import AnyBackend, Preprocessed, VisionEncoderBackend
from retinue.encoder.driver import AsyncVisionEncoder, PreprocessObserver
from retinue.encoder.loading import load_backend

__all__ = [
    "AnyBackend",
    "AsyncVisionEncoder",
    "PreprocessObserver",
    "Preprocessed",
    "VisionEncoderBackend",
    "load_backend",
]
