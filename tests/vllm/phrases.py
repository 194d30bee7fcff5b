"""An encoder that sees words: the artifact of a picture is the language model's own embeddings of a phrase.

So what a model says to a picture can be compared, token for token, with what it says to the phrase as text.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

import PIL.Image
import pybase64
import torch
from safetensors import safe_open
from torch import Tensor
from transformers import AutoTokenizer

from retinue.encoder import Preprocessed, VisionEncoderBackend
from retinue.media import Image

__all__ = ["PHRASES", "Phrases", "data_url", "picture"]

PHRASES = (
    "a cat on a red chair",
    "the number 4207",
    "Three sheep graze beside a small river, and a fourth one sleeps.",
    "a naïve café in Zürich",
    "daisies",
    "The capital of France is not Lyon.",
    "a blue bicycle without wheels leans against the door of an old bakery",
)


def picture(phrase: int) -> bytes:
    """A PNG whose colour says which phrase it is."""
    file = io.BytesIO()
    PIL.Image.new("RGB", (8, 8), (phrase, 0, 0)).save(file, "PNG")
    return file.getvalue()


def data_url(phrase: int) -> str:
    return f"data:image/png;base64,{pybase64.b64encode(picture(phrase)).decode()}"


class Phrases(VisionEncoderBackend[Image, Tensor, Tensor]):
    """One row for each token of the phrase; ``cost`` counts them."""

    max_batch_cost = 64

    def build(self, model_id: str) -> None:
        tokenizer: Any = AutoTokenizer.from_pretrained(model_id)
        self._ids = [torch.tensor(tokenizer.encode(phrase)) for phrase in PHRASES]
        with safe_open(f"{model_id}/model.safetensors", "pt") as weights:
            self._table = weights.get_tensor("model.embed_tokens.weight")  # (vocabulary, hidden) bfloat16

    def preprocess(self, raw: Image) -> Preprocessed[Tensor]:
        red, _, _ = raw.decode().getpixel((0, 0))  # type: ignore[misc]  # it is RGB
        ids = self._ids[int(red) % len(PHRASES)]  # the server tries us out with a picture of its own
        return Preprocessed(ids, cost=len(ids))

    def forward_batch(self, items: Sequence[Tensor], target_bucket: int | None = None) -> list[Tensor]:
        rows = self._table[torch.cat(list(items))]  # (all tokens, hidden)
        return [one.clone() for one in rows.split([len(ids) for ids in items])]
