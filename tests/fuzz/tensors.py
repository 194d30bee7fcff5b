"""Embeddings as a client may send them: what ``torch.save`` wrote, damaged, or of another kind."""

from __future__ import annotations

import io
from typing import Any

import pybase64
import torch
from hypothesis import strategies as st

__all__ = ["WIDTH", "damaged_tensors", "saved"]

#: Of the demo's language model.
WIDTH = 128


def saved(value: Any, **options: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file, **options)
    return file.getvalue()


def _corpus() -> list[bytes]:
    rows = torch.ones(2, WIDTH)
    values: list[Any] = [
        rows,
        rows.bfloat16(),
        rows.double(),
        rows.int(),
        rows[0],
        rows[:, :4].clone(),
        rows[:0],
        rows * float("nan"),
        rows[:1].expand(2**40, WIDTH),
        torch.empty(2**40, WIDTH, device="meta"),
        rows.to_sparse(),
        torch.nested.nested_tensor([rows, rows[:1]], layout=torch.jagged),
        {"a": rows},
        [rows] * 3,
        torch.nn.Parameter(rows),
        "text",
        2**70,
    ]
    return [saved(value) for value in values] + [saved(rows, _use_new_zipfile_serialization=False)]


_CORPUS = _corpus()


@st.composite
def damaged_tensors(draw: st.DrawFn) -> str:
    """The ``data`` of a ``prompt_embeds`` part."""
    data = draw(st.just(_CORPUS[0]) | st.sampled_from(_CORPUS))
    for _ in range(draw(st.sampled_from([0, 0, 1, 3]))):
        place = draw(st.integers(0, len(data)))
        kind = draw(st.sampled_from(["flip", "cut", "number", "splice"]))
        if kind == "flip":
            piece = bytes(byte ^ draw(st.integers(1, 255)) for byte in data[place : place + 1])
        elif kind == "number":
            piece = draw(st.sampled_from([b"\xff" * 4, bytes(4), b"\0\0\0\x7f"]))
        elif kind == "splice":
            piece = draw(st.sampled_from(_CORPUS))[place:]
        else:
            piece = b""
        data = data[:place] + piece + (b"" if kind == "cut" else data[place + len(piece) :])
    text = pybase64.b64encode(data).decode()
    return draw(st.sampled_from([text, text, text, text[:-1], text + "=", "", "é" + text]))
