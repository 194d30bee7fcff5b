"""The demo as a person runs it, and the pictures that it shows."""

from __future__ import annotations

import subprocess
import sys

import pytest

from retinue.demo.run import PICTURES, Service, pictures

ALBUM = pictures()


def test_the_pictures_are_of_many_sizes_formats_and_kinds() -> None:
    assert {picture.name.rsplit(".")[-1] for picture in ALBUM} == {"png", "jpg", "webp"}
    assert {picture.digit for picture in ALBUM} == set("0123456789")
    for kind in ("handwritten", "rendered", "held-out-font"):
        assert sum(f"-{kind}-" in picture.name for picture in ALBUM) >= 12
    assert sum(path.stat().st_size for path in PICTURES.iterdir()) < 300_000


async def test_every_picture_that_is_shipped_is_read_right() -> None:
    async with Service() as service:
        misread = {
            picture.name: answer
            for picture in ALBUM
            if (answer := await service.ask([picture])) != picture.digit
        }
    assert misread == {}


@pytest.mark.timeout(120)
def test_the_demo_answers_42_shows_its_batches_and_exits_with_0() -> None:
    command = [sys.executable, "-m", "retinue.cli", "demo", "--requests", "24"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "42" in done.stdout.split("and at last")[1].split("right")[0]
    assert done.stdout.count("left half-way") >= 1
    assert "The batches that formed" in done.stdout
    assert "times as fast" in done.stdout


def test_a_bad_option_is_an_error_that_names_it() -> None:
    command = [sys.executable, "-m", "retinue.cli", "demo", "--requests", "0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=50, check=False)
    assert done.returncode == 2
    assert "requests must be 1 or more, got 0" in done.stdout + done.stderr
