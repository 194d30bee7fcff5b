"""A worker of one's own around vLLM: your encoder and its engine, driven from one event loop, no server.

Run it:  python examples/vllm_worker.py

It needs vLLM. The models are the demo's, which are shipped: one sees digits, the other, in vLLM, answers.
Three things are worth copying:

-   ``answer``: a request is one coroutine, and whoever serves it cancels it when its caller leaves. Then an
    encode that waits never reaches the encoder, and a generation that runs is aborted in the engine.
-   ``Chat`` and ``EngineModel`` make the prompt. No text that a caller writes can spell an image or a special
    token, and no artifact that would harm other requests gets into the engine.
-   ``main``: the encoder, which feeds the engine, is closed first.
"""

import asyncio
from collections.abc import Sequence
from typing import TypeAlias
from uuid import uuid4

from torch import Tensor
from transformers import AutoTokenizer
from vllm import SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.v1.engine.async_llm import AsyncLLM

from retinue import AsyncVisionEncoder
from retinue.decoders.chat import Chat
from retinue.decoders.vllm import EngineModel
from retinue.demo.encoder import CHECKPOINT, DigitsEncoder
from retinue.demo.prompt import QUESTION
from retinue.media import Image

Encoder: TypeAlias = AsyncVisionEncoder[bytes | Image, Tensor, Tensor]


class Worker:
    """Answers questions about pictures."""

    def __init__(self, encoder: Encoder, engine: AsyncLLM, params: SamplingParams) -> None:
        self._encoder, self._engine, self._params = encoder, engine, params
        self._model = EngineModel.of(engine.model_config)
        self._chat = Chat(AutoTokenizer.from_pretrained(engine.model_config.tokenizer))

    async def answer(self, pictures: Sequence[bytes], question: str) -> str:
        artifacts = await self._encoder.encode(pictures)
        images = [{"type": "prompt_embeds", "data": artifact} for artifact in artifacts]
        message = {"role": "user", "content": [*images, {"type": "text", "text": question}]}
        model = self._model
        prompt = model.accept(
            self._chat.prompt([message], hidden_size=model.hidden_size, context=model.context)
        )
        text = ""
        async for output in self._engine.generate(prompt, self._params, request_id=uuid4().hex):
            text = output.outputs[0].text
        return text


async def main() -> None:
    engine = AsyncLLM.from_engine_args(
        AsyncEngineArgs(model=str(CHECKPOINT), dtype="float32", enable_prompt_embeds=True, enforce_eager=True)
    )
    try:
        async with AsyncVisionEncoder(DigitsEncoder(), "demo") as encoder:
            worker = Worker(encoder, engine, SamplingParams(temperature=0, max_tokens=8))
            album = sorted(CHECKPOINT.with_name("pictures").glob("*-rendered-*"))
            asked = [album[first : first + 1 + first % 4] for first in range(12)]
            callers = [
                asyncio.create_task(worker.answer([path.read_bytes() for path in shown], QUESTION))
                for shown in asked
            ]
            await asyncio.sleep(0)  # they begin
            callers[5].cancel()  # as a server does for a caller who leaves
            await asyncio.wait(callers)
            for shown, caller in zip(asked, callers, strict=True):
                said = "(left)" if caller.cancelled() else caller.result()
                print(f"{', '.join(path.name for path in shown)}: {said}")
    finally:
        engine.shutdown()


if __name__ == "__main__":
    asyncio.run(main())
