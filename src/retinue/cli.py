"""``retinue``: the command line. Each command's options are a frozen dataclass; tyro derives the flags."""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, TypeAlias, TypeVar

try:
    import tyro

    from retinue.media import MediaPolicy
    from retinue.server.limits import EncodeLimits, FailurePolicy, ServerLimits
except ModuleNotFoundError as error:
    sys.exit(f"the retinue command needs more than the library: pip install 'retinue[serve]' ({error})")

if TYPE_CHECKING:
    from retinue.server.stack import Behind, Stack
    from retinue.tools import simulate

__all__ = ["main"]

T = TypeVar("T")
#: An option that may be given again and again.
_Several: TypeAlias = Annotated[tuple[T, ...], tyro.conf.UseAppendAction]


@dataclass(frozen=True, kw_only=True)
class Demo:
    """Answer dozens of concurrent requests about pictures of digits, with a model that is shipped.

    Prints each answer as it arrives, the batches that formed, and what they gain over one request at a time.
    Exits with 1 if an answer is wrong.
    """

    requests: int = 48
    """Concurrent requests, of one to four pictures each; every eighth is left half-way."""

    def __post_init__(self) -> None:
        if self.requests < 1:
            raise ValueError(f"requests must be 1 or more, got {self.requests}")

    def run(self) -> int:
        """Run the command; its exit status."""
        from retinue.demo.run import run

        return run(self.requests)


_KEY_VARIABLE = "RETINUE_API_KEY"


