"""The operations on a CUDA device, against the references in float64 on the CPU."""

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from stateflow.loss import linear_cross_entropy, reference_cross_entropy
from stateflow.recurrence import attention_parts, gated_delta_rule, mamba3, short_conv
from tests.recurrence import test_gated_delta, test_prefix_attention, test_short_conv
from tests.recurrence.op_testing import assert_close, documents, with_grads
from tests.recurrence.recurrences import mamba3_inputs

pytestmark = pytest.mark.gpu

# Forward, backward: the bounds of the design for 16 bits; IEEE products for float32.
TOLERANCES = {torch.float32: (1e-5, 2e-5), torch.bfloat16: (5e-3, 1.5e-2)}
DTYPES = list(TOLERANCES)


def on_device(inputs: list[Tensor | None], to_16_bits: list[bool], dtype: torch.dtype):
    """The inputs rounded to what the device gets, there and, as float64, here."""
    low = [
        None if x is None else x.detach().to("cuda", dtype if rounded else torch.float32).requires_grad_()
        for x, rounded in zip(inputs, to_16_bits, strict=True)
    ]
    return low, [None if x is None else x.detach().cpu().double().requires_grad_() for x in low]


def check(low: list[Tensor], high: list[Tensor], num_outputs: int, dtype: torch.dtype) -> None:
    low = [x.cpu() for x in low]
    forward, backward = TOLERANCES[dtype]
    assert_close(low[:num_outputs], high[:num_outputs], forward)
    assert_close(low[num_outputs:], high[num_outputs:], backward)


def with_cpu_grads(outputs, inputs) -> list[Tensor]:
    """`with_grads` with the same random gradients on both devices, rounded as the outputs are."""
    generator = torch.Generator().manual_seed(0)
    grads = [torch.randn(o.shape, generator=generator).bfloat16().to(o.device, o.dtype) for o in outputs]
    return [*outputs, *torch.autograd.grad(outputs, inputs, grads)]


