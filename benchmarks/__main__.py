"""``make bench``: every benchmark, one after the other, with its defaults."""

import subprocess
import sys
from pathlib import Path

REFERENCE = Path(".bench/dynamo/vllm/multimodal_utils/custom_encoder/batcher.py")

for command in (
    ["overhead", "--reference", str(REFERENCE)],
    ["packing"],
    ["coalescing", "--reference", str(REFERENCE)],
    ["open_loop"],
    ["peers"],
    ["vit"],
    ["simulation"],
    ["contract"],
    ["demo_encoder"],
    ["decode"],
    ["serve"],
):
    print(f"\n== benchmarks.{' '.join(command)}", flush=True)
    subprocess.run([sys.executable, "-m", f"benchmarks.{command[0]}", *command[1:]], check=True)
