"""The prefill kernels against the float64 twin: in Triton's interpreter on small shapes, on a GPU on real ones."""

import itertools

import pytest
import torch

from hybridstate.errors import NumericError
from hybridstate.kernels import prefill as subject
from hybridstate.kernels.prefill import Geometry, choose, draw, prefill, trial
from hybridstate.kernels.reference import chunk_prefill, recurrent_loop
from tests.tolerances import assert_within

pytest.importorskip("triton")
interpreter = pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels run on the GPU")
DEVICES = [pytest.param("cpu", marks=interpreter), pytest.param("cuda", marks=pytest.mark.gpu)]

SMALL = [
    Geometry(2, 2, 16, 16, per_channel=False),
    Geometry(2, 6, 12, 20, per_channel=False),
    Geometry(1, 2, 24, 40, per_channel=True),
    Geometry(1, 3, 13, 37, per_channel=True),
    Geometry(1, 1, 72, 24, per_channel=True),
]
"""d_k and d_v differ and are no powers of two; 1, 2 and 3 value heads per key head."""

RELEASED = [
    Geometry(4, 8, 128, 128, per_channel=False),
    Geometry(16, 32, 128, 128, per_channel=False),
    Geometry(30, 30, 96, 192, per_channel=False),
    Geometry(4, 4, 128, 128, per_channel=True),
    Geometry(32, 32, 128, 128, per_channel=True),
    Geometry(4, 4, 256, 256, per_channel=True),
]


def check(geometry: Geometry, tokens: int, device: str, *, initial: bool, batch: int = 2) -> None:
    args, state = draw(geometry, batch, tokens, torch.float32)
    given = state if initial else None
    exact = chunk_prefill(*(x.double() for x in args), state.double() if initial else None)
    on_device = [x.to(device) for x in args]
    found = prefill(*on_device, None if given is None else given.to(device))
    for ours, expected in zip(found, exact, strict=True):
        assert ours.dtype == torch.float32
        assert_within(ours, expected, "kernel-f32")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("tokens", [1, 2, 32, 33, 71])
@pytest.mark.parametrize("geometry", SMALL, ids=str)
def test_outputs_and_states_of_small_shapes(geometry: Geometry, tokens: int, device: str) -> None:
    check(geometry, tokens, device, initial=tokens != 33, batch=1 if tokens == 71 else 2)


@pytest.mark.gpu
@pytest.mark.parametrize("geometry", RELEASED, ids=str)
@pytest.mark.parametrize("tokens", [7, 300, 1024])
def test_outputs_and_states_of_released_shapes(geometry: Geometry, tokens: int) -> None:
    check(geometry, tokens, "cuda", initial=tokens != 300)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("per_channel", [False, True])
def test_pieces_continue_as_one_prompt(device: str, per_channel: bool) -> None:
    args, state = draw(Geometry(1, 2, 20, 36, per_channel=per_channel), 1, 70, torch.float32)
    on_device, begun = [x.to(device) for x in args], state.to(device)
    o, end = prefill(*on_device, begun)
    first, middle = prefill(*[x[:, :37] for x in on_device], begun)
    second, last = prefill(*[x[:, 37:] for x in on_device], middle)
    assert torch.equal(begun.cpu(), state), "the initial state was written"
    assert_within(torch.cat([first, second], 1), o, "kernel-f32")
    assert_within(last, end, "kernel-f32")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("per_channel", [False, True])
def test_segments_continue_as_one_prompt(
    device: str, per_channel: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subject, "SEGMENT_BYTES", 1)  # one chunk at a time
    check(Geometry(1, 2, 20, 36, per_channel=per_channel), 70, device, initial=False)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "decay", [0.0, -1e-4, -20.0, -200.0, float("-inf")], ids=lambda x: f"decay {x}"
)
@pytest.mark.parametrize("per_channel", [False, True])
def test_decays_that_underflow_and_none_at_all(
    device: str, per_channel: bool, decay: float
) -> None:
    (q, k, v, g, beta), state = draw(
        Geometry(1, 2, 20, 36, per_channel=per_channel), 1, 40, torch.float32
    )
    g[:, 3:30] = decay
    if per_channel:
        g[..., ::2] = -0.01  # neighbouring channels forget nothing
    exact = recurrent_loop(*(x.double() for x in (q, k, v, g, beta)), state.double())
    found = prefill(*(x.to(device) for x in (q, k, v, g, beta)), state.to(device))
    for ours, expected in zip(found, exact, strict=True):
        assert_within(ours, expected, "kernel-f32")