@pytest.mark.parametrize("backend", ["chunk", "auto"])
@pytest.mark.parametrize("with_docs", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_gated_delta_rule(dtype, with_docs, backend):
    torch.manual_seed(0)
    inputs = test_gated_delta.make_inputs(2, 300, 2, 2, 32, 48)
    docs = documents(2, 300, rate=0.02) if with_docs else None
    low, high = on_device(inputs, [True, True, True, False, True, False], dtype)
    result = with_cpu_grads(gated_delta_rule(*low, None if docs is None else docs.cuda(), backend=backend), low)
    check(result, with_cpu_grads(gated_delta_rule(*high, docs, backend="reference"), high), 2, dtype)


@pytest.mark.parametrize("with_docs", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_mamba3(dtype, with_docs):
    torch.manual_seed(0)
    inputs = mamba3_inputs(2, 300, 2, 2, 32, 48)
    docs = documents(2, 300, rate=0.02) if with_docs else None
    low, high = on_device(inputs, [True] * 8 + [False] * 10, dtype)
    result = with_cpu_grads(mamba3(*low, None if docs is None else docs.cuda()), low)
    expected = with_cpu_grads(mamba3(*high, docs, backend="reference"), high)
    result[1], expected[1] = result[1].cos(), expected[1].cos()  # angles are equal modulo 2 pi
    check(result, expected, 5, dtype)


@pytest.mark.parametrize("with_docs", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_short_conv_(dtype, with_docs):
    torch.manual_seed(0)
    inputs = test_short_conv.make_inputs(2, 100, 64, 4, True)
    docs = documents(2, 100) if with_docs else None
    low, high = on_device(inputs, [True, True, True, False], dtype)
    result = with_cpu_grads(short_conv(*low, None if docs is None else docs.cuda()), low)
    check(result, with_cpu_grads(short_conv(*high, docs, backend="reference"), high), 2, dtype)


@pytest.mark.parametrize("with_docs", [False, True])
@pytest.mark.parametrize("prefix_len", [0, 700])
@pytest.mark.parametrize("dtype", DTYPES)
def test_prefix_attention_(dtype, prefix_len, with_docs):
    torch.manual_seed(0)
    # 16 bits without documents takes a library's kernels; everything else several blocks of the own form.
    inputs = test_prefix_attention.make_inputs(2, 600, prefix_len, 2, 3, 32, 32)
    docs = documents(2, 600, rate=0.01) if with_docs else None
    low, high = on_device(inputs, [True] * 5, dtype)
    operands = attention_parts.Operands(*low[:3], *(x[:, :prefix_len] for x in low[3:]))
    assert (attention_parts.choose(operands, docs) is not None) == (dtype == torch.bfloat16 and not with_docs)
    result = with_cpu_grads(
        test_prefix_attention.run(low, prefix_len, None if docs is None else docs.cuda()), low
    )
    expected = test_prefix_attention.run(high, prefix_len, docs, backend="reference")
    check(result, with_cpu_grads(expected, high), 1, dtype)


@pytest.mark.parametrize("part", [attention_parts.CUDNN, attention_parts.FLASH])
@pytest.mark.parametrize(
    ("batch", "num_tokens", "prefix_len", "groups", "repeats", "head_dim"),
    [(1, 512, 1024, 5, 4, 128), (1, 512, 0, 5, 4, 128), (2, 333, 701, 2, 3, 64), (1, 130, 2, 1, 4, 128)],
)
def test_attention_of_two_parts(part, batch, num_tokens, prefix_len, groups, repeats, head_dim, monkeypatch):
    torch.manual_seed(0)
    inputs = test_prefix_attention.make_inputs(
        batch, num_tokens, prefix_len, groups, repeats, head_dim, head_dim
    )
    low, high = on_device(inputs, [True] * 5, torch.bfloat16)
    operands = attention_parts.Operands(*low[:3], *(x[:, :prefix_len] for x in low[3:]))
    if not part.fits(operands):
        pytest.skip(f"{type(part).__name__} does not take this shape here")
    monkeypatch.setattr(attention_parts, "choose", lambda *_: part)
    monkeypatch.setattr(attention_parts, "_refused", set())
    result = with_cpu_grads(test_prefix_attention.run(low, prefix_len, None), low)
    if num_tokens % 128 == 0:  # of odd lengths cuDNN may think better
        assert not attention_parts._refused
    expected = test_prefix_attention.run(high, prefix_len, None, backend="reference")
    check(result, with_cpu_grads(expected, high), 1, torch.bfloat16)


def test_cudnn_is_taken_on_hopper_unless_switched_off():
    inputs = [torch.randn(1, 256, 4, 128, device="cuda", dtype=torch.bfloat16) for _ in range(5)]
    operands = attention_parts.Operands(*inputs)
    hopper = torch.cuda.get_device_capability() >= (9, 0)
    assert attention_parts.choose(operands, None) is (attention_parts.CUDNN if hopper else attention_parts.FLASH)
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        assert attention_parts.choose(operands, None) is attention_parts.FLASH


@pytest.mark.parametrize("dtype", DTYPES)
def test_blocks_and_flash_agree_where_both_fit(dtype):
    torch.manual_seed(0)
    inputs = [x.detach().to("cuda", dtype).requires_grad_() for x in (
        test_prefix_attention.make_inputs(1, 130, 70, 2, 2, 64, 64)
    )]  # fmt: skip
    everything = torch.full((1, 130), -70, device="cuda")
    plain, masked = (
        with_cpu_grads(test_prefix_attention.run(inputs, 70, docs), inputs) for docs in (None, everything)
    )
    assert_close(plain, masked, tolerance=1e-2 if dtype == torch.bfloat16 else 1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
def test_linear_cross_entropy(dtype):
    torch.manual_seed(0)
    hidden, weight = torch.randn(2, 150, 64), torch.randn(300, 64)
    labels = torch.randint(300, (2, 150)).masked_fill(torch.rand(2, 150) < 0.2, -100)
    low, high = on_device([hidden, weight], [True, True], dtype)
    loss = linear_cross_entropy(*low, labels.cuda(), block_tokens=64)
    expected = reference_cross_entropy(tuple(high), labels)
    check(with_grads([loss], low), with_grads([expected], high), 1, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_compiled_with_inductor(dtype):
    from tests.layers.test_block import make_arguments, make_block

    for kind in ("gdn", "mamba3", "attention"):
        block = make_block(kind, dtype).cuda()
        x, state = make_arguments(block, dtype)
        x, state = x.cuda(), tuple(s.cuda() for s in state)
        plain = block(x, state, None)
        compiled = torch.compile(block, fullgraph=True)(x, state, None)
        tolerance = 2e-2 if dtype == torch.bfloat16 else 1e-5
        assert_close([compiled[0], *compiled[1]], [plain[0], *plain[1]], tolerance)
        compiled[0].float().sum().backward()
        assert all(p.grad.isfinite().all() for p in block.parameters())
