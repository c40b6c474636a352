"""The tables of ``docs/configuration.md`` and ``docs/settings.md``, written by this program:

python docs/reference_page.py
"""

from __future__ import annotations

import inspect
import json
import math
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from pydantic import BaseModel

from dct_plugin.config.data_parallel import (
    AccordionConfig,
    DataParallelConfig,
    ExpertSettings,
    LocalStepsConfig,
    ParametersConfig,
    VerifyConfig,
)
from dct_plugin.config.dct import DCTConfig, KernelConfig, MetricsConfig
from dct_plugin.config.embedding import EmbeddingChannelConfig
from dct_plugin.config.model_parallel import (
    ActivationConfig,
    AnswerMethod,
    ExpertsConfig,
    Method,
    ModelParallelConfig,
    PipelineConfig,
    TensorConfig,
)
from dct_plugin.config.options import allowed, as_json, documentation, models
from dct_plugin.config.section import Section, Variant
from dct_plugin.policy import OptimizerFamily, Training, resolve
from dct_plugin.policy.evidence import MEASURED_DEFAULTS, MeasuredDefault

_MARK = "<!-- generated from the {source}: {place} -->"
_HEAD = "| Option | Default | Allowed | Meaning |\n|---|---|---|---|"


def updated(page: str) -> str:
    """Return a page whose generated parts are those of the models and of the table of settings."""
    for source, make in (("models", tables), ("table", settings_table)):
        begin, end = (_MARK.format(source=source, place=place) for place in ("begin", "end"))
        before, found, rest = page.partition(begin)
        if found:
            page = f"{before}{begin}\n\n{make()}\n{end}{rest.partition(end)[2]}"
    return page


def settings_table() -> str:
    """Return what sections without density become, as Markdown."""
    head = ("Optimizer", "Ranks", '`"dct": {}` becomes', "Fewer bytes", "Quality, and time of a step")
    return "\n".join([_line(head), "|---" * len(head) + "|", *map(_default, MEASURED_DEFAULTS), ""])


def _default(row: MeasuredDefault) -> str:
    momentum = 0.9 if row.family is OptimizerFamily.MOMENTUM else 0.0
    name = "SGD" if momentum else row.family.value
    exact = "" if 0 not in row.stages else None
    training = Training([name], momentum, row.stages[0], row.ranks[1], row.most_lr, exact_unavailable=exact)
    settings = resolve(DataParallelConfig(), training).settings
    words = "all entries" if settings.sparsity == 0 else f"sparsity {settings.sparsity:g}"
    words += f" in {settings.value_dtype}" + (", step-ahead" if settings.feedback.looks_ahead else "")
    words += ", exact updates" if settings.parameters == "exact" else ""
    job = row.family.value
    if row.most_lr < math.inf:
        job += f", at {row.most_lr:g} or less"
    if 0 not in row.stages:
        job += f", ZeRO-{' and '.join(map(str, row.stages))} in bf16 or fp16"
    ranks = "2" if row.ranks == (2, 2) else "{} to {}".format(*row.ranks)
    measured = "; ".join(f"[{each.what}]({each.source})" for each in (row.quality, row.step) if each)
    return _line((job, ranks, words, f"[{row.fewer_bytes.what}]({row.fewer_bytes.source})", measured))


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def tables() -> str:
    """Return the tables of all sections, as Markdown."""
    return "\n".join(
        [
            _section(DCTConfig),
            _section(DataParallelConfig),
            *(_optional(name, model) for name, model in _OPTIONAL.items()),
            _section(ExpertSettings),
            _section(ModelParallelConfig),
            "### Places\n\n`dct.model_parallel.pipeline`, `tensor` and `experts` all have these options."
            f"\n\n{_table(ActivationConfig, ActivationConfig.model_fields)}",
            *(_place(model) for model in (PipelineConfig, TensorConfig, ExpertsConfig)),
            _methods(),
            *(_section(model) for model in (EmbeddingChannelConfig, MetricsConfig, KernelConfig)),
        ]
    )


_OPTIONAL: dict[str, type[Section]] = {
    "adaptive": AccordionConfig,
    "parameters": ParametersConfig,
    "local_steps": LocalStepsConfig,
    "verify": VerifyConfig,
}


def _section(model: type[Section]) -> str:
    keys = [key for key, field in model.model_fields.items() if not _is_section(models(field))]
    level = "##" if model.section_path.count(".") < 2 else "###"
    return f"{level} `{model.section_path}`\n\n{_text(model)}\n\n{_table(model, keys)}"


def _optional(key: str, model: type[Section]) -> str:
    """Return a section that is absent by default."""
    what, when = documentation(DataParallelConfig, key)
    keys = [name for name in model.model_fields if name != "kind"]
    return "\n\n".join(
        [f"### `{model.section_path}`", _text(model), f"{what} {when}".strip(), _table(model, keys)]
    )


def _place(model: type[Section]) -> str:
    keys = [key for key in model.model_fields if key not in ActivationConfig.model_fields]
    lines = [f"### `{model.section_path}`", _text(model)]
    for key in ("forward", "backward"):
        methods = allowed(model.model_fields[key])
        if methods != allowed(ActivationConfig.model_fields[key]):
            lines.append(f"`{key}`: {methods}.")
    return "\n\n".join([*lines, _table(model, keys)]) if keys else "\n\n".join(lines) + "\n"


def _methods() -> str:
    """Return the methods, and one table of their settings; a setting that several have is one row."""
    kinds = [kind for kind in models(TensorConfig.model_fields["forward"]) if issubclass(kind, Method)]
    lines = [f"- `{json.dumps(kind.label())}`: {_text(kind)} {_settings(kind)}" for kind in kinds]
    lines.append(f'- `"answer"` (only `backward`): {_text(AnswerMethod)} {_settings(AnswerMethod)}')
    owners = {name: kind for kind in reversed(kinds) for name in kind.model_fields if name != "method"}
    names = dict.fromkeys(name for kind in kinds for name in kind.model_fields if name in owners)
    rows = [_row(owners[name], name) for name in names]
    return "### Methods\n\n" + "\n".join([*lines, "", _HEAD, *rows, ""])


def _settings(kind: type[Variant]) -> str:
    names = [f"`{name}`" for name in kind.model_fields if name != kind.selector]
    return f"Settings: {', '.join(names)}." if names else ""


def _table(model: type[BaseModel], keys: Iterable[str]) -> str:
    return "\n".join([_HEAD, *(_row(model, key) for key in keys), ""])


def _row(model: type[BaseModel], key: str) -> str:
    field = model.model_fields[key]
    what, when = documentation(model, key)
    default = "required" if field.is_required() else f"`{json.dumps(as_json(field.get_default()))}`"
    return f"| `{key}` | {default} | {allowed(field)} | {f'{what} *{when}*' if when else what} |"


def _is_section(kinds: list[type[BaseModel]]) -> bool:
    return bool(kinds) and len(kinds) == 1


def _text(model: type[BaseModel]) -> str:
    return " ".join((inspect.getdoc(model) or "").split()).replace("``", "`")


def main(pages: Iterator[str]) -> None:
    """Update pages in place."""
    for page in map(Path, pages):
        page.write_text(updated(page.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main(iter(sys.argv[1:] or ["docs/configuration.md", "docs/settings.md"]))
