"""On GPUs: the same exactness, and receive buffers that are not overwritten while compute still reads them."""

from __future__ import annotations

import os
import socket

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from stateflow.chunks import ChunkPlan
from stateflow.layer_graphs import CudaRecorder, LayerGraphs
from stateflow.layers import DecayGate
from stateflow.loss import cross_entropy_sum
from stateflow.model import LanguageModel, ModelConfig
from stateflow.pipeline.local import run_local
from stateflow.pipeline.runtime import ScheduleStateFlow, StateFlowStage
from stateflow.pipeline.split import split_model
from stateflow.recompute import Recomputed
from stateflow.working_weights import WorkingWeights
from tests import cases
from tests.pipeline.failing_rank import TIMEOUTS
from tests.pipeline.test_failures import AWAITS_GRADIENT, check_sigterm, start, survive
from tests.shared_gpu import gpu_of

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("policy", ["1f1b", "gpipe"])
def test_gradients_on_one_gpu_equal_the_reference(policy):
    plan = ChunkPlan.explicit(150, [64, 64, 1, 21])
    model = cases.make_model(["gdn", "attention", "gdn", "attention"]).cuda()
    tokens, labels = (t.cuda() for t in cases.make_batch(3, plan.seq_len, seed=1, ignore=0.3))
    docs = cases.make_documents(3, plan.seq_len, seed=1, density=0.02).cuda()
    stages = cases.make_stages(model, 2, plan)
    scale = 1 / (labels != -100).sum().item()
    schedule = cases.schedule_of(policy, 2, 3, plan)
    run_local(schedule, stages, plan, tokens, labels, docs=docs, loss_scale=scale)
    _, ref_grads = cases.reference_gradients(model.cpu(), tokens.cpu(), labels.cpu(), docs.cpu())
    grads = {name: g.cpu() for name, g in cases.gradients_of(stages).items()}
    worst, name = cases.largest_difference(grads, ref_grads)
    assert worst <= 1e-10, (name, worst)


WIDE = ModelConfig(
    dim=1024, num_layers=4, pattern=["gdn", "attention"], vocab_size=512, num_heads=8, head_k_dim=64, head_v_dim=64,
    num_attention_heads=8, num_kv_heads=2, attention_head_dim=64, ffn_dim=2048, init_seed=0,
)  # fmt: skip
STRESS_PLAN = ChunkPlan.explicit(4096, [1536, 1024, 1024, 512])
STRESS_MICROBATCHES, STRESS_STEPS = 6, 4


def stress_batch(step: int):
    generator = torch.Generator().manual_seed(step)
    text = torch.randint(0, 512, (STRESS_MICROBATCHES, STRESS_PLAN.seq_len + 1), generator=generator).cuda()
    return text[:, :-1].contiguous(), text[:, 1:].contiguous()


def wide_model() -> LanguageModel:
    model = LanguageModel(WIDE).cuda()
    model.init_weights()
    return model


# Where ranks share a GPU, NCCL aborts a survivor as soon as the socket to the other is closed, and 800 steps take long.
a_gpu_each = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


def stress_worker(rank: int, port: int, folder: str) -> None:
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE="2")
    device = gpu_of(rank)
    dist.init_process_group("nccl", device_id=device)
    part = split_model(wide_model(), 2)[rank]
    stage = StateFlowStage(part, rank, 2, device, STRESS_PLAN, microbatch_size=1, hidden_size=WIDE.dim)
    schedule = ScheduleStateFlow([stage], STRESS_MICROBATCHES, loss_fn=cross_entropy_sum)
    steps = []
    for step in range(STRESS_STEPS):  # no synchronisation within: a race has room to show
        part.zero_grad()
        tokens, labels = stress_batch(step)
        schedule.step(*((tokens,) if rank == 0 else ()), target=labels if rank == 1 else None)
        steps.append({name: p.grad.clone() for name, p in part.named_parameters()})
    steps = [{name: g.cpu() for name, g in grads.items()} for grads in steps]
    torch.save((steps, schedule.pool.num_allocated), f"{folder}/{rank}.pt")
    dist.destroy_process_group()


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("localhost", 0))
        return s.getsockname()[1]


def test_pooled_buffers_over_nccl_give_the_single_gpu_gradients(tmp_path):
    mp.spawn(stress_worker, args=(free_port(), str(tmp_path)), nprocs=2)
    (first, buffers), (second, _) = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    assert buffers <= 2 * STRESS_PLAN.num_chunks + 4

    stages = cases.make_stages(wide_model(), 2, STRESS_PLAN)
    schedule = cases.schedule_of("1f1b", 2, STRESS_MICROBATCHES, STRESS_PLAN)
    for step in range(STRESS_STEPS):
        for stage in stages:
            stage.module.zero_grad()
        run_local(schedule, stages, STRESS_PLAN, *stress_batch(step))
        expected = {name: g.cpu() for name, g in cases.gradients_of(stages).items()}
        worst, name = cases.largest_difference({**first[step], **second[step]}, expected)
        assert worst <= 1e-5, (step, name, worst)


