"""``dct config check``: a file judged as the start of its job would, without starting anything."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from dct_plugin.config import DCTConfig
from dct_plugin.config.automatic import judged
from dct_plugin.config.known_losses import Training
from dct_plugin.config.optimizers import OptimizerFamily, unknown_step
from dct_plugin.config.options import show
from dct_plugin.config.validation_errors import DEEPSPEED_KEYS
from dct_plugin.errors import ConfigError

from ..host.versions import parse
from .job import STAGES, Job
from .parser import keys_for
from .rules import advice, applied, obstacle, refusals, unread_keys, without_slot
from .section import SECTION, backend_name, misplaced_section

#: Optimizers of DeepSpeed's own, in upper or lower case; for the others it asks torch, in torch's writing.
_DEEPSPEED_OPTIMIZERS = {
    name.lower(): name
    for name in ("Adam", "AdamW", "Adagrad", "Lamb", "Lion", "MuAdam", "MuAdamW", "MuSGD", "Muon")
}
_TORCH_OPTIMIZERS = (
    "SGD", "RMSprop", "NAdam", "RAdam", "Adamax", "Adadelta", "Adafactor", "ASGD", "LBFGS", "Rprop",
)  # fmt: skip


@dataclass
class FileReport:
    """The faults and warnings of a file.

    Attributes:
        config: The section as the job applies it; None if it cannot be read.
        faults: What stops the job.
        warnings: What trains, but probably not as it was meant.
        notes: What the section becomes in this job.
    """

    config: DCTConfig | None = None
    faults: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def check(content: Mapping[str, Any]) -> FileReport:
    """Return what is to be said about a DeepSpeed JSON, or about a bare ``dct`` section."""
    report = FileReport()
    section = _find_section(content, report)
    if section is None:
        return report
    try:
        report.config = DCTConfig.parse(section)
    except ConfigError as error:
        report.faults += error.faults or [str(error)]
    is_deepspeed = bool(DEEPSPEED_KEYS & content.keys())
    if is_deepspeed and (report.config is None or report.config.enabled):
        _judge(content, report)
    return report


def _judge(content: Mapping[str, Any], report: FileReport) -> None:
    """Add what the start of a DeepSpeed job would say."""
    job = Job.of_json(content)
    report.faults += _misspelt(content)
    if job.exchanges_momentum and parse(job.version) > (0, 19, 6):
        report.faults.append(without_slot(job.version))
    # A section with faults says nothing, but the job can be judged without it.
    config = report.config or DCTConfig()
    if report.config is not None and not job.exchanges_momentum:
        config = _settled(job, config, report)
    report.faults += refusals(job, config)
    report.warnings += [f"{key}: nothing reads it" for key in unread_keys(content, keys_for(content))]
    report.warnings += advice(job)
    if report.config is not None:
        report.config = applied(job, config)


def _settled(job: Job, config: DCTConfig, report: FileReport) -> DCTConfig:
    """Return the section with the feedback that suits the optimizer; add what is to be said about it."""
    training = Training([job.optimizer] if job.optimizer else [], momentum=job.momentum, stage=job.stage)
    if training.family is OptimizerFamily.UNTOLD:
        report.notes.append("the script makes the optimizer, which the feedback depends on")
        return config
    made = judged(config.data_parallel, training, steps=job.steps, obstacle=obstacle(job, config))
    if made.line:
        (report.warnings if made.warns else report.notes).append(made.line)
    if made.settings.feedback.looks_ahead and training.family is OptimizerFamily.OTHER:
        report.faults.append(str(unknown_step(job.optimizer)))
    return config.model_copy(update={"data_parallel": made.settings})


def _find_section(content: Mapping[str, Any], report: FileReport) -> Any:
    """Return the section of a file; add a fault where it does not stand in its place."""
    if SECTION in content:
        return content[SECTION]
    if found := misplaced_section(content):
        report.faults.append(found[0])
        return found[1]
    if not (known := sorted(DEEPSPEED_KEYS & content.keys())):
        return content
    if misplaced := {key: content[key] for key in DCTConfig.model_fields if key in content}:
        keys = ", ".join(map(repr, misplaced))
        report.faults.append(
            f'{keys}: nothing reads it at the top of the file; write "{SECTION}": {{{keys}: ...}}'
        )
        return misplaced
    if backend_name(content) == SECTION:
        return {}
    report.faults.append(f'a DeepSpeed configuration (it has {known[0]!r}) without a "{SECTION}" section')
    return None


def _misspelt(content: Mapping[str, Any]) -> Iterator[str]:
    """Yield values for which DeepSpeed would not start, among those that the rules depend on."""
    zero, optimizer = content.get("zero_optimization"), content.get("optimizer")
    stage = zero.get("stage", 0) if isinstance(zero, Mapping) else 0
    if str(stage) not in STAGES:
        yield f"zero_optimization.stage = {show(stage)}: must be 0, 1, 2 or 3"
    name = optimizer.get("type") if isinstance(optimizer, Mapping) else None
    if isinstance(name, str) and name.lower() not in _DEEPSPEED_OPTIMIZERS and name not in _TORCH_OPTIMIZERS:
        names = {each.lower(): each for each in (*_DEEPSPEED_OPTIMIZERS.values(), *_TORCH_OPTIMIZERS)}
        if close := difflib.get_close_matches(name.lower(), names, n=1, cutoff=0.8):
            meant = show(names[close[0]])
            yield f"optimizer.type = {show(name)}: DeepSpeed has no such optimizer; did you mean {meant}?"
