"""The gated delta rule's walks through several segments at once, against the recurrence token by token in float64."""

import dataclasses
import functools

import pytest
import torch
import triton

import stateflow_kernels.gated_delta_rule as kernels
from stateflow.recurrence import gated_delta_kernels, self_check
from stateflow_kernels import plans, transition, waves
from stateflow_kernels.primitives import INTERPRETED
from stateflow_kernels.waves import walk_segments
from tests.kernels.gluon_emulation import hopper_on_the_cpu
from tests.kernels.kernel_testing import on_devices, only_own_memory
from tests.kernels.test_gated_delta_kernels import BOUNDS, exact, grads_like, make_inputs, make_layer, run
from tests.recurrence.op_testing import assert_close, assert_same_bits, documents, poisoned_memory

EPS = 1e-6


@pytest.fixture(autouse=True)
def fresh_choices(monkeypatch):
    """On a GPU none is another plan's or the chunk form's: those tests would say nothing."""
    monkeypatch.setattr(self_check, "_outcomes", {})
    monkeypatch.setattr(gated_delta_kernels, "_chosen", {})
    yield
    replaced = [(*key, out) for key, out in self_check._outcomes.items() if key[0].device.type == "cuda"]
    assert all(outcome.plan == plan for _, plan, outcome in replaced)


def results(inputs, docs, num_segments: int) -> list[torch.Tensor]:
    """Both outputs and all gradients by the operation."""
    docs = None if docs is None else docs.to(inputs[0].device)
    outputs = torch.ops.stateflow.gated_delta_rule_triton(*inputs, docs, 0.3, EPS, num_segments)[:2]
    return [*outputs, *torch.autograd.grad(outputs, inputs, grads_like(outputs))]


def check(given, inputs, docs, bounds) -> None:
    options = dict(scale=0.3, use_qk_l2norm_in_kernel=True, l2norm_eps=EPS, backend="reference")
    for x, reference, bound in zip(given, run(exact(inputs), docs, **options), bounds, strict=True):
        assert_close([x.cpu()], [reference], bound)


@on_devices
@pytest.mark.parametrize(
    ("dtype", "num_tokens", "num_segments", "with_docs", "max_decay", "max_beta"),
    [
        (torch.float32, 150, 2, True, 0.1, 1.0),
        (torch.float32, 230, 4, False, 0.0, 2.0),  # nothing is forgotten; a ragged end
        (torch.float32, 70, 5, False, 0.02, 1.0),  # more segments than chunks
        (torch.bfloat16, 150, 3, True, 0.02, 1.0),
    ],
)
def test_equal_the_recurrence(device, dtype, num_tokens, num_segments, with_docs, max_decay, max_beta):
    torch.manual_seed(0)
    decays = dict(max_decay=max_decay, max_beta=max_beta)
    inputs = make_inputs(1, num_tokens, 1, 2, 24, 40, dtype=dtype, device=device, normalize=True, **decays)
    docs = documents(1, num_tokens, rate=0.01) if with_docs else None
    bounds = BOUNDS[dtype] if max_beta <= 1 else [3e-5] * 8
    check(results(inputs, docs, num_segments), inputs, docs, bounds)


@on_devices
def test_one_segment_is_the_exact_order(device):
    torch.manual_seed(0)
    inputs = make_inputs(1, 70, 1, 1, 16, 16, device=device, normalize=True)
    options = dict(scale=0.3, use_qk_l2norm_in_kernel=True, l2norm_eps=EPS, backend="triton")
    given = run(inputs, None, **options)
    assert_same_bits(results(inputs, None, 1), given)
    # A short sequence has one segment anyway.
    assert_same_bits(run(inputs, None, exact_order=False, **options), given)


@pytest.mark.skipif(not INTERPRETED, reason="needs TRITON_INTERPRET=1")
def test_no_other_memory_is_touched_or_read_unwritten():
    torch.manual_seed(0)
    inputs = make_inputs(1, 70, 1, 1, 24, 40, normalize=True)
    with only_own_memory(), poisoned_memory():
        given = results(inputs, documents(1, 70, rate=0.02), 3)
    assert all(x.isfinite().all() for x in given)


def test_how_many_segments():
    assert [walk_segments(512, heads, 128, 128) for heads in (4, 8, 10, 13, 14, 20, 40)] == [16, 8, 6, 5, 1, 1, 1]
    assert [walk_segments(chunks, 10, 128, 128) for chunks in (159, 160, 191, 192, 4096)] == [1, 5, 5, 6, 6]
    assert walk_segments(512, 2, 256, 128) == 1  # no kernel composes maps of such keys
    assert walk_segments(512, 0, 128, 128) == 1  # an empty batch


