"""``dct advise``: run a job for some dense steps, and say which settings pay."""

from __future__ import annotations

import json
import math
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer
from rich.console import Console
from rich.table import Table

from .. import processes
from ..config import DataParallelConfig, ParametersConfig
from ..config.data_parallel import LocalStepsConfig
from ..console import print_warning
from ..data_parallel.autotune.cost_model import Coding, CostModel, Link
from ..data_parallel.autotune.decision_rules import DecisionRules
from ..errors import ConfigError, DCTError
from ..integrations.host.measured_job import SECTION, VARIABLE
from ..integrations.megatron.options import CONFIG_VARIABLE
from ..metrics import format_bytes
from ..policy import resolve
from ..policy.evidence import Training, known_losses, suggestion
from ..policy.memory import JOBS, memory
from ..policy.rules import exchange_by_rule, safe_sparsity
from ..policy.settings import Setting
from ..processes import tail
from ..rates import bits_per_second, check_rates, rate_name

#: Lines of a failed job's output that are shown.
_LINES = 30
#: Where torchrun begins to say that a rank failed, for which the rank has given its reason before.
_LAUNCHER = re.compile(r"^.*(?:failed \(exitcode: |closing signal SIGTERM)", re.MULTILINE)


class Candidate(NamedTuple):
    """A row of the table: the setting of gradients, that of updates of weights (None: gathers), and the steps
    from one exchange to the next.
    """

    setting: Setting
    updates: Setting | None = None
    every: int = 1

    @property
    def section(self) -> dict[str, Any]:
        """The section ``dct.data_parallel`` as it is pasted."""
        if self.every > 1:
            return {"local_steps": self.every}
        made: dict[str, Any] = {"sparsity": self.setting.sparsity, "value_dtype": self.setting.value_dtype}
        if self.updates is not None:
            sparsity, value_dtype = self.updates
            made["parameters"] = {"sparsity": sparsity, "value_dtype": value_dtype}
        return made

    def __str__(self) -> str:
        if self.every > 1:
            return f"local steps: {self.every}, {self.setting.value_dtype} values"
        return str(self.setting) + ("" if self.updates is None else f"; updates {self.updates.sparsity:g}")


#: Local steps at their defaults.
_LOCAL = Candidate(Setting(0.0, "int8"), every=LocalStepsConfig().every)


