"""Eyes for vLLM's own server.

    vllm serve MODEL --enable-prompt-embeds --middleware retinue.vllm.EncodeImages

The middleware is configured by environment variables, one for each field of ``Config``: RETINUE_ENCODER,
RETINUE_MAX_IMAGES and so on. It builds the encoder before the server's port opens and closes it when the
server has stopped.
"""

from __future__ import annotations

import concurrent.futures
import logging
import os
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar

import prometheus_client
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from retinue.encoder import load_backend
from retinue.media import MediaPolicy
from retinue.server.door import bears_one_of
from retinue.server.front import Front
from retinue.server.lifespan import live_within
from retinue.server.limits import EncodeLimits, FailurePolicy
from retinue.server.operations import json_response

__all__ = ["Config", "EncodeImages", "serve"]

logger = logging.getLogger("retinue")

_PREFIX = "RETINUE_"
_NOT_OURS = frozenset(["RETINUE_API_KEY"])  # of ``retinue serve``; vLLM has a key of its own
# What vLLM's tokenizer reads as the place of an embedding, wherever it stands.
_PLACE = "<prompt_embeds>"


@dataclass(frozen=True, kw_only=True)
class Config:
    """What the middleware needs to know; each field is also an environment variable, RETINUE_ before it."""

    encoder: str
    """The backend's class, as package.module:Class."""
    encoder_model: str = ""
    """What the backend's build gets; vLLM's own MODEL if not given."""
    encode_timeout_s: float = 120.0
    """Seconds from a request's last byte until its images are embeddings; beyond it 504."""
    record_trace: Path | None = None
    """File to append a trace of what is encoded to, for ``retinue simulate``."""
    limits: EncodeLimits = field(default_factory=EncodeLimits)
    media: MediaPolicy = field(default_factory=MediaPolicy)
    failures: FailurePolicy = field(default_factory=FailurePolicy)

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> Config:
        """Read all RETINUE_ variables; ``ValueError`` names what is missing, unknown or of a wrong kind.

        A tuple is written with commas, and a bool as true or false.
        """
        from pydantic import TypeAdapter, ValidationError

        given = {
            name.removeprefix(_PREFIX).lower(): value
            for name, value in environment.items()
            if name.startswith(_PREFIX) and name not in _NOT_OURS
        }
        values: dict[str, Any] = {}
        for group, name, is_tuple in cls._flat():
            if name in given:
                value = given.pop(name)
                into = values.setdefault(group, {}) if group else values
                into[name] = tuple(value.split(",")) if is_tuple else value
        if given:
            unknown = ", ".join(sorted(f"{_PREFIX}{name.upper()}" for name in given))
            raise ValueError(f"unknown variables in the environment: {unknown}")
        if "encoder" not in values:
            raise ValueError("RETINUE_ENCODER is not set: your backend's class, as package.module:Class")
        try:
            return TypeAdapter(cls).validate_python(values)
        except ValidationError as error:
            problems = [
                f"{_PREFIX}{'_'.join(map(str, one['loc'][-1:])).upper()}: {one['msg']}"
                for one in error.errors()
            ]
            raise ValueError("; ".join(problems)) from None

    def to_environment(self) -> dict[str, str]:
        """The variables that ``from_environment`` reads this from; none for what has its default."""
        variables = {}
        for group, name, _ in self._flat():
            owner = getattr(self, group) if group else self
            value = getattr(owner, name)
            if value != next(one.default for one in fields(owner) if one.name == name):
                text = ",".join(value) if isinstance(value, tuple) else str(value)
                variables[f"{_PREFIX}{name.upper()}"] = text
        return variables

    @classmethod
    def _flat(cls) -> Iterator[tuple[str, str, bool]]:
        """Each field: the group that it is in, its name, and whether it is a tuple."""
        for one in fields(cls):
            if one.default_factory is MISSING:
                yield "", one.name, False
        for group, kind in (
            ("limits", EncodeLimits),
            ("media", MediaPolicy),
            ("failures", FailurePolicy),
        ):
            for one in fields(kind):
                yield group, one.name, isinstance(one.default, tuple)