@on_devices
def test_only_without_exact_order(device, monkeypatch):
    """Through a layer, as compiled code has it, too."""
    monkeypatch.setattr(waves, "_LEAST_CHUNKS", 1)
    monkeypatch.setattr(waves, "_FEWEST_SEGMENTS", 2)
    used, forward = [], kernels.forward
    monkeypatch.setattr(kernels, "forward", lambda *args: used.append(args[-1].num_segments) or forward(*args))
    layer = make_layer(device, "triton")
    x = torch.randn(1, 70, 16).to(device)
    with torch.no_grad():
        expected = layer(x)[0]
        assert set(used) == {1}  # a self-check's, too
        used.clear()
        layer.exact_order = False
        given = [form(x)[0] for form in (layer, torch.compile(layer, backend="aot_eager", fullgraph=True))]
    assert set(used) == {2}
    assert_close(given, [expected] * 2, 1e-5)


@pytest.mark.skipif(not INTERPRETED, reason="needs TRITON_INTERPRET=1")
def test_a_call_is_checked_in_as_many_ways_as_it_walks(monkeypatch):
    """In segments where it goes through segments, and not by the check of one walk."""
    asked = []
    monkeypatch.setattr(
        self_check, "checked_plan", lambda problem, plan: asked.append((problem.in_segments, plan.num_segments)) or plan
    )
    torch.manual_seed(0)
    inputs = make_inputs(1, 70, 1, 1, 16, 16, normalize=True)
    for num_segments in (1, 2):
        results(inputs, None, num_segments)
    assert set(asked) == {(False, 1), (True, 2)}


@triton.jit
def first_chunk_of_a_segment(segment, num_segments, first_chunk, end_chunk):
    first = first_chunk + segment * (end_chunk - first_chunk) // num_segments
    return first, first + 1


@triton.jit
def without_the_last_chunk(segment, num_segments, first_chunk, end_chunk):
    chunks = end_chunk - first_chunk
    end = first_chunk + (segment + 1) * chunks // num_segments
    return first_chunk + segment * chunks // num_segments, end - (segment == num_segments - 1)


def composed_otherwise(monkeypatch, change, backward_only: bool = False) -> None:
    """Maps reach `compose` as `change` leaves them."""
    compose = kernels._Problem.compose

    def faulty(self, state, ends, maps, backward):
        compose(self, state, ends, change(maps) if backward or not backward_only else maps, backward)

    monkeypatch.setattr(kernels._Problem, "compose", faulty)


def maps_of_other_chunks(monkeypatch, segment_chunks, backward_only: bool = False) -> None:
    """The walks for maps go through other chunks than those whose states and gradients are kept."""
    walk, right = kernels._Problem.walk, transition._segment_chunks

    def faulty(self, kernel, *args, maps_of=()):
        backward = kernel is transition.transition_backward_kernel
        wrong = bool(maps_of) and (backward or not backward_only)
        transition._segment_chunks = segment_chunks if wrong else right
        try:
            walk(self, kernel, *args, maps_of=maps_of)
        finally:
            transition._segment_chunks = right

    monkeypatch.setattr(kernels._Problem, "walk", faulty)


def gradients_that_end_with_their_segment(monkeypatch) -> None:
    compose = kernels._Problem.compose

    def faulty(self, state, ends, maps, backward):
        compose(self, state, ends, maps, backward)
        if backward:
            ends[:, :, :-1] = 0

    monkeypatch.setattr(kernels._Problem, "compose", faulty)


def without_map(index: int):
    def change(maps):
        return maps.index_fill(2, torch.tensor([index], device=maps.device), 0.0)

    return change


FAULTS = {
    "no map": lambda patch: composed_otherwise(patch, torch.zeros_like),
    "no map of the second segment": lambda patch: composed_otherwise(patch, without_map(0)),
    "no map of the third one": lambda patch: composed_otherwise(patch, without_map(1)),
    "none of it for gradients": lambda patch: composed_otherwise(patch, without_map(1), backward_only=True),
    "maps in another order": lambda patch: composed_otherwise(patch, lambda maps: maps.roll(1, 2)),
    "gradients by M": lambda patch: composed_otherwise(patch, lambda maps: maps.mT.contiguous(), backward_only=True),
    "maps of a chunk": lambda patch: maps_of_other_chunks(patch, first_chunk_of_a_segment),
    "maps of a chunk for gradients": lambda patch: maps_of_other_chunks(patch, first_chunk_of_a_segment, True),
    "no ragged end for gradients": lambda patch: maps_of_other_chunks(patch, without_the_last_chunk, True),
    "gradients within segments": gradients_that_end_with_their_segment,
}


def problem_in_segments(dtype=torch.float32, **changes) -> self_check.Problem:
    fields = dict(num_heads=1, num_key_heads=1, k_dim=16, v_dim=16, normalize=True, has_docs=False) | changes
    return self_check.Problem(torch.device("cpu"), dtype, **fields, in_segments=True)


@functools.cache
def example_and_expected(problem: self_check.Problem) -> tuple:
    inputs, grads = problem.example()
    return inputs, grads, problem.expected(*([self_check._to_float64(x) for x in xs] for xs in (inputs, grads)))


def misses_of(problem: self_check.Problem, plan) -> list[str]:
    return self_check._try(problem, plan, *example_and_expected(problem)).misses(problem.bounds)


