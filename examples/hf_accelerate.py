"""A training loop with Hugging Face's Accelerate and compressed gradients.

    torchrun --nproc-per-node 2 examples/hf_accelerate.py
    torchrun --nproc-per-node 2 examples/hf_accelerate.py --deepspeed configs/deepspeed_zero1_dct.json

Without DeepSpeed ``prepare`` wraps the model in torch's DistributedDataParallel, and one call attaches to it.
With DeepSpeed only the ``dct`` section of the JSON is needed.
"""

import argparse

import torch
from accelerate import Accelerator, PartialState
from accelerate.utils import DeepSpeedPlugin, DummyOptim
from torch import nn

from dct_plugin.accelerate import attach


def batches(steps, size=32):
    """Points and the sum of some of their coordinates, squared."""
    generator = torch.Generator().manual_seed(1)
    points = torch.randn(steps * size * 2, 64, generator=generator)
    data = torch.utils.data.TensorDataset(points, points[:, :8].square().sum(1, keepdim=True) / 8)
    return torch.utils.data.DataLoader(data, batch_size=size)


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--deepspeed", help="DeepSpeed's JSON, with a dct section")
    parser.add_argument("--sparsity", type=float, default=0.99, help="without DeepSpeed")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--folder", help="keeps a checkpoint of the middle of the training")
    parser.add_argument("--resume", action="store_true", help="begin with that checkpoint")
    parser.add_argument("--metrics-folder", help="folder for TensorBoard, without DeepSpeed")
    options = parser.parse_args(arguments)

    deepspeed = None if options.deepspeed is None else DeepSpeedPlugin(hf_ds_config=options.deepspeed)
    PartialState(cpu=not torch.cuda.is_available())  # under DeepSpeed Accelerate itself looks for GPUs alone
    tracker = None if options.metrics_folder is None else "tensorboard"
    accelerator = Accelerator(
        deepspeed_plugin=deepspeed, log_with=tracker, project_dir=options.metrics_folder
    )
    if tracker is not None:
        accelerator.init_trackers("accelerate")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 1))
    make = torch.optim.AdamW if deepspeed is None else DummyOptim  # DeepSpeed makes the one of its JSON
    model, optimizer, loader = accelerator.prepare(
        model, make(model.parameters(), lr=2e-3), batches(options.steps)
    )
    if deepspeed is None:
        section = {"data_parallel": {"sparsity": options.sparsity}, "metrics": {"every": 5}}
        attach(accelerator, model, optimizer, section, total_steps=options.steps)

    losses, half = [], options.steps // 2
    if options.resume:
        accelerator.load_state(options.folder)
        loader = accelerator.skip_first_batches(loader, half)
    for points, wanted in loader:
        loss = nn.functional.mse_loss(model(points), wanted)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(accelerator.reduce(loss.detach(), "mean").item())
        if options.folder and not options.resume and len(losses) == half:
            accelerator.save_state(options.folder)
    for each in accelerator.trackers:
        each.finish()
    accelerator.print(
        f"loss {sum(losses[:5]) / 5:.4f} in the first steps, {sum(losses[-5:]) / 5:.4f} in the last"
    )
    return model, losses


if __name__ == "__main__":
    main()
