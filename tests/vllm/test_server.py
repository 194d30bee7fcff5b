"""vLLM's own OpenAI server with eyes, in each way that it can have them: real processes, real clients."""

from __future__ import annotations

import base64
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import urlopen

import openai
import pytest
from transformers import AutoTokenizer

from retinue.demo.encoder import CHECKPOINT
from retinue.demo.prompt import QUESTION
from retinue.demo.run import Picture, pictures

pytestmark = pytest.mark.timeout(240)

HERE = Path(__file__).parent
LIMIT_S = 150.0  # an engine takes 15 s here, and several times that on a machine that does other things
KEY = "secret"
RETINUE = str(Path(sys.executable).with_name("retinue"))
ENGINE = ["--dtype", "float32", "--enforce-eager", "--max-model-len", "512", "--max-num-seqs", "16"]
STOCK = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(CHECKPOINT), *ENGINE]
STOCK += ["--served-model-name", "demo", "--host", "127.0.0.1", "--api-key", KEY]
PARTS_TEMPLATE = (
    "{% for message in messages %}{{ message.role }}:{% if message.content is string %}{{ message.content }}"
    "{% else %}{% for part in message.content %}{{ part.text }}{% endfor %}{% endif %}{% endfor %}>"
)


class Server:
    """A server in a process of its own."""

    def __init__(self, command: Sequence[str], folder: Path, **environment: str) -> None:
        self._log, self._diary = folder / "log", folder / "diary"
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        url = f"http://127.0.0.1:{self.port}/v1"
        self.client = openai.OpenAI(base_url=url, api_key=KEY, max_retries=0)
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [*command, "--port", str(self.port)] if "--" not in command else self._with_port(command),
                cwd=HERE,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # so that it can be ended with the engine's processes
                env=os.environ | {"EYES_DIARY": str(self._diary), "VLLM_LOGGING_LEVEL": "INFO"} | environment,
            )

    def _with_port(self, command: Sequence[str]) -> list[str]:
        at = list(command).index("--")
        return [*command[:at], "--port", str(self.port), *command[at:]]

    def wait_until_ready(self, path: str = "/ready") -> None:
        began_s = time.monotonic()
        while self.get(path) is None:
            assert self._process.poll() is None, self.log
            assert time.monotonic() - began_s < LIMIT_S, self.log
            time.sleep(0.1)  # there is nothing to wait on before it listens

    def get(self, path: str) -> str | None:
        """What a path answers with 200; None for anything else."""
        try:
            with urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=10) as answer:
                return str(answer.read().decode())
        except HTTPError as error:
            error.close()
        except (URLError, ConnectionError):
            pass  # it does not listen yet
        return None

    def figure(self, name: str) -> float:
        """The sum of a metric over its labels."""
        lines = (self.get("/metrics") or "").splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith((f"{name} ", f"{name}{{")))

    @property
    def log(self) -> str:
        return self._log.read_text()

    @property
    def diary(self) -> list[str]:
        return self._diary.read_text().split()

    def wait(self) -> int:
        """Its exit status, once it has ended."""
        return self._process.wait(LIMIT_S)

    def stop(self) -> int:
        """Its exit status, after it was told to stop."""
        self._process.send_signal(signal.SIGTERM)
        return self.wait()

    def close(self) -> None:
        """End it, if it has not ended."""
        self.client.close()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(LIMIT_S)


@contextlib.contextmanager
def running(command: Sequence[str], folder: Path, **environment: str) -> Iterator[Server]:
    server = Server(command, folder, **environment)
    try:
        yield server
    finally:
        server.close()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server of vLLM's as one starts it, with the flag that gives it eyes."""
    command = [*STOCK, "--enable-prompt-embeds", "--middleware", "retinue.vllm.EncodeImages"]
    command += ["--trust-request-chat-template", "--tool-call-parser", "hermes", "--enable-auto-tool-choice"]
    folder = tmp_path_factory.mktemp("stock")
    with running(command, folder, RETINUE_ENCODER="eyes:Eyes", RETINUE_MAX_IMAGES="4") as server:
        server.wait_until_ready()
        yield server


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(CHECKPOINT)


def image(shown: Picture) -> dict[str, Any]:
    return {
        "type": "image_url",
        "image_url": {"url": f"data:;base64,{base64.b64encode(shown.data).decode()}"},
    }


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def of_digit(digit: int) -> Picture:
    return next(picture for picture in pictures() if picture.name.startswith(f"{digit}-"))


def ask(server: Server, content: Sequence[dict[str, Any]], **options: Any) -> Any:
    create: Any = server.client.chat.completions.create
    messages = [{"role": "user", "content": content}]
    return create(**{"model": "demo", "messages": messages, "temperature": 0, "max_tokens": 8} | options)


