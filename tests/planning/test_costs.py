"""Counted costs and memory against the formulas, real modules and hand counts."""

import dataclasses
import functools
import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from stateflow.chunks import ChunkCost, ChunkPlan, default_multiple
from stateflow.loss import cross_entropy_sum
from stateflow.model import LanguageModel, count_parameters, flops_per_token
from stateflow.pipeline.accounting import held_bytes
from stateflow.pipeline.lowering import lower
from stateflow.pipeline.policies import build_schedule
from stateflow.pipeline.schedule import Action, Kind
from stateflow.pipeline.simulator import Link, simulate
from stateflow.pipeline.split import split_model
from stateflow.pipeline.stage import ChunkStage
from stateflow.planning.analytic import Analytic, Cell, best_cell
from stateflow.planning.costs import layer_cost, stage_costs, static_bytes
from stateflow.planning.devices import DEVICES, device_named
from stateflow.planning.job import Job
from stateflow.titan.config import chunk_cost
from stateflow.titan.flavors import FLAVORS
from tests import cases


def make_job(config=None, num_ranks=2, num_microbatches=2, **changes) -> Job:
    config = FLAVORS["tiny"] if config is None else config
    share = config.num_layers // num_ranks
    parts = [[f"layers.{i}" for i in range(r * share, (r + 1) * share)] for r in range(num_ranks)]
    parts[0].insert(0, "tok_embeddings")
    parts[-1] += ["norm", "output"]
    seq_len = changes.pop("seq_len", 64)
    return Job(
        model=config, parts=tuple(map(tuple, parts)), seq_len=seq_len, num_ranks=num_ranks, microbatch_size=1,
        num_microbatches=num_microbatches, skew_cost=chunk_cost(config, seq_len), **changes,
    )  # fmt: skip


@pytest.mark.parametrize("flavor", ["tiny", "demo", "gdn_3b_hybrid", "gdn_32b", "mamba3_3b_hybrid"])
def test_flops_of_a_sequence_are_those_of_the_model(flavor):
    """Forward plus backward of all stages is flops_per_token: head and loss run once, in the backward."""
    config, seq_len = FLAVORS[flavor], 4096
    stages = stage_costs(make_job(config, seq_len=seq_len))
    total = sum(
        sum(stage.forward_flops(0, seq_len).values()) + sum(stage.backward_flops(0, seq_len).values())
        for stage in stages
    )
    assert total == pytest.approx(seq_len * flops_per_token(config, seq_len), rel=1e-12)
    # And of a chunk they are those by which [stateflow] skew cuts.
    of_chunk = [(*stage.forward_flops(3000, 96).values(), *stage.backward_flops(3000, 96).values()) for stage in stages]
    assert sum(map(sum, of_chunk)) == pytest.approx(chunk_cost(config, seq_len).cost(3000, 96), rel=1e-12)
    assert sum(stage.parameters for stage in stages) == count_parameters(config)


@functools.cache
def _stage_with_attention():
    return stage_costs(make_job())[1]


@settings(max_examples=30)
@given(st.integers(0, 60), st.integers(1, 64))
def test_eq_9_is_additive_over_chunks(cut, length):
    """Chunks of a sequence cost what the sequence costs: nothing is counted twice."""
    stage, cut = _stage_with_attention(), min(cut, length)
    for flops in (stage.forward_flops, stage.backward_flops):
        whole, left, right = flops(0, length), flops(0, cut), flops(cut, length - cut)
        assert all(left[name] + right[name] == pytest.approx(whole[name]) for name in whole)


@pytest.mark.parametrize("degree", [2, 4])
@pytest.mark.parametrize("kind", ["gdn", "mamba3", "attention"])
def test_tensor_parallelism_divides_what_it_can(kind, degree):
    config = FLAVORS["gdn_3b_hybrid"]
    one, part = (layer_cost(config, kind, d, torch.bfloat16) for d in (1, degree))
    assert part.pairs == one.pairs / degree
    assert part.recurrence == one.recurrence / degree
    assert one.parameters / degree <= part.parameters < 1.2 * one.parameters / degree
    if kind == "attention":  # 5 K/V heads: 2 ranks hold 3 of them, 4 ranks 2, and the weights of all
        assert part.window_bytes == one.window_bytes * {2: 3, 4: 2}[degree] / 5
        assert part.dense > one.dense / degree
    else:
        shared = 1.03 if kind == "mamba3" else 1.0  # every rank computes Mamba-3's B and C
        assert one.dense / degree <= part.dense <= shared * one.dense / degree
        assert part.carry_bytes == one.carry_bytes / degree


