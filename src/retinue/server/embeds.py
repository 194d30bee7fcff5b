"""``prompt_embeds`` parts: an artifact on its way to the language model.

Between processes an artifact travels as vLLM's public format has it, base64 of what ``torch.save`` writes.
Within one it travels as it is.
"""

from __future__ import annotations

import io
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pybase64
import torch
from torch import Tensor

from retinue.errors import EncoderFailed, InvalidInput
from retinue.prompt.tensors import all_finite

__all__ = ["PARSED_REQUEST", "Embeds", "rows_of_text"]

#: Where the ASGI scope has the parsed chat request, with ``Embeds`` for data, for an app that takes it so.
PARSED_REQUEST = "retinue.request"

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_MAX_RECORD_BYTES = 4096  # of a saved tensor's archive, all but its values; genuine ones have some hundred


@dataclass(frozen=True, eq=False)
class Embeds:
    """The artifact of one image of a request: ``number`` of ``count``, the first being 1."""

    artifact: Any
    number: int
    count: int

    @classmethod
    def of(cls, artifacts: Sequence[Any]) -> list[Embeds]:
        """Of all images of one request, in order."""
        return [cls(artifact, number, len(artifacts)) for number, artifact in enumerate(artifacts, 1)]

    def rows(self, width: int | None = None) -> Tensor:
        """The artifact as a tensor, (rows, hidden), on the CPU; finite, and of ``width`` if that is known.

        ``EncoderFailed`` if it is not that, naming the image.
        """
        what = f"image {self.number} of {self.count}: its artifact"
        try:
            tensor = torch.as_tensor(self.artifact).detach().cpu()
        except (TypeError, ValueError, RuntimeError) as error:
            raise EncoderFailed(f"{what} is no tensor") from error
        if (
            tensor.ndim != 2
            or not len(tensor)
            or not tensor.is_floating_point()
            or width not in (None, tensor.shape[1])
        ):
            hidden = "hidden" if width is None else width
            raise EncoderFailed(
                f"{what} has shape {tuple(tensor.shape)} and dtype {tensor.dtype}, "
                f"not (rows, {hidden}) of floating point with 1 row or more"
            )
        if not all_finite(tensor):
            raise EncoderFailed(f"{what} has values that are not finite")
        return tensor

    def text(self, width: int | None = None) -> str:
        """The data of its part, for a server that reads ``prompt_embeds`` parts; raises as ``rows`` does."""
        file = io.BytesIO()
        torch.save(self.rows(width).contiguous().clone(), file)  # a view would bring its whole storage along
        return pybase64.b64encode_as_string(file.getbuffer())


def rows_of_text(data: str, width: int) -> Tensor:
    """The tensor, (rows, width), that ``data`` is, which a client may have sent; ``InvalidInput`` if not."""
    try:
        saved = pybase64.b64decode(data, validate=True)
    except ValueError:
        raise InvalidInput("its data is not base64") from None
    rows = _load(saved)
    if rows.dtype not in _DTYPES:
        raise InvalidInput(f"its tensor has dtype {rows.dtype}, not one of {', '.join(map(str, _DTYPES))}")
    if rows.ndim != 2 or rows.shape[0] < 1 or rows.shape[1] != width:
        raise InvalidInput(f"its tensor has shape {tuple(rows.shape)}, not (1 or more rows, {width})")
    if rows.nbytes > len(saved):  # an expanded view: a few bytes that would become any amount of memory
        raise InvalidInput(f"its tensor has {rows.nbytes} bytes of values, of which not all were sent")
    if not all_finite(rows):
        raise InvalidInput("its tensor has values that are not finite")
    return rows


def _load(saved: bytes) -> Tensor:
    try:
        _check_archive(saved)
        loaded = torch.load(io.BytesIO(saved), map_location="cpu", weights_only=True)
    except Exception:  # each layer of the format has errors of its own
        raise InvalidInput("its data is no tensor as torch.save writes one") from None
    if not isinstance(loaded, Tensor) or loaded.layout is not torch.strided or loaded.is_nested:
        raise InvalidInput("its data is no plain, dense tensor")
    if loaded.device.type != "cpu":  # "meta": no values came with it
        raise InvalidInput("its tensor has no values")
    return loaded.detach()


def _check_archive(saved: bytes) -> None:
    """Raise for an archive that could become more than was sent; ``torch.save`` writes none such.

    It stores without compression, and beside the values of a tensor all is small.
    """
    with zipfile.ZipFile(io.BytesIO(saved)) as archive:
        for record in archive.infolist():
            if record.compress_type != zipfile.ZIP_STORED:
                raise ValueError("compressed")
            if record.file_size > _MAX_RECORD_BYTES and not record.filename.endswith("/data/0"):
                raise ValueError("more than one tensor")