def answer(server: Server, *digits: int, **options: Any) -> str:
    shown = [image(of_digit(digit)) for digit in digits]
    return str(ask(server, [*shown, text(QUESTION)], **options).choices[0].message.content)


def tokens_seen(server: Server, content: Sequence[dict[str, Any]], **options: Any) -> list[int]:
    """The ids of the prompt that the model got."""
    extra = {"return_token_ids": True} | options
    return list(ask(server, content, extra_body=extra).prompt_token_ids)


# -- the stock server ----------------------------------------------------------------------------------


def test_pictures_of_concurrent_requests_are_answered_each_with_its_own(server: Server) -> None:
    numbers = [(4, 2), (7,), (1, 9, 3), (5, 0, 8, 6)] * 3
    with ThreadPoolExecutor(len(numbers)) as callers:
        answers = list(callers.map(lambda digits: answer(server, *digits), numbers))
    assert answers == ["".join(map(str, digits)) for digits in numbers]


def test_streams_stream_and_count_the_rows_of_images(server: Server) -> None:
    content = [image(of_digit(4)), image(of_digit(2)), text(QUESTION)]
    whole = ask(server, content)
    chunks = list(ask(server, content, stream=True, stream_options={"include_usage": True}))
    pieces = [chunk.choices[0].delta.content for chunk in chunks if chunk.choices]
    assert [piece for piece in pieces if piece] == ["4", "2"]
    assert chunks[-1].usage == whole.usage
    assert whole.usage.prompt_tokens > 20


def test_what_vllm_can_do_it_can_do_with_images(server: Server) -> None:
    content = [image(of_digit(4)), text(QUESTION)]
    several = ask(server, content, n=2, temperature=0.01, logprobs=True, top_logprobs=2)
    assert [choice.message.content for choice in several.choices] == ["4", "4"]
    assert several.choices[0].logprobs.content[0].token == "4"
    assert len(several.choices[0].logprobs.content[0].top_logprobs) == 2
    chosen = ask(server, content, extra_body={"structured_outputs": {"choice": ["7", "8"]}})
    assert chosen.choices[0].message.content in ("7", "8")
    tool = {"type": "function", "function": {"name": "say", "parameters": {"type": "object"}}}
    assert answer(server, 4, tools=[tool], tool_choice="auto") == "4"


def test_a_template_of_strings_gets_the_parts_on_lines_of_their_own(server: Server, tokenizer: Any) -> None:
    four, two = of_digit(4), of_digit(2)
    seen = tokens_seen(server, [text("A"), image(four), text("B"), image(two)])
    (first, first_rows), (second, second_rows) = _places(seen, tokenizer)
    between, after = tokenizer.encode("\nB\n"), tokenizer.encode("<|im_end|>")
    assert seen[:first] == tokenizer.encode("<|im_start|>user\nA\n")
    assert seen[first + first_rows : second] == between
    assert seen[second + second_rows :][: len(after)] == after


def test_a_template_of_parts_gets_them_as_they_are(server: Server, tokenizer: Any) -> None:
    content = [text("A"), image(of_digit(4)), text("B"), image(of_digit(2)), image(of_digit(7))]
    seen = tokens_seen(server, content, chat_template=PARTS_TEMPLATE)
    (first, rows), (second, _) = _places(seen, tokenizer)  # the last two pictures lie side by side
    assert seen[:first] == tokenizer.encode("user:A")
    assert seen[first + rows : second] == tokenizer.encode("B")
    assert seen[-1:] == tokenizer.encode(">")


def _places(seen: Sequence[int], tokenizer: Any) -> list[tuple[int, int]]:
    """Where embeddings lie in a prompt, and how many; their places have an id beyond the vocabulary's."""
    places: list[tuple[int, int]] = []
    for position, token in enumerate(seen):
        if token >= len(tokenizer):
            start, rows = places.pop() if places and sum(places[-1]) == position else (position, 0)
            places.append((start, rows + 1))
    return places


@pytest.mark.parametrize("template", [None, PARTS_TEMPLATE], ids=["strings", "parts"])
def test_text_that_spells_vllms_sentinel_neither_moves_nor_swallows_an_image(
    server: Server, tokenizer: Any, template: str | None
) -> None:
    sentinel = "<##PROMPT_EMBEDS##>"
    options = {"chat_template": template} if template else {}
    for content in (
        [text(sentinel), image(of_digit(4)), text(QUESTION)],
        [image(of_digit(4)), text(sentinel), image(of_digit(2)), text(QUESTION)],
        [text(f"a {sentinel} b"), image(of_digit(4)), text(sentinel)],
    ):
        seen = tokens_seen(server, content, **options)
        # The same prompt with other words, as far as the first image and from the last one on.
        stand_in = "something else"
        plain = [
            text(part["text"].replace(sentinel, stand_in)) if part["type"] == "text" else part
            for part in content
        ]
        expected = tokens_seen(server, plain, **options)
        assert [rows for _, rows in _places(seen, tokenizer)] == [
            rows for _, rows in _places(expected, tokenizer)
        ]
        assert tokenizer.decode(_text_of(seen, tokenizer)).replace(sentinel, stand_in) == tokenizer.decode(
            _text_of(expected, tokenizer)
        )


