"""What these tests need of a real vLLM: its environment, and one engine in this process for all of them.

Without vLLM they are skipped; ``make test-vllm`` runs them where it is.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import signal
import subprocess
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from vllm import RequestOutput, SamplingParams
    from vllm.v1.engine.llm_engine import LLMEngine

_FOUND = importlib.util.find_spec("vllm")
HAS_VLLM = _FOUND is not None and _FOUND.origin is not None  # this folder is a "vllm" without an origin

if HAS_VLLM:
    os.environ.update(
        HF_HUB_OFFLINE="1",
        VLLM_NO_USAGE_STATS="1",
        VLLM_LOGGING_LEVEL="ERROR",
        VLLM_CPU_KVCACHE_SPACE="1",  # GiB
        VLLM_WORKER_MULTIPROCESSING_METHOD="spawn",  # a fork would inherit the engine of this process
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what is deprecated in PyTorch: for vLLM to mind
        import vllm.v1.engine.async_llm
        import vllm.v1.engine.llm_engine  # noqa: F401


def run(*command: str, timeout_s: float) -> subprocess.CompletedProcess[str]:
    """Run a program that may start an engine; whatever it has started ends with it, or at the time limit."""
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        try:
            out, errors = process.communicate(timeout=timeout_s)
        finally:
            with contextlib.suppress(ProcessLookupError):  # as it should be
                os.killpg(process.pid, signal.SIGKILL)
    return subprocess.CompletedProcess(command, process.returncode, out, errors)


class NeedsVllm(pytest.Module):
    """A module of tests where vLLM is not installed."""

    def collect(self) -> Any:
        """Skip them all, visibly."""
        pytest.skip("vLLM is not installed here; run make test-vllm", allow_module_level=True)


if not HAS_VLLM:

    def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> NeedsVllm:
        """Keep the module from being imported."""
        module: NeedsVllm = NeedsVllm.from_parent(parent, path=module_path)
        return module


class Engine:
    """vLLM's engine in this process: requests are added and steps are made by hand, so nothing races.

    All requests that were added and are not finished share its batches, as in a server.
    """

    def __init__(self, engine: LLMEngine) -> None:
        self._engine = engine
        self._finished: dict[str, RequestOutput] = {}
        self._added = 0
        self.model_config = engine.model_config

    def add(self, prompt: Any, params: SamplingParams) -> str:
        """Let the engine have one more request; return its id."""
        self._added += 1
        name = f"request {self._added}"
        self._engine.add_request(name, prompt, params)
        return name

    def step(self, times: int = 1) -> None:
        for _ in range(times):
            for output in self._engine.step():
                if output.finished:
                    self._finished[output.request_id] = output

    def finish(self, name: str) -> RequestOutput:
        """Step until this request is finished, whatever else runs."""
        for _ in range(1000):
            if name in self._finished:
                return self._finished.pop(name)
            self.step()
        raise AssertionError(f"{name} is not finished after 1000 steps")

    def abort(self, name: str) -> None:
        self._engine.abort_request([name])

    @property
    def unfinished(self) -> int:
        """How many requests the scheduler itself still has."""
        scheduler = self._engine.engine_core.engine_core.scheduler
        return int(scheduler.get_num_unfinished_requests())

    @property
    def free_blocks(self) -> int:
        """Blocks of the KV cache that no request uses."""
        scheduler = self._engine.engine_core.engine_core.scheduler
        return int(scheduler.kv_cache_manager.block_pool.get_num_free_blocks())


@pytest.fixture(scope="session")
def engine() -> Engine:
    """The demo's language model in vLLM; no process is started for it."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine

    from retinue.demo.encoder import CHECKPOINT

    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # as above
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        arguments = EngineArgs(
            model=str(CHECKPOINT),
            dtype="float32",
            enable_prompt_embeds=True,
            max_model_len=512,
            max_num_seqs=16,
            block_size=32,  # the default is longer than most of our prompts
            enforce_eager=True,
            distributed_executor_backend="uni",
            disable_log_stats=True,
        )
        made = LLMEngine.from_engine_args(arguments)
    return Engine(made)