LONG_RUN = ModelConfig(
    dim=512, num_layers=4, pattern=["gdn", "gdn", "attention"], vocab_size=512, num_heads=4, head_k_dim=128,
    head_v_dim=128, num_attention_heads=4, num_kv_heads=2, attention_head_dim=128, ffn_dim=1024, init_seed=0,
)  # fmt: skip
LONG_RUN_STEPS, LONG_RUN_MICROBATCHES = 200, 3


def train(rank: int, device: torch.device, graphs: LayerGraphs | None) -> tuple[list, list, list]:
    """Losses by step, parameters at the end, and bytes allocated behind each step."""
    model = LanguageModel(LONG_RUN)
    model.init_weights()
    part = split_model(model, 2)[rank].to(device)
    WorkingWeights(part, torch.bfloat16, lambda module: isinstance(module, DecayGate))
    for name, block in list(part.layers.named_children()):
        part.layers.register_module(name, Recomputed(block, graphs))
    stage = StateFlowStage(
        part, rank, 2, device, STRESS_PLAN, microbatch_size=1, hidden_size=LONG_RUN.dim,
        activation_dtype=torch.bfloat16,
    )  # fmt: skip
    schedule = ScheduleStateFlow([stage], LONG_RUN_MICROBATCHES, loss_fn=cross_entropy_sum)
    optimizer = torch.optim.AdamW(part.parameters(), lr=1e-3)
    losses, allocated = [], []
    for step in range(LONG_RUN_STEPS):
        optimizer.zero_grad()
        text = torch.randint(
            0, 512, (LONG_RUN_MICROBATCHES, STRESS_PLAN.seq_len + 1), generator=torch.Generator().manual_seed(step)
        ).to(device)
        inputs = (text[:, :-1],) if rank == 0 else ()
        units: list = []
        schedule.step(*inputs, target=text[:, 1:] if rank == 1 else None, losses=units, loss_scale=1e-4)
        optimizer.step()
        losses.append(torch.stack(units).sum() if units else torch.zeros(()))
        if device.type == "cuda":
            allocated.append(torch.cuda.memory_allocated(device))
    return [loss.cpu() for loss in losses], [p.detach().cpu() for p in part.parameters()], allocated


def long_run_worker(rank: int, port: int, folder: str) -> None:
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE="2")
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    device = gpu_of(rank)
    dist.init_process_group("nccl", device_id=device)
    runs = [train(rank, device, LayerGraphs(CudaRecorder()) if graphs else None) for graphs in (0, 0, 1, 1)]
    torch.save(runs, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


@a_gpu_each
@pytest.mark.timeout(280)
def test_long_runs_over_nccl_are_equal_to_the_bit_and_memory_stays(tmp_path):
    """Mixed precision, recomputation, with and without CUDA graphs; two runs of each."""
    mp.spawn(long_run_worker, args=(free_port(), str(tmp_path)), nprocs=2)
    for rank in range(2):
        first, again, recorded, recorded_again = torch.load(tmp_path / f"{rank}.pt")
        for one, other in ((first, again), (recorded, recorded_again)):
            assert all(torch.equal(a, b) for a, b in zip(one[0], other[0], strict=True))
            assert all(torch.equal(a, b) for a, b in zip(one[1], other[1], strict=True))
        for losses, parameters, allocated in (first, recorded):
            assert all(p.isfinite().all() for p in parameters)
            assert max(allocated[20:]) == min(allocated[20:]), (rank, allocated[20], max(allocated), min(allocated))
            if rank == 1:
                assert torch.stack(losses).isfinite().all()
                assert (torch.stack(recorded[0]) - torch.stack(first[0])).abs().max() <= 1e-2 * first[0][0]


@a_gpu_each
@pytest.mark.parametrize(
    ("victim", "action", "awaited"),
    [
        (1, "1F0.1", AWAITS_GRADIENT),
        (0, "0F0.1", "stage 1, forward of microbatch 0, chunk 1 (1F0.1), waits for the activation of microbatch 0, "
                     "chunk 1 from stage 0 on rank 0"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("signal_name", ["SIGKILL", "SIGSTOP"])
def test_a_lost_rank_ends_the_other_over_nccl(tmp_path, signal_name, victim, action, awaited):
    processes = start("nccl", tmp_path, victim, signal_name, action)
    status, errors, seconds = survive(processes, victim)
    assert status == 1, errors
    assert f"StateFlow: rank {1 - victim}, {awaited}: " in errors
    # The step before is through, and the process ends a little before NCCL's own watchdog would abort it.
    assert 0.5 * TIMEOUTS["nccl"] <= seconds <= TIMEOUTS["nccl"] + 5.0


@a_gpu_each
def test_sigterm_tells_the_place_over_nccl(tmp_path):
    check_sigterm(start("nccl", tmp_path, 1, "SIGSTOP", "1F0.1", "sigterm"), 3.0)
