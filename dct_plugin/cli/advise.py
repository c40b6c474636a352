"""``dct advise``: run a job for some dense steps, and say which settings pay."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer
from rich.console import Console
from rich.table import Table

from .. import processes
from ..config import DataParallelConfig
from ..console import print_warning
from ..data_parallel.autotune.cost_model import Coding, CostModel, DecisionRules, Link, gentlest_of_fastest
from ..data_parallel.autotune.measurements import unmeasured
from ..errors import ConfigError, DCTError
from ..integrations.host.measured_job import SECTION, VARIABLE
from ..integrations.megatron.options import CONFIG_VARIABLE
from ..metrics import format_bytes
from ..policy import AppliedSettings, Training, resolve
from ..policy.memory import JOBS, memory
from ..policy.rules import Setting, exchange_by_rule, settings_within
from ..rates import bits_per_second, check_rates, rate_name

#: Lines of a failed job's output that are shown.
_LINES = 30
#: Where torchrun begins to say that a rank failed, for which the rank has given its reason before.
_LAUNCHER = re.compile(r"^.*(?:failed \(exitcode: |closing signal SIGTERM)", re.MULTILINE)


class Figures(NamedTuple):
    """The figures that a job measured.

    Attributes:
        model: Predicts the time of a step.
        training: Optimizer, ZeRO stage and ranks.
        settings: What the job gets with nothing written, and why.
        left_out: Names of the script's own communication hooks, which were left out.
        device: Type of the device that gradients lie on.
    """

    model: CostModel
    training: Training
    settings: AppliedSettings
    left_out: Sequence[str] = ()
    device: str = "cpu"

    @classmethod
    def read(cls, path: Path) -> Figures:
        """Read what the ranks wrote."""
        content = json.loads(path.read_text(encoding="utf-8"))
        given, facts = content["model"], content["facts"]
        codings = {Setting(*row[:2]): Coding(*row[2:]) for row in given["codings"]}
        steps = {Setting(*row[:2]): tuple(row[2:]) for row in given["steps"]}
        model = CostModel(**given | {"codings": codings, "link": Link(*given["link"]), "steps": steps})
        training = Training(**facts, ranks=model.ranks)
        made = resolve(DataParallelConfig(), training)
        # The steps were measured with other feedback than such a training takes.
        model = model._replace(
            is_direct=exchange_by_rule(made.settings, model.ranks) == "direct",
            server_density=made.settings.server_density,
            step_ahead=model.step_ahead if made.settings.feedback.looks_ahead else 0.0,
        )
        return cls(model, training, made, content["left_out"], content["device"])

    @property
    def rows(self) -> list[Setting]:
        """The settings that were timed, or that a job with nothing written compares; the dense one first."""
        return list(self.model.steps) or settings_within(self.settings.settings)

    def best(self, model: CostModel) -> Setting:
        """Return the setting that a job with nothing written takes, by the rule of the job itself."""
        seconds = {setting: model.predict(setting).total for setting in self.rows}
        return gentlest_of_fastest(seconds, DecisionRules())

    def pays_below(self, setting: Setting) -> float:
        """Return the rate of links, in bits per second, below which a setting beats the dense exchange; 0:
        nowhere; infinite: on all links.
        """
        fast, slow = self.model.at_rate(math.inf), self.model.at_rate(1.0)
        price = fast.predict(setting).total - fast.predict(Setting()).total
        if price <= 0.0:
            return math.inf
        saved = slow.predict(Setting()).total - slow.predict(setting).total + price
        return max(saved, 0.0) / price


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
        bool, typer.Option("--memory", help="Print the memory of a rank by framework, and run no job.")
    ] = False,
    parameters: Annotated[
        list[float] | None, typer.Option(min=1, help="With --memory: parameters of the model.")
    ] = None,
) -> None:
    """Run a job for some steps, and say whether the plugin pays.

    The job is stopped when its steps are measured. It trains with DistributedDataParallel, FSDP2, DeepSpeed
    or Megatron. Steps are dense; FSDP2 on one mesh makes 40 compressed ones, too.
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
    if note := unmeasured(figures.device):
        print_warning(note)
    models = {"here": figures.model} | {
        rate_name(rate): figures.model.at_rate(bits_per_second(rate)) for rate in rates
    }
    if as_json:
        typer.echo(json.dumps(list(_rows(figures, models)), indent=1))
        return
    _print(figures, models, line)


