"""Whole numbers of few bits against a formula of their bytes."""

from __future__ import annotations

import hashlib

import torch

from dct_plugin.codecs import planes


def test_every_byte_holds_one_bit_of_eight_numbers() -> None:
    generator = torch.Generator().manual_seed(1)
    widths, groups = [3, 0, 32, 1, 10, 5], [4, 2, 1, 0, 3, 5]
    segments = [
        torch.randint(-(2 ** (width - 1)), 2 ** (width - 1), (count, 8), generator=generator)
        if width
        else torch.zeros(count, 8, dtype=torch.int64)
        for width, count in zip(widths, groups, strict=True)
    ]
    expected = bytes(
        sum((number >> plane & 1) << place for place, number in enumerate(group))
        for segment, width in zip(segments, widths, strict=True)
        for plane in range(width)
        for group in segment.tolist()
    )
    numbers = torch.cat(segments).to(torch.int32)
    described = torch.tensor(widths), torch.tensor(groups)
    packed = planes.pack(numbers, *described, len(expected))
    assert bytes(packed.tolist()) == expected
    assert torch.equal(planes.unpack(packed, *described, len(numbers)), numbers)
    assert hashlib.sha256(expected).hexdigest()[:16] == "cbba8dc083b6d606"
