"""Compile Triton kernels for sm_90, on a machine with or without a GPU: `triton_compile.py [kernel ...]`."""

from __future__ import annotations

import sys
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from dct_plugin.kernels.triton import message_kernels, planes, selection_kernels, step_ahead_kernels
from dct_plugin.kernels.triton.launch import OPTIONS

_POINTERS = {
    **dict.fromkeys(("source", "taus", "beside"), "*fp32"),
    **dict.fromkeys(("words", "positions", "others", "magnitudes"), "*i32"),
    **dict.fromkeys(("table", "state", "states", "counts", "bounds", "meta", "rows", "row"), "*i64"),
    **dict.fromkeys(("mask_rows", "heads", "places", "offsets", "nothing", "errors"), "*i64"),
    **dict.fromkeys(("out", "mask", "buffer", "slot", "planes"), "*u8"),
    "numbers": "*i32",
    **dict.fromkeys(("outs", "x", "decoded"), "*fp32"),
    **dict.fromkeys(("segments", "parts", "plans", "sizes", "status"), "*i64"),
    **dict.fromkeys(("largest", "halves", "checks", "advances", "powers"), "*i32"),
    **dict.fromkeys(("partial", "means"), "*fp32"),
    "scale": "fp32",
}
#: Where a name means something else.
_OTHERWISE = {
    "fill_slots": {"fingerprint": "i64"},
    "scan": {"checks": "i32"},
}
_FEEDBACK = {"GRAD": 0, "HAS_RESIDUAL": True}
_BF16, _CHANGES, _INT4 = 1, 3, 4
#: Selected entries of accumulated fp32 gradients.
_WRITTEN = {"GRAD": 0, "HAS_RESIDUAL": False, "SELECTED": True, "ACCUMULATED": True, "HAS_LEFT": True}
#: One form of each kernel; constants, and None for pointers that are not there.
FORMS: dict[str, list[dict[str, Any]]] = {
    "overflow": [{"GRAD": _BF16, "ALIGNED": True}],
    "select": [
        {**_FEEDBACK, "HAS_LEFT": True, "IN_PLACE": True, "ALIGNED": True},
        {**_FEEDBACK, "HAS_LEFT": True, "IN_PLACE": False, "ALIGNED": False},
        *(
            {**_FEEDBACK, "GRAD": grad, "HAS_LEFT": True, "IN_PLACE": False, "ALIGNED": True}
            for grad in range(3)
        ),
        {"GRAD": _CHANGES, "HAS_RESIDUAL": False, "HAS_LEFT": False, "IN_PLACE": False, "ALIGNED": True},
    ],
    "settle": [
        {**_FEEDBACK, "SELECTED": True, "VALUE": _INT4, "PUT_BACK": put_back, "CLEAR": clear, "ALIGNED": True}
        for put_back, clear in ((True, True), (True, False), (False, True))
    ],
    "compact": [{}],
    "write": [
        *({**_WRITTEN, "VALUE": value} for value in range(6)),
        {
            **_WRITTEN, "words": None, "GRAD": _BF16, "VALUE": _BF16, "HAS_RESIDUAL": True, "SELECTED": False,
            "ACCUMULATED": False,
        },
        {**_WRITTEN, "GRAD": _CHANGES, "VALUE": _INT4, "ACCUMULATED": False, "HAS_LEFT": False},
    ],
    "sample": [_FEEDBACK],
    "kth_largest": [{"LANES": 16_384}],
    "difference": [{"GRAD": grad} for grad in range(3)],
    "pack": [{"GROUPED": True}, {"GROUPED": False}],
    "unpack": [{"GROUPED": True}, {"GROUPED": False}],
    "open_messages": [{"SLOTS": slots, "ABSENT": int(not slots)} for slots in (True, False)],
    "scan": [{}],
    "place": [{}],
    "add": [{"SCALED": scaled, "SCALED_SUM": not scaled} for scaled in (True, False)],
    "fill_slots": [{"EMPTY": True}, {"nothing": None, "EMPTY": False}],
    "partial_sums": [{"GRAD": grad} for grad in range(3)],
    "add_partial_sums": [{}],
    "mean_rows": [{}],
    "write_planes": [{}],
    "read_planes": [{}],
    "displace": [{"WEIGHT": weight} for weight in range(3)],
}  # fmt: skip


#: As they are launched, where that is not Triton's number (``test_triton.py`` compares).
WARPS = {"write": 8, "compact": 8, "open_messages": 1, "kth_largest": 32}


def compiled(name: str, constants: dict[str, Any]) -> Any:
    """Machine code of one form of a kernel, for sm_90."""
    modules = (message_kernels, planes, selection_kernels, step_ahead_kernels)
    kernel = next(vars(module)[name] for module in modules if name in vars(module))
    types = _POINTERS | _OTHERWISE.get(name, {})
    signature = {
        argument: "constexpr" if argument in constants else types.get(argument, "i32")
        for argument in kernel.arg_names
    }
    aligned = {
        (place,): [["tt.divisibility", 16]]
        for place, argument in enumerate(kernel.arg_names)
        if signature[argument].startswith("*") and signature[argument] != "*u8"
    }
    source = ASTSource(kernel, signature, constants, aligned)
    options = OPTIONS | {"num_warps": WARPS.get(name, 4)}
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


if __name__ == "__main__":
    for wanted in sys.argv[1:] or FORMS:
        for form in FORMS[wanted]:
            ptx = compiled(wanted, form).asm["ptx"]
            # Every rounding step is its own, and small numbers are not flushed: else bits differ.
            assert "fma.rn.f" not in ptx, wanted
            assert ".ftz" not in ptx, wanted
            # Whole tiles of aligned tensors are read, or written, 16 bytes at once; an old residual, which is
            # put back after an overflow alone, is not.
            whole = form.get("ALIGNED") and form.get("CLEAR", True)
            assert not whole or "global.v4.b32" in ptx, wanted
            print(wanted, len(ptx))
