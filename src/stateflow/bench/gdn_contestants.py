"""Who takes part in the benchmark of the gated delta rule: ways to call it that mean the same.

A contestant gets q, k, v, g, beta and state as `gated_delta_rule` does, normalises q and k itself, and returns o and
the last state.
"""

from __future__ import annotations

import contextlib
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from stateflow.bench import shares
from stateflow.bench.contestants import OURS, SERIAL, Absent, Contestant, Subject, import_from, serial, with_choice
from stateflow.planning.kernel_launches import EPS, Launches, launched, random_inputs
from stateflow.recurrence.self_check import BOUNDS_16_BITS, NAMES
from stateflow_kernels.gated_delta_rule import CHUNK, Tile
from stateflow_kernels.plan_table import Shape, to_json
from stateflow_kernels.waves import walk_segments

DEFAULT, SERIAL_64, ANY_ORDER = "ours, default plan", "ours, serial BV 64", "ours, any order"
BLOCKS_V = (16, 32, 64)
COMPILE_SECONDS = 150.0


class GatedDeltaRule(Subject):
    name = "gdn"
    peers = ("fla", "flashqla")
    packages = {"fla": ("fla-core",), "flashqla": ("flash-qla", "tilelang")}
    # FLA hands its work to other libraries where it finds them: what is measured is FLA.
    environment = {"fla": {"FLA_FLASH_QLA": "0", "FLA_TILELANG": "0"}}
    names = NAMES
    bounds = BOUNDS_16_BITS
    by_token = frozenset(NAMES) - {"state", "dstate"}
    parity_tokens = 1008  # no multiple of 64, but of 16, as `shares.SHORT`
    choices = {"serial": SERIAL, "default": DEFAULT, "serial-64": SERIAL_64, "any-order": ANY_ORDER, "walks": "parts"}

    def shape(self, heads, tokens, k_dim, v_dim, dtype):
        from stateflow.planning.kernel_shapes import explicit_shapes

        explicit_shapes([heads], [tokens], k_dim, v_dim, dtype)  # raises
        return Shape("gated_delta_rule", heads, heads, k_dim, v_dim, dtype, 1, tokens)

    def contestants(self, group, shape, device):
        return {OURS: _ours, "fla": _fla, "flashqla": _flashqla}[group](shape, device)

    def random_inputs(self, shape, num_tokens, device, seed=0):
        return random_inputs(shape, num_tokens, device, seed)

    def exact_results(self, shape, inputs, grads):
        """The chunk form."""
        from stateflow.recurrence.gated_delta_kernels import chunk_form, chunk_form_backward

        scale = shape.k_dim**-0.5
        inputs, grads = ([x.detach().cpu().double() for x in xs] for xs in (inputs, grads))
        return [*chunk_form(*inputs, None, scale, EPS), *chunk_form_backward(*grads, *inputs, None, scale, EPS)]

    def get_ready(self, spec, device):
        """Kernels that no table's tuning has compiled, for all shapes at once; FLA's variants."""
        if spec.group == "fla":
            with contextlib.suppress(Absent):
                self.contestants("fla", spec.shapes[0], device)
                shares.compile_at_once(self.name, "fla", spec.group_shapes, "fla", Path(spec.work))
        if spec.group != OURS:
            return
        from stateflow.planning.kernel_bench import compile_jobs, default_workers

        jobs: dict = {}
        for shape in spec.shapes:
            for contestant in self.chosen(OURS, shape, device, spec.choices):
                segments = contestant.plan.num_segments
                for name, tile in launched(contestant.plan, shape, device):
                    in_segments = segments if name.startswith("transition") else 1
                    jobs[replace(shape, tokens=1, segments=in_segments), name, tile] = None
                if contestant.name == OURS and "walks" in spec.choices:
                    jobs |= {(replace(shape, tokens=1), *pair): None for pair in walk_tiles(contestant.plan)}
        compile_jobs(list(jobs), device, default_workers(), COMPILE_SECONDS)

    def check_plan(self, contestant, shape, device):
        """Raises if the self-check would put anything else in this plan's place."""
        from stateflow.recurrence.self_check import Problem, checked_plan

        dtype = getattr(torch, shape.dtype)
        sizes = (shape.num_heads, shape.num_key_heads, shape.k_dim, shape.v_dim)
        options = dict(batch=shape.batch, in_segments=contestant.plan.num_segments > 1)
        problem = Problem(device, dtype, *sizes, normalize=True, has_docs=False, **options)
        if checked_plan(problem, contestant.plan) != contestant.plan:
            raise ValueError("the kernels' self-check failed with this plan")

    def parts(self, shape, device):
        """ST and STB, by the columns of V that a program takes."""
        from stateflow_kernels import plans

        plan = plans.choice_for(shape, device).plan
        launches = Launches(shape, shape.tokens, device, fill=plan)
        return [
            (dict(kernel=name, tile=to_json(tile)), partial(launches.by_name[name], tile))
            for name, tile in walk_tiles(plan)
        ]


