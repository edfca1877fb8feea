import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from stateflow.layers import Attention, Block, GatedDeltaNet, Mamba3
from tests.recurrence.op_testing import assert_close, assert_same_bits, documents, with_grads

DIM = 8


def make_block(kind: str, dtype: torch.dtype = torch.float32) -> Block:
    torch.manual_seed(3)
    mixer = {
        "gdn": lambda: GatedDeltaNet(DIM, 1, 2, head_k_dim=4, head_v_dim=3, chunk_size=8),
        "mamba3": lambda: Mamba3(DIM, 2, head_dim=3, state_dim=4, num_angles=1, chunk_size=8),
        "attention": lambda: Attention(DIM, 2, 1, head_dim=4),
    }[kind]()
    return Block(DIM, mixer, ffn_dim=12).to(dtype)


def make_arguments(block: Block, dtype: torch.dtype = torch.float32) -> tuple[Tensor, tuple[Tensor, ...]]:
    """An input and an incoming state (a window of 5 tokens), all requiring grad."""
    torch.manual_seed(4)
    state = []
    for spec in block.mixer.state_spec(dtype):
        tokens = (5,) if spec.kind == "window" else ()
        state.append(torch.randn(2, *tokens, *spec.shape, dtype=spec.dtype).requires_grad_())
    return torch.randn(2, 11, DIM, dtype=dtype).requires_grad_(), tuple(state)


def run(block: nn.Module, arguments, docs: Tensor | None, parameters: list[Tensor]) -> list[Tensor]:
    x, state = arguments
    y, update = block(x, state, docs)
    return with_grads([y, *update], [x, *state, *parameters])


@pytest.mark.parametrize("kind", ["gdn", "mamba3", "attention"])
def test_block_is_mixer_and_feed_forward_beside_the_residual(kind):
    block = make_block(kind, torch.float64)
    x, state = make_arguments(block, torch.float64)
    y, update = block(x, state, None)
    mixed, expected_update = block.mixer.update(block.mixer_norm(x), state, None)
    middle = x + mixed
    hidden = block.ffn_norm(middle)
    ffn = block.feed_forward
    gated = torch.nn.functional.silu(ffn.w1(hidden)) * ffn.w3(hidden)
    assert isinstance(update, tuple)
    assert_close([y, *update], [middle + ffn.w2(gated), *expected_update])


@pytest.mark.parametrize(("kind", "with_docs"), [("gdn", False), ("mamba3", True), ("attention", True)])
def test_block_compiles_to_one_graph(kind, with_docs):
    block = make_block(kind)
    arguments, docs = make_arguments(block), documents(2, 11) if with_docs else None
    parameters = list(block.parameters())
    compiled = torch.compile(block, backend="aot_eager", fullgraph=True)
    assert_close(
        run(compiled, arguments, docs, parameters), run(block, arguments, docs, parameters), tolerance=1e-6
    )


@pytest.mark.parametrize("kind", ["gdn", "mamba3", "attention"])
def test_recomputation_gives_the_same_bits(kind):
    block = make_block(kind)
    arguments, docs, parameters = make_arguments(block), documents(2, 11), list(block.parameters())

    def recomputed(*args):
        return checkpoint(block, *args, use_reentrant=False)

    assert_same_bits(run(recomputed, arguments, docs, parameters), run(block, arguments, docs, parameters))


@pytest.mark.parametrize("kind", ["gdn", "mamba3", "attention"])
def test_16_bit_blocks_carry_float32(kind):
    block = make_block(kind, torch.bfloat16)
    x, state = make_arguments(block, torch.bfloat16)
    y, update = block(x, state, None)
    assert y.dtype == torch.bfloat16
    assert [u.dtype for u in update] == [spec.dtype for spec in block.mixer.state_spec(torch.bfloat16)]
    grads = torch.autograd.grad([y.float().sum(), *(u.float().sum() for u in update)], [x, *state])
    for grad, tensor in zip(grads, [x, *state], strict=True):
        assert grad.isfinite().all() and grad.dtype == tensor.dtype


@pytest.mark.parametrize("kind", ["gdn", "mamba3", "attention"])
def test_initializers_name_every_parameter(kind):
    block = make_block(kind)
    assert block.initializers(0.1, 0.1).keys() == dict(block.named_parameters()).keys()
