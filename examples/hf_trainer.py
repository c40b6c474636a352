"""A small GPT-2, made from a configuration, trained by Hugging Face's Trainer with compressed gradients.

    torchrun --nproc-per-node 2 examples/hf_trainer.py --deepspeed configs/huggingface_zero1.json
    torchrun --nproc-per-node 2 examples/hf_trainer.py

With DeepSpeed only the ``dct`` section of the JSON is needed; the Trainer passes it on. Without DeepSpeed a
callback attaches to the model when training begins, and keeps residuals in the Trainer's checkpoints.
"""

import argparse
import os
import tempfile

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from dct_plugin.transformers import DCTCallback

SYMBOLS, LENGTH = 64, 32


def sequences(count, seed):
    """Counting in steps of 1 to 7, modulo the number of symbols: the first two symbols tell all others."""
    generator = torch.Generator().manual_seed(seed)
    first, step = (
        torch.randint(SYMBOLS, (count, 1), generator=generator),
        torch.randint(1, 8, (count, 1), generator=generator),
    )
    rows = (first + step * torch.arange(LENGTH)) % SYMBOLS
    return [{"input_ids": row, "labels": row} for row in rows]


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--deepspeed", help="DeepSpeed's JSON, with a dct section")
    parser.add_argument("--sparsity", type=float, default=0.99, help="without DeepSpeed")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--folder", help="keeps a checkpoint of the middle of the training")
    parser.add_argument("--resume", action="store_true", help="begin with that checkpoint")
    parser.add_argument("--metrics-folder", help="folder for the plugin's metrics; the Trainer logs, too")
    parser.add_argument("--report-to", nargs="+", default=["tensorboard"], help="and mlflow, wandb, ...")
    options = parser.parse_args(arguments)

    torch.manual_seed(0)
    section = {"data_parallel": {"sparsity": options.sparsity}}
    if options.metrics_folder is not None:
        section["metrics"] = {"path": f"{options.metrics_folder}/metrics.jsonl", "every": 5}
        os.environ["TENSORBOARD_LOGGING_DIR"] = options.metrics_folder
    model = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=SYMBOLS,
            n_positions=LENGTH,
            n_embd=64,
            n_layer=2,
            n_head=4,
            bos_token_id=0,
            eos_token_id=0,
        )
    )
    trainer = Trainer(
        model,
        TrainingArguments(
            options.folder or tempfile.mkdtemp(),
            deepspeed=options.deepspeed,
            max_steps=options.steps,
            per_device_train_batch_size=16,
            learning_rate=2e-3,
            logging_steps=max(1, options.steps // 6),
            save_strategy="no" if options.folder is None else "steps",
            save_steps=options.steps // 2,
            report_to="none" if options.metrics_folder is None else options.report_to,
            ddp_find_unused_parameters=False,
            use_cpu=not torch.cuda.is_available(),
        ),
        train_dataset=sequences(4096, seed=1),
    )
    trainer.add_callback(DCTCallback(section, trainer=trainer))
    trainer.train(
        resume_from_checkpoint=f"{options.folder}/checkpoint-{options.steps // 2}" if options.resume else None
    )
    return trainer.model, [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


if __name__ == "__main__":
    main()
