"""The way from the ``dct`` section to a hooked engine: check, agree with the other ranks, then patch."""

from __future__ import annotations

import logging
from typing import Any

import deepspeed
import torch.distributed as dist

from dct_plugin.config import DCTConfig

from ..host import lost_peers, startup
from .attachment import Attachment
from .paths import ACTIVATION_PATHS, activation_paths_of, gradient_path_of, job_of
from .rules import advice, applied, require, unread_keys
from .section import TOPIC, configuration_of, gradient_path_of_optimizer
from .support import check_version, facts_of, has_optimizer

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
    agreement = startup.join(TOPIC)
    with startup.reported(agreement):
        config = DCTConfig.parse(section, rank=dist.get_rank())
        if not config.enabled and gradient_path_of_optimizer(engine) is None:
            agreement.abstain()
            return None
        attachment = _prepared(engine, config)
    path, applied = ("none", config) if attachment is None else (attachment.description, attachment.config)
    agreement.confirm(
        startup.facts_of(applied, {"version of deepspeed": deepspeed.__version__, "gradient path": path})
    )
    if attachment is None:
        if dist.get_rank() == 0:
            trains = has_optimizer(engine)
            why = "dct.data_parallel.enabled is false" if trains else "the engine has no optimizer"
            logger.warning("dct: nothing to do: %s", why)
        return None
    attachment.install()
    lost_peers.watch(attachment, lambda attachment: attachment.steps.step)
    engine.__dict__[ATTRIBUTE] = attachment
    if dist.get_rank() == 0:
        _report(engine, attachment)
    return attachment


def _prepared(engine: Any, config: DCTConfig) -> Attachment | None:
    """Return what is to be added to the engine, which is not patched yet; None if there is nothing to do.

    Raises:
        ConfigError, VersionError: See :func:`attach`.
    """
    check_version(deepspeed.__version__)
    path = gradient_path_of(engine, config)
    job = job_of(engine, path)
    require(job, config, rank=engine.global_rank)
    config = applied(job, config)
    if path is not None:
        path.check(engine)
    for activation in ACTIVATION_PATHS:
        activation.check(engine, config)
    if path is None or not (config.data_parallel.enabled or activation_paths_of(engine, config)):
        return None
    return Attachment(engine, config, path)


def _report(engine: Any, attachment: Attachment) -> None:
    """Log what is active, and what is strange about the configuration."""
    settings = attachment.config.data_parallel
    gradients = f"sparsity {settings.sparsity:g}, {settings.value_dtype} values"
    logger.warning(
        "dct: active on %s, %d ranks, %s, config %s",
        attachment.description,
        dist.get_world_size(),
        gradients if settings.enabled else "dense gradients",
        attachment.config.fingerprint(),
    )
    if unknown := unread_keys(configuration_of(engine) or {}):
        logger.warning("dct: keys of the configuration that nothing reads: %s", ", ".join(unknown))
    for sentence in advice(facts_of(engine)):
        logger.warning("dct: %s", sentence)
