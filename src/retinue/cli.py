"""``retinue``: the command line. Each command's options are a frozen dataclass; tyro derives the flags."""

from __future__ import annotations

import sys
from dataclasses import dataclass

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


def main() -> None:
    """Entry point of the ``retinue`` command."""
    try:
        import tyro
    except ModuleNotFoundError:
        sys.exit("the retinue command needs more than the library: pip install 'retinue[demo]'")
    command = tyro.extras.subcommand_cli_from_dict(
        {"demo": Demo},
        prog="retinue",
        description="Batches the images of concurrent requests through a vision encoder of your own.",
    )
    sys.exit(command.run())


if __name__ == "__main__":
    main()
