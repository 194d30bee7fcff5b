"""``prompt_embeds`` parts: an artifact on its way to the language model.

Between processes an artifact travels as vLLM's public format has it, base64 of what ``torch.save`` writes.
Within one it travels as it is.
"""

from __future__ import annotations

import ctypes
import functools
import io
import zipfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

import pybase64
import torch
from torch import Tensor

from retinue.errors import EncoderFailed, InvalidInput
from retinue.prompt.tensors import all_finite, pieces

__all__ = ["PARSED_REQUEST", "Embeds", "rows_of_text", "soon_written"]

#: Where the ASGI scope has the parsed chat request, with ``Embeds`` for data, for an app that takes it so.
PARSED_REQUEST = "retinue.request"

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_SMALL_BYTES = 2**16  # of values
_PATTERN = bytes(range(251))  # of a prime length, so that it is no row's
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
        tensor = self.artifact
        try:
            if not (_is_here(tensor) and not tensor.requires_grad):
                tensor = torch.as_tensor(tensor).detach().cpu()
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
        return pybase64.b64encode_as_string(_saved(self.rows(width)))


def soon_written(embeds: Sequence[Embeds]) -> bool:
    """Whether writing all of them takes less of an event loop's time than handing it to a thread and back."""
    artifacts = [of_one.artifact for of_one in embeds]
    return all(map(_is_here, artifacts)) and sum(rows.nbytes for rows in artifacts) <= _SMALL_BYTES


def _is_here(artifact: Any) -> TypeGuard[Tensor]:
    return isinstance(artifact, Tensor) and artifact.device.type == "cpu"


def _saved(rows: Tensor) -> bytes:
    """What ``torch.save`` writes for ``rows``, on the CPU, but for its id of the archive.

    That takes 100 us for the smallest tensor, and gives the interpreter's lock away dozens of times. But what
    it writes around the values is the same for all tensors of one shape and dtype.
    """
    around = _around(rows.shape, rows.dtype) if rows.nbytes <= _SMALL_BYTES else None
    if around is None:
        return _as_torch_saves(rows)
    rows = rows.contiguous()
    values = ctypes.string_at(rows.data_ptr(), rows.nbytes)
    checksum = _checksum(values)
    before, between, beyond, after = around
    return b"".join((before, values, between, checksum, beyond, checksum, after))


@functools.lru_cache(maxsize=512)  # some KB each
def _around(shape: torch.Size, dtype: torch.dtype) -> tuple[bytes, bytes, bytes, bytes] | None:
    """What stands before the values, from there to their checksum, to its second place, and to the end.

    None where a value or two cannot be told from the rest.
    """
    size = shape.numel() * dtype.itemsize
    values = (_PATTERN * (size // len(_PATTERN) + 1))[:size]
    checksum = _checksum(values)
    saved = _as_torch_saves(torch.frombuffer(bytearray(values), dtype=dtype).view(shape))
    before, *behind = saved.split(values)
    pieces = behind[0].split(checksum)
    if len(behind) != 1 or len(pieces) != 3 or checksum in before:
        return None
    between, beyond, after = pieces
    return before, between, beyond, after


def _as_torch_saves(rows: Tensor) -> bytes:
    own = torch.empty(rows.shape, dtype=rows.dtype)  # a view would bring its whole storage along
    for piece, source in zip(pieces(own), pieces(rows), strict=True):
        piece.copy_(source)
    file = io.BytesIO()
    torch.save(own, file)
    return file.getvalue()


def _checksum(values: bytes) -> bytes:
    return zlib.crc32(values).to_bytes(4, "little")


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
