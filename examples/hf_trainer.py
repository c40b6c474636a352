"""A small GPT-2, made from a configuration, trained by Hugging Face's Trainer with compressed gradients.

    torchrun --nproc-per-node 2 examples/hf_trainer.py --deepspeed configs/huggingface_zero1.json
    torchrun --nproc-per-node 2 examples/hf_trainer.py

With DeepSpeed the ``dct`` section of the JSON is all there is to it; the Trainer passes it on. Without, the
model is torch's DistributedDataParallel, which takes the communication hook when training begins.
"""

import argparse
import tempfile

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

from dct_plugin import DCTState

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


class Compressed(TrainerCallback):
    """Gradients of a Trainer without DeepSpeed."""

    def __init__(self, trainer, section):
        self.trainer, self.section = trainer, section

    def on_train_begin(self, args, state, control, **_):
        DCTState(self.section).register(self.trainer.model_wrapped)


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--deepspeed", help="DeepSpeed's JSON, with a dct section")
    parser.add_argument("--sparsity", type=float, default=0.9, help="without DeepSpeed")
    parser.add_argument("--steps", type=int, default=60)
    options = parser.parse_args(arguments)

    torch.manual_seed(0)
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
            tempfile.mkdtemp(),
            deepspeed=options.deepspeed,
            max_steps=options.steps,
            per_device_train_batch_size=16,
            learning_rate=2e-3,
            logging_steps=max(1, options.steps // 6),
            save_strategy="no",
            report_to="none",
            ddp_find_unused_parameters=False,
            use_cpu=not torch.cuda.is_available(),
        ),
        train_dataset=sequences(4096, seed=1),
    )
    if options.deepspeed is None:
        trainer.add_callback(Compressed(trainer, {"data_parallel": {"sparsity": options.sparsity}}))
    trainer.train()
    return trainer.model, [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


if __name__ == "__main__":
    main()
