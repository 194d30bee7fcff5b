"""Any bytes are a picture, within the bounds on its size, memory and time, or an ``InvalidInput``."""

from __future__ import annotations

import time
import warnings

import pytest
from hypothesis import given
from hypothesis import strategies as st

from retinue.errors import InvalidInput
from retinue.media import Image

from .effort import LIMIT_S, effort
from .memory import within
from .pictures import CORPUS, damaged

pytestmark = pytest.mark.timeout(LIMIT_S)

MAX_PIXELS = 2**20
# Decoded, converted, pasted, turned: four pictures of 4 bytes a pixel, a codec's planes beside them, and what
# the allocator keeps. A header that is believed beyond the bound asks for hundreds of MiB.
MOST_BYTES = 48 * MAX_PIXELS
MOST_S = 5.0  # of this thread's own work, which no busy machine makes longer


@pytest.mark.parametrize("name", sorted(CORPUS))
def test_the_corpus_is_read(name: str) -> None:
    assert Image(CORPUS[name]).decode().mode == "RGB"


@effort(1000)
@given(data=damaged(), max_side=st.sampled_from([None, 8]))
def test_damaged_pictures_cost_no_more_than_their_bound(data: bytes, max_side: int | None) -> None:
    began_s = time.thread_time()
    with warnings.catch_warnings(record=True) as caught, within(MOST_BYTES):
        warnings.simplefilter("always")  # as errors they would become InvalidInput, and pass
        try:
            image = Image(data, max_pixels=MAX_PIXELS)
            assert 0 < image.size[0] * image.size[1] <= MAX_PIXELS
            picture = image.decode(max_side)
        except InvalidInput:
            pass
        else:
            assert picture.mode == "RGB"
            assert picture.size == image.size or max(picture.size) == max_side
    assert [str(warning.message) for warning in caught] == []
    assert time.thread_time() - began_s < MOST_S
