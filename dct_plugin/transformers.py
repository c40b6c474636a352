"""Hugging Face's Trainer with torch's DDP: :class:`DCTCallback`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import Trainer, TrainerCallback

from .config import DCTConfig
from .integrations.attach import Attachment, attach
from .metrics import Metrics

__all__ = ["DCTCallback"]


class DCTCallback(TrainerCallback):
    """Callback that compresses the gradients of a Trainer and saves residuals in its checkpoints.

    With DeepSpeed it only logs: there the ``dct`` section of the JSON compresses. Metrics go to the
    Trainer's log, and so to TensorBoard, W&B or MLflow. The loss goes to the metrics' file.

    Args:
        section: The keys of the ``dct`` section; without it the defaults, which follow the optimizer.
        trainer: The Trainer that the callback is added to, which wraps the model when training begins.

    Attributes:
        state: The state of the training, once it has begun; None under DeepSpeed.

    Example:
        >>> trainer.add_callback(DCTCallback({"data_parallel": {"sparsity": 0.99}}, trainer=trainer))
    """

    def __init__(self, section: DCTConfig | Mapping[str, Any] | None = None, *, trainer: Trainer) -> None:
        self.trainer, self.section = trainer, DCTConfig.given(section)
        self.state: Attachment | None = None
        self._metrics: Metrics | None = None
        self._unlogged: dict[str, float] = {}

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Attach to the wrapped model; restore the residuals of a training that is resumed."""
        trainer = self.trainer
        if trainer.is_deepspeed_enabled:
            self._report(getattr(getattr(trainer.model_wrapped, "dct", None), "metrics", None))
            return
        self.state = attach(
            trainer.model_wrapped,
            trainer.optimizer,
            self.section,
            scaler=trainer.accelerator.scaler,
            total_steps=state.max_steps,
        )
        self._report(self.state.metrics)
        if state.global_step:
            given = args.resume_from_checkpoint
            self.state.load(given if isinstance(given, str) else self._folder(state))

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Remove all hooks; the next training attaches again."""
        if self.state is not None:
            self.state.finish()

    def _report(self, metrics: Metrics | None) -> None:
        """Follow the metrics of this training."""
        if metrics is not None and metrics is not self._metrics:
            metrics.add_sink(lambda events: self._unlogged.update({name: value for name, value, _ in events}))
            self._metrics = metrics

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Log a report that was made in this step."""
        figures, self._unlogged = self._unlogged, {}
        if figures and state.is_world_process_zero:
            is_due = control.should_log
            self.trainer.log(figures)
            control.should_log = is_due  # log() clears it; a log that is due gathers the loss of all ranks

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        """Write the loss to the metrics' file."""
        if self._metrics is not None and "loss" in (logs or {}):
            self._metrics.event("loss", step=state.global_step, loss=float(logs["loss"]))

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Save the residuals in the folder of a checkpoint that training can go on from."""
        if self.state is not None and not args.save_only_model:
            self.state.save(self._folder(state))

    def _folder(self, state: Any) -> Path:
        """Return the Trainer's folder of a checkpoint; each trial of a hyperparameter search has its own."""
        trainer = self.trainer
        return Path(trainer._get_output_dir(trainer._trial)) / f"checkpoint-{state.global_step}"