SUBJECT = GatedDeltaRule()


def walk_tiles(plan) -> list[tuple[str, Tile]]:
    """ST's and STB's tiles at each width, otherwise the plan's; at most two stages where wider tiles need the room."""
    return [
        (name, replace(tile, block_v=block_v, num_stages=min(tile.num_stages, 3 if block_v <= 32 else 2)))
        for name, tile in (("transition", plan.transition), ("transition_backward", plan.transition_backward))
        for block_v in BLOCKS_V
    ]


def _ours(shape: Shape, device: torch.device) -> list[Contestant]:
    from stateflow.recurrence import gated_delta_rule
    from stateflow_kernels import plans

    def call(*inputs, exact_order: bool = True):
        options = dict(backend="triton", use_qk_l2norm_in_kernel=True, exact_order=exact_order)
        return gated_delta_rule(*inputs, **options)

    ours = with_choice(Contestant(OURS, call), shape, device)
    default = plans.fallback_plan(device, getattr(torch, shape.dtype), shape.k_dim, shape.v_dim)
    walks = ("transition", "transition_backward")
    wide = replace(default, **{name: Tile(64, 4, 2) for name in walks}, overlap_backward=False)

    wider = "the default with BV 64 in ST and STB"
    segments = walk_segments(-(-shape.tokens // CHUNK), shape.batch * shape.num_heads, shape.k_dim, shape.v_dim)
    in_segments = Contestant(ANY_ORDER, partial(call, exact_order=False))
    return [
        ours,
        serial(ours),
        replace(ours, name=DEFAULT, plan=default, plan_source="default", tuned=False),
        replace(ours, name=SERIAL_64, plan=wide, plan_source=wider, tuned=False),
        *([with_choice(in_segments, replace(shape, segments=segments), device)] if segments > 1 else []),
    ]


def _fla(shape: Shape, device: torch.device) -> list[Contestant]:
    op = import_from("fla.ops.gated_delta_rule", "chunk_gated_delta_rule")

    def call(q, k, v, g, beta, state):
        options = dict(output_final_state=True, use_qk_l2norm_in_kernel=True)
        return op(q=q, k=k, v=v, g=g, beta=beta, initial_state=state, **options)

    return [Contestant("fla", call)]


def _flashqla(shape: Shape, device: torch.device) -> list[Contestant]:
    if (shape.k_dim, shape.v_dim) != (128, 128):
        raise Absent("flash_qla takes heads of 128 x 128 only")
    op = import_from("flash_qla", "chunk_gated_delta_rule")

    def call(auto_cp: bool, q, k, v, g, beta, state):
        options = dict(output_final_state=True, use_qk_l2norm_in_kernel=True, auto_cp=auto_cp)
        return op(q=q, k=k, v=v, g=g, beta=beta, initial_state=state, **options)

    # Its split of a sequence among the SMs may be inexact: with and without.
    names = {"flashqla": True, "flashqla, no split": False}
    return [Contestant(name, lambda *args, on=on: call(on, *args)) for name, on in names.items()]
