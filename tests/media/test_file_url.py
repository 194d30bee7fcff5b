"""File URLs: below one folder, after symbolic links, and nothing told about the rest."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from retinue.errors import InvalidInput
from retinue.media import MediaLoader, MediaPolicy
from retinue.media.file_url import find

from .origin import picture


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "pictures"
    root.mkdir()
    (root / "a picture.png").write_bytes(picture())
    (tmp_path / "secret.png").write_bytes(picture())
    (tmp_path / "pictures-not").mkdir()
    (tmp_path / "pictures-not" / "secret.png").write_bytes(picture())
    return root


async def refusal(url: str, root: Path | None) -> str:
    async with MediaLoader(MediaPolicy(file_root=root)) as loader:
        with pytest.raises(InvalidInput) as caught:
            await loader.load([url])
    return str(caught.value)


@pytest.mark.parametrize("prefix", ["file://", "file://localhost", "file:", "FILE://"])
async def test_a_file_below_the_root_is_read(root: Path, prefix: str) -> None:
    url = f"{prefix}{root}/a%20picture.png"
    held: list[int] = []
    async with MediaLoader(MediaPolicy(file_root=root)) as loader:
        (image,) = await loader.load([url], reserve=held.append)
    assert image.data == picture()
    assert image.url == url
    assert held == [len(picture())]


async def test_without_a_root_no_file_is_read(root: Path) -> None:
    assert (
        await refusal(f"file://{root}/a%20picture.png", None)
        == "image 1 of 1: a file URL, which file_root does not allow"
    )


@pytest.mark.parametrize(
    "path",
    [
        "/../secret.png",
        "/%2e%2e/secret.png",
        "/..%2Fsecret.png",
        "/../pictures-not/secret.png",
        "/../there-is-none.png",
        "/link.png",
        "/folder/secret.png",
        "/link-to-nothing",
    ],
)
async def test_what_is_outside_is_refused_alike_whether_it_is_there_or_not(root: Path, path: str) -> None:
    (root / "link.png").symlink_to(root.parent / "secret.png")
    (root / "folder").symlink_to(root.parent)
    (root / "link-to-nothing").symlink_to(root.parent / "there-is-none.png")
    assert await refusal(f"file://{root}{path}", root) == "image 1 of 1: a file URL outside file_root"


async def test_a_link_that_stays_inside_is_followed(root: Path) -> None:
    (root / "link.png").symlink_to(root / "a picture.png")
    async with MediaLoader(MediaPolicy(file_root=root)) as loader:
        (image,) = await loader.load([f"file://{root}/link.png"])
    assert image.data == picture()


@pytest.mark.parametrize("path", ["/none.png", "", "/circle", "/pipe", "/a%00b", "/%ff", "/" + "x" * 300])
async def test_what_is_no_readable_file_is_refused_without_waiting_for_it(root: Path, path: str) -> None:
    (root / "circle").symlink_to(root / "circle")
    os.mkfifo(root / "pipe")
    assert await refusal(f"file://{root}{path}", root) == "image 1 of 1: its file cannot be read"


@pytest.mark.parametrize("url", ["file://other.example/x.png", "file:x.png", "file:", "file://"])
async def test_another_machines_file_and_a_relative_one_are_outside(root: Path, url: str) -> None:
    assert "outside file_root" in await refusal(url, root)


async def test_a_large_file_is_refused_by_its_size(root: Path) -> None:
    (root / "large.png").touch()
    os.truncate(root / "large.png", 2**40)
    assert await refusal(f"file://{root}/large.png", root) == (
        f"image 1 of 1: {2**40} bytes, more than max_image_bytes={20 * 2**20}"
    )


def test_a_file_that_became_a_link_or_grew_since_is_not_followed_and_not_read_on(root: Path) -> None:
    path = root / "a picture.png"
    size = path.stat().st_size
    found = find(f"file://{root}/a%20picture.png", root=root, max_bytes=size)
    path.write_bytes(picture() + bytes(1000))
    assert found.read() == picture()
    path.unlink()
    path.symlink_to(root.parent / "secret.png")
    with pytest.raises(InvalidInput, match="its file cannot be read"):
        found.read()
