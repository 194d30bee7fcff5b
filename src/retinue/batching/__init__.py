"""Batching across concurrent requests: standard library only, nothing of images."""

from retinue.batching.batcher import ThreadedMicroBatcher
from retinue.batching.records import (
    BatchRecord,
    LifeObserver,
    LifeRecord,
    Observer,
    Pending,
    RequestRecord,
)

__all__ = [
    "BatchRecord",
    "LifeObserver",
    "LifeRecord",
    "Observer",
    "Pending",
    "RequestRecord",
    "ThreadedMicroBatcher",
]