@pytest.mark.parametrize("device", DEVICES)
def test_equal_keys_written_in_full_keep_their_digits(device: str) -> None:
    """The powers of this triangular system grow to 1e8: a series of them would lose every digit."""
    for per_channel in (False, True):
        (q, k, v, g, beta), state = draw(
            Geometry(1, 2, 20, 36, per_channel=per_channel), 1, 64, torch.float32
        )
        k[:] = k[:, :1]
        g.fill_(-1e-5)
        beta.fill_(1.0)
        exact = recurrent_loop(*(x.double() for x in (q, k, v, g, beta)), state.double())
        found = prefill(*(x.to(device) for x in (q, k, v, g, beta)), state.to(device))
        for ours, expected in zip(found, exact, strict=True):
            assert_within(ours, expected, "kernel-f32")


@pytest.mark.parametrize("device", DEVICES)
def test_views_of_one_projection_with_channels_first(device: str) -> None:
    """As a convolution leaves them: q, k and v are parts of `[B, C, T]`, gates parts of one projection."""
    geometry = Geometry(1, 2, 20, 36, per_channel=False)
    args, state = draw(geometry, 2, 35, torch.float32)
    q, k, v, g, beta = (x.to(device) for x in args)
    parts = [x.flatten(2) for x in (q, k, v)]
    mixed = torch.cat(parts, 2).transpose(1, 2).contiguous().transpose(1, 2)
    views = mixed.split([x.shape[2] for x in parts], 2)
    strided = [x.unflatten(2, y.shape[2:]) for x, y in zip(views, (q, k, v), strict=True)]
    gates = torch.stack([g, beta], -1)
    o, end = prefill(*strided, gates[..., 0], gates[..., 1], state.to(device))
    expected, last = prefill(q, k, v, g, beta, state.to(device))
    assert torch.equal(o, expected)
    assert torch.equal(end, last)


@interpreter
def test_nothing_is_read_that_was_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    empty = torch.empty
    monkeypatch.setattr(
        torch,
        "empty",
        lambda *a, **k: empty(*a, **k).fill_(float("nan")),  # type: ignore[call-overload]
    )
    for per_channel, tokens in itertools.product((False, True), (5, 37)):
        check(Geometry(1, 2, 20, 36, per_channel=per_channel), tokens, "cpu", initial=False)


def test_what_does_not_fit_is_refused() -> None:
    args, state = draw(Geometry(1, 2, 20, 36, per_channel=False), 1, 4, torch.float32)
    with pytest.raises(NumericError, match="beta has shape"):
        prefill(*args[:4], args[4][:, :3])
    with pytest.raises(NumericError, match="float64 belongs to the reference"):
        prefill(*args, state.double())


def test_the_choice_says_why_the_torch_form_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    geometry = Geometry(1, 2, 20, 36, per_channel=True)
    assert choose("cpu", torch.float32, geometry).reason == "torch on cpu"
    assert choose("cuda:7", torch.float64, geometry).precision is None
    answers = {"tf32x3": "state error 1.0e-03, at most 5e-06", "ieee": None}
    monkeypatch.setattr(subject, "trial", lambda *a: answers[a[-1]])
    chosen = choose("cuda:0", torch.bfloat16, geometry)
    assert chosen.precision == "ieee"
    assert chosen.reason == "tf32x3: state error 1.0e-03, at most 5e-06; triton, ieee products"

    def broken(*_: object) -> None:
        raise RuntimeError("no compiler\nmore")

    monkeypatch.setattr(subject, "trial", broken)
    chosen = choose("cuda:1", torch.bfloat16, geometry)
    assert chosen.precision is None
    assert chosen.reason.endswith("ieee: RuntimeError: no compiler; torch")


@interpreter
def test_a_trial_finds_a_wrong_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    geometry = Geometry(1, 2, 20, 36, per_channel=True)
    cpu = torch.device("cpu")
    assert trial(cpu, torch.float32, geometry, "tf32x3") is None
    whole = subject.prefill

    def wrong(*args: torch.Tensor, **options: str) -> tuple[torch.Tensor, torch.Tensor]:
        o, state = whole(*args, **options)  # type: ignore[arg-type]
        return o, state * 1.0001

    monkeypatch.setattr(subject, "prefill", wrong)
    assert "state error" in str(trial(cpu, torch.float32, geometry, "tf32x3"))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("geometry", RELEASED, ids=str)
def test_the_kernels_pass_their_trial(geometry: Geometry, dtype: torch.dtype) -> None:
    found = choose("cuda", dtype, geometry)
    assert found.precision == "tf32x3", found.reason