@dataclass(frozen=True, kw_only=True)
class Serve:
    """Serve an OpenAI-compatible endpoint whose images go through a vision encoder of your own.

    One of these stands behind the encoder: the shipped demo model (--demo), a text model in this process,
    which transformers or vLLM runs (TEXT_MODEL, --engine), or any running server that takes prompt_embeds
    parts, such as vLLM (--upstream). With --engine vllm, options of vLLM's own server follow after a --.
    """

    text_model: Annotated[str | None, tyro.conf.Positional, tyro.conf.arg(metavar="TEXT_MODEL")] = None
    """Folder or Hub name of a causal language model and its tokenizer."""
    engine: Literal["transformers", "vllm"] = "transformers"
    """What runs TEXT_MODEL: transformers, or vLLM's own OpenAI server, which must be installed."""
    demo: bool = False
    """Serve the demo model, which reads pictures of digits, with its own encoder."""
    upstream: Annotated[str | None, tyro.conf.arg(metavar="URL")] = None
    """URL of a running server to stand in front of, such as http://127.0.0.1:8001."""
    encoder: Annotated[str | None, tyro.conf.arg(metavar="MODULE:CLASS")] = None
    """The backend's class, as package.module:Class."""
    encoder_model: Annotated[str | None, tyro.conf.arg(metavar="PATH")] = None
    """What the backend's build gets; TEXT_MODEL if not given."""
    name: Annotated[str | None, tyro.conf.arg(metavar="NAME")] = None
    """What clients call the model; TEXT_MODEL or "demo" if not given. An upstream has names of its own."""
    dtype: str = "auto"
    """Of TEXT_MODEL: float32, bfloat16, float16, or that of its checkpoint."""
    decoder_batch: int = 16
    """So many texts are written at once by TEXT_MODEL; for vLLM, see its --max-num-seqs."""
    host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0 for all, which wants an API key."""
    port: int = 8000
    """Port to listen on; 0 for any that is free."""
    api_key: Annotated[str | None, tyro.conf.arg(metavar="KEY")] = field(default=None, repr=False)
    """What clients must send as a bearer token. Others on this machine can read a command line; the
    environment they cannot: RETINUE_API_KEY."""
    grace_s: Annotated[float, tyro.conf.arg(name="grace")] = 30.0
    """Seconds for what is in flight when the server is told to stop."""
    record_trace: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """File to append times, costs and outcomes of what is encoded to, for retinue simulate; 1 GiB at most."""
    limits: tyro.conf.OmitArgPrefixes[ServerLimits] = field(default_factory=ServerLimits)
    """How much the server takes on."""
    media: tyro.conf.OmitArgPrefixes[MediaPolicy] = field(default_factory=MediaPolicy)
    """What images may be, and where they may come from."""
    failures: tyro.conf.OmitArgPrefixes[FailurePolicy] = field(default_factory=FailurePolicy)
    """What is done about a backend that fails as a whole."""

    def __post_init__(self) -> None:
        behind = [self.text_model is not None, self.demo, self.upstream is not None]
        if sum(behind) != 1:
            raise ValueError("serve needs exactly one of TEXT_MODEL, --demo and --upstream URL")
        if self.demo and self.encoder is not None:
            raise ValueError("--demo brings its own encoder; leave --encoder out")
        if not self.demo and self.encoder is None:
            raise ValueError("serve needs your backend's class: --encoder package.module:Class")
        if self.engine == "vllm":
            if self.text_model is None:
                raise ValueError("--engine vllm needs the TEXT_MODEL that it is to run")
            if self.decoder_batch != Serve.decoder_batch:
                raise ValueError("--decoder-batch is for transformers; vLLM's own is -- --max-num-seqs N")
            if self.limits.max_concurrent_requests != ServerLimits.max_concurrent_requests:
                raise ValueError("--max-concurrent-requests is not for vLLM, which queues what it cannot run")
            if self.limits.max_header_bytes != ServerLimits.max_header_bytes:
                raise ValueError("--max-header-bytes is not for vLLM, whose server reads the headers itself")

    def run(self, engine_options: Sequence[str] = ()) -> int:
        """Run the command; its exit status. ``engine_options``: what followed after a ``--``."""
        from retinue.server.serving import serve

        if engine_options and self.engine != "vllm":
            print("retinue serve: options after -- are for --engine vllm", file=sys.stderr)
            return 2
        api_key = self.api_key or os.environ.get(_KEY_VARIABLE)
        if api_key is None and self.host not in ("127.0.0.1", "localhost", "::1"):
            print(f"warning: {self.host} is open to others, and there is no API key", file=sys.stderr)
        sys.path.insert(0, os.getcwd())  # where the backend's module is, as a rule
        logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s")
        if self.engine == "vllm":
            return self._run_vllm(api_key, engine_options)
        try:
            stack = self._stack(api_key)
            if self.record_trace is not None:
                stack.record(self.record_trace)
        except (ValueError, OSError) as error:  # an option whose value only its user can judge
            print(f"retinue serve: {error}", file=sys.stderr)
            return 2
        return serve(stack, "retinue", host=self.host, port=self.port, grace_s=self.grace_s)

    def _run_vllm(self, api_key: str | None, engine_options: Sequence[str]) -> int:
        from retinue.vllm import Config, serve

        assert self.text_model is not None
        assert self.encoder is not None
        options = ["--host", self.host, "--port", str(self.port), "--dtype", self.dtype]
        options += ["--shutdown-timeout", str(round(self.grace_s))]
        options += ["--api-key", api_key] if api_key else []
        options += ["--served-model-name", self.name] if self.name else []
        config = Config(
            encoder=self.encoder,
            encoder_model=self.encoder_model or "",
            encode_timeout_s=self.limits.request_timeout_s,
            record_trace=self.record_trace,
            limits=EncodeLimits(**{one.name: getattr(self.limits, one.name) for one in fields(EncodeLimits)}),
            media=self.media,
            failures=self.failures,
        )
        return serve(self.text_model, [*options, *engine_options], config)

    def _stack(self, api_key: str | None) -> Stack:
        from retinue.encoder import load_backend
        from retinue.server.stack import Stack

        if self.demo:
            from retinue.demo.serving import demo_stack

            return demo_stack(limits=self.limits, media=self.media, failures=self.failures, api_key=api_key)
        assert self.encoder is not None
        return Stack(
            load_backend(self.encoder),
            self.encoder_model or self.text_model or "",
            self._upstream() if self.upstream is not None else self._embedded(),
            limits=self.limits,
            media=self.media,
            failures=self.failures,
            api_key=api_key,
            join_timeout_s=self.grace_s,
        )

    def _upstream(self) -> Behind:
        from retinue.server.proxy import ProxyApp
        from retinue.server.stack import Behind

        assert self.upstream is not None
        proxy = ProxyApp(self.upstream)
        return Behind(proxy, close=proxy.aclose)

    def _embedded(self) -> Behind:
        from retinue.decoders.transformers import TransformersDecoder
        from retinue.server.embedded import EmbeddedApp
        from retinue.server.stack import Behind

        assert self.text_model is not None
        decoder = TransformersDecoder(self.text_model, dtype=self.dtype, max_batch_items=self.decoder_batch)
        app = EmbeddedApp(decoder, model_name=self.name or self.text_model)
        return Behind(app, load=decoder.aload, close=decoder.aclose, takes_artifacts=True)


@dataclass(frozen=True, kw_only=True)
class Split:
    """Take a vision-language model apart: OUT/text, a text-only model, and OUT/encoder, its eyes.

    Serve the two with: retinue serve OUT/text --encoder retinue.encoders.hf:HFVisionEncoder
    --encoder-model OUT/encoder
    """

    model: tyro.conf.Positional[str]
    """Folder or Hub name of the vision-language model."""
    out: tyro.conf.Positional[Path]
    """Folder to write to; it must not exist, or be empty."""

    def run(self) -> int:
        """Run the command; its exit status."""
        from retinue.tools.split import split

        try:
            halves = split(self.model, self.out)
        except (ValueError, OSError) as error:
            print(f"retinue split: {error}", file=sys.stderr)
            return 1
        print(halves.summary)
        return 0


@dataclass(frozen=True, kw_only=True)
class Simulate:
    """Ask what other limits and waits would make of a load: the batcher on a virtual clock, side by side.

    The load is one of these: a trace that retinue serve --record-trace wrote (--trace), callers who ask again
    when they are answered (--callers), or requests that come at random (--rate). A trace tells how fast the
    device is by its calls; else --call-ms and --cost-ms do.
    """

    trace: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """What a server has recorded."""
    callers: Annotated[int | None, tyro.conf.arg(metavar="INT")] = None
    """So many ask again and again."""
    think_ms: float = 0.0
    """Milliseconds, at most, from an answer to the same caller's next request."""
    rate: Annotated[float | None, tyro.conf.arg(metavar="FLOAT")] = None
    """Requests per second, whatever becomes of them."""
    items: int = 1
    """Of one request."""
    cost: _Several[int] = ()
    """Of an item, 1 if not given; of several, any is as likely as the others."""
    seconds: float = 5.0
    """For so long requests come; what happens in the first fifth does not count."""
    call_ms: Annotated[float | None, tyro.conf.arg(metavar="FLOAT")] = None
    """Milliseconds that a call takes whatever is in it."""
    cost_ms: float = 0.0
    """Milliseconds that each unit of cost adds."""
    jitter_ms: float = 0.0
    """Milliseconds, at most, that a call takes longer than that."""
    max_batch_cost: _Several[int] = ()
    """A cap to try. A trace's own limits are tried, too."""
    max_batch_items: Annotated[int | None, tyro.conf.arg(metavar="INT")] = None
    """Items of a batch."""
    bucket: _Several[int] = ()
    """A cost for which a graph exists; a call takes what its bucket takes."""
    wait_ms: _Several[float] = ()
    """A fixed wait to try, in milliseconds, beside the measured hold and none."""
    seed: int = 0
    """The same one gives the same figures."""
    json: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """File for the figures."""

    def __post_init__(self) -> None:
        if [self.trace, self.callers, self.rate].count(None) != 2:
            raise ValueError("simulate needs exactly one of --trace, --callers and --rate")
        if (self.trace is None) == (self.call_ms is None):
            raise ValueError("how fast the device is, --call-ms says, or else a trace: give one of the two")

    def run(self) -> int:
        """Run the command; its exit status."""
        from retinue.tools.simulate import plain, table

        try:
            rows = self._rows()
            print(table(rows))
            if self.json is not None:
                self.json.write_text(json.dumps(plain(rows), indent=1) + "\n")
        except (ValueError, OSError) as error:
            print(f"retinue simulate: {error}", file=sys.stderr)
            return 1
        return 0

    def _rows(self) -> list[simulate.Row]:
        from retinue.batching.planner import Limits
        from retinue.batching.recording import read_trace
        from retinue.tools import simulate

        limits = Limits(None, self.max_batch_items, self.bucket)
        load: simulate.Load
        rows, choices = [], []
        if self.trace is not None:
            trace = read_trace(self.trace)
            load, device = simulate.Replay(trace.requests), simulate.Device.of(trace.batches)
            rows.append(simulate.Row("recorded", trace.limits, simulate.recorded(trace)))
            choices.append(trace.limits)
            limits = Limits(
                limits.max_batch_cost or trace.limits.max_batch_cost,
                limits.max_batch_items or trace.limits.max_batch_items,
                limits.buckets or trace.limits.buckets,
            )
            print(*simulate.notes(trace, device), "", sep="\n")
        else:
            load, device = self._load(), self._device()
        choices += [simulate.capped(limits, cap) for cap in self.max_batch_cost] or [limits]
        for policy in simulate.policies(choices, [wait_ms * 1e-3 for wait_ms in self.wait_ms]):
            figures = simulate.simulate(load, device, policy, self.seed)
            rows.append(simulate.Row(policy.name, policy.limits, figures))
        return rows

    def _device(self) -> simulate.Device:
        from retinue.tools.simulate import Device, Line

        assert self.call_ms is not None
        return Device(Line(self.call_ms * 1e-3, self.cost_ms * 1e-3), jitter_s=self.jitter_ms * 1e-3)

    def _load(self) -> simulate.Load:
        from retinue.tools.simulate import Callers, Poisson

        costs, think_s = self.cost or (1,), self.think_ms * 1e-3
        if self.callers is not None:
            return Callers(
                count=self.callers, think_s=think_s, items=self.items, costs=costs, for_s=self.seconds
            )
        assert self.rate is not None
        return Poisson(rate=self.rate, items=self.items, costs=costs, for_s=self.seconds)


def main() -> None:
    """Entry point of the ``retinue`` command."""
    arguments, rest = sys.argv[1:], []
    if "--" in arguments:
        at = arguments.index("--")
        arguments, rest = arguments[:at], arguments[at + 1 :]
    command = tyro.extras.subcommand_cli_from_dict(
        {"serve": Serve, "split": Split, "simulate": Simulate, "demo": Demo},
        prog="retinue",
        args=arguments,
        description="Batches the images of concurrent requests through a vision encoder of your own.",
        config=(tyro.conf.FlagCreatePairsOff,),
    )
    if isinstance(command, Serve):
        sys.exit(command.run(rest))
    if rest:
        sys.exit("retinue: options after -- are for retinue serve --engine vllm")
    sys.exit(command.run())


if __name__ == "__main__":
    main()
