"""Measure the loss and the bytes of PowerSGD and of thresholded gradients: the text model of ``adam.py``.

torch DDP with torch's own PowerSGD hook (error feedback, warm start; dense for the first 60 steps; one
bucket, since its collectives follow no fixed order on gloo otherwise) and with the plugin's hook, after 60
dense steps and a ramp of 180. AdamW, clipping and schedule as in ``adam.py``, for all alike.

    python benchmarks/studies/powersgd.py --text wikitext2_valid.txt.gz
"""

from __future__ import annotations

import argparse
import json
from typing import Any

import adam

START = 60
SETTINGS: dict[str, dict[str, Any]] = {
    "dense": {},
    **{f"PowerSGD {rank}": {"powersgd": rank} for rank in (1, 2, 4, 8)},
    **{
        f"DCT 0.99 {kind}": {
            "dct": {"data_parallel": {**adam.SETTINGS["ahead-0.99-ramp180"], "value_dtype": kind}}
        }
        for kind in ("bf16", "int8")
    },
}


class Engine:
    """A model under DDP with the parts of DeepSpeed's engine that the study uses."""

    def __init__(self, model: Any, config: dict[str, Any]) -> None:
        import torch
        from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

        from dct_plugin import DCTState, dct_hook

        self.module = model
        self.optimizer = torch.optim.AdamW(model.parameters(), **config["optimizer"])
        self._ddp = torch.nn.parallel.DistributedDataParallel(
            model, gradient_as_bucket_view=True, bucket_cap_mb=1e6 if "powersgd" in config else 25
        )
        if "powersgd" in config:
            state = powerSGD_hook.PowerSGDState(
                None, matrix_approximation_rank=config["powersgd"], start_powerSGD_iter=START
            )
            self._ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        if "dct" in config:
            dct = DCTState(config["dct"], named_parameters=model.named_parameters())
            dct.step_ahead(model, self.optimizer)
            self._ddp.register_comm_hook(dct, dct_hook)

    def __call__(self, x: Any) -> Any:
        return self._ddp(x)

    def backward(self, loss: Any) -> None:
        loss.backward()

    def step(self) -> None:
        """Clip, step, and clear the gradients."""
        import torch

        torch.nn.utils.clip_grad_norm_(self.module.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=False)

    def eval(self) -> None:
        self._ddp.eval()

    def destroy(self) -> None:
        pass


def configure(args: argparse.Namespace, setting: str) -> dict[str, Any]:
    """Return the options that a rank trains one setting with."""
    options = json.loads(args.optimizer_params)
    options.pop("torch_adam", None)
    return {"optimizer": {"lr": args.lr, **options}, **SETTINGS[setting]}


def main() -> None:
    adam.run(adam.parser_of(__doc__, SETTINGS, list(SETTINGS)).parse_args(), configure, Engine)


if __name__ == "__main__":
    main()
