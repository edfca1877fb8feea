"""Two partial attentions merged by their log-sum-exp, on a CPU in float64; the kernels are tested on a GPU."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from stateflow.recurrence import attention_parts as parts
from stateflow.recurrence import prefix_attention
from tests.recurrence.op_testing import assert_close, documents, with_grads
from tests.recurrence.test_prefix_attention import make_inputs, run


class Plain:
    """What a kernel computes, as formulas."""

    def __init__(self):
        self.keys: list[Tensor] = []

    def weights(self, q, k, lse, causal, scale):
        scores = torch.einsum("bthk,bshk->bhts", q, self.repeat(k, q)) * scale
        if causal:
            scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -torch.inf)
        lse = scores.logsumexp(-1) if lse is None else lse
        return (scores - lse[..., None]).exp(), lse

    @staticmethod
    def repeat(x, q):
        return x.repeat_interleave(q.shape[2] // x.shape[2], dim=2)

    def forward(self, q, k, v, causal, scale):
        self.keys.append(k)
        weights, lse = self.weights(q, k, None, causal, scale)
        return torch.einsum("bhts,bshv->bthv", weights, self.repeat(v, q)), lse

    def backward(self, grad_o, q, k, v, output, lse, causal, scale):
        weights, _ = self.weights(q, k, lse, causal, scale)
        delta = (grad_o * output).sum(-1).transpose(1, 2)[..., None]
        grad_weights = torch.einsum("bthv,bshv->bhts", grad_o, self.repeat(v, q)) - delta
        grad_scores = weights * grad_weights * scale
        grads = (
            torch.einsum("bhts,bthk->bshk", grad_scores, q),
            torch.einsum("bhts,bthv->bshv", weights, grad_o),
        )
        grad_q = torch.einsum("bhts,bshk->bthk", grad_scores, self.repeat(k, q))
        return grad_q, *(g.unflatten(2, (k.shape[2], -1)).sum(3) for g in grads)


@settings(max_examples=40)
@given(
    seed=st.integers(0, 2**20),
    batch=st.integers(1, 2),
    num_tokens=st.integers(1, 12),
    prefix_len=st.integers(0, 12),
    groups=st.integers(1, 2),
    repeats=st.integers(1, 3),
    scale=st.sampled_from([None, 2.0]),
    with_docs=st.booleans(),
)
def test_two_parts_and_all_gradients_equal_the_full_softmax(
    seed, batch, num_tokens, prefix_len, groups, repeats, scale, with_docs
):
    torch.manual_seed(seed)
    inputs = make_inputs(batch, num_tokens, prefix_len, groups, repeats, 4, 4)
    docs = documents(batch, num_tokens) if with_docs else None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parts, "choose", lambda _, docs: Plain() if docs is None else None)
        result = with_grads(run(inputs, prefix_len, docs, scale=scale), inputs)
    assert_close(result, with_grads(run(inputs, prefix_len, docs, scale=scale, backend="reference"), inputs))


def test_the_prefix_is_handed_on_as_the_view_that_it_is():
    part, inputs = Plain(), make_inputs(2, 5, 7, 1, 2, 4, 4)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parts, "choose", lambda *_: part)
        run(inputs, 7, None)
    assert part.keys[1].untyped_storage().data_ptr() == inputs[3].untyped_storage().data_ptr()


@pytest.mark.parametrize("gap", [0.0, 3.0, 1e4, -1e4])
def test_the_merge_is_computed_in_float32(gap):
    torch.manual_seed(0)
    outputs = [torch.randn(2, 5, 3, 4).bfloat16() for _ in range(2)]
    lses = [torch.randn(2, 3, 5), torch.randn(2, 3, 5) + gap]
    merged, lse = parts.merge(*zip(outputs, lses, strict=True))
    assert merged.dtype == torch.bfloat16 and lse.dtype == torch.float32
    shares = torch.stack(lses).double().softmax(0).transpose(2, 3)[..., None]
    expected = sum(share * o.double() for share, o in zip(shares, outputs, strict=True))
    # One rounding to 16 bits: half a unit in the last of 8 binary digits.
    assert ((merged.double() - expected).abs() <= 2**-8 * expected.abs() + 1e-6).all()
    torch.testing.assert_close(lse.double(), torch.stack(lses).double().logsumexp(0), rtol=1e-6, atol=1e-6)


def test_on_a_cpu_and_with_documents_no_library_is_chosen():
    inputs = [x.detach().bfloat16() for x in make_inputs(1, 128, 128, 1, 1, 64, 64)]
    assert parts.choose(parts.Operands(*inputs), None) is None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parts.Cudnn, "fits", lambda *_: True)
        assert parts.choose(parts.Operands(*inputs), None) is parts.CUDNN
        assert parts.choose(parts.Operands(*inputs), documents(1, 128)) is None


def test_a_shape_that_cudnn_refuses_goes_to_flash_from_then_on(monkeypatch):
    monkeypatch.setattr(parts, "_refused", set())
    for kind in (parts.Cudnn, parts.Flash):
        monkeypatch.setattr(kind, "fits", lambda *_: True)
    plain = Plain()
    monkeypatch.setattr(parts.Flash, "forward", lambda _, *arguments: plain.forward(*arguments))

    def refuse(*_):
        raise RuntimeError(message)

    monkeypatch.setattr(parts.Cudnn, "forward", refuse)
    inputs = [x.detach() for x in make_inputs(1, 5, 7, 1, 2, 4, 4)]
    message = "CUDA error: an illegal memory access"
    with pytest.raises(RuntimeError, match="illegal memory access"):
        prefix_attention(*inputs)
    message = "cuDNN Frontend error: no execution plan"
    with pytest.warns(UserWarning, match="cuDNN has no attention kernel for .*no execution plan"):
        output = prefix_attention(*inputs)
    assert parts.choose(parts.Operands(*inputs), None) is parts.FLASH
    assert_close([output], [prefix_attention(*inputs, backend="reference")])
