"""``retinue``: the command line. Each command's options are a frozen dataclass; tyro derives the flags."""

from __future__ import annotations

import logging
import os
import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated

try:
    import tyro

    from retinue.media import MediaPolicy
    from retinue.server.limits import ServerLimits
except ModuleNotFoundError as error:
    sys.exit(f"the retinue command needs more than the library: pip install 'retinue[serve]' ({error})")

if TYPE_CHECKING:
    from retinue.server.stack import Behind, Stack

__all__ = ["main"]


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

    One of three stands behind the encoder: the shipped demo model (--demo), a Hugging Face text model in this
    process (TEXT_MODEL), or any server that takes prompt_embeds parts, such as vLLM (--upstream).
    """

    text_model: Annotated[str | None, tyro.conf.Positional, tyro.conf.arg(metavar="TEXT_MODEL")] = None
    """Folder or Hub name of a causal language model and its tokenizer."""
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
    """So many texts are written at once by TEXT_MODEL."""
    host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0 for all, which wants an API key."""
    port: int = 8000
    """Port to listen on; 0 for any that is free."""
    api_key: Annotated[str | None, tyro.conf.arg(metavar="KEY")] = None
    """What clients must send as a bearer token on /v1/*; also from the environment: RETINUE_API_KEY."""
    grace_s: Annotated[float, tyro.conf.arg(name="grace")] = 30.0
    """Seconds for what is in flight when the server is told to stop."""
    limits: tyro.conf.OmitArgPrefixes[ServerLimits] = field(default_factory=ServerLimits)
    """How much the server takes on."""
    media: tyro.conf.OmitArgPrefixes[MediaPolicy] = field(default_factory=MediaPolicy)
    """What images may be, and where they may come from."""

    def __post_init__(self) -> None:
        behind = [self.text_model is not None, self.demo, self.upstream is not None]
        if sum(behind) != 1:
            raise ValueError("serve needs exactly one of TEXT_MODEL, --demo and --upstream URL")
        if self.demo and self.encoder is not None:
            raise ValueError("--demo brings its own encoder; leave --encoder out")
        if not self.demo and self.encoder is None:
            raise ValueError("serve needs your backend's class: --encoder package.module:Class")

    def run(self) -> int:
        """Run the command; its exit status."""
        from retinue.server.serving import serve

        api_key = self.api_key or os.environ.get(_KEY_VARIABLE)
        if api_key is None and self.host not in ("127.0.0.1", "localhost", "::1"):
            print(f"warning: {self.host} is open to others, and there is no API key", file=sys.stderr)
        sys.path.insert(0, os.getcwd())  # where the backend's module is, as a rule
        logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s")
        try:
            stack = self._stack(api_key)
        except ValueError as error:  # an option whose value only its user can judge
            print(f"retinue serve: {error}", file=sys.stderr)
            return 2
        return serve(stack, "retinue", host=self.host, port=self.port, grace_s=self.grace_s)

    def _stack(self, api_key: str | None) -> Stack:
        from retinue.encoder import load_backend
        from retinue.server.stack import Stack

        if self.demo:
            from retinue.demo.serving import demo_stack

            return demo_stack(limits=self.limits, media=self.media, api_key=api_key)
        assert self.encoder is not None
        return Stack(
            load_backend(self.encoder),
            self.encoder_model or self.text_model or "",
            self._upstream() if self.upstream is not None else self._embedded(),
            limits=self.limits,
            media=self.media,
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
        return Behind(app, load=decoder.aload, close=decoder.aclose)


def main() -> None:
    """Entry point of the ``retinue`` command."""
    command = tyro.extras.subcommand_cli_from_dict(
        {"serve": Serve, "demo": Demo},
        prog="retinue",
        description="Batches the images of concurrent requests through a vision encoder of your own.",
        config=(tyro.conf.FlagCreatePairsOff,),
    )
    sys.exit(command.run())


if __name__ == "__main__":
    main()
