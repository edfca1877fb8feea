"""The gated delta rule's kernels at real sizes: every size of heads, the same bits each time, very long tensors.

On a new machine the first run compiles for minutes.
"""

import dataclasses
import itertools

import pytest
import torch

import stateflow_kernels.plans
from stateflow.recurrence import gated_delta_kernels, gated_delta_rule, self_check
from stateflow_kernels import hopper
from stateflow_kernels.gated_delta_rule import Plan, Tile
from tests.kernels.test_gated_delta_kernels import (
    BOUNDS,
    exact,
    grads_like,
    make_inputs,
    make_layer,
    run,
    run_in_pieces,
    use_plans,
)
from tests.recurrence.op_testing import assert_close, assert_same_bits, documents

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(1800)]

SIZES = [(32, 40), (64, 64), (96, 96), (128, 128), (144, 144), (192, 192), (256, 256), (64, 256), (256, 64), (96, 192)]
IN_FLOAT32 = [sizes for sizes in SIZES if sizes[0] <= 128]  # larger keys are refused there
TRITON = dict(backend="triton", use_qk_l2norm_in_kernel=True)
GIB = 2**30


@pytest.fixture(autouse=True)
def no_fallback(monkeypatch):
    """A plan that was replaced would make these tests say nothing."""
    monkeypatch.setattr(self_check, "_outcomes", {})
    monkeypatch.setattr(gated_delta_kernels, "_chosen", {})
    yield
    replaced = {problem: outcome for (problem, plan), outcome in self_check._outcomes.items() if outcome.plan != plan}
    assert not replaced


# Segments that overlap, in the forward and in the backward.
OVERLAP = dict(cuts=(0.3, 0.6), backward_cuts=(0.4, 0.8), overlap_backward=True)


def use_default_with(monkeypatch, **changes) -> None:
    """The default plan of each call, with these fields changed."""

    def plan_for(_, *, device, dtype, k_dim, v_dim, **__) -> Plan:
        default = stateflow_kernels.plans.fallback_plan(device, dtype, k_dim, v_dim)
        return dataclasses.replace(default, **changes)

    use_plans(monkeypatch, plan_for)


def make(batch: int, num_tokens: int, *args, dtype=torch.bfloat16, **options):
    return make_inputs(batch, num_tokens, *args, dtype=dtype, device="cuda", normalize=True, **options)


@pytest.mark.parametrize("with_docs", [False, True])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("dtype", list(BOUNDS), ids=str)
def test_sizes_of_heads(dtype, sizes, with_docs):
    if dtype == torch.float32 and sizes not in IN_FLOAT32:
        pytest.skip("refused")
    torch.manual_seed(0)
    inputs = make(2, 300, 2, 2, *sizes, dtype=dtype)
    docs = documents(2, 300, rate=0.02) if with_docs else None
    results = run(inputs, docs, **TRITON)
    # The chunk form in float64 on the CPU: the recurrence token by token agrees with it, and is slow at these sizes.
    expected = run(exact(inputs), docs, backend="chunk", use_qk_l2norm_in_kernel=True)
    for result, reference, bound in zip(results, expected, BOUNDS[dtype], strict=True):
        assert_close([result.cpu()], [reference], bound)


@pytest.mark.parametrize("with_docs", [False, True])
@pytest.mark.parametrize("sizes", [(64, 64), (64, 128), (128, 128), (96, 192)], ids=str)
def test_walks_in_segments(sizes, with_docs, monkeypatch):
    """Of a memory that lasts, about as accurate as one walk, and with the same bits each time.

    Compiling takes a minute or two for each of these on a new machine: run them as processes of their own.
    """
    torch.manual_seed(0)
    inputs = make(1, 1100, 2, 1, *sizes, max_decay=1e-3)
    docs = documents(1, 1100, rate=0.001) if with_docs else None
    expected = run(exact(inputs), docs, backend="chunk", use_qk_l2norm_in_kernel=True)
    docs = None if docs is None else docs.cuda()

    def results(num_segments: int) -> list[torch.Tensor]:
        args = (*inputs, docs, sizes[0] ** -0.5, 1e-6, num_segments)
        outputs = torch.ops.stateflow.gated_delta_rule_triton(*args)[:2]
        return [*outputs, *torch.autograd.grad(outputs, inputs, grads_like(outputs))]

    def errors(given) -> list[float]:
        # Where a document begins with the first token, the state gets no gradient.
        pairs = zip(given, expected, strict=True)
        return [((x.cpu().double() - y).norm() / y.norm().clamp_min(1e-30)).item() for x, y in pairs]

    one_walk, first = errors(results(1)), results(5)
    for error, of_one, bound in zip(errors(first), one_walk, BOUNDS[torch.bfloat16], strict=True):
        assert error <= min(bound, 2 * of_one + 1e-4)
    for _ in range(20):
        assert_same_bits(results(5), first)


