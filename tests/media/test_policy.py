"""``MediaPolicy``: defaults that are safe, and no value that cannot be meant."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import PIL.Image
import pytest

from retinue.media import DEFAULT_MAX_PIXELS, MediaPolicy


def test_the_defaults_reach_nothing_private_and_no_file() -> None:
    policy = MediaPolicy()
    assert not policy.allow_private_addresses
    assert policy.file_root is None
    assert policy.max_image_bytes == 20 * 2**20
    assert policy.max_image_pixels == DEFAULT_MAX_PIXELS


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_image_bytes": 0}, "max_image_bytes must be 1 or more, got 0"),
        ({"max_image_pixels": 0}, "max_image_pixels must be 1 or more, got 0"),
        ({"max_images": 0}, "max_images must be 1 or more, got 0"),
        ({"max_redirects": -1}, "max_redirects must be 0 or more, got -1"),
        ({"fetch_timeout_s": 0.0}, "fetch_timeout_s must be finite and more than 0, got 0.0"),
        ({"fetch_timeout_s": float("inf")}, "fetch_timeout_s must be finite and more than 0, got inf"),
        ({"fetch_timeout_s": float("nan")}, "fetch_timeout_s must be finite and more than 0, got nan"),
        ({"allowed_domains": "a.example"}, "allowed_domains must be a tuple of host names, got 'a.example'"),
        ({"file_root": Path("/no/such/folder")}, "file_root must be a folder that exists"),
    ],
)
def test_a_value_out_of_bounds_is_refused_by_name(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MediaPolicy(**options)


@pytest.mark.parametrize(
    "domain", ["", "https://a.example", "a.example/x", "*.a.example", ".a.example", "a.example.", "bücher.de"]
)
def test_a_domain_is_a_bare_host_name(domain: str) -> None:
    with pytest.raises(ValueError, match="bare ASCII host names"):
        MediaPolicy(allowed_domains=("good.example", domain))


def test_pixels_are_bounded_by_pillows_own_bound_at_once_and_not_at_the_first_image() -> None:
    bound = PIL.Image.MAX_IMAGE_PIXELS
    assert bound is not None
    MediaPolicy(max_image_pixels=bound)
    with pytest.raises(ValueError, match=f"at most PIL.Image.MAX_IMAGE_PIXELS={bound}, got {bound + 1}"):
        MediaPolicy(max_image_pixels=bound + 1)


def test_every_field_says_what_it_is_for_in_the_source() -> None:
    """The command line's help is derived from these docstrings."""
    import ast
    import inspect

    (tree,) = ast.parse(inspect.getsource(MediaPolicy)).body
    assert isinstance(tree, ast.ClassDef)
    documented = {
        node.target.id
        for node, text in zip(tree.body, tree.body[1:], strict=False)
        if isinstance(node, ast.AnnAssign)
        and isinstance(node.target, ast.Name)
        and isinstance(text, ast.Expr)
        and isinstance(text.value, ast.Constant)
    }
    assert documented == {field.name for field in dataclasses.fields(MediaPolicy)}
