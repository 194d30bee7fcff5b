"""``retinue serve`` as a person runs it."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import openai
import pytest
from openai import AsyncOpenAI

from retinue.demo.run import pictures
from retinue.demo.serving import MODEL_NAME

from .asgi import SOON_S, Mirror
from .processes import started
from .serving import serving
from .test_end_to_end import about

ALBUM = pictures()
SERVE = ("-m", "retinue.cli", "serve", "--port", "0")


@pytest.mark.timeout(120)
async def test_the_demo_is_served_to_who_has_the_key_until_a_signal_comes() -> None:
    async with started("retinue", *SERVE, "--demo", "--api-key", "sesame") as server:
        await server.ready()
        url = f"http://127.0.0.1:{server.port}/v1"
        async with AsyncOpenAI(base_url=url, api_key="sesame", max_retries=0) as client:
            answer = await client.chat.completions.create(
                model=MODEL_NAME, messages=about(*ALBUM[:2]), max_tokens=8
            )
        assert answer.choices[0].message.content == ALBUM[0].digit + ALBUM[1].digit
        async with AsyncOpenAI(base_url=url, api_key="guess", max_retries=0) as stranger:
            with pytest.raises(openai.AuthenticationError):
                await stranger.models.list()
        server.signal(signal.SIGTERM)
        assert await server.end() == 0


@pytest.mark.timeout(120)
async def test_an_upstream_gets_embeddings_in_place_of_images() -> None:
    behind = Mirror()
    with serving(behind) as upstream:
        encoder = ("--encoder", "retinue.demo.encoder:DigitsEncoder", "--encoder-model", "demo")
        async with started("retinue", *SERVE, "--upstream", upstream.url, *encoder) as server:
            await server.ready()
            url = f"http://127.0.0.1:{server.port}/v1"
            async with AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=SOON_S) as client:
                await client.chat.completions.create(model="any", messages=about(ALBUM[0]))
            server.signal(signal.SIGTERM)
            assert await server.end() == 0
    assert b"image_url" not in behind.bodies[0]
    assert b'"type":"prompt_embeds"' in behind.bodies[0]


async def test_a_backend_that_cannot_be_found_is_said_in_a_line() -> None:
    encoder = ("--upstream", "http://127.0.0.1:1", "--encoder", "no_such_package:Encoder")
    async with started("retinue", *SERVE, *encoder) as server:
        assert await server.end() != 0
        errors = await server.errors()
    assert "no_such_package" in errors
    assert "Traceback" not in errors


async def test_a_backend_is_found_in_the_folder_where_the_command_is_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.py").write_text(
        "from retinue import VisionEncoderBackend\n"
        "class Encoder(VisionEncoderBackend):\n"
        "    def build(self, model_id): print('built', repr(model_id), flush=True)\n"
        "    def forward_batch(self, items, target_bucket=None): return []\n"
    )
    monkeypatch.chdir(tmp_path)
    options = ("--upstream", "http://127.0.0.1:1", "--encoder", "mine:Encoder", "--encoder-model", "weights")
    script = str(Path(sys.executable).with_name("retinue"))
    async with started("retinue", script, *SERVE[2:], *options) as server:
        await server.listening()
        await server.line("built 'weights'")
        server.signal(signal.SIGTERM)
        assert await server.end() == 0