def _memory(sizes: Sequence[float]) -> Table:
    """Return the memory of a rank by framework and setting, for models of these sizes."""
    caption = (
        "Bytes that a rank keeps for the plugin on a GPU, beside the framework's: eight ranks, or as many "
        "nodes as a row says. A bucket, while it is selected, takes 4 bytes per entry more, at most 256 MiB."
    )
    table = Table(caption=caption, caption_justify="left", box=None, pad_edge=False)
    table.add_column("framework and setting")
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
            return Figures.read(path)
        own = _LAUNCHER.split(log.read_text(encoding="utf-8", errors="replace"), maxsplit=1)[0]
        what = (
            f"was not measured within {limit:g} s (--limit)"
            if not is_over
            else f"ended with status {job.returncode} before it was measured"
        )
        raise DCTError(
            f"the job {what}, which takes 15 optimizer steps of DistributedDataParallel, FSDP2 (61 on "
            "one mesh), DeepSpeed or Megatron on at least two ranks; the end of its output:\n"
            + processes.tail(own, _LINES)
        )


def _rows(figures: Figures, models: dict[str, CostModel]) -> Iterator[dict[str, Any]]:
    for setting in figures.rows:
        yield {
            "sparsity": setting.sparsity,
            "value_dtype": setting.value_dtype,
            "step_ms": {name: 1e3 * model.predict(setting).total for name, model in models.items()},
            "sent_bytes": figures.model.sent_bytes(setting),
            "pays_below": None if setting.is_dense else figures.pays_below(setting),
        }


def _print(figures: Figures, models: dict[str, CostModel], line: Sequence[str]) -> None:
    table = Table(title_justify="left", box=None, pad_edge=False)
    for name in ("setting", "sent", *(f"ms, {name}" for name in models), "pays below"):
        table.add_column(name, justify="left" if name == "setting" else "right")
    best = {name: figures.best(model) for name, model in models.items()}
    for row, setting in zip(_rows(figures, models), figures.rows, strict=True):
        times = [f"{ms:.1f}" + (" *" if best[name] == setting else "") for name, ms in row["step_ms"].items()]
        below = "" if setting.is_dense else _rate(row["pays_below"])
        table.add_row(str(setting), format_bytes(row["sent_bytes"]), *times, below)
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
    if model.weight_gathers:
        copies = "; with copies of them only what changed crosses (docs/nodes.md#zero-3)"
        said = f"{format_bytes(model.gathered_bytes)} of each row are gathered weights"
        console.print(said + copies * (training.stage == 3))
    if said := "; ".join(figures.settings.lines):
        typer.echo(f"nothing written: {said}")
    typer.echo(" ".join(decision(figures, name, model, line) for name, model in models.items()))


def decision(figures: Figures, name: str, model: CostModel, line: Sequence[str]) -> str:
    """Return the sentence that says whether the plugin pays on a link."""
    best, dense = figures.best(model), model.predict(Setting()).total
    if best.is_dense:
        others = (model.predict(each).total for each in figures.rows if not each.is_dense)
        return f"{name}: leave the plugin out, dense steps are as fast ({dense / min(others):.2f}x)."
    section = "--dct '{}'" if "dct_plugin.megatron" in line else '"dct": {}'
    if best.value_dtype == "log4":  # a section must ask for it
        section = '"dct": {"data_parallel": {"value_dtype": "log4"}}'
    return f"{name}: take {section}, which becomes {best}: {dense / model.predict(best).total:.2f}x as fast."


def _rate(bits: float) -> str:
    if bits == 0.0:
        return "never"
    for unit, size in (("Gbit/s", 1e9), ("Mbit/s", 1e6)):
        if bits >= size:
            return "any rate" if bits > 1e13 else f"{bits / size:.3g} {unit}"
    return f"{bits:.3g} bit/s"
