"""Keys of a DeepSpeed JSON that nobody reads. DeepSpeed itself passes over them in silence.

A mistyped ``dct`` would train dense without a word, a mistyped ``optimizer`` without DeepSpeed's.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterable


def near_misses(keys: Iterable[object], section: str) -> list[str]:
    """Return the keys that were probably meant to be ``section``, which is not among them.

    Such a key is the plugin's whole name, or the section's name in another case, with letters in another
    order, or one edit away from it (one letter more, fewer or different, with the same first letter).
    """
    found = []
    for key in map(str, keys):
        plain = re.sub(r"[^a-z]", "", key.lower())
        ours = plain == section or plain in (f"{section}plugin", f"{section}section")
        if key != section and key[:1] not in "_#/" and (ours or _one_edit_away(plain, section)):
            found.append(key)
    return found


def _one_edit_away(word: str, target: str) -> bool:
    if sorted(word) == sorted(target) or target in _without_one_letter(word):
        return True
    if word[:1] != target[:1]:
        return False
    differing = sum(a != b for a, b in zip(word, target, strict=False))
    return word in _without_one_letter(target) or (len(word) == len(target) and differing == 1)


def _without_one_letter(word: str) -> list[str]:
    return [word[:i] + word[i + 1 :] for i in range(len(word))]


def unread(keys: Iterable[object], known: Collection[str]) -> list[str]:
    """Return keys of the top level that are not ``known``: ``'optimzer' (did you mean 'optimizer'?)``."""
    found = []
    for key in map(str, keys):
        if key not in known and key[:1] not in "_#/":
            closest = difflib.get_close_matches(key.lower(), known, n=1, cutoff=0.75)
            found.append(repr(key) + (f" (did you mean {closest[0]!r}?)" if closest else ""))
    return found
