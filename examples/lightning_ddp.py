"""A small network, trained by Lightning with its DDP strategy and compressed gradients.

    torchrun --nproc-per-node 2 examples/lightning_ddp.py

The callback attaches to the model when training begins, and keeps residuals in Lightning's checkpoints.
"""

import argparse
import tempfile

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loggers import CSVLogger
from torch import nn

from dct_plugin.lightning import DCTCallback


class Network(LightningModule):
    """Learns the sum of some squared coordinates of a point."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 1)
        )
        self.losses = []

    def forward(self, points):
        return self.layers(points)

    def training_step(self, batch, _):
        points, wanted = batch
        loss = nn.functional.mse_loss(self(points), wanted)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=2e-3)


def batches(steps, size=32):
    """Points and the sum of some of their coordinates, squared."""
    generator = torch.Generator().manual_seed(1)
    points = torch.randn(steps * size * 2, 64, generator=generator)
    data = torch.utils.data.TensorDataset(points, points[:, :8].square().sum(1, keepdim=True) / 8)
    return torch.utils.data.DataLoader(data, batch_size=size)


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sparsity", type=float, default=0.99)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--folder", help="keeps a checkpoint of the end of the training")
    parser.add_argument("--resume", action="store_true", help="begin with that checkpoint")
    parser.add_argument("--metrics-folder", help="folder for Lightning's log, and for the plugin's metrics")
    options = parser.parse_args(arguments)

    torch.manual_seed(0)
    section = {"data_parallel": {"sparsity": options.sparsity}}
    if options.metrics_folder is not None:
        section["metrics"] = {"path": f"{options.metrics_folder}/metrics.jsonl", "every": 5}
    model, file = Network(), f"{options.folder}/end.ckpt"
    trainer = Trainer(
        accelerator="auto" if torch.cuda.is_available() else "cpu",
        devices=2,
        strategy="ddp",
        max_steps=options.steps,
        callbacks=[DCTCallback(section)],
        default_root_dir=tempfile.mkdtemp(),
        logger=False if options.metrics_folder is None else CSVLogger(options.metrics_folder),
        log_every_n_steps=5,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, batches(options.steps), ckpt_path=file if options.resume else None)
    if options.folder is not None:
        trainer.save_checkpoint(file)
    return model, model.losses


if __name__ == "__main__":
    main()
