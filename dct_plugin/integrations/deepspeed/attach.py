"""The way from the ``dct`` section to a hooked engine: check, agree with the other ranks, then patch."""

from __future__ import annotations

import logging
from typing import Any

import deepspeed
import torch.distributed as dist

from dct_plugin.config import DCTConfig
from dct_plugin.transport.agreement import HINT

from ..host import startup
from ..host.settings import resolve_settings, steps_of
from .attachment import Attachment
from .checkpointing import tell_what_is_dropped
from .parser import keys_read
from .paths import ACTIVATION_PATHS, activation_paths_of, gradient_path_of
from .rules import advice, applied, require, step_ahead_unavailable, unread_keys
from .section import SECTION, TOPIC, configuration_of, gradient_path_of_optimizer
from .support import check_version, has_optimizer, job_of

logger = logging.getLogger("dct_plugin")

#: The attribute of an engine that holds its attachment, for scripts: ``engine.dct.reducer``.
ATTRIBUTE = "dct"


def attach(engine: Any, section: Any) -> Attachment | None:
    """Attach to a finished engine; called for every engine whose JSON has a ``dct`` section.

    Args:
        engine: A ``DeepSpeedEngine`` after its ``__init__``.
        section: The ``dct`` section as read from the JSON.

    Returns:
        What was attached (also ``engine.dct``), None when the section is disabled.

    Raises:
        ConfigError: The section is wrong, or the engine's combination of features is not supported.
        VersionError: This DeepSpeed is not supported.
        DesyncError: Other ranks failed, do not take part, or run another configuration or version.
    """
    if ATTRIBUTE in engine.__dict__:
        attached: Attachment = engine.__dict__[ATTRIBUTE]
        return attached
    agreement = startup.join(TOPIC, hint=f"its configuration has no {SECTION!r} section, or {HINT}")
    with startup.reported(agreement):
        config = DCTConfig.parse(section, rank=dist.get_rank())
        if not config.enabled and gradient_path_of_optimizer(engine) is None:
            agreement.abstain()
            tell_what_is_dropped(engine)
            return None
        attachment, note = _prepared(engine, config)
    path, applied = ("none", config) if attachment is None else (attachment.description, attachment.config)
    agreement.confirm(
        startup.facts_of(applied, {"version of deepspeed": deepspeed.__version__, "gradient path": path})
    )
    if attachment is None:
        if dist.get_rank() == 0:
            trains = has_optimizer(engine)
            why = "dct.data_parallel.enabled is false" if trains else "the engine has no optimizer"
            logger.warning("dct: nothing to do: %s", why)
        tell_what_is_dropped(engine)
        return None
    attachment.install()
    engine.__dict__[ATTRIBUTE] = attachment
    if dist.get_rank() == 0:
        _report(engine, attachment, note)
    return attachment


def _prepared(engine: Any, config: DCTConfig) -> tuple[Attachment | None, str]:
    """Return what is to be added to the engine, which is not patched yet, and a note about its feedback;
    None if there is nothing to do.

    Raises:
        ConfigError, VersionError: See :func:`attach`.
    """
    check_version(deepspeed.__version__)
    path, note = gradient_path_of(engine, config), ""
    job = job_of(engine, path)
    if path is not None and not job.exchanges_momentum:
        config, note = resolve_settings(
            config,
            engine.optimizer,
            ranks=dist.get_world_size(engine.seq_data_parallel_group),
            stage=job.stage,
            steps=steps_of(engine.lr_scheduler),
            step_ahead_unavailable=step_ahead_unavailable(job, config),
        )
    require(job, config, rank=engine.global_rank)
    config = applied(job, config)
    if path is not None:
        path.check(engine)
    for activation in ACTIVATION_PATHS:
        activation.check(engine, config)
    if path is None or not (config.data_parallel.enabled or activation_paths_of(engine, config)):
        return None, ""
    return Attachment(engine, config, path), note


def _report(engine: Any, attachment: Attachment, note: str) -> None:
    """Log what is active, and what is strange about the configuration; ``note`` is about its feedback."""
    what = f"{attachment.description}, {attachment.coverage}, {dist.get_world_size()} ranks"
    startup.log_active(what, attachment.config, note, attachment.reducer.config)
    if attachment.weights_lag:
        logger.warning(
            "dct: the weights lack updates that dct.data_parallel.parameters has not sent yet: before an "
            "evaluation or export call engine.dct.gather_parameters() on all ranks; save_checkpoint does it"
        )
    if unknown := unread_keys(configuration_of(engine) or {}, keys_read()):
        logger.warning("dct: keys of the configuration that nothing reads: %s", ", ".join(unknown))
    for sentence in advice(job_of(engine)):
        logger.warning("dct: %s", sentence)