@pytest.mark.parametrize("kinds", [["gdn", "gdn"], ["attention", "gdn"]])
def test_footprint_is_what_the_running_stage_reports_and_saves(kinds):
    config = dataclasses.replace(FLAVORS["tiny"], pattern=kinds, num_layers=2, backend="chunk")
    stages = stage_costs(make_job(config))
    model = LanguageModel(config)
    for stage, part in zip(stages, split_model(model, 2), strict=True):
        running = ChunkStage(part, ChunkPlan.build(64, 2)).footprint(1, config.dim)
        per_token = [f"{name}_bytes_per_token" for name in ("activation", "window", "window_grad")]
        for name in (*per_token, "carry_bytes"):
            assert getattr(stage.footprint, name) == getattr(running, name), name
        layer, block = stage.layers[0], next(iter(part.layers.values()))
        assert layer.saved_bytes == pytest.approx(saved_bytes_a_token(block, config.dim), rel=0.02)


def saved_bytes_a_token(block: nn.Module, dim: int, num_tokens: int = 512) -> float:
    """Counted in a real forward on the CPU, by the storages' addresses."""
    sizes = {}

    def note(tensor):
        sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    x = torch.randn(1, num_tokens, dim, requires_grad=True)
    state = block.mixer.initial_state(1, "cpu", torch.float32)
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        result = block(x, state, None)
    for tensor in (*block.parameters(), *state):
        sizes.pop(tensor.untyped_storage().data_ptr(), None)
    del result
    return sum(sizes.values()) / num_tokens


@pytest.mark.parametrize("number", [0, 1, 2])
def test_a_stage_keeps_what_is_counted_until_its_backward(number):
    """What autograd saves and what waits for the loss: not the received input, whose buffer is counted apart."""
    config = dataclasses.replace(FLAVORS["tiny"], pattern=["gdn"], num_layers=3, backend="chunk")
    tokens, sizes = 512, {}

    def note(tensor):
        sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    part = split_model(LanguageModel(config), 3)[number]
    stage = ChunkStage(part, ChunkPlan((0, tokens)), is_last=number == 2, loss_fn=cross_entropy_sum)
    ids = torch.randint(config.vocab_size, (1, tokens))
    x = ids if number == 0 else torch.randn(1, tokens, config.dim)
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        stage.forward(0, 0, x, target=ids.clone() if number == 2 else None)
    unit = stage._units[0, 0]
    if unit.put_off is not None:
        for tensor in (*unit.put_off.output, unit.put_off.target):
            note(tensor)
    for tensor in (*part.parameters(), *unit.carries, *([] if number == 0 else [x])):
        sizes.pop(tensor.untyped_storage().data_ptr(), None)
    counted = stage_costs(make_job(config, num_ranks=3, seq_len=tokens))[number].footprint.saved_bytes_per_token
    norm = 4 * (config.dim + 1) if number == 2 else 0  # kept by the last norm on a CPU only: its input over the root
    assert sum(sizes.values()) / tokens - norm == pytest.approx(counted, abs=1)


def test_a_stage_is_counted_once_a_sequence_and_works_in_logits_and_a_layer():
    config = dataclasses.replace(FLAVORS["tiny"], pattern=["gdn", "attention"])
    jobs = [dataclasses.replace(make_job(config, recompute="full"), microbatch_size=n) for n in (1, 3)]
    (first, last), (first_of_3, last_of_3) = (stage_costs(job) for job in jobs)
    for one, three in ((first, first_of_3), (last, last_of_3)):
        for field in dataclasses.fields(one.footprint):
            value = getattr(one.footprint, field.name)
            if field.name not in ("working_bytes", "carry_grad_bytes"):
                assert getattr(three.footprint, field.name) == 3 * value > 0, field.name
        again = one.footprint.backward_bytes_per_token - one.footprint.forward_bytes_per_token
        assert again == max(layer.saved_bytes for layer in one.layers)  # of the layer that is computed again
    assert [job.message_bytes(5) for job in jobs] == [5 * config.dim * 4, 3 * 5 * config.dim * 4]
    every_second = dataclasses.replace(jobs[0], recompute="selective", recompute_every=2)
    assert [every_second.recomputes(n) for n in range(5)] == [False, True, False, True, False]
    logits, head = 64 * config.vocab_size * 4, config.vocab_size * config.dim * 4
    assert first.footprint.working_bytes == 0 and last.footprint.working_bytes == 2 * logits + head


def test_recomputation_saves_inputs_only_and_costs_a_forward():
    config = FLAVORS["gdn_3b_hybrid"]
    none, full = (stage_costs(make_job(config, recompute=mode, seq_len=4096))[1] for mode in ("none", "full"))
    assert full.footprint.saved_bytes_per_token < none.footprint.saved_bytes_per_token / 10
    forward = none.forward_flops(0, 128)
    for name in ("attention", "recurrence"):
        assert full.backward_flops(0, 128)[name] == none.backward_flops(0, 128)[name] + forward[name]