class Figures(NamedTuple):
    """The figures that a job measured.

    Attributes:
        model: Predicts the time of a step.
        training: Optimizer, ZeRO stage and ranks.
        left_out: Names of the script's own communication hooks, which were left out.
        local_steps: Whether the host can train with local steps.
    """

    model: CostModel
    training: Training
    left_out: Sequence[str] = ()
    local_steps: bool = False

    @classmethod
    def read(cls, path: Path, *, is_megatron: bool) -> Figures:
        """Read what the ranks wrote."""
        content = json.loads(path.read_text(encoding="utf-8"))
        given, facts = content["model"], content["facts"]
        codings = {Setting(*row[:2]): Coding(*row[2:]) for row in given["codings"]}
        model = CostModel(**given | {"codings": codings, "link": Link(*given["link"])})
        if whole := codings.get(Setting(0.0, "bf16")):  # once in many steps: another time to code is nothing
            codings[_LOCAL.setting] = whole._replace(nbytes=1.0)
        local_steps = bool(whole) and not (facts["stage"] or model.weight_gathers or is_megatron)
        figures = cls(model, Training(**facts, ranks=model.ranks), content["left_out"], local_steps)
        # The steps were measured with other feedback than such a training takes.
        taken = figures._resolved_settings(Candidate(Setting(0.99, "bf16")))
        is_direct = exchange_by_rule(taken, model.ranks) == "direct"
        return figures._replace(
            model=model._replace(is_direct=is_direct, server_density=taken.server_density)
        )

    def candidates(self) -> list[Candidate]:
        """Return all settings, from gentle to strong, then those with thresholded updates of the weights."""
        settings = sorted(self.model.codings.keys() - {_LOCAL.setting}, key=lambda each: each.strength)
        found = [Candidate(each) for each in (Setting(), *settings)]
        updates, _ = self._updates()
        if self.model.weight_gathers == 1 and updates in self.model.codings:
            found += [Candidate(each, updates) for each in settings if each.sparsity]
        return [*found, _LOCAL] if self.local_steps else found

    def is_safe(self, candidate: Candidate) -> bool:
        """Return whether nothing measurable was lost with a setting in such a training."""
        safe = safe_sparsity(self._resolved_settings(candidate), self.training)
        if candidate.updates is not None:
            safe = min(safe, self._updates()[1])
        return candidate.every == 1 and candidate.setting.sparsity <= safe

    def quality(self, candidate: Candidate) -> str:
        """Return the expected loss of a setting, with the section of the results that says so."""
        if candidate.setting.is_dense:
            return "as it is"
        if candidate.every > 1:
            return "lost 0.07 nats (docs/local-steps.md#quality)"
        if self.is_safe(candidate):
            return "nothing measurable lost (docs/quality.md)"
        found = next(known_losses(self._resolved_settings(candidate), self.training), None)
        return "not measured" if found is None else f"lost {found.loss} (docs/quality.md#{found.source})"

    def pays_below(self, candidate: Candidate) -> float:
        """Return the rate of links, in bits per second, below which a setting beats the dense exchange; 0:
        nowhere; infinite: on all links.
        """
        fast, slow = self.model.at_rate(math.inf), self.model.at_rate(1.0)
        price = fast.predict(*candidate).total - fast.predict(Setting()).total
        if price <= 0.0:
            return math.inf
        saved = slow.predict(Setting()).total - slow.predict(*candidate).total + price
        return max(saved, 0.0) / price

    def _updates(self) -> tuple[Setting, float]:
        """Return the updates of weights that ``dct config suggest`` names for such a training, and the
        highest sparsity of gradients that lost nothing measurable beside them: 0 where none was measured.
        """
        stage = self.training.stage or 1  # Megatron's distributed optimizer is like ZeRO-1
        row, measured = suggestion(replace(self.training, stage=stage, lr=math.inf), 1e9)
        found = dict(row.data_parallel or {}) if row is not None and measured else {}
        updates = ParametersConfig.model_validate(found.get("parameters", {}))
        safe = found["sparsity"] if "parameters" in found else 0.0
        return Setting(updates.sparsity, updates.value_dtype), safe

    def _resolved_settings(self, candidate: Candidate) -> DataParallelConfig:
        setting = candidate.setting
        written = DataParallelConfig.of({**candidate.section, "value_dtype": setting.value_dtype or "fp32"})
        unavailable = "ZeRO-3" if self.training.stage == 3 else ""
        # With some optimizers `feedback: "auto"` lowers the sparsity, too.
        resolved = resolve(written, replace(self.training, step_ahead_unavailable=unavailable)).settings
        return resolved.model_copy(update={"sparsity": setting.sparsity})


def advise(
    command: Annotated[list[str] | None, typer.Argument(help="The launch line of the job, after --.")] = None,
    link: Annotated[
        list[str] | None, typer.Option(help="Also predict for links of this rate, such as 1gbit.")
    ] = None,
    limit: Annotated[float, typer.Option(min=1, help="Most seconds for the measurement.")] = 600,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON: milliseconds, bytes, bits per second.")
    ] = False,
    shows_memory: Annotated[
        bool, typer.Option("--memory", help="Print the memory of a rank by host, and run no job.")
    ] = False,
    parameters: Annotated[
        list[float] | None, typer.Option(min=1, help="With --memory: parameters of the model.")
    ] = None,
) -> None:
    """Run a job for some dense steps, and print what each setting would cost and save.

    The job is stopped when its steps are measured; nothing of it is changed. It trains with
    DistributedDataParallel, FSDP2 with replicas, DeepSpeed or Megatron.
    """
    if shows_memory:
        Console(width=None if sys.stdout.isatty() else 160).print(_memory(parameters or [125e6, 1e9, 8e9]))
        return
    if not command:
        raise ConfigError("dct advise: the launch line of a job is missing, after --; or --memory")
    rates = check_rates(link or [], option="--link")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that the job is ended, too
    figures = _measured(line := launch_line(command), limit)
    if figures.left_out:
        print_warning(
            f"the script registers a communication hook of its own ({', '.join(figures.left_out)}), and DDP "
            "takes one: the figures are those of the job without it"
        )
    models = {"here": figures.model} | {
        rate_name(rate): figures.model.at_rate(bits_per_second(rate)) for rate in rates
    }
    if as_json:
        typer.echo(json.dumps(list(_rows(figures, models)), indent=1))
        return
    _print(figures, models, line)


