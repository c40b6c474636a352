"""``dct demo``: train a DLRM with DeepSpeed on local ranks, dense and then with DCT, and compare.

Both runs have the same data, seed and batches; all that differs is the ``dct`` section of the JSON.
"""

from __future__ import annotations

import copy
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from dct_plugin.errors import DCTError
from dct_plugin.output import check_target, write
from dct_plugin.rates import check_rates, rate_name
from dct_plugin.recommender.links.namespaces import LinksError

from ..figures import BASELINE
from ..provenance import provenance
from ..settings import MODEL_SECTION
from .options import takes_options
from .shared import Job, chosen_format, complete, launch


@dataclass(frozen=True)
class Preset:
    """Settings that suit a data set; options override them."""

    epochs: int
    batch_size: int


PRESETS = {"diabetes": Preset(epochs=3, batch_size=512), "criteo": Preset(epochs=1, batch_size=128)}
QUICK = Preset(epochs=1, batch_size=128)
QUICK_ROWS = 16_000

#: Rates of links that steps are measured at where that is possible, and for how long at each.
LINKS, LINK_SECONDS = ["1gbit", "100mbit"], 8.0
QUICK_LINKS, QUICK_LINK_SECONDS = ["1gbit"], 2.0

#: Data-parallel tables: all gradients cross in the all-reduce that DCT replaces.
MODEL = {"model": "dlrm", "tables": "replicated", "embedding_dim": 32, "bottom": [512], "top": [512, 256]}

#: Recommenders are usually trained with Adagrad, and error feedback does it no harm (see docs/demo.md).
OPTIMIZER = "Adagrad"
WARMUP_STEPS = 20
LEARNING_RATES = {"adagrad": 0.02, "adam": 1e-3, "adamw": 1e-3, "sgd": 0.1}

#: Optimizers of which DeepSpeed would take its fused form, which it compiles first; the rest come from torch.
_DEEPSPEED_OWN = {"adam", "adamw"}
#: Of ``dct.data_parallel``, with optimizers that lose by delay, where the configuration does not choose.
AHEAD = {"feedback": "step_ahead", "warmup_steps": 10, "sparsity_warmup_steps": 20}


@dataclass(frozen=True)
class Options:
    """The options of ``dct demo``; those of the configuration are None where they are not given."""

    sparsity: Annotated[
        float | None,
        typer.Option(min=0, max=1, help="Share of gradient entries not sent (0.99 if not given)."),
    ] = None
    epochs: Annotated[
        int | None,
        typer.Option(min=1, help="Passes over the training part; if not given 3 for diabetes, 1 for criteo."),
    ] = None
    ranks: Annotated[int, typer.Option(min=2, help="Local processes.")] = 2
    zero_stage: Annotated[
        int | None, typer.Option(min=0, max=2, help="ZeRO stage: 0 (if not given), 1 or 2.")
    ] = None
    seed: Annotated[
        int,
        typer.Option(min=0, max=2**31, help="Seed of the initial weights, the batches and the test part."),
    ] = 0
    data: Annotated[
        Path | None, typer.Option(help="File to train on; without it Diabetes 130-US, which ships with this.")
    ] = None
    format: Annotated[
        str | None, typer.Option(help="Format of the data: criteo (if --data is given) or diabetes.")
    ] = None
    optimizer: Annotated[
        str | None, typer.Option(help="Any optimizer of torch or DeepSpeed (Adagrad if not given).")
    ] = None
    lr: Annotated[float | None, typer.Option(min=0, help="Learning rate.")] = None
    batch_size: Annotated[int | None, typer.Option(min=1, help="Rows per step, all ranks together.")] = None
    config: Annotated[
        Path | None, typer.Option(help="DeepSpeed JSON to start from; options given here override it.")
    ] = None
    out: Annotated[Path, typer.Option(help="Folder for report, JSON files and the ranks' output.")] = Path(
        "out"
    )
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Also write the figures, curves and versions to this file.")
    ] = None
    link: Annotated[
        list[str] | None,
        typer.Option(
            help="Rate of links, as tc writes it, at which steps are measured; may be repeated (1gbit and "
            "100mbit where network namespaces can be made), or none."
        ),
    ] = None
    quick: Annotated[
        bool, typer.Option("--quick", help="Train for a few seconds, to see that everything works.")
    ] = False