@pytest.mark.skipif(not INTERPRETED, reason="needs TRITON_INTERPRET=1")
@pytest.mark.parametrize("fault", FAULTS)
def test_the_self_check_sees_what_is_wrong_with_segments(fault, monkeypatch):
    """In 16 bits, whose bounds are wide."""
    problem = problem_in_segments(torch.bfloat16)
    FAULTS[fault](monkeypatch)
    assert misses_of(problem, plans.in_segments(problem.fallback_plan(), 6, 16))


@pytest.mark.skipif(not INTERPRETED, reason="needs TRITON_INTERPRET=1")
@pytest.mark.parametrize(
    ("dtype", "changes"),
    [(torch.float32, {}), (torch.bfloat16, dict(has_docs=True)), (torch.float16, dict(num_heads=2, normalize=False))],
)
def test_the_self_check_of_segments_passes(dtype, changes, monkeypatch):
    problem = problem_in_segments(dtype, **changes)
    used, forward = [], kernels.forward
    monkeypatch.setattr(kernels, "forward", lambda *args: used.append(args[-1].num_segments) or forward(*args))
    plan = plans.in_segments(problem.fallback_plan(), 6, 16)
    assert misses_of(problem, plan) == [] and used == [self_check.MOST_SEGMENTS]
    # Each has several chunks, and the last one an end of its own.
    tokens = problem.example()[0][0].shape[1]
    assert tokens % 64 and tokens // 64 >= 2 * self_check.MOST_SEGMENTS


@pytest.mark.skipif(not INTERPRETED, reason="needs TRITON_INTERPRET=1")
def test_the_chunk_form_takes_the_place_of_wrong_segments(monkeypatch, caplog):
    monkeypatch.setattr(self_check, "CHECKED_DEVICES", ("cpu",))
    problem = problem_in_segments()
    FAULTS["no map"](monkeypatch)
    assert self_check.checked_plan(problem, plans.in_segments(problem.fallback_plan(), 3, 16)) is None
    assert "float32, normalised, in segments) failed their self-check" in caplog.records[0].getMessage()
    torch.manual_seed(0)
    inputs = make_inputs(1, 70, 1, 1, 16, 16, normalize=True)
    check(results(inputs, None, 3), inputs, None, [1e-5] * 8)  # with the same outputs kept


def plan_for_hopper() -> kernels.Plan:
    """Of heads of 64 x 64."""
    plan = kernels.default_plan(64, 64, torch.bfloat16)
    tiles = {name: dataclasses.replace(getattr(plan, name), specialized=True) for name in ("pre", *plans.WIDE_WALKS)}
    wide = plans.in_segments(dataclasses.replace(plan, **tiles), 4, 64)
    assert wide.transition.block_v == 64
    return wide


@pytest.mark.skipif(not INTERPRETED, reason="the other kernels must run on the CPU, too")
def test_the_self_check_sees_what_is_wrong_with_those_for_hopper(monkeypatch):
    problem = problem_in_segments(torch.bfloat16, k_dim=64, v_dim=64)
    with hopper_on_the_cpu(monkeypatch):
        from stateflow_kernels import hopper_segments  # the emulated one

        assert misses_of(problem, plan_for_hopper()) == []

        def first_chunk(segment, num_segments, first_chunk, end_chunk):
            first = first_chunk + segment * (end_chunk - first_chunk) // num_segments
            return first, first + 1

        monkeypatch.setattr(hopper_segments, "_segment_chunks", first_chunk)
        assert {miss.split()[0] for miss in misses_of(problem, plan_for_hopper())} >= set(self_check.NAMES)


@pytest.mark.skipif(not INTERPRETED, reason="the other kernels must run on the CPU, too")
def test_those_for_hopper_do_what_tritons_do(monkeypatch):
    from stateflow_kernels import hopper

    for name in ("K_DIMS", "MERGED_DIMS"):
        monkeypatch.setattr(hopper, name, (64,))
    torch.manual_seed(0)
    inputs = [x.detach() for x in make_inputs(1, 300, 1, 1, 64, 64, dtype=torch.bfloat16, normalize=True)]
    inputs[3] *= 0.02
    grads = grads_like([inputs[2], inputs[5]])
    plan, wide = kernels.default_plan(64, 64, torch.bfloat16), plan_for_hopper()

    def both(plan) -> list[torch.Tensor]:
        o, state, kept = kernels.forward(*inputs, None, 0.3, EPS, plan)
        return [o, state, kept[1], kept[2], *kernels.backward(*grads, *inputs, None, kept, 0.3, EPS, plan)]

    expected = both(plans.in_segments(plan, 4, 64))
    launches = []
    for name in ("transition_maps", "transition_backward_maps", "transition_out"):
        launch = getattr(hopper, name)
        monkeypatch.setattr(hopper, name, lambda *args, f=launch: launches.append(f.__name__) or f(*args))
    with hopper_on_the_cpu(monkeypatch):
        given = both(wide)
    assert len(launches) == 3
    assert_close(given, expected, 4e-3)