def test_a_split_backward_does_what_a_whole_one_does():
    for stage in stage_costs(make_job(FLAVORS["gdn_3b_hybrid"], recompute="full", seq_len=4096)):
        analytic = Analytic(make_job(seq_len=64), DEVICES["cpu"])
        whole, split = (
            {kind: analytic._flops(kind, stage, 256, 128) for kind in kinds} for kinds in ((Kind.B,), (Kind.I, Kind.W))
        )
        assert split[Kind.W].keys() == {"dense"}
        for name, amount in whole[Kind.B].items():
            assert split[Kind.I][name] + split[Kind.W].get(name, 0) == amount
        # Recomputed, a layer's backward is three forwards: I does two of them, and all of the head.
        assert split[Kind.W]["dense"] <= whole[Kind.B]["dense"] / 3


def test_what_waits_for_w_is_what_a_running_stage_keeps():
    model = cases.make_model(["gdn", "attention"], torch.float32)
    (stage,) = cases.make_stages(model, 1, ChunkPlan((0, 8)))
    tokens, labels = cases.make_batch(1, 8, seed=0)
    stage.split_backward()
    stage.forward(0, 0, tokens, target=labels)
    stage.backward(0, 0, input_only=True)
    counted = sum(
        layer_cost(model.config, kind, 1, torch.float32).weight_bytes for kind in model.config.layer_kinds()
    )
    assert stage.usage().weight_work_bytes == 8 * counted > 0
    stage.weight_backward(0, 0)
    assert stage.usage().weight_work_bytes == 0


def test_static_bytes():
    job = make_job()
    assert static_bytes(job, 100) == {"parameters": 400, "gradients": 400, "optimizer": 800, "fsdp": 0}
    sharded = dataclasses.replace(job, fsdp=4, wrapped_by_fsdp=True, compute_dtype=torch.bfloat16)
    # A quarter of parameters and optimizer; whole bf16 parameters and float32 gradients while the step runs.
    assert static_bytes(sharded, 100) == {"parameters": 100, "gradients": 400, "optimizer": 200, "fsdp": 200}


costs = st.builds(ChunkCost, st.floats(0.01, 1e9), st.floats(0, 1e6))


@given(costs, st.integers(2, 1 << 20), st.integers(1, 40))
def test_balanced_boundaries_solve_eq_10(cost, seq_len, num_chunks):
    num_chunks = min(num_chunks, seq_len)
    cuts = cost.balanced_boundaries(seq_len, num_chunks)
    share = cost.cost(0, seq_len) / num_chunks
    for start, stop in zip(cuts, cuts[1:], strict=False):
        assert cost.cost(start, stop - start) == pytest.approx(share, rel=1e-9)


