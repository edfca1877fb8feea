"""Full recomputation of a layer: from forward to backward only its inputs live.

torch's checkpoint finds out through hooks on every saved tensor what to compute again, which costs the host more than
the layer itself does.  A `Block` needs none of it: it is a pure function of (x, state, docs) without random numbers, so
the backward runs it again, under autograd, from its saved inputs.  Like torch's, it leaves out the last product, whose
value nobody needs: the gradients of that projection are those of its input, which has been recomputed.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import ActivationWrapper

from stateflow.autocast import Autocast
from stateflow.layer_graphs import LayerGraphs
from stateflow.layers import Block
from stateflow.layers.mixer import State
from stateflow.pipeline.deferred import project_backward
from stateflow.projections import only_multiplies


class Recomputed(ActivationWrapper):
    """A block whose forward keeps its inputs only.

    Args:
        block: without tensor parallelism and not compiled.
        graphs: record it as CUDA graphs, those of the model part. Its parameters' gradients must add up in memory that
            stays in place (`WorkingWeights`), and its weights must not be put off (`DeferredWeights`). A layer whose
            state grows with the sequence has new shapes in every chunk, and runs as usual.
    """

    def __init__(self, block: Block, graphs: LayerGraphs | None = None):
        super().__init__(block)
        grows = any(spec.kind == "window" for spec in block.mixer.state_spec(torch.float32))
        self._graphs = None if grows else graphs

    @property
    def block(self) -> Block:
        return self._checkpoint_wrapped_module

    def forward(self, x_BTD: Tensor, state: State, docs: Tensor | None) -> tuple[Tensor, State]:
        inputs = (x_BTD, *state)
        if not torch.is_grad_enabled() or not any(t.requires_grad for t in inputs):
            return self.block(x_BTD, state, docs)
        output_BTD, *update = _Recompute.apply(self, docs, *inputs)
        return output_BTD, tuple(update)

    def call_forward(self, inputs: Sequence[Tensor], docs: Tensor | None) -> Sequence[Tensor]:
        """`run_forward`, perhaps from a graph."""
        if self._graphs is None:
            return self.run_forward(inputs, docs)
        return self._graphs.call((self, "forward"), lambda ts: self.run_forward(ts[1:], ts[0]), (docs, *inputs))

    def call_backward(
        self, inputs: Sequence[Tensor], docs: Tensor | None, needs_grad: Sequence[bool], grads: Sequence[Tensor | None]
    ) -> Sequence[Tensor | None]:
        """`run_backward`, perhaps from a graph."""
        if self._graphs is None:
            return self.run_backward(inputs, docs, needs_grad, grads)
        count = len(inputs)

        def run(tensors: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
            return self.run_backward(tensors[1 : 1 + count], tensors[0], needs_grad, tensors[1 + count :])

        return self._graphs.call((self, "backward", *needs_grad), run, (docs, *inputs, *grads))

    def run_forward(self, inputs: Sequence[Tensor], docs: Tensor | None) -> tuple[Tensor, ...]:
        """The outputs (y, *update) from (x, *state), without autograd."""
        output_BTD, update = self.block(inputs[0], tuple(inputs[1:]), docs)
        return output_BTD, *update

    def run_backward(
        self, inputs: Sequence[Tensor], docs: Tensor | None, needs_grad: Sequence[bool], grads: Sequence[Tensor | None]
    ) -> list[Tensor | None]:
        """The gradients of (x, *state) from those of (y, *update); those of parameters are added up.

        `grads`: None for an output that nothing depends on.
        """
        block = self.block
        with torch.enable_grad():
            leaves = [t.detach().requires_grad_(need) for t, need in zip(inputs, needs_grad, strict=True)]
            residual_BTD, hidden_BTF, update = block.up_to_last(leaves[0], tuple(leaves[1:]), docs)
        outputs, output_grads = [*update], [*grads[1:]]
        if grads[0] is not None:
            last = block.feed_forward.w2
            if only_multiplies(last):
                outputs += [residual_BTD, hidden_BTF]
                output_grads += [grads[0], project_backward(last, hidden_BTF.detach(), grads[0])]
            else:  # it may have been replaced, or have hooks
                with torch.enable_grad():
                    outputs += [residual_BTD, last(hidden_BTF)]
                output_grads += [grads[0], grads[0]]
        pairs = [(y, g) for y, g in zip(outputs, output_grads, strict=True) if g is not None and y.requires_grad]
        if pairs:
            torch.autograd.backward([y for y, _ in pairs], [g for _, g in pairs])
        return [leaf.grad for leaf in leaves]


class _Recompute(torch.autograd.Function):
    @staticmethod
    def forward(ctx, layer: Recomputed, docs: Tensor | None, *inputs: Tensor):
        ctx.layer, ctx.autocast = layer, Autocast.at(inputs[0])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(docs, *inputs)
        return tuple(layer.call_forward(inputs, docs))

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads: Tensor | None):
        docs, *inputs = ctx.saved_tensors
        with ctx.autocast.again():
            return None, None, *ctx.layer.call_backward(inputs, docs, ctx.needs_input_grad[2:], grads)
