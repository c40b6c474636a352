"""Lightning with its DDP strategy: :class:`DCTCallback`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .config import DCTConfig
from .errors import ConfigError
from .integrations.attach import attach
from .integrations.ddp import AveragedResiduals, DCTState
from .integrations.host.attachment import PlainTraining
from .metrics import Event

try:
    from lightning.pytorch import Callback
except ImportError:
    from pytorch_lightning import Callback

__all__ = ["DCTCallback"]

_KEY = "dct_residuals"


class DCTCallback(Callback):
    """Callback that compresses the gradients of a Trainer and saves residuals in its checkpoints.

    The metrics go to the Trainer's loggers, and the loss to the metrics' file. Lightning's checkpoint is one
    file, so it gets the mean of the ranks' residuals, 4 bytes per parameter.
    Any number of ranks can resume from it.

    Args:
        section: The keys of the ``dct`` section; without it the defaults, which follow the optimizer.

    Attributes:
        state: The state of the training, once it has begun; None on a single process, or switched off.

    Example:
        >>> Trainer(strategy="ddp", callbacks=[DCTCallback({"data_parallel": {"sparsity": 0.99}})])
    """

    def __init__(self, section: DCTConfig | Mapping[str, Any] | None = None) -> None:
        self.section = DCTConfig.given(section)
        self.state: DCTState | None = None
        self._loaded: dict[str, Any] | None = None

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Attach to the model that the strategy has wrapped.

        Raises:
            ConfigError: The strategy or the section does not work with Lightning.
        """
        if self.section.data_parallel.nonfinite_action == "skip":
            raise ConfigError(
                "dct.data_parallel.nonfinite_action = 'skip': Lightning runs passes inside the optimizer's "
                "step, which has begun when gradients are known; set it to 'pass'"
            )
        steps = trainer.estimated_stepping_batches
        state = attach(
            trainer.strategy.model,
            trainer.optimizers,
            self.section,
            scaler=getattr(trainer.precision_plugin, "scaler", None),
            total_steps=int(steps) if 0 < steps < float("inf") else None,  # -1: data of unknown length
        )
        if isinstance(state, PlainTraining):
            return
        if not isinstance(state, DCTState):
            raise ConfigError(
                "DCTCallback: Lightning's checkpoints do not take FSDP2's residuals; use the strategy 'ddp'"
            )
        self.state = state
        if trainer.is_global_zero:
            state.metrics.add_sink(lambda events: _log(trainer, events))
        if self._loaded is not None:
            AveragedResiduals(self.state).load_state_dict(self._loaded)
            self._loaded = None

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, *_: Any) -> None:
        """Write the loss to the metrics' file, as often as the Trainer logs."""
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        if self.state is None or loss is None or trainer.global_step % trainer.log_every_n_steps:
            return
        self.state.metrics.event("loss", step=trainer.global_step, loss=float(loss))

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Take everything off the model; a further fit attaches anew."""
        if self.state is not None:
            self.state.finish()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Take everything off the model; other ranks may train on."""
        if self.state is not None:
            self.state.close()

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Put the mean of the residuals into a checkpoint; a collective."""
        if self.state is not None:
            checkpoint[_KEY] = AveragedResiduals(self.state).state_dict()

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Keep the residuals of a checkpoint until the model is wrapped."""
        self._loaded = checkpoint.get(_KEY)


def _log(trainer: Any, events: list[Event]) -> None:
    """Hand a report to the loggers."""
    for logger in trainer.loggers:
        logger.log_metrics({name: value for name, value, _ in events}, step=events[0][2])