def _memory(sizes: Sequence[float]) -> Table:
    """Return the memory of a rank by host and setting, for models of these sizes."""
    caption = (
        "Bytes that a rank keeps for the plugin on a GPU, beside the framework's: eight ranks, or as many "
        "nodes as a row says. A bucket, while it is selected, takes 4 bytes per entry more, at most 256 MiB."
    )
    table = Table(caption=caption, caption_justify="left", box=None, pad_edge=False)
    table.add_column("host and setting")
    for size in sizes:
        table.add_column(f"{size / 1e9:g}B" if size >= 1e9 else f"{size / 1e6:g}M", justify="right")
    table.add_column("bytes per parameter")
    for job in JOBS:
        kept = [memory(job, size) for size in sizes]
        parts = ", ".join(f"{value / sizes[-1]:.2f} {what}" for what, value in kept[-1].items() if value)
        table.add_row(job.name, *(format_bytes(sum(each.values())) for each in kept), parts)
    return table


def launch_line(command: Sequence[str]) -> list[str]:
    """Return the launch line to run: a Megatron script is started through the plugin's wrapper."""
    for index, word in enumerate(command):
        if word.endswith(".py") and Path(word).is_file() and word != sys.argv[0]:
            text = Path(word).read_text(encoding="utf-8", errors="replace")
            if "megatron" in text and "dct_plugin.megatron" not in command[:index]:
                return [*command[:index], "-m", "dct_plugin.megatron", *command[index:]]
            break
    return list(command)


