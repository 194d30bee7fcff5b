"""The ``retinue`` command: what it refuses, what its help says, and that it serves."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from retinue.cli import Serve
from retinue.server.limits import ServerLimits

VLLM = {"engine": "vllm", "text_model": "m", "encoder": "a:B"}


def retinue(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "retinue.cli", *arguments]
    environment = {**os.environ, "COLUMNS": "200"}
    return subprocess.run(command, capture_output=True, text=True, timeout=50, check=False, env=environment)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "exactly one of TEXT_MODEL, --demo and --upstream"),
        ({"demo": True, "upstream": "http://127.0.0.1:1"}, "exactly one of"),
        ({"text_model": "m", "upstream": "http://127.0.0.1:1", "encoder": "a:B"}, "exactly one of"),
        ({"demo": True, "encoder": "a:B"}, "--demo brings its own encoder"),
        ({"text_model": "m"}, "--encoder package.module:Class"),
        ({"upstream": "http://127.0.0.1:1"}, "--encoder package.module:Class"),
        ({"engine": "vllm", "upstream": "http://127.0.0.1:1", "encoder": "a:B"}, "needs the TEXT_MODEL"),
        (VLLM | {"decoder_batch": 2}, "--max-num-seqs"),
        (VLLM | {"limits": ServerLimits(max_concurrent_requests=1)}, "which queues what it cannot run"),
    ],
)
def test_what_does_not_go_together_says_what_would(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Serve(**options)


def test_a_combination_that_cannot_be_is_an_error_and_no_traceback() -> None:
    done = retinue("serve")
    assert done.returncode == 2
    assert "exactly one of TEXT_MODEL" in done.stdout + done.stderr
    assert "Traceback" not in done.stdout + done.stderr


def test_the_help_says_every_option_and_its_default_but_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RETINUE_API_KEY", "sesame")
    done = retinue("serve", "--help")
    assert done.returncode == 0
    for option in ("--upstream", "--max-image-bytes", "--max-concurrent-requests", "--grace"):
        assert option in done.stdout
    assert "127.0.0.1" in done.stdout
    assert "sesame" not in done.stdout


def test_a_bad_limit_names_its_bound() -> None:
    done = retinue("serve", "--demo", "--max-body-bytes", "0")
    assert done.returncode == 2
    assert "max_body_bytes must be more than 0, got 0" in done.stdout + done.stderr


@pytest.mark.parametrize("command", [["serve", "--demo"], ["demo"]])
def test_options_for_vllm_are_for_vllm(command: list[str]) -> None:
    done = retinue(*command, "--", "--max-model-len", "8")
    assert done.returncode != 0
    assert "--engine vllm" in done.stdout + done.stderr


def test_without_vllm_its_engine_is_refused_in_words() -> None:
    done = retinue("serve", "m", "--engine", "vllm", "--encoder", "a:B")
    assert done.returncode == 1
    assert "--engine vllm needs vLLM" in done.stderr
    assert "Traceback" not in done.stderr


def test_what_cannot_be_split_is_refused_in_words(tmp_path: Path) -> None:
    done = retinue("split", str(tmp_path), str(tmp_path / "out"))
    assert done.returncode == 1
    assert done.stderr.startswith("retinue split: ")
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "out").exists()