class EncodeImages:
    """The class that vLLM's ``--middleware`` takes: ``retinue.server.middleware.EncodeImages`` with a life.

    It answers ``/ready``: 200 if a forward of the encoder lately succeeded and the engine is alive. Its
    figures are among those of vLLM's ``/metrics``. Requests without vLLM's API key, if it has one, go through
    untouched, for vLLM to refuse.
    """

    #: 1 once the encoder has failed and the server was told to exit for it.
    exit_status: ClassVar[int] = 0

    def __init__(self, app: ASGIApp) -> None:
        config = Config.from_environment(os.environ)
        sys.path.insert(0, os.getcwd())  # where the backend's module is, as a rule
        self._app = app
        self._model_id = config.encoder_model
        self._exit_on_failure = config.failures.exit_on_failure
        self._front = Front(
            app,
            load_backend(config.encoder),
            limits=config.limits,
            media=config.media,
            failures=config.failures,
            encode_timeout_s=config.encode_timeout_s,
            place=_PLACE,
        )
        if config.record_trace is not None:
            self._front.record(config.record_trace)
        self._keys: list[bytes] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The ASGI interface."""
        if scope["type"] == "lifespan":
            server = scope["app"]
            await live_within(
                self._app, scope, receive, send, start=lambda: self._start(server.state), stop=self._stop
            )
        elif scope["type"] == "http" and scope["path"] == "/ready":
            await (await self._ready(scope["app"].state))(scope, receive, send)
        elif scope["type"] == "http" and (not self._keys or bears_one_of(self._keys, scope)):
            await self._front.app(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    async def _start(self, state: Any) -> None:
        """Build the encoder for the server whose state this is; raises what is in the way."""
        model = state.vllm_config.model_config
        if not model.enable_prompt_embeds:
            raise ValueError("vLLM takes no embeddings: start it with --enable-prompt-embeds")
        keys = state.args.api_key or [os.environ.get("VLLM_API_KEY")]
        self._keys = [key.encode() for key in keys if key]
        self._front.images.width = model.get_inputs_embeds_size()
        await self._front.build(self._model_id or model.model)
        await self._front.try_out()
        self._front.open()
        if self._exit_on_failure:
            self._front.readiness.failed.add_done_callback(self._exit)
        prometheus_client.REGISTRY.register(self._front.metrics.registry)

    @classmethod
    def _exit(cls, failed: concurrent.futures.Future[str]) -> None:
        """End the server as a signal would, with what is in flight."""
        logger.error("exits: %s", failed.result())
        cls.exit_status = 1
        os.kill(os.getpid(), signal.SIGTERM)

    async def _stop(self) -> None:
        await self._front.close()

    async def _ready(self, state: Any) -> Response:
        report = asdict(await self._front.readiness.report())
        try:
            await state.engine_client.check_health()
        except Exception as error:  # vLLM's own, whatever it is
            report |= {"ready": False, "reason": f"the engine is not well: {type(error).__name__}"}
        return json_response(200 if report["ready"] else 503, report)


def serve(model: str, options: Sequence[str], config: Config) -> int:
    """Run vLLM's own OpenAI server in this process, with the middleware in front; the process's exit status.

    ``options``: as on vLLM's command line. 2 for options that cannot be together; stderr says which.
    """
    try:
        import uvloop
        from vllm.entrypoints.launchers.api_server.entry import run_server
        from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
        from vllm.entrypoints.serve.utils.api_utils import cli_env_setup
        from vllm.utils.argparse_utils import FlexibleArgumentParser
    except ImportError as error:
        print(f"retinue serve: --engine vllm needs vLLM 0.32 in this environment: {error}", file=sys.stderr)
        return 1
    try:
        load_backend(config.encoder)  # now, and not when the engine is up
    except ValueError as error:
        print(f"retinue serve: {error}", file=sys.stderr)
        return 2
    cli_env_setup()
    parser = make_arg_parser(FlexibleArgumentParser(prog="retinue serve --engine vllm"))
    args = parser.parse_args(["--model", model, "--enable-prompt-embeds", *options])
    if problem := _problem(args):
        print(f"retinue serve: {problem}", file=sys.stderr)
        return 2
    validate_parsed_serve_args(args)
    for name in [name for name in os.environ if name.startswith(_PREFIX) and name not in _NOT_OURS]:
        del os.environ[name]  # the command line alone says how
    os.environ.update(config.to_environment())
    args.middleware.append("retinue.vllm.EncodeImages")
    uvloop.run(run_server(args))
    return EncodeImages.exit_status


def _problem(args: Any) -> str:
    """Why ``args``, vLLM's options parsed, cannot be served; empty if they can."""
    if not args.enable_prompt_embeds:
        return "leave --no-enable-prompt-embeds out: images reach the model as embeddings"
    if (args.api_server_count or 1) > 1:
        return (
            f"--api-server-count {args.api_server_count} would build an encoder in each; leave it out, "
            "or run the encoder in front: retinue serve --upstream URL"
        )
    if args.headless:
        return "--headless starts no API server for the images to go through; leave it out"
    if "retinue.vllm.EncodeImages" in args.middleware:
        return "leave --middleware retinue.vllm.EncodeImages out: it is there already"
    return ""