def _measured(command: Sequence[str], limit: float) -> Figures:
    """Run the job until it has written its figures.

    Raises:
        ConfigError: The job cannot be started.
        DCTError: It ended, or ran too long, before its steps were measured; with the end of its output.
    """
    with tempfile.TemporaryDirectory(prefix="dct-advise-") as folder:
        path, log, section = Path(folder, "figures.json"), Path(folder, "log"), Path(folder, "section.json")
        section.write_text(json.dumps(SECTION), encoding="utf-8")
        with log.open("wb") as output:
            try:
                job = subprocess.Popen(
                    command,
                    env={**os.environ, VARIABLE: str(path), CONFIG_VARIABLE: str(section)},
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            except OSError as error:
                raise ConfigError(f"{command[0]}: cannot be started: {error.strerror or error}") from error
        try:
            end = time.monotonic() + limit
            while not path.exists() and job.poll() is None and time.monotonic() < end:
                time.sleep(0.2)
            is_over = job.poll() is not None
        finally:
            processes.end(job)
        if path.exists():
            return Figures.read(path, is_megatron="dct_plugin.megatron" in command)
        own = _LAUNCHER.split(log.read_text(encoding="utf-8", errors="replace"), maxsplit=1)[0]
        what = (
            f"was not measured within {limit:g} s (--limit)"
            if not is_over
            else f"ended with status {job.returncode} before it was measured"
        )
        raise DCTError(
            f"the job {what}, which takes 15 optimizer steps of DistributedDataParallel, FSDP2 with "
            "replicas, DeepSpeed or Megatron on at least two ranks; the end of its output:\n"
            + tail(own, _LINES)
        )


def _rows(figures: Figures, models: dict[str, CostModel]) -> Iterator[dict[str, Any]]:
    for each in figures.candidates():
        yield {
            "sparsity": each.setting.sparsity,
            "value_dtype": each.setting.value_dtype,
            "parameters": each.section.get("parameters"),
            "local_steps": each.section.get("local_steps"),
            "step_ms": {name: 1e3 * model.predict(*each).total for name, model in models.items()},
            "sent_bytes": figures.model.sent_bytes(*each),
            "pays_below": None if each.setting.is_dense else figures.pays_below(each),
            "quality": figures.quality(each),
        }


def _print(figures: Figures, models: dict[str, CostModel], line: Sequence[str]) -> None:
    table = Table(title_justify="left", box=None, pad_edge=False)
    for name in ("setting", "sent", *(f"ms, {name}" for name in models), "pays below", "quality"):
        table.add_column(name, justify="left" if name in ("setting", "quality") else "right")
    best = {name: _best(figures, model) for name, model in models.items()}
    for row, each in zip(_rows(figures, models), figures.candidates(), strict=True):
        times = [f"{ms:.1f}" + (" *" if best[name] == each else "") for name, ms in row["step_ms"].items()]
        below = "" if each.setting.is_dense else _rate(row["pays_below"])
        table.add_row(str(each), format_bytes(row["sent_bytes"]), *times, below, row["quality"])
    console = Console(width=None if sys.stdout.isatty() else 160)
    model, link, training = figures.model, figures.model.link, figures.training
    rate = _rate(8.0 * model.link_rate) if link.seconds_per_byte else "without limit"
    console.print(
        f"{(model.large_entries + model.small_bytes / model.entry_bytes) / 1e6:.3g}M parameters, "
        f"{model.ranks} ranks, {training.optimizer[0] if training.optimizer else 'no optimizer seen'}; "
        f"link {rate}, {1e3 * link.latency:.2f} ms"
        + (f"; {model.reductions} reductions a step" if model.reductions > 1 else "")
    )
    console.print(table)
    console.print("* the gentlest of the fastest that lost nothing measurable")
    if model.weight_gathers == 1:
        console.print(
            f"{format_bytes(model.gathered_bytes)} are gathered weights; where a row names updates, they are "
            "thresholded, too (dct.data_parallel.parameters, docs/configuration.md)"
        )
    for name, each in best.items():
        text = "leave the plugin out" if each.setting.is_dense else _pasted(each.section, line)
        typer.echo(f"{name}: {text}")
    typer.echo(f"or let the job choose: {_pasted({'sparsity': 'auto'}, line)}")
    if "dct_plugin.megatron" not in line:
        text = "into DeepSpeed's configuration, or: dct_plugin.attach(model, optimizer, SECTION)"
        typer.echo(f"one of these goes {text}")


def _pasted(section: dict[str, Any], line: Sequence[str]) -> str:
    """Return settings as they are given to the job: Megatron takes them in its launch line."""
    if "dct_plugin.megatron" not in line:
        return json.dumps({"dct": {"data_parallel": section}})
    if not section["sparsity"]:  # with which alone everything is left to Megatron
        section = {"quality": "bytes", **section}
    values = {key: shlex.quote(json.dumps(x)) if isinstance(x, dict) else x for key, x in section.items()}
    options = [f"--dct-data-parallel-{key.replace('_', '-')} {value}" for key, value in values.items()]
    return " ".join(["-m dct_plugin.megatron", *options, "SCRIPT ..."])


def _best(figures: Figures, model: CostModel) -> Candidate:
    safe = [each for each in figures.candidates() if each.setting.is_dense or figures.is_safe(each)]
    seconds = {each: model.predict(*each).total for each in safe}
    least = DecisionRules().equal_ratio * min(seconds.values())
    # Gathered weights are gentler than thresholded updates.
    return min(
        (each for each in safe if seconds[each] <= least),
        key=lambda each: (each.updates is not None, each.setting.strength),
    )


def _rate(bits: float) -> str:
    if bits == 0.0:
        return "never"
    for unit, size in (("Gbit/s", 1e9), ("Mbit/s", 1e6)):
        if bits >= size:
            return "any rate" if bits > 1e13 else f"{bits / size:.3g} {unit}"
    return f"{bits:.3g} bit/s"