@takes_options(Options)
def demo(options: Options) -> None:
    """Train a recommender on real data on two local ranks, dense and with DCT, and compare."""
    quick, data, out = options.quick, options.data, options.out
    rates = check_rates(options.link or (QUICK_LINKS if quick else LINKS), also="none", option="--link")
    format = chosen_format(options.format, data, tuple(PRESETS))
    preset = QUICK if quick else PRESETS[format]
    with_dct = deepspeed_config(preset, options)
    dense = {key: value for key, value in with_dct.items() if key != "dct"}
    metrics_file = out / "dct.metrics.jsonl"
    check_target(metrics_file, "--out")
    check_target(options.json_file, "--json")
    metrics_file.unlink(missing_ok=True)
    with_dct["dct"]["metrics"] = {**with_dct["dct"].get("metrics", {}), "path": str(metrics_file), "every": 1}
    job = Job(
        format,
        None if data is None else str(data),
        max_rows=QUICK_ROWS if quick else None,
        epochs=options.epochs or preset.epochs,
        seeds=[options.seed],
        configs={BASELINE: dense, "dct": with_dct},
        split_seed=options.seed,
    )
    run = _Demo(job, options.ranks, out, quick=quick)
    run.train(metrics_file)
    run.measure_links([rate for rate in rates if rate != "none"], wanted=bool(options.link))
    run.report(options.json_file)


class _Demo:
    """One demonstration: both runs, steps on links, and the report of it all.

    Args:
        job: The two configurations under one seed.
        ranks: Number of local processes.
        out: Folder of everything that is written.
        quick: True for a run that only shows that everything works.
    """

    def __init__(self, job: Job, ranks: int, out: Path, *, quick: bool) -> None:
        from rich.console import Console

        self._job, self._ranks, self._out, self._quick = job, ranks, out, quick
        self._dct = job.configs["dct"]
        self._started = time.monotonic()
        self._console = Console()

    def train(self, metrics_file: Path) -> None:
        """Train both configurations and compare what they give.

        Raises:
            DCTError: A rank failed, or the plugin was not active.
        """
        from dct_plugin.config import DCTConfig
        from dct_plugin.report.reading import read

        from ..comparison import Comparison, Sent
        from ..figures import read_runs

        self._done = launch("demo", self._job, ranks=self._ranks, folder=self._out, console=self._console)
        try:
            self._metrics, _ = read([metrics_file])
        except DCTError as error:
            raise DCTError(
                "the DCT run wrote no metrics, so the plugin was not active in it. See `dct doctor`: is "
                f"TORCH_DEVICE_BACKEND_AUTOLOAD=0 set, or the plugin not installed for {sys.executable}?"
            ) from error
        rows = self._metrics[0].rows
        dense, dct = read_runs(self._done.events)
        target = DCTConfig.parse(self._dct["dct"]).data_parallel.density
        self._comparison = Comparison(
            dense=dense,
            dct=dct,
            dense_sent=Sent.by_dense_run(rows),
            dct_sent=Sent.by_dct_run(rows, density_target=target),
            ranks=self._ranks,
            zero_stage=self._dct["zero_optimization"].get("stage", 0),
        )

    def measure_links(self, rates: list[str], *, wanted: bool) -> None:
        """Measure steps on links of these rates; where there can be none, say why.

        Raises:
            LinksError: There can be none, and they were ``wanted``.
        """
        from ..comparison import measured_on
        from ..runner import enough_gpus

        if not rates:
            return
        names = " and ".join(map(rate_name, rates))
        dct = {key: value for key, value in self._dct["dct"].items() if key != "metrics"}
        try:
            if enough_gpus(self._ranks):
                raise LinksError("ranks on GPUs talk past network namespaces")
            with self._console.status(f"measuring steps on links of {names}"):
                self._comparison.measured = measured_on(
                    rates,
                    self._job.configs[BASELINE],
                    {**self._dct, "dct": dct},
                    ranks=self._ranks,
                    data={key: getattr(self._job, key) for key in ("format", "data", "max_rows")},
                    seconds=QUICK_LINK_SECONDS if self._quick else LINK_SECONDS,
                    folder=self._out / "logs",
                )
        except LinksError as error:
            if wanted:
                raise
            line = f"Steps at {names} are not measured: {error}"
            self._console.print(line, markup=False, soft_wrap=True)

    def report(self, json_file: Path | None) -> None:
        """Print the table and the verdict, draw the plot, and write the figures and the page.

        Raises:
            typer.Exit: The ranks of a run ended with different weights.
        """
        from rich.padding import Padding
        from rich.text import Text

        from dct_plugin.report.metrics_part import metrics_part
        from dct_plugin.report.page import write_page

        from ..report import comparison_part, diverged, draw_training, speed_table, verdict

        comparison, console = self._comparison, self._console
        of_data, of_run = self._titles()
        plot = self._out / "demo.png"
        draw_training(comparison, plot, title=f"{of_data}\n{of_run}")
        table = speed_table(comparison, title=f"{of_data} {of_run}").rich()
        console.print(Padding(table, (1, 0, 1, 0)))
        broken = diverged([comparison.dense, comparison.dct])
        for paragraph in [*verdict(comparison, quick=self._quick), *broken]:
            console.print(Text(paragraph), end="\n\n")
        console.print("To repeat each run by itself:")
        for line in self._done.command_lines.values():
            console.print(Text("  " + line), soft_wrap=True)
        page = self._out / "report.html"
        shown = comparison_part(comparison, title=f"{of_data} {of_run}", quick=self._quick)
        write_page(page, [shown, metrics_part(self._metrics)])
        files = str(plot)
        if json_file is not None:
            write(json_file, {**self._figures(), "quick": self._quick})
            files += f", {json_file}"
        seconds = time.monotonic() - self._started
        console.print(Text(f"\nWrote {files} and {page} in {seconds:.0f} s."))
        if broken:
            raise typer.Exit(1)

    def _titles(self) -> tuple[str, str]:
        """Return one line about the data and one about the runs."""
        start, trained, method = self._done.events[0], self._comparison.dct, self._dct["optimizer"]
        return f"{start['data']}: {start['training_rows']:,} training rows,", (
            f"{trained.weights:,} weights, {self._ranks} ranks, ZeRO-{self._comparison.zero_stage}, "
            f"{method['type']} {method['params'].get('lr', '')}, batch {trained.batch_size}, "
            f"{trained.steps} steps"
        )

    def _figures(self) -> dict[str, Any]:
        start, trained = self._done.events[0], self._comparison.dct
        return {
            **provenance(self._started),
            "data": {
                **{key: start[key] for key in ("data", "rows", "training_rows")},
                "parameters": trained.weights,
                "batch_size": trained.batch_size,
            },
            **self._comparison.as_dict(),
            "deepspeed_config": self._dct,
            "runs": self._done.command_lines,
        }


