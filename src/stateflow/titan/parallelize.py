"""How one model part is wrapped for training: tensor parallelism, activation checkpointing, torch.compile, FSDP2."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torchtitan.config import TORCH_DTYPE_MAP
from torchtitan.distributed.activation_checkpoint import apply_ac
from torchtitan.models.llama3.infra.parallelize import apply_compile, disable_fsdp_gradient_division

from stateflow.layer_graphs import CudaRecorder, LayerGraphs
from stateflow.layers import DecayGate, Mamba3Dynamics
from stateflow.recompute import Recomputed
from stateflow.titan.config import has_working_weights, mixed_precision_alone
from stateflow.titan.tensor_parallel import apply_tp
from stateflow.working_weights import WorkingWeights

# What op-level selective checkpointing keeps: the results of the expensive ops, ours among them.
OPS_TO_SAVE = {
    torch.ops.aten.mm.default,
    torch.ops.stateflow.gated_delta_rule.default,
    torch.ops.stateflow.gated_delta_rule_triton.default,
    torch.ops.stateflow.mamba3.default,
    torch.ops.stateflow.mamba3_triton.default,
    torch.ops.stateflow.prefix_attention.default,
    # Tensor parallelism: reduce once. Gathered tokens are not kept: that would undo sequence parallelism.
    torch.ops._c10d_functional.all_reduce.default,
    torch.ops._c10d_functional.reduce_scatter_tensor.default,
}


def parallelize(model: nn.Module, parallel_dims, job_config) -> nn.Module:
    """torchtitan's ``parallelize_fn`` for a whole model or one pipeline stage's part of it (on the meta device)."""
    compiled = job_config.compile.enable and "model" in job_config.compile.components
    alone = None
    if mixed_precision_alone(job_config) and not parallel_dims.fsdp_enabled:
        if has_working_weights(job_config):
            dtype = TORCH_DTYPE_MAP[job_config.training.mixed_precision_param]
            WorkingWeights(model, dtype, keep=_computes_in_float32)
        else:
            alone = _meshes_of_one(parallel_dims.tp)
    if parallel_dims.tp_enabled:
        apply_tp(
            model,
            # FSDP2 and tensor parallelism of one parameter need meshes of one root.
            parallel_dims.get_mesh("tp") if alone is None else alone["tp"],
            loss_parallel=not job_config.parallelism.disable_loss_parallel,
            sequence_parallel_norms=job_config.stateflow.sequence_parallel_norms,
        )
    if job_config.activation_checkpoint.mode == "full" and not compiled and not parallel_dims.tp_enabled:
        graphs = None
        if job_config.stateflow.cuda_graphs and torch.cuda.is_available():
            graphs = LayerGraphs(CudaRecorder())
        for name, block in list(model.layers.named_children()):
            model.layers.register_module(name, Recomputed(block, graphs))
    elif job_config.activation_checkpoint.mode != "none":
        apply_ac(
            model,
            job_config.activation_checkpoint,
            model_compile_enabled=compiled,
            op_sac_save_list=OPS_TO_SAVE,
            base_folder=job_config.job.dump_folder,
        )
    if compiled:
        apply_compile(model, job_config.compile)
    if parallel_dims.fsdp_enabled:
        names = ["dp_replicate", "fsdp"] if parallel_dims.dp_replicate_enabled else ["fsdp"]
        apply_fsdp(model, parallel_dims.get_mesh(names), parallel_dims.pp_enabled, job_config)
    elif alone is not None:
        apply_fsdp(model, alone["alone"], parallel_dims.pp_enabled, job_config)
    elif parallel_dims.dp_replicate_enabled:
        raise ValueError(
            f"data_parallel_replicate_degree = {parallel_dims.dp_replicate} without sharding is not supported; "
            "set data_parallel_shard_degree instead"
        )
    return model


def _computes_in_float32(module: nn.Module) -> bool:
    return isinstance(module, DecayGate | Mamba3Dynamics)


def _meshes_of_one(tp_degree: int) -> DeviceMesh:
    """"alone": a mesh that holds this rank only; "tp": its tensor-parallel group.

    (torchtitan's own meshes of size one have no working collectives.)
    """
    device = torch.accelerator.current_accelerator()
    shape = (dist.get_world_size() // tp_degree, 1, tp_degree)
    return init_device_mesh("cpu" if device is None else device.type, shape, mesh_dim_names=("rest", "alone", "tp"))


def apply_fsdp(model: nn.Module, mesh: DeviceMesh, pipelined: bool, job_config) -> None:
    """Wraps blocks, embedding, head and the root by ``fully_shard``; gates stay float32 whatever the compute dtype."""
    training, policy = job_config.training, job_config.parallelism.fsdp_reshard_after_forward
    reduce_dtype = TORCH_DTYPE_MAP[training.mixed_precision_reduce]
    # A float32 boundary state is an argument of the block: FSDP must not cast it to the compute dtype.
    mixed = MixedPrecisionPolicy(
        TORCH_DTYPE_MAP[training.mixed_precision_param], reduce_dtype, cast_forward_inputs=False
    )
    # Under pipelining a reshard would bring an all-gather for every unit.
    reshard = policy == "always" or (policy == "default" and not pipelined)
    common = dict(mesh=mesh, reshard_after_forward=reshard)
    if training.enable_cpu_offload:
        from torch.distributed.fsdp import CPUOffloadPolicy

        common["offload_policy"] = CPUOffloadPolicy()
    gate_policy = MixedPrecisionPolicy(reduce_dtype=reduce_dtype, cast_forward_inputs=False)
    for block in model.layers.values():
        for module in block.modules():
            if _computes_in_float32(module):
                fully_shard(module, mp_policy=gate_policy, **common)
                # Its own hooks never run (see GatedDeltaNet.pre, Mamba3.core); FSDP reshards it after the backward.
                block.register_forward_pre_hook(lambda _block, _args, gate=module: gate.unshard())
    if model.tok_embeddings is not None:
        fully_shard(model.tok_embeddings, mp_policy=mixed, **common)
    for block in model.layers.values():
        fully_shard(block, mp_policy=mixed, **common)
    if model.norm is not None and model.output is not None:
        # The loss reads the head's weight after the head's forward, so it must stay unsharded until the backward.
        fully_shard([model.norm, model.output], mp_policy=mixed, **{**common, "reshard_after_forward": False})
    fully_shard(model, mp_policy=mixed, **common)
    disable_fsdp_gradient_division(model)
    if not torch.accelerator.is_available():
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)  # gloo has no PREMUL_SUM
