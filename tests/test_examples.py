"""Every example is a program that ends well, soon, and shows what it says."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"


def run(name: str) -> list[str]:
    """The lines that the example prints; it must say nothing else, warnings included."""
    ended = subprocess.run(
        [sys.executable, "-W", "error", str(EXAMPLES / name)],
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    return ended.stdout.splitlines()


def batches(lines: list[str], pattern: str) -> list[tuple[int, ...]]:
    """The numbers of each line that ``pattern`` matches whole."""
    found = [re.fullmatch(pattern, line) for line in lines]
    return [tuple(map(int, match.groups())) for match in found if match]


def test_own_encoder_shares_batches_across_requests_within_its_limits() -> None:
    lines = run("own_encoder.py")
    assert lines[:4] == [
        "building brightness-8",
        "48 requests, 93 pictures: each got its own back",
        "refused: image 2 of 2: not a PGM file",
        "closed",
    ]
    ran = batches(lines, r"batch +\d+: +(\d+) pictures of +(\d+) requests, +(\d+) patches, [\d.]+ ms")
    assert len(ran) == len(lines) - 4
    assert sum(pictures for pictures, _, _ in ran) == 93
    assert max(requests for _, requests, _ in ran) > 1
    assert max(pictures for pictures, _, _ in ran) <= 32
    assert max(patches for _, _, patches in ran) <= 256


def test_plain_batcher_needs_few_queries_for_many_callers() -> None:
    queries, several = run("plain_batcher.py")
    [(count,)] = batches([queries], r"300 callers, (\d+) queries")
    assert 3 <= count < 100
    assert several == "one caller may want several: ['name 7', None, 'name 7']"


def test_asyncio_worker_survives_hang_ups_deadlines_and_its_own_end() -> None:
    lines = run("asyncio_worker.py")
    owl = lines.pop(-2)
    assert lines == [
        "loading shout-1",
        "'20 bee' was answered: '504 bee took too long'",
        "the caller of fox hung up",
        "'60000 cat dog' was answered: '200 CAT DOG'",
        "closed, having encoded: cat dog elk",  # and neither bee nor fox nor owl
        "'60000 elk' was answered: '200 ELK'",
    ]
    assert owl.startswith("'60000 owl' was answered: '503 ")


def test_torch_vit_batches_pictures_of_one_shape_within_its_buckets() -> None:
    pytest.importorskip("torch")
    lines = run("torch_vit.py")
    assert lines[:3] == [
        "artifacts: [(16, 128), (32, 128), (128, 128)]",
        "alone or in company, a picture's artifact is the same",
        "refused: image 2 of 2: (3, height, width) is needed, 14 px at least, got (3, 7, 56)",
    ]
    ran = batches(lines, r"(\d+) pictures of \((\d+), (\d+)\) patches: cost (\d+), bucket (\d+)")
    assert len(ran) == len(lines) - 3
    assert sum(pictures for pictures, *_ in ran) == 24 + 3
    for pictures, rows, columns, cost, bucket in ran:
        assert cost == pictures * rows * columns
        assert bucket == min(size for size in (64, 128, 256) if size >= cost)


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.name)
def test_an_example_says_what_it_shows_and_how_to_run_it_and_has_a_test(path: Path) -> None:
    words = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    assert f"Run it:  python examples/{path.name}" in words
    tests = [Path(__file__), *Path(__file__).parent.glob("vllm/test_*.py")]
    assert any(f'"{path.name}"' in test.read_text(encoding="utf-8") for test in tests)