def deepspeed_config(preset: Preset, given: Options) -> dict[str, Any]:
    """Return the DeepSpeed JSON of the DCT run: the file, or the preset, with the options that were given.

    Raises:
        ConfigError: The file is no JSON object, the ``dct`` section is wrong, or the batch cannot be split.
    """
    from dct_plugin.config import DCTConfig
    from dct_plugin.config.dct import read_json
    from dct_plugin.policy.optimizers import family_of

    file = given.config
    content: dict[str, Any] = {} if file is None else read_json(file)
    source = (
        "--batch-size" if given.batch_size is not None else "the configuration" if file is None else str(file)
    )
    if given.batch_size is not None:
        for key in ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps"):
            content.pop(key, None)
        content["train_batch_size"] = given.batch_size
    ours = given.optimizer is not None or "optimizer" not in content
    if given.optimizer is not None:
        content["optimizer"] = {"type": given.optimizer}
    content = complete(
        content, optimizer={"type": OPTIMIZER}, batch_size=preset.batch_size, ranks=given.ranks, source=source
    )
    section = content["optimizer"]
    kind = str(section.get("type")).lower()
    parameters = section.setdefault("params", {})
    if given.lr is not None:
        parameters["lr"] = given.lr
    elif kind in LEARNING_RATES:
        parameters.setdefault("lr", LEARNING_RATES[kind])
    if kind in _DEEPSPEED_OWN:
        parameters.setdefault("torch_adam", True)
    if ours and "lr" in parameters:
        # Adagrad's first steps are as long as the learning rate: without this they throw the model far off.
        warmup = {"warmup_min_lr": 0, "warmup_max_lr": parameters["lr"], "warmup_num_steps": WARMUP_STEPS}
        content["scheduler"] = {"type": "WarmupLR", "params": {**warmup, "warmup_type": "linear"}}
    if given.zero_stage is not None:
        content["zero_optimization"]["stage"] = given.zero_stage
    content[MODEL_SECTION] = copy.deepcopy(MODEL)

    dct = DCTConfig.parse(content.get("dct", {})).updated({"enabled": True})
    family = family_of([kind], momentum=parameters.get("momentum", 0.0))
    if family.loses_by_delay and "data_parallel" not in content.get("dct", {}):
        dct = dct.updated({"data_parallel": AHEAD})
    if given.sparsity is not None:
        dct = dct.updated({"data_parallel": {"sparsity": given.sparsity}})
    content["dct"] = dct.model_dump(mode="json", exclude_defaults=True)
    content["dct"].setdefault("data_parallel", {})["sparsity"] = dct.data_parallel.sparsity
    return content
