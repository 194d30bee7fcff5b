"""Any ``prompt_embeds`` data is rows no larger than what was sent, or ``InvalidInput``; none of it runs."""

from __future__ import annotations

from pathlib import Path

import pybase64
import pytest
from hypothesis import given

from retinue.errors import InvalidInput
from retinue.server.embeds import rows_of_text

from .effort import LIMIT_S, effort
from .memory import within
from .tensors import WIDTH, damaged_tensors, saved

pytestmark = pytest.mark.timeout(LIMIT_S)

MOST_BYTES = 2**24  # the largest in the corpus has some KiB


@effort(400)
@given(data=damaged_tensors())
def test_damaged_tensors_cost_no_more_than_was_sent(data: str) -> None:
    with within(MOST_BYTES):
        try:
            rows = rows_of_text(data, WIDTH)
        except InvalidInput:
            return
    assert rows.shape == (len(rows), WIDTH)
    assert rows.nbytes <= len(data)
    assert bool(rows.isfinite().all())


class Bomb:
    """Unpickled, it makes a file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return Path.touch, (self._path,)


@pytest.mark.parametrize("zipped", [True, False])
def test_what_is_sent_to_be_called_is_not(tmp_path: Path, zipped: bool) -> None:
    data = pybase64.b64encode(saved(Bomb(tmp_path / "made"), _use_new_zipfile_serialization=zipped)).decode()
    with pytest.raises(InvalidInput, match="its data is no tensor"):
        rows_of_text(data, WIDTH)
    assert not (tmp_path / "made").exists()
