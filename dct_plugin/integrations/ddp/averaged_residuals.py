"""Residuals of a state in the form of ``torch.distributed.checkpoint``, for any number of ranks."""

from __future__ import annotations

from typing import Any

from dct_plugin.compression.stream import fresh_state
from dct_plugin.errors import ConfigError

from ..host.mean_residuals import mean_residuals
from .state import DCTState


class AveragedResiduals:
    """The mean of the ranks' residuals, which any number of ranks can load.

    ``dcp.save({"model": ..., "dct": AveragedResiduals(state)}, checkpoint_id=folder)``, and ``dcp.load`` in
    the same way. Both methods are collectives. Thresholds are measured anew after loading. A run that must
    continue bitwise, each rank with its own residuals, uses :meth:`.state.DCTState.save`.

    Args:
        state: The state; it knows the parameters' names.

    Raises:
        ConfigError: The state does not know the names.
    """

    def __init__(self, state: DCTState) -> None:
        sizes = state.parameters.sizes
        if sizes is None:
            raise ConfigError(
                "AveragedResiduals(state) needs DCTState(..., named_parameters=model.named_parameters())"
            )
        self._state = state
        small = state.config.data_parallel.min_numel
        self._sizes = {name: numel for name, numel in sizes.items() if numel >= small}

    def state_dict(self) -> dict[str, Any]:
        """Return the residuals by parameter, fp32 [numel], with the step and the loss scale."""
        own = self._state.state_dict()["reducer"]
        residuals = mean_residuals(own, self._sizes, self._state.process_group)
        return {"step": own["step"], "loss_scale": own["loss_scale"], "residuals": residuals}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Restore :meth:`state_dict`."""
        streams = {name: fresh_state(residual) for name, residual in saved["residuals"].items()}
        state = {"step": saved["step"], "loss_scale": saved["loss_scale"], "streams": streams}
        self._state.load_state_dict({"reducer": state})