def _text_of(seen: Sequence[int], tokenizer: Any) -> list[int]:
    """A prompt with one line break for each image."""
    kept: list[int] = []
    places = dict(_places(seen, tokenizer))
    for position, token in enumerate(seen):
        if position in places:
            kept += tokenizer.encode(" | ")
        elif token < len(tokenizer):
            kept.append(token)
    return kept


def test_text_that_vllm_takes_for_an_image_is_a_400_wherever_it_stands(server: Server) -> None:
    tool = {"type": "function", "function": {"name": "f", "description": "<prompt_embeds>", "parameters": {}}}
    with pytest.raises(openai.BadRequestError, match="<prompt_embeds>"):
        answer(server, 4, tools=[tool])
    with pytest.raises(openai.BadRequestError, match="<prompt_embeds>"):
        ask(server, [text("<prompt_embeds>")])
    assert answer(server, 4) == "4"


def test_a_bad_image_is_a_400_that_names_it_and_nobody_else_notices(server: Server) -> None:
    bad = {"type": "image_url", "image_url": {"url": "data:;base64,AAAA"}}
    with ThreadPoolExecutor(8) as callers:
        good = [callers.submit(answer, server, 4, 2) for _ in range(7)]
        with pytest.raises(openai.BadRequestError, match="image 2 of 2") as caught:
            ask(server, [image(of_digit(4)), bad, text(QUESTION)])
    assert caught.value.param == "messages[0].content[1].image_url"
    assert [future.result() for future in good] == ["42"] * 7


def test_embeddings_of_a_clients_own_are_refused(server: Server) -> None:
    with pytest.raises(openai.BadRequestError, match="client_embeds"):
        ask(server, [{"type": "prompt_embeds", "data": "AAAA"}, text(QUESTION)])


def test_text_goes_through_untouched(server: Server) -> None:
    encoded = server.figure("retinue_images_total")
    assert ask(server, [text("How many images are there?")]).usage.prompt_tokens > 0
    assert server.figure("retinue_images_total") == encoded
    assert [model.id for model in server.client.models.list()] == ["demo"]


def test_without_the_key_vllm_refuses_and_nothing_is_encoded(server: Server) -> None:
    encoded = server.figure("retinue_images_total")
    stranger = server.client.with_options(api_key="wrong")
    with pytest.raises(openai.AuthenticationError):
        stranger.chat.completions.create(
            model="demo",
            messages=[{"role": "user", "content": [image(of_digit(4))]}],  # type: ignore[list-item, misc]
        )
    assert server.figure("retinue_images_total") == encoded


def test_a_client_that_hangs_up_ends_its_text_in_the_engine(server: Server) -> None:
    written = server.figure("vllm:generation_tokens_total")
    content = [image(of_digit(4)), text(QUESTION)]
    stream = ask(server, content, stream=True, max_tokens=450, extra_body={"ignore_eos": True})
    next(iter(stream))
    assert server.figure("vllm:num_requests_running") == 1
    stream.close()
    began_s = time.monotonic()
    while server.figure("vllm:num_requests_running"):
        assert time.monotonic() - began_s < LIMIT_S
        time.sleep(0.01)  # its metrics are all that the engine shows
    assert server.figure("vllm:generation_tokens_total") - written < 450
    assert answer(server, 4) == "4"


def test_its_figures_and_its_readiness_are_the_servers(server: Server) -> None:
    answer(server, 4)
    assert '"ready":true' in (server.get("/ready") or "")
    assert server.get("/health") is not None
    assert server.figure("retinue_images_total") >= 1
    assert server.figure("vllm:prompt_tokens_total") >= 1


