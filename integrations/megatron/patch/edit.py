"""Put the plugin into a launch script, and take it out again.

The only edit is one insertion before the training script of each launch command,

    torchrun ${ARGS[@]} pretrain_gpt.py ...  ->  torchrun ${ARGS[@]} -m dct_plugin.megatron pretrain_gpt.py
    ...

so that taking it out again gives back the original byte for byte.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Sequence

from .finder import MODULE, Launch, LaunchError, Launches, find_launches
from .launchers import TRAINING


def patch(
    text: str, *, config: str | None = None, scripts: Sequence[str] = TRAINING, partial: bool = False
) -> tuple[str, Launches]:
    """Return the text with the plugin in every training launch; a launch that has it stays as it is.

    Args:
        text: A shell script.
        config: Path for ``--dct-config``, written as given; ``None`` leaves what is there.
        scripts: File name patterns of training scripts.
        partial: Edit what is understood even if something else is not.

    Raises:
        LaunchError: A launch is not understood, or there is none.
    """
    found = find_launches(text, scripts)
    if found.errors and not partial:
        rest = "\n--partial patches the rest" if found.training else ""
        raise LaunchError("\n".join(found.errors) + rest)
    if not found.training:
        raise LaunchError(_nothing_found(found))
    edits = []
    for launch in found.training:
        if launch.removal is None:
            edits.append((launch.place, launch.place, _insertion(launch, config)))
        elif config is not None and f"{MODULE} --dct-config {_word(config, launch)} " not in launch.present:
            edits.append((*launch.removal, _insertion(launch, config)))
    patched = _edited(text, edits)
    _check_reversible(text, patched, found)
    return patched, found


def revert(text: str) -> tuple[str, Launches]:
    """Return the text without the plugin, and what was found in it.

    Raises:
        LaunchError: The text does not follow the shell's grammar, or nests too deep.
    """
    found = find_launches(text)
    return _reverted(text, found), found


def _reverted(text: str, found: Launches) -> str:
    return _edited(text, [(*launch.removal, "") for launch in found.launches if launch.removal])


def _check_reversible(text: str, patched: str, found: Launches) -> None:
    """Refuse an edit after which the grammar no longer sees the same launches, as near a syntax error."""
    try:
        is_original = revert(patched)[0] == _reverted(text, found)
    except LaunchError:
        is_original = False
    if not is_original:
        raise LaunchError(f"line {found.training[0].line}: near this launch the syntax is not understood")


def _edited(text: str, edits: Iterable[tuple[int, int, str]]) -> str:
    """Return ``text`` with spans replaced; of two that overlap, the first counts."""
    parts = []
    done = 0
    for start, end, new in sorted(edits):
        if start >= done:
            parts += [text[done:start], new]
            done = end
    return "".join([*parts, text[done:]])


def _insertion(launch: Launch, config: str | None) -> str:
    option = f"--dct-config {_word(config, launch)} " if config is not None else ""
    if launch.is_module:
        return f"{MODULE} {option}-m "
    return f"{launch.launcher.module_flag} {MODULE} {option}"


def _word(config: str, launch: Launch) -> str:
    """Return a path as a shell word; one with variables is left for the script's shell to expand."""
    if re.fullmatch(r"[\w./${}:@%+,=~-]+", config):
        return config
    if launch.in_string:
        raise LaunchError(
            f"line {launch.line}: the launch stands inside a quoted string, where the path {config!r} cannot "
            "be written; use one without blanks and special characters"
        )
    return shlex.quote(config)


def _nothing_found(found: Launches) -> str:
    text = "no launch of a training script found"
    if left := [f"{launch.script} (line {launch.line})" for launch in found.launches]:
        text += f"; launched are {_some(left)}: name what is to be patched with --script"
    text += "".join(f"\n{error}" for error in found.errors)
    if found.other_scripts:
        text += f"; it hands on to {_some(found.other_scripts)}: patch the script that launches"
    return text


def _some(names: Sequence[str], most: int = 20) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
