"""Retinue batches the images of concurrent requests through your own vision encoder.

    async with AsyncVisionEncoder(MyBackend(), "path/of/the/weights") as encoder:
        artifacts = await encoder.encode([image, another])

Importing this package imports the standard library alone. What needs more lives in its own modules:
``retinue.media`` (Pillow), ``retinue.prompt.tensors`` (torch), ``retinue.decoders.transformers``.
"""

from retinue.batching import BatchRecord, Observer, Pending, RequestRecord, ThreadedMicroBatcher
from retinue.encoder import AsyncVisionEncoder, Preprocessed, VisionEncoderBackend, load_backend
from retinue.errors import (
    BackendLost,
    DeadlineExceeded,
    EncoderFailed,
    EncoderUnavailable,
    InvalidInput,
    Overloaded,
    RetinueError,
)

__all__ = [
    "AsyncVisionEncoder",
    "BackendLost",
    "BatchRecord",
    "DeadlineExceeded",
    "EncoderFailed",
    "EncoderUnavailable",
    "InvalidInput",
    "Observer",
    "Overloaded",
    "Pending",
    "Preprocessed",
    "RequestRecord",
    "RetinueError",
    "ThreadedMicroBatcher",
    "VisionEncoderBackend",
    "load_backend",
]