@pytest.mark.parametrize(("max_decay", "max_beta"), [(0.0, 1.0), (1e4, 1.0), (0.1, 2.0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_extreme_gates(dtype, max_decay, max_beta):
    torch.manual_seed(0)
    inputs = make(1, 300, 1, 2, 128, 128, dtype=dtype, max_decay=max_decay, max_beta=max_beta)
    results = run(inputs, None, **TRITON)
    expected = run(exact(inputs), None, backend="chunk", use_qk_l2norm_in_kernel=True)
    factor = 3 if max_beta > 1 else 1
    for result, reference, bound in zip(results, expected, BOUNDS[dtype], strict=True):
        assert result.isfinite().all()
        error = (result.detach().cpu().double() - reference).norm()
        assert error <= factor * bound * reference.norm() + 1e-6


@pytest.mark.parametrize("changes", [{}, OVERLAP], ids=["serial", "overlap"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_hundred_runs_give_the_same_bits(dtype, changes, monkeypatch):
    use_default_with(monkeypatch, **changes)
    torch.manual_seed(0)
    inputs = make(1, 1000, 4, 2, 128, 128, dtype=dtype)
    docs = documents(1, 1000, rate=0.005)
    first = run(inputs, docs, **TRITON)
    for _ in range(99):
        assert_same_bits(run(inputs, docs, **TRITON), first)


@pytest.mark.parametrize("dtype", list(BOUNDS), ids=str)
@pytest.mark.parametrize("sizes", [(128, 128), (96, 192), (256, 256)], ids=str)
def test_cuts_and_splits_give_the_same_bits(dtype, sizes, monkeypatch):
    if dtype == torch.float32 and sizes[0] > 128:
        pytest.skip("refused")
    torch.manual_seed(0)
    inputs = make(2, 1000, 2, 2, *sizes, dtype=dtype)
    docs = documents(2, 1000, rate=0.005)
    whole = run(inputs, docs, **TRITON)
    for changes, cuts in itertools.product(({}, OVERLAP), ([], [128, 192, 896])):
        use_default_with(monkeypatch, **changes)
        assert_same_bits(run_in_pieces(inputs, docs, cuts, **TRITON), whole)


@pytest.mark.parametrize("with_docs", [False, True])
@pytest.mark.parametrize("sizes", list(itertools.product(hopper.MERGED_DIMS, repeat=2)), ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_all_gradients_from_one_kernel(dtype, sizes, with_docs, monkeypatch):
    """Right, the same bits each time and however the sequence is cut, for any number of chunks a program."""
    torch.manual_seed(0)
    inputs = make(1, 1000, 3, 1, *sizes, dtype=dtype)
    if not hopper.available(inputs[0].device):
        pytest.skip("not this GPU, or not this Triton")
    docs = documents(1, 1000, rate=0.005) if with_docs else None
    launches, launch = [], hopper.gradients
    monkeypatch.setattr(hopper, "gradients", lambda *args: launches.append(args) or launch(*args))
    use_default_with(monkeypatch, gradient_chunks=8)
    first = run(inputs, docs, **TRITON)
    assert launches
    expected = run(exact(inputs), docs, backend="chunk", use_qk_l2norm_in_kernel=True)
    for result, reference, bound in zip(first, expected, BOUNDS[dtype], strict=True):
        assert_close([result.cpu()], [reference], bound)
    for chunks, overlap in itertools.product((1, 3, 8), ({}, OVERLAP)):
        use_default_with(monkeypatch, gradient_chunks=chunks, **overlap)
        for _ in range(10):
            assert_same_bits(run(inputs, docs, **TRITON), first)
        assert_same_bits(run_in_pieces(inputs, docs, [128, 192, 896], **TRITON), first)


@pytest.mark.parametrize("with_docs", [False, True])
@pytest.mark.parametrize("sizes", list(itertools.product(hopper.K_DIMS, (64, 128))), ids=str)
def test_walk_and_outputs_in_one_have_the_bits_of_two(sizes, with_docs, monkeypatch):
    torch.manual_seed(0)
    inputs = make(1, 1000, 3, 2, *sizes)
    if not hopper.available(inputs[0].device):
        pytest.skip("not this GPU, or not this Triton")
    docs = documents(1, 1000, rate=0.005).cuda() if with_docs else None
    pre = Tile(64, 4, 2)  # the other form rounds otherwise than Out does
    use_default_with(monkeypatch, pre=pre, transition_out=Tile(32, 4, 2))
    expected = gated_delta_rule(*inputs, docs, **TRITON)
    for block_v, stages, cuts in itertools.product((16, 32), (2, 3), ((), (0.3, 0.6))):
        if hopper.out_shared_bytes(sizes[0], block_v, stages) + 1024 <= 232_448:
            tile = Tile(block_v, 4, stages, specialized=True)
            use_default_with(monkeypatch, pre=pre, transition_out=tile, cuts=cuts)
            for _ in range(10):
                assert_same_bits(gated_delta_rule(*inputs, docs, **TRITON), expected)


@pytest.mark.parametrize("with_docs", [False, True])
@pytest.mark.parametrize("sizes", list(itertools.product(hopper.K_DIMS, (64, 128))), ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_specialised_walks_have_the_bits_of_tritons(dtype, sizes, with_docs, monkeypatch):
    """At each depth that fits: an odd one has three places for results, the others two."""
    torch.manual_seed(0)
    inputs = make(1, 1000, 3, 2, *sizes, dtype=dtype)
    if not hopper.available(inputs[0].device):
        pytest.skip("not this GPU, or not this Triton")
    docs = documents(1, 1000, rate=0.005) if with_docs else None
    walks, pre = ("transition", "transition_out", "transition_backward"), Tile(64, 4, 2)
    use_default_with(monkeypatch, pre=pre, **dict.fromkeys(walks, Tile(32, 4, 2)), gradient_chunks=0)
    expected = run(inputs, docs, **TRITON)
    for block_v, stages, overlap in itertools.product((16, 32), (2, 3, 4), ({}, OVERLAP)):
        fits = (sizes[0], block_v, 232_448)
        if stages > min(hopper.default_stages(True, *fits), hopper.default_out_stages(*fits)):
            continue
        tiles = dict.fromkeys(walks, Tile(block_v, 4, stages, specialized=True))
        use_default_with(monkeypatch, pre=pre, **tiles, gradient_chunks=0, **overlap)
        for _ in range(10):
            assert_same_bits(run(inputs, docs, **TRITON), expected)


@pytest.mark.parametrize("with_docs", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_prepared_for_hopper(dtype, with_docs, monkeypatch):
    """Right, the same bits each time and however the sequence is cut; two heads share their keys."""
    torch.manual_seed(0)
    inputs = make(1, 1000, 2, 2, 128, 128, dtype=dtype, max_decay=0.3)
    if not hopper.available(inputs[0].device):
        pytest.skip("not this GPU, or not this Triton")
    docs = documents(1, 1000, rate=0.005) if with_docs else None
    launches, launch = [], hopper.prepare
    monkeypatch.setattr(hopper, "prepare", lambda *args: launches.append(args[-1]) or launch(*args))
    first = run(inputs, docs, **TRITON)
    assert {False, True} == set(launches), "with the solve and without"
    expected = run(exact(inputs), docs, backend="chunk", use_qk_l2norm_in_kernel=True)
    for result, reference, bound in zip(first, expected, BOUNDS[dtype], strict=True):
        assert_close([result.cpu()], [reference], bound)
    for changes in ({}, OVERLAP):
        use_default_with(monkeypatch, **changes)
        for _ in range(20):
            assert_same_bits(run(inputs, docs, **TRITON), first)
        assert_same_bits(run_in_pieces(inputs, docs, [128, 192, 896], **TRITON), first)


def test_keys_that_are_nearly_parallel(monkeypatch):
    """beta 2 and nothing forgotten: the solve of T is at its hardest, and both forms have the same errors."""
    torch.manual_seed(0)
    inputs = make(1, 300, 1, 1, 128, 128, max_decay=0.0)
    with torch.no_grad():
        inputs[1] += 10 * torch.randn_like(inputs[1][:, :1])
        inputs[4].fill_(2.0)
    expected = run(exact(inputs), None, backend="chunk", use_qk_l2norm_in_kernel=True)
    errors = []
    for pre in (Tile(64, 4, 2), Tile(64, 4, 2, specialized=True)):
        use_default_with(monkeypatch, pre=pre)
        results = run(inputs, None, **TRITON)
        pairs = zip(results, expected, strict=True)
        errors.append([((x.cpu().double() - y).norm() / y.norm()).item() for x, y in pairs])
    assert all(b < 1.5 * a + 1e-3 for a, b in zip(*errors, strict=True)), errors


def test_a_batch_is_its_sequences():
    # Of one sequence the kernels for Hopper would be others, with other bits, where keys are of 64 or 128 in 16 bits.
    torch.manual_seed(0)
    inputs = make(3, 200, 1, 2, 96, 64)
    outputs = gated_delta_rule(*inputs, **TRITON)
    for b in range(3):
        assert_same_bits(gated_delta_rule(*(x[b : b + 1] for x in inputs), **TRITON), [x[b : b + 1] for x in outputs])


@pytest.mark.parametrize("changes", [{}, OVERLAP], ids=["serial", "overlap"])
def test_in_a_cuda_graph(changes, monkeypatch):
    use_default_with(monkeypatch, **changes)
    torch.manual_seed(0)
    inputs = [x.detach() for x in make(1, 500, 2, 1, 128, 128)]
    expected = gated_delta_rule(*inputs, **TRITON)  # also the self-check, which cannot run in a capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = gated_delta_rule(*inputs, **TRITON)
    for x in outputs:
        x.zero_()
    graph.replay()
    torch.cuda.synchronize()
    assert_same_bits(outputs, expected)


def test_on_another_than_the_current_device():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    torch.manual_seed(0)
    inputs = make(1, 100, 1, 1, 64, 64)
    expected = run(inputs, None, **TRITON)
    others = [x.detach().to("cuda:1").requires_grad_() for x in inputs]
    assert torch.cuda.current_device() == 0
    assert_same_bits([x.to("cuda:0") for x in run(others, None, **TRITON)], expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_layer_compiled_with_inductor(dtype):
    layer = make_layer("cuda", "triton")
    layer = layer.to(dtype)
    compiled = torch.compile(layer, fullgraph=True)
    for num_tokens in (100, 70, 164):  # from the second on with a symbolic length
        x = torch.randn(1, num_tokens, 16, device="cuda", dtype=dtype, requires_grad=True)
        results = []
        for form in (compiled, layer):
            y, state = form(x)
            outputs = [y, *state]
            results.append([*outputs, *torch.autograd.grad(outputs, [x, *layer.parameters()], grads_like(outputs))])
        assert_close(*results, 1e-5 if dtype == torch.float32 else 3e-2)


def test_more_than_2_31_elements():
    """Of q, k, v and o. The first tokens and the last document are those of short sequences, bit for bit."""
    torch.cuda.empty_cache()
    if torch.cuda.mem_get_info()[0] < 110 * GIB:
        pytest.skip("needs 110 GiB of free GPU memory")
    num_tokens, last, heads, dim = 2**17 + 100, 2**17, 128, 128
    assert num_tokens * heads * dim > 2**31 and last % 64 == 0
    generator = torch.Generator("cuda").manual_seed(0)
    options = dict(device="cuda", generator=generator)
    tokens = [torch.randn(1, num_tokens, heads, dim, dtype=torch.bfloat16, **options) for _ in range(3)]
    tokens += [-torch.rand(1, num_tokens, heads, **options), torch.rand(1, num_tokens, heads, **options)]
    state = torch.randn(1, heads, dim, dim, **options)
    docs = torch.tensor([[-1] * last + [last] * (num_tokens - last)], device="cuda")
    inputs = [x.requires_grad_() for x in (*tokens, state)]
    o, new_state = gated_delta_rule(*inputs, docs, **TRITON)
    with torch.no_grad():
        start, _ = gated_delta_rule(*(x[:, :192] for x in tokens), state, docs[:, :192], **TRITON)
    assert_same_bits([start], [o[:, :192]])

    short = [x[:, last:].detach().clone().requires_grad_() for x in tokens] + [state.detach().clone().requires_grad_()]
    short_outputs = gated_delta_rule(*short, docs[:, last:] - last, **TRITON)
    assert_same_bits(short_outputs, [o[:, last:], new_state])
    short_grads = torch.autograd.grad(short_outputs, short, [torch.ones_like(x) for x in short_outputs])
    *token_grads, _ = torch.autograd.grad([o, new_state], inputs, [torch.ones_like(o), torch.ones_like(new_state)])
    assert_same_bits([x[:, last:] for x in token_grads], short_grads[:5])
    assert all(x[:, : last : 2**12].isfinite().all() for x in token_grads)
