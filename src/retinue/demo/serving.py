"""The demo model behind the server: its encoder, its embedded decoder, and the HTTP around them."""

from __future__ import annotations

from retinue.batching import Observer
from retinue.decoders.transformers import TransformersDecoder
from retinue.demo.encoder import CHECKPOINT, DigitsEncoder
from retinue.media import MediaPolicy
from retinue.server.embedded import EmbeddedApp
from retinue.server.limits import FailurePolicy, ServerLimits
from retinue.server.stack import Behind, Stack

__all__ = ["MODEL_NAME", "demo_stack"]

#: What clients call the demo model.
MODEL_NAME = "demo"


def demo_stack(
    *,
    limits: ServerLimits | None = None,
    media: MediaPolicy | None = None,
    failures: FailurePolicy | None = None,
    api_key: str | None = None,
    observer: Observer | None = None,
) -> Stack:
    """The server that ``retinue serve --demo`` and ``retinue demo`` run."""
    decoder = TransformersDecoder(CHECKPOINT, dtype="float32", max_batch_items=32)
    app = EmbeddedApp(decoder, model_name=MODEL_NAME)
    behind = Behind(app, load=decoder.aload, close=decoder.aclose, takes_artifacts=True)
    return Stack(
        DigitsEncoder(),
        "demo",
        behind,
        limits=limits,
        media=media,
        failures=failures,
        api_key=api_key,
        observer=observer,
    )
