"""Entropy of dense gradients, and ratio and speed of the plugin's lossless code.

    python benchmarks/lossless.py

The gradients are those of the GPT of ``benchmarks/megatron_gpt.py``, in one process. "Pays below" is the link
on which the saved bytes take as long as coding and decoding, if these are not hidden. The plugin codes one
chunk while others travel, so that its own limit is higher.
"""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import megatron_gpt
import numpy as np
import torch
from torch import Tensor

from dct_plugin.data_parallel.lossless import decode, encode


def gradients(steps: list[int]) -> dict[int, Tensor]:
    """Return the gradient after so many steps."""
    made: list[Any] = []
    build = megatron_gpt._model
    megatron_gpt._model = lambda *given, **named: made.append(build(*given, **named)) or made[-1]
    megatron_gpt.Megatron({"dct": False}).open("DP 2")
    step = partial(next, megatron_gpt.training(1, megatron_gpt.BATCH, distributed_optimizer=False))
    found = {}
    for number in range(1, max(steps) + 1):
        step()
        if number in steps:
            found[number] = torch.cat([each.main_grad.flatten() for each in made[-1].parameters()])
    return found


def entropy(values: np.ndarray) -> float:
    """Return the bits per value."""
    counts = np.bincount(values).astype(float)
    share = counts[counts > 0] / counts.sum()
    return float(-(share * np.log2(share)).sum())


def seconds(work: Callable[[], object]) -> float:
    """Return the least processor time of some calls."""
    taken = []
    for _ in range(5):
        began = time.process_time()
        work()
        taken.append(time.process_time() - began)
    return min(taken)


def main() -> None:
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0", RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")
    torch.distributed.init_process_group("gloo")
    print("| step | type | exponent, bits | ratio | code, MB/s | decode, MB/s | pays below, Mbit/s |")
    print("|--:|---|--:|--:|--:|--:|--:|")
    for step, gradient in gradients([1, 20, 100]).items():
        for dtype, words, shift in ((torch.float32, torch.int32, 23), (torch.bfloat16, torch.int16, 7)):
            flat = gradient.to(dtype)
            bits = entropy(((flat.view(words).to(torch.int64) >> shift) & 0xFF).numpy())
            message = encode(flat)
            ratio = flat.nbytes / message.numel()
            code, back = seconds(partial(encode, flat)), seconds(partial(decode, message, flat))
            below = 8 * flat.nbytes * (1 - 1 / ratio) / (code + back) / 1e6
            speeds = f"{flat.nbytes / code / 1e6:.0f} | {flat.nbytes / back / 1e6:.0f}"
            print(
                f"| {step} | {str(dtype)[6:]} | {bits:.2f} | {ratio:.2f} | {speeds} | {below:.0f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
