"""Batching across concurrent requests: standard library only, nothing of images."""

from retinue.batching.batcher import ThreadedMicroBatcher
from retinue.batching.records import BatchRecord, Observer, Pending, RequestRecord

__all__ = ["BatchRecord", "Observer", "Pending", "RequestRecord", "ThreadedMicroBatcher"]