@given(costs, st.integers(2, 1 << 18), st.integers(1, 32), st.floats(0, 1))
def test_rounding_keeps_sum_and_order(cost, seq_len, num_chunks, skew):
    num_chunks = max(1, min(num_chunks, seq_len // 2))
    plan = ChunkPlan.build(seq_len, num_chunks, skew, cost)
    assert sum(plan.lengths) == seq_len and min(plan.lengths) >= 1
    assert all(cut % default_multiple(seq_len, num_chunks) == 0 for cut in plan.boundaries[:-1])


def test_prediction_of_uniform_work_is_eq_15():
    """Without messages, launches and a head, and with equal stages, the step is (M + (P-1)/N) t."""
    config = dataclasses.replace(FLAVORS["demo"], pattern=["gdn"])
    job = make_job(config, num_ranks=4, num_microbatches=6, seq_len=1024)
    device = dataclasses.replace(DEVICES["h200"], launch_seconds=0, link_latency=0, link_bandwidth=float("inf"))
    analytic = Analytic(job, device)
    analytic.stages = [dataclasses.replace(stage, head_flops=0) for stage in analytic.stages]
    whole = analytic.cell(1, 0.0).step_time / (6 + 3)
    for num_chunks in (2, 4, 8):
        assert analytic.cell(num_chunks, 0.0).step_time == pytest.approx((6 + 3 / num_chunks) * whole)


@pytest.mark.parametrize(("recompute", "backward"), [("none", 2), ("full", 3)])
def test_an_action_takes_as_long_as_its_work_or_its_launches(recompute, backward):
    job, plan = make_job(recompute=recompute), ChunkPlan.build(64, 4)
    free, idle, bound = (
        Analytic(job, dataclasses.replace(DEVICES["cpu"], launch_seconds=launch)).cost(plan)
        for launch in (0.0, 1e3, 9e-6)
    )
    layers, bounds = len(job.parts[0]) - 1, set()
    assert layers == len(job.parts[1]) - 2 == 2
    for stage, head in ((0, 0), (1, 1)):  # head and loss run in the backward
        launches = {Kind.F: layers, Kind.B: backward * layers + 2 * head, Kind.W: layers / 2}
        launches[Kind.I] = launches[Kind.B] - launches[Kind.W]
        for kind, count in launches.items():
            for chunk in range(4):
                action = Action(stage, kind, 0, chunk)
                assert idle(action) == 1e3 * count
                assert bound(action) == pytest.approx(max(free(action), 9e-6 * count))
                bounds.add(free(action) > 9e-6 * count)
    assert bounds == {True, False}


def test_messages_take_time_and_stages_belong_to_the_ranks_of_the_schedule():
    device = dataclasses.replace(DEVICES["cpu"], link_latency=0.5, link_bandwidth=1e5)
    config = dataclasses.replace(FLAVORS["tiny"], num_layers=4)
    job = make_job(config, num_ranks=4)
    analytic, plan = Analytic(dataclasses.replace(job, num_ranks=2), device), ChunkPlan.build(64, 2)
    schedule = analytic.schedule("v_shape", 2)
    messages = (Link(0.5, 1e5), lambda action: 32 * config.dim * 4)
    assert analytic.simulate(plan, "v_shape").step_time == simulate(schedule, analytic.cost(plan), *messages).step_time
    static = [sum(static_bytes(job, stage.parameters).values()) for stage in analytic.stages]
    assert len({static[0] + static[3], static[1] + static[2], static[0] + static[2], static[1] + static[3]}) > 2
    held = held_bytes(lower(schedule), plan, [stage.footprint for stage in analytic.stages])
    units = [max(during for during, _ in row) for row in held]
    expected = (static[0] + static[3] + units[0], static[1] + static[2] + units[1])
    assert analytic.peak_bytes(schedule, plan) == expected  # although the job's policy places them in a loop


def test_orders_are_the_jobs_and_of_equal_cells_the_simplest_is_best():
    config = dataclasses.replace(FLAVORS["tiny"], num_layers=8)
    job = dataclasses.replace(make_job(config, num_ranks=8, recompute="full", weight_lag=1), num_ranks=4)
    analytic = Analytic(job, DEVICES["cpu"])
    for policy, lag in (("1f1b", None), ("zero_bubble", 1)):  # with two stages a rank both would be others
        assert analytic.schedule(policy, 4) == build_schedule(policy, 4, 2, 4, 2, lag, recomputed=True)
    cells = [Cell(n, skew, "1f1b", step_time=1.0, fits=True) for n, skew in ((4, 0.0), (2, 0.5), (2, 0.25), (6, 0.0))]
    assert best_cell(cells) is cells[2]


def test_overhead_of_chunks_is_what_whole_sequences_would_not_take():
    plan, whole = ChunkPlan.explicit(64, [40, 16, 8]), ChunkPlan((0, 64))
    analytic = Analytic(make_job(), dataclasses.replace(DEVICES["cpu"], launch_seconds=1e-3))
    cost, overhead, uncut = analytic.cost(plan), analytic.overhead(plan), analytic.cost(whole)
    for stage, kind in itertools.product((0, 1), (Kind.F, Kind.B)):
        chunks = [Action(stage, kind, 0, chunk) for chunk in range(3)]
        lost = sum(map(cost, chunks)) - uncut(chunks[0])
        assert lost > 0 and sum(map(overhead, chunks)) == pytest.approx(lost)


def test_what_does_not_fit_says_why_and_is_never_chosen():
    job = make_job(seq_len=64)
    analytic = Analytic(job, DEVICES["cpu"])
    cells = analytic.grid()
    skews = (0, 0.1, 0.2, 0.25, 0.3, 0.4, 0.5, 0.6, 0.7, 0.75, 0.8, 0.9, 1, 1.25)
    assert {(c.num_chunks, c.skew) for c in cells} == {(n, s) for n in (1, 2, 4, 6, 8, 16, 32) for s in skews}
    assert best_cell(cells) == min((c for c in cells if c.fits), key=lambda c: c.step_time)
    peaks = sorted(max(cell.peak_bytes) for cell in cells if cell.peak_bytes)
    tight = Analytic(job, DEVICES["cpu"], memory_limit=peaks[len(peaks) // 2]).grid()
    assert any(c.fits for c in tight) and any(not c.fits for c in tight)
    for cell in tight:
        if cell.peak_bytes is not None:
            assert cell.fits == (max(cell.peak_bytes) <= peaks[len(peaks) // 2])
            assert cell.fits or "GiB of" in cell.why_not
    assert best_cell(Analytic(job, DEVICES["cpu"], memory_limit=1).grid((1, 2), (0.0,))) is None


def test_unknown_device():
    with pytest.raises(ValueError, match="--device b200: unknown; there are h200"):
        device_named("b200")