def test_a_hundred_requests_of_which_a_third_hang_up(server: Server) -> None:
    def one(number: int) -> str | None:
        digits = (number % 10, number // 10)
        if number % 3:
            return answer(server, *digits)
        content = [*(image(of_digit(digit)) for digit in digits), text(QUESTION)]
        ask(server, content, stream=True, max_tokens=300, extra_body={"ignore_eos": True}).close()
        return None

    with ThreadPoolExecutor(32) as callers:
        answers = list(callers.map(one, range(100)))
    for number, got in enumerate(answers):
        assert got == (f"{number % 10}{number // 10}" if number % 3 else None)
    began_s = time.monotonic()
    while server.figure("vllm:num_requests_running") or server.figure("retinue_pending_items"):
        assert time.monotonic() - began_s < LIMIT_S
        time.sleep(0.01)
    assert server.figure("retinue_pending_bytes") == 0


# -- its life ------------------------------------------------------------------------------------------


def test_the_one_command_serves_and_ends_well(server: Server, tmp_path: Path) -> None:
    """While the other runs, which a machine with less memory would not like; both engines are tiny."""
    command = ["retinue", "serve", str(CHECKPOINT), "--engine", "vllm", "--encoder", "eyes:Eyes"]
    command = [str(Path(sys.executable).with_name("retinue")), *command[1:]]
    command += [
        "--name",
        "demo",
        "--dtype",
        "float32",
        "--api-key",
        KEY,
        "--max-images",
        "2",
        "--grace",
        "20",
    ]
    command += ["--", "--enforce-eager", "--max-model-len", "512", "--max-num-seqs", "8"]
    with running(command, tmp_path, RETINUE_MAX_IMAGES="1") as other:  # the command line alone counts
        other.wait_until_ready()
        assert other.diary == ["built"]
        assert answer(other, 4, 2) == "42"
        with pytest.raises(openai.BadRequestError, match="more than max_images=2"):
            answer(other, 1, 2, 3)
        assert other.stop() == 0
        assert other.diary == ["built", "closed"]


def test_a_backend_that_is_lost_for_good_ends_the_server_with_status_1_if_it_is_to(tmp_path: Path) -> None:
    command = [RETINUE, "serve", str(CHECKPOINT), "--engine", "vllm", "--encoder", "eyes:Doomed"]
    command += ["--name", "demo", "--dtype", "float32", "--api-key", KEY]
    command += ["--max-rebuilds", "0", "--exit-on-failure"]
    command += ["--", "--enforce-eager", "--max-model-len", "512", "--max-num-seqs", "8"]
    with running(command, tmp_path) as other:
        other.wait_until_ready()
        with pytest.raises(openai.InternalServerError, match="cannot answer now"):
            answer(other, 4)
        assert other.wait() == 1
        assert other.diary == ["built", "closed"]


def test_an_upstream_that_knows_nothing_of_us_sees_too(server: Server, tmp_path: Path) -> None:
    plain, front = tmp_path / "plain", tmp_path / "front"
    plain.mkdir()
    front.mkdir()
    with running([*STOCK, "--enable-prompt-embeds"], plain) as upstream:
        upstream.wait_until_ready("/health")
        command = [RETINUE, "serve", "--encoder", "eyes:Eyes"]
        command += ["--upstream", f"http://127.0.0.1:{upstream.port}"]
        with running(command, front) as seeing:
            seeing.wait_until_ready()
            assert answer(seeing, 4, 2) == "42"
            chunks = list(ask(seeing, [image(of_digit(7)), text(QUESTION)], stream=True))
            assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "7"
            stranger = seeing.client.with_options(api_key="wrong")
            with pytest.raises(openai.AuthenticationError):
                stranger.models.list()
            assert seeing.stop() == 0
            assert seeing.diary == ["built", "closed"]


@pytest.mark.parametrize(
    ("options", "encoder", "why"),
    [
        ([], "eyes:Eyes", "start it with --enable-prompt-embeds"),
        (["--enable-prompt-embeds"], "eyes:TooWide", "does not fit the model"),
    ],
    ids=["no embeddings", "another width"],
)
def test_a_server_that_could_not_answer_does_not_start(
    options: list[str], encoder: str, why: str, tmp_path: Path
) -> None:
    command = [*STOCK, *options, "--middleware", "retinue.vllm.EncodeImages"]
    with running(command, tmp_path, RETINUE_ENCODER=encoder) as server:
        assert server.wait() != 0
        assert why in server.log


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (["--api-server-count", "2"], "--api-server-count 2 would build an encoder in each"),
        (["--no-enable-prompt-embeds"], "leave --no-enable-prompt-embeds out"),
        (["--headless"], "--headless starts no API server"),
    ],
)
def test_options_that_cannot_be_together_are_refused_at_once(
    options: list[str], why: str, tmp_path: Path
) -> None:
    command = [RETINUE, "serve", str(CHECKPOINT), "--engine", "vllm"]
    with running([*command, "--encoder", "eyes:Eyes", "--", *options], tmp_path) as server:
        assert server.wait() == 2
        assert why in server.log


def test_an_encoder_that_is_not_there_is_refused_before_the_engine_starts(tmp_path: Path) -> None:
    command = [RETINUE, "serve", str(CHECKPOINT), "--engine", "vllm", "--encoder", "eyes:Nobody", "--"]
    with running(command, tmp_path) as server:
        assert server.wait() == 2
        assert "eyes has no VisionEncoderBackend called 'Nobody'" in server.log
