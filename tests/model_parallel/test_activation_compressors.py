"""Every compressor class for activations against a plain-torch formula: what arrives, what comes back, sizes,
seeds, state, and the messages of every class between two ranks.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support import ROOT, processes
from support.host_reads import HostReads
from torch import Tensor

from dct_plugin.codecs.quantised import Quantiser, pack, unpack
from dct_plugin.config import DCTConfig, PipelineConfig, TensorConfig
from dct_plugin.config.model_parallel import NoMethod
from dct_plugin.config.options import models
from dct_plugin.errors import ConfigError, PayloadError
from dct_plugin.model_parallel import ActivationStream, CompressedCollectives, FixedMessages
from dct_plugin.model_parallel.compressors import COMPRESSORS, Site, transform

SHAPE = (24, 2, 48)
SETTINGS: dict[str, dict[str, Any]] = {
    "threshold": {"forward": {"method": "threshold", "sparsity": 0.75}},
    "threshold, int4": {"forward": {"method": "threshold", "sparsity": 0.75, "value_dtype": "int4"}},
    "quantise": {"forward": {"method": "quantise", "bits": 3}},
    "transform": {"forward": "transform"},
    "transform, few gradients": {
        "forward": {"method": "transform", "rate": 2},
        "backward": {"method": "transform", "rate": 0.5},
    },
    "transform, thresholded gradients": {
        "forward": "transform",
        "backward": {"method": "threshold", "sparsity": 0.9},
    },
    "quantise, no gradients": {"forward": "quantise", "backward": "none"},
    "threshold of its own": {"forward": "none", "backward": {"method": "threshold", "sparsity": 0.5}},
    "none": {"forward": "none"},
}


def tensor(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape or SHAPE, generator=torch.Generator().manual_seed(seed)).to(dtype)


def ends(
    method: str | None = None, backward: dict[str, Any] | None = None, **settings: Any
) -> tuple[FixedMessages, FixedMessages]:
    """Sender and receiver of one boundary; ``settings`` are the section's, or a forward ``method``'s."""
    section = settings if method is None else {"forward": {"method": method, **settings}}
    config = PipelineConfig.of(section if backward is None else {**section, "backward": backward})
    sender, receiver = (FixedMessages(ActivationStream(config, name="x", rank=rank)) for rank in range(2))
    return sender, receiver


def cross(sender: FixedMessages, receiver: FixedMessages, x: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """What arrives of ``x``, and of the gradient ``g`` that comes back."""
    message, kept, _ = sender.encode(x, 3)
    assert message.numel() == receiver.nbytes(x.shape, x.dtype)
    out = torch.full_like(x, 7)
    received = receiver.decode(message, out)
    answer, _ = receiver.encode_gradient(g, received)
    assert answer.numel() == sender.nbytes(x.shape, x.dtype, gradient=True)
    exact, _ = receiver.encode_gradient(g, received, exact=True)
    assert exact.numel() == sender.nbytes(x.shape, x.dtype, gradient=True, kept=kept)
    back = torch.full_like(g, 7)
    sender.decode_gradient(exact, {3: kept}, back)
    return out, back


# -- values of few bits -----


@pytest.mark.parametrize("bits", [16, 8, 4, 3, 2, 1])
@pytest.mark.parametrize("numel", [1, 8, 63, 64, 200, 4096])
def test_quantised_values_are_the_nearest_levels(bits: int, numel: int) -> None:
    quantiser = Quantiser(bits, 64)
    x = tensor(bits, numel)
    data = quantiser.encode(x)
    assert data.dtype == torch.uint8
    assert data.numel() == quantiser.nbytes(numel)
    found = quantiser.decode(data, numel)
    if bits == 16:
        assert torch.equal(found, x.bfloat16().float())
        return
    table = torch.nn.functional.pad(x, (0, -numel % 64)).view(-1, 64)
    arrived = torch.nn.functional.pad(found, (0, -numel % 64)).view(-1, 64)
    for group, decoded in zip(table, arrived, strict=True):
        step = data[: data.numel() - bits * -(-numel // 8)].view(torch.bfloat16).float()
        (size,) = step[table.eq(group).all(dim=1)][:1]
        levels = (torch.arange(2**bits) - (2**bits - 1) / 2) * size
        nearest = levels[(group.unsqueeze(1) - levels).abs().argmin(dim=1)]
        inside = group != 0  # between two levels either will do; padding is not returned
        torch.testing.assert_close(decoded[inside], nearest[inside], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("bits", "error"),
    [(8, 0.008), (7, 0.02), (6, 0.035), (5, 0.06), (4, 0.11), (3, 0.20), (2, 0.35), (1, 0.61)],
)
def test_quantisation_error_of_normal_values(bits: int, error: float) -> None:
    """At most what the best equally spaced levels leave (Max, 1960), and a little for scales."""
    x = tensor(1, 1 << 16)
    quantiser = Quantiser(bits, 128)
    found = quantiser.decode(quantiser.encode(x), x.numel())
    assert float((found - x).norm() / x.norm()) < error


@pytest.mark.parametrize("bits", range(1, 9))
def test_packing_is_its_own_inverse(bits: int) -> None:
    codes = torch.randint(0, 2**bits, (8 * 37,), generator=torch.Generator().manual_seed(1)).to(torch.uint8)
    packed = pack(codes, bits)
    assert packed.numel() == bits * 37
    assert torch.equal(unpack(packed, bits), codes)
    word = sum(int(code) << (bits * place) for place, code in enumerate(codes[:8]))
    assert packed[:bits].tolist() == list(word.to_bytes(bits, "little"))


def test_a_group_with_a_poisoned_value_has_no_finite_one() -> None:
    x = tensor(1, 256)
    x[5], x[200] = float("nan"), float("inf")
    found = Quantiser(4, 64).decode(Quantiser(4, 64).encode(x), 256).view(4, 64)
    assert found.isfinite().all(dim=1).tolist() == [False, True, True, False]
    assert not found[0].isfinite().any()


def test_rows_of_tokens_have_a_scale_each() -> None:
    tokens = tensor(1, 12, 64) * torch.logspace(-3, 3, 12).unsqueeze(1)
    quantiser = Quantiser(8, 64)
    found = quantiser.decode(quantiser.encode(tokens), tokens.numel()).view_as(tokens)
    assert float(((found - tokens).norm(dim=1) / tokens.norm(dim=1)).max()) < 0.01
    assert quantiser.encode(tokens[:0]).numel() == quantiser.nbytes(0) == 0


# -- classes -----


def test_quantised_tensors_and_gradients_take_their_own_bits() -> None:
    x, g = tensor(1), tensor(2)
    sender, receiver = ends("quantise", {"method": "quantise", "bits": 2}, bits=4)
    for end in (sender, receiver):
        end.stream.fit_groups(64)
    out, back = cross(sender, receiver, x, g)
    for there, here, bits in ((out, x, 4), (back, g, 2)):
        quantiser = Quantiser(bits, 64)
        expected = quantiser.decode(quantiser.encode(here), here.numel()).view(SHAPE)
        assert torch.equal(there, expected)


def test_transform_coding_spends_its_bits_where_the_variance_is() -> None:
    turned = torch.linalg.qr(tensor(5, 48, 48))[0]
    x = tensor(4, 1024, 48) @ torch.diag(0.8 ** torch.arange(48.0)) @ turned
    g = tensor(6, 1024, 48) @ torch.diag(0.8 ** torch.arange(48.0)) @ turned.flip(0)
    sender, receiver = ends("transform", rate=8 * 4 / 48)
    for end in (sender, receiver):
        end.stream.group_size = 1024
    for step in range(3):
        cross(sender, receiver, x + step, g)
        for end in (sender, receiver):
            end.stream.end_step()
    # Bits one after the other, each to the direction whose error it lowers most.
    left, bits = [1.0, 0.3634, 0.1188, 0.03744, 0.01154, 0.003495, 0.001041, 0.0003035, 0.0000869], [0] * 9
    variances = torch.linalg.svdvals(g - g.mean(dim=0))[:9] ** 2
    for _ in range(8 * 4):
        gains = [float(v) * (left[b] - left[b + 1]) for v, b in zip(variances, bits, strict=True)]
        bits[gains.index(max(gains))] += 1
    assert receiver.stream._gradient._states[48].own.bits.tolist() == bits


def test_directions_cross_in_some_steps_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transform, "_BASIS_INTERVAL", 5)
    sender, receiver = ends(method="transform", rate=32 / 48)
    x, g = tensor(1), tensor(2)
    sizes = []
    for _ in range(27):
        sizes.append(sender.nbytes(x.shape, x.dtype))
        cross(sender, receiver, x, g)
        for end in (sender, receiver):
            end.stream.end_step()
    assert [step for step, size in enumerate(sizes) if size > min(sizes)] == [
        *range(9),
        10,
        12,
        15,
        16,
        20,
        25,
    ]
    assert min(sizes) == 8 + 2 * 48 + 2 * 9 + 8 * 4 * 48 // 8
    message, _, _ = sender.encode(x, 1)
    late = FixedMessages(ActivationStream(sender.stream.config, name="x"))
    late.stream._forward._state(48).age = 9
    with pytest.raises(PayloadError, match="directions of rank 0 of the group have not arrived"):
        late.decode(message, torch.empty_like(x))


def test_transform_makes_the_cpu_wait_for_nothing_that_was_just_queued() -> None:
    """Directions that arrive are checked by a copy that is started then and read at the end of the step."""
    sender, receiver = ends(method="transform")
    copied, read = "codecs/copies.py:to", "model_parallel/compressors/transform.py:__bool__"
    for step in range(12):
        x, out = tensor(step), torch.zeros(SHAPE)
        with HostReads() as reads:
            message = sender.stream.activations.encode([x]).messages[0]
        assert not reads.places
        with HostReads() as reads:
            receiver.stream.activations.decode(message, out, 0)
        crossed = [] if step in (9, 11) else [0]
        assert reads.places == [copied for _ in crossed]
        with HostReads() as reads:
            sender.stream.end_step()
            receiver.stream.end_step()
        assert reads.places == [read for _ in crossed]


def test_damaged_directions_decode_to_nan_and_are_named_at_the_end_of_the_step() -> None:
    sender, receiver = ends(method="transform")
    x, out = tensor(1), torch.zeros(SHAPE)
    message = sender.encode(x, 1)[0]
    message[8] += 1  # the bits of the first direction
    receiver.decode(message, out)
    assert out.isnan().all()
    with pytest.raises(PayloadError, match="x: directions of rank 0 of the group are damaged"):
        receiver.stream.end_step()


def test_directions_at_hidden_4096_take_half_the_bytes_of_8_bits_each() -> None:
    """The figures of docs/model-parallel.md, of a message of 4,096 rows at 1.42 bits."""
    sender, _ = ends(method="transform", rate=1.42)
    state = sender.stream._forward._state(4096)
    sizes = {}
    for state.age in (0, 41):
        sizes[state.age] = sender.nbytes(torch.Size([4096, 4096]), torch.bfloat16)
    directions = sizes[0] - sizes[41]
    assert (directions, sizes[41]) == (4_768_880, 2_989_480)
    before = 2181 + 4096 * 2181 * (8 + 16 / 64) / 8  # 8 bits, a scale for 64 of them
    assert directions / before == pytest.approx(0.518, abs=0.001)
    assert directions / (directions + 10 * sizes[41]) == pytest.approx(0.138, abs=0.001)


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_recomputed_tensors_give_the_same_message_and_resumed_streams_go_on_bitwise(
    name: str, dtype: torch.dtype
) -> None:
    sender, receiver = ends(**SETTINGS[name])
    copies: tuple[FixedMessages, FixedMessages] | None = None
    for step in range(5):
        x, g = tensor(step, dtype=dtype), tensor(step + 50, dtype=dtype)
        first = sender.encode(x, 1)[0]
        sender.encode(tensor(step + 90, dtype=dtype), 2)  # another micro-batch
        assert torch.equal(sender.encode(x, 1)[0], first)
        found = cross(sender, receiver, x, g)
        if copies is not None:
            copies[0].encode(x, 1)
            for mine, other in zip(found, cross(*copies, x, g), strict=True):
                assert torch.equal(mine, other)
        for end in (sender, receiver, *(copies or ())):
            end.stream.end_step()
        if step == 2:
            copies = ends(**SETTINGS[name])
            for end, copy in zip((sender, receiver), copies, strict=True):
                copy.stream.load_state_dict(end.stream.state_dict())


def test_the_state_of_another_method_is_left_out_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    sender, receiver = ends("threshold", sparsity=0.75)
    sender.stream.load_state_dict({"step": 5, "weights": {}, "gradient": {}})  # of a method that is gone
    assert "x: the saved state is not one of the method 'threshold', which starts afresh" in caplog.text
    assert sender.stream.step == 5
    cross(sender, receiver, tensor(1), tensor(2))


@pytest.mark.parametrize("name", SETTINGS)
def test_forward_only_passes_change_nothing(name: str) -> None:
    sender, receiver = ends(**SETTINGS[name])
    for step in range(2):
        cross(sender, receiver, tensor(step), tensor(step + 50))
        sender.stream.end_step()
        receiver.stream.end_step()
    before = str(sender.stream.state_dict())
    sender.stream.training = False
    sender.encode(tensor(9), 0)
    sender.stream.training = True
    assert str(sender.stream.state_dict()) == before


@pytest.mark.parametrize("name", SETTINGS)
def test_warm_up_is_bitwise_dense_and_short_messages_are_refused(name: str) -> None:
    sender, receiver = ends(**SETTINGS[name], warmup_steps=1)
    x, g = tensor(1), tensor(2)
    out, back = cross(sender, receiver, x, g)
    assert torch.equal(out, x)
    assert torch.equal(back, g)
    for end in (sender, receiver):
        end.stream.end_step()
    message, _, _ = sender.encode(x, 5)
    with pytest.raises(PayloadError, match="x: message 5"):
        receiver.decode(message[:20], torch.empty_like(x))


def test_messages_are_as_small_as_their_settings_say() -> None:
    """fp32 bytes over message bytes, forward and back, of a large tensor."""
    shape = torch.Size([2048, 256])

    def fewer(method: str, backward: dict[str, Any] | None = None, **settings: Any) -> tuple[float, float]:
        messages = ends(method, backward, **settings)[0]
        sizes = (messages.nbytes(shape, torch.float32, gradient=way) for way in (False, True))
        forward, back = (4 * shape.numel() / size for size in sizes)
        return forward, back

    assert fewer(method="quantise", bits=4) == pytest.approx((32 / 4.125, 32 / 4.125), rel=0.01)
    assert fewer("quantise", {"method": "quantise"}, bits=1)[0] == pytest.approx(32 / 1.125, rel=0.01)
    answer = {"method": "answer", "value_dtype": "int4"}
    forward, back = fewer("threshold", answer, sparsity=0.9, value_dtype="int4")
    assert forward > 24
    assert back > 75


def test_every_class_is_in_the_configuration() -> None:
    methods = {method.label() for method in models(TensorConfig.model_fields["forward"])}
    assert methods == set(COMPRESSORS)


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"forward": "topc"}, 'dct.model_parallel.pipeline.forward = "topc": must be one of "threshold"'),
        (
            {"forward": {"method": "quantise", "bits": 5}},
            "dct.model_parallel.pipeline.forward.bits = 5: must be one of 16, 8, 4, 3, 2, 1",
        ),
        ({"forward": {"method": "transform", "rate": 9}}, "rate = 9: must be a number in (0, 8]"),
        ({"forward": "threshold"}, "dct.model_parallel.pipeline.forward.sparsity: missing; must be a number"),
        ({"boundaries": [-1]}, "boundaries = [-1]: must be a list of integers >= 0 or null"),
        (
            {"forward": "quantise", "boundary_sparsity": [0.5]},
            "boundary_sparsity needs a sparsity, and forward",
        ),
        ({"forward": "quantise", "backward": "answer"}, "backward = 'answer' does not go with forward"),
        ({"forward": {"method": "quantise", "rate": 4}}, 'forward.rate = 4: only "transform" has it'),
    ],
)
def test_faults_name_key_value_and_what_is_allowed(section: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as fault:
        DCTConfig.parse({"model_parallel": {"pipeline": section}})
    assert message in str(fault.value)


def test_boundaries_and_directions_of_a_section() -> None:
    section = PipelineConfig.of(forward={"method": "transform", "rate": 4}, boundaries=[1])
    assert [section.at(boundary).compresses for boundary in range(3)] == [False, True, False]
    sparse = PipelineConfig.of(forward={"method": "threshold", "sparsity": 0.0}, boundary_sparsity=[0.0, 0.5])
    assert [sparse.at(boundary).compresses for boundary in range(3)] == [False, True, False]
    assert sparse.compresses
    assert not PipelineConfig().compresses
    assert PipelineConfig.of(forward="none", backward="quantise").compresses
    assert not PipelineConfig.of(forward="none").compresses
    backward = {"method": "transform", "rate": 2}
    own = PipelineConfig.of(forward={"method": "quantise", "bits": 4}, backward=backward)
    assert own.summary == "quantise, 4 bits, gradients transform, 2 bits per entry"


def test_the_documented_class_is_whole() -> None:
    page = (ROOT / "docs" / "extending.md").read_text()
    names: dict[str, Any] = {}
    (code,) = (block.split("```")[0] for block in page.split("```python\n")[1:] if "class Signs" in block)
    exec(code, names)
    signs = names["Signs"](NoMethod(), Site("x"))
    x = tensor(1, 7, 11)
    (message,) = signs.encode([x]).messages
    assert message.numel() == signs.nbytes(x.shape, x.dtype)
    out = torch.zeros_like(x)
    signs.decode(message, out, 0)
    torch.testing.assert_close(out, x.sign() * x.abs().mean())


# -- between processes -----


def _collectives(rank: int, world_size: int) -> dict[str, Tensor]:
    """Every class in every collective, with gradients, against streams that cross within this process."""
    comm = CompressedCollectives()
    report = {}
    for name, settings in SETTINGS.items():
        for kind in ("all_gather", "reduce_scatter", "all_to_all", "all_reduce"):
            config = TensorConfig.of(settings)
            stream = ActivationStream(config, name=kind, rank=rank)
            for step in range(2):
                x = tensor(10 * step + rank, 2 * world_size, 4, 48).requires_grad_()
                out = getattr(comm, kind)(x, stream)
                again = getattr(comm, kind)(x.detach(), stream)  # recomputation
                assert torch.equal(out, again), (name, kind)
                weights = tensor(77, *out.shape)
                (out * weights).sum().backward()
                assert x.grad is not None
                stream.end_step()
                report[f"{name} {kind} {step}"] = out.detach()
            if config.forward.label() == "quantise":  # straight through where nothing crosses back
                if kind == "all_reduce":
                    assert torch.equal(x.grad, weights)
                own, other = x.detach(), tensor(10 + 1 - rank, 2 * world_size, 4, 48)
                part = slice(None) if kind in ("all_gather", "all_reduce") else slice(2 * rank, 2 * rank + 2)
                theirs = ActivationStream(config, name=kind, rank=1 - rank)
                theirs.step = 1
                arrived = torch.zeros_like(other[part])
                theirs.activations.decode(theirs.activations.encode([other[part]]).messages[0], arrived, 0)
                if kind == "reduce_scatter":
                    torch.testing.assert_close(out, own[part] + arrived)
                elif kind in ("all_gather", "all_to_all"):
                    blocks = out.split(out.shape[0] // 2)
                    assert torch.equal(blocks[rank], own[part])
                    assert torch.equal(blocks[1 - rank], arrived)
    empty = comm.all_to_all(
        torch.zeros(0, 48),
        ActivationStream(TensorConfig.of(forward="transform"), name="empty"),
        [0, 0],
        [0, 0],
    )
    assert empty.shape == (0, 48)
    return report


@pytest.mark.slow
def test_classes_in_collectives() -> None:
    mine, other = processes.run(2, _collectives)
    for key, value in mine.items():
        if " all_reduce " in key:
            assert torch.equal(value, other[key]), key
