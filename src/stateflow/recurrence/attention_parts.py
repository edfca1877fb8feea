"""Attention of a chunk over [prefix; chunk] from two calls of a library's kernel, exact in outputs and gradients.

One causal call over the chunk's own keys, a square, and one without a mask over the prefix, a rectangle:

    lse = log(e^lse_own + e^lse_prefix),   o = e^{lse_own - lse} o_own + e^{lse_prefix - lse} o_prefix

A kernel's backward recomputes its probabilities as e^{score - lse} and needs <do, o>.  Given the *merged* o and lse
these are the whole softmax's, so each part's dk and dv are final and the two dq add up.

Keys and values of the prefix are read where they are, as strided views.  A kernel adds to no buffer: gradients of the
prefix are written once, in the kernel's type, and whoever owns the float32 buffer adds them.
"""

import warnings
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from .numerics import HALF_DTYPES


class Operands(NamedTuple):
    """[B, T, H, K] queries, [B, T, G, K] keys and values of the chunk, and [B, S, G, K] those of the prefix."""

    q_BTHK: Tensor
    k_BTGK: Tensor
    v_BTGV: Tensor
    k_prefix_BSGK: Tensor
    v_prefix_BSGV: Tensor

    @property
    def has_prefix(self) -> bool:
        return self.k_prefix_BSGK.shape[1] > 0


class Part(Protocol):
    """A kernel for softmax(scale q k^T) v over one set of keys, `causal` only where these are the queries' own."""

    def forward(
        self, q_BTHK: Tensor, k_BSGK: Tensor, v_BSGV: Tensor, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor]:
        """The output [B, T, H, V] in q's dtype and the logsumexp [B, H, T] of the scores."""

    def backward(
        self,
        grad_o_BTHV: Tensor,
        q_BTHK: Tensor,
        k_BSGK: Tensor,
        v_BSGV: Tensor,
        output_BTHV: Tensor,
        lse_BHT: Tensor,
        causal: bool,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of q, k and v for a softmax whose output and logsumexp are given."""


def forward(part: Part, x: Operands, scale: float) -> tuple[Tensor, Tensor]:
    """The output and the logsumexp over [prefix; chunk]."""
    own = part.forward(x.q_BTHK, x.k_BTGK, x.v_BTGV, True, scale)
    if not x.has_prefix:
        return own[0].contiguous(), own[1]
    return merge(own, part.forward(x.q_BTHK, x.k_prefix_BSGK, x.v_prefix_BSGV, False, scale))


def merge(one: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Output and logsumexp over two sets of keys from those over each, computed in at least float32."""
    (output_BTHV, lse_BHT), (other_output_BTHV, other_lse_BHT) = one, other
    merged_lse_BHT = torch.logaddexp(lse_BHT, other_lse_BHT)
    share, other_share = (
        (lse - merged_lse_BHT).exp().transpose(1, 2)[..., None] for lse in (lse_BHT, other_lse_BHT)
    )
    merged = (share * output_BTHV).addcmul_(other_share, other_output_BTHV)
    return merged.to(output_BTHV.dtype, memory_format=torch.contiguous_format), merged_lse_BHT


def backward(
    part: Part, grad_o_BTHV: Tensor, x: Operands, output_BTHV: Tensor, lse_BHT: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of the operands, in their dtypes."""
    grad_o_BTHV = grad_o_BTHV.contiguous()
    merged = (output_BTHV, lse_BHT)
    grad_q, grad_k, grad_v = part.backward(grad_o_BTHV, x.q_BTHK, x.k_BTGK, x.v_BTGV, *merged, True, scale)
    if x.has_prefix:
        prefix_grad_q, grad_k_prefix, grad_v_prefix = part.backward(
            grad_o_BTHV, x.q_BTHK, x.k_prefix_BSGK, x.v_prefix_BSGV, *merged, False, scale
        )
        grad_q = grad_q + prefix_grad_q
    else:
        grad_k_prefix, grad_v_prefix = torch.empty_like(x.k_prefix_BSGK), torch.empty_like(x.v_prefix_BSGV)
    return tuple(g.contiguous() for g in (grad_q, grad_k, grad_v, grad_k_prefix, grad_v_prefix))


class Flash:
    """torch's flash kernels."""

    def fits(self, x: Operands) -> bool:
        head_dim = x.q_BTHK.shape[3]
        return (
            x.q_BTHK.is_cuda
            and torch.version.cuda is not None
            and x.q_BTHK.dtype in HALF_DTYPES
            and x.v_BTGV.shape[3] == head_dim
            and head_dim % 8 == 0
            and head_dim <= 256
            and torch.cuda.get_device_capability(x.q_BTHK.device) >= (8, 0)
        )

    def forward(self, q_BTHK, k_BSGK, v_BSGV, causal, scale):
        return torch.ops.aten._flash_attention_forward(
            q_BTHK, k_BSGK, v_BSGV, None, None, q_BTHK.shape[1], k_BSGK.shape[1], 0.0, causal, False, scale=scale
        )[:2]

    def backward(self, grad_o_BTHV, q_BTHK, k_BSGK, v_BSGV, output_BTHV, lse_BHT, causal, scale):
        # Without dropout the kernel does not read its random state.
        no_random_state = torch.empty(2, dtype=torch.uint64, device=q_BTHK.device)
        nothing = torch.empty((), dtype=torch.uint64, device=q_BTHK.device)
        return torch.ops.aten._flash_attention_backward(
            *(grad_o_BTHV, q_BTHK, k_BSGK, v_BSGV, output_BTHV, lse_BHT),
            *(None, None, q_BTHK.shape[1], k_BSGK.shape[1], 0.0, causal, no_random_state, nothing),
            scale=scale,
        )


class Cudnn:
    """cuDNN's kernels, on Hopper and later; a graph is built at the first call with a shape, without measuring.

    torch calls them as [B, H, T, K], which is a view here, with the logsumexp as [B, H, T, 1].
    """

    def fits(self, x: Operands) -> bool:
        q_BTHK = x.q_BTHK
        if not q_BTHK.is_cuda or q_BTHK.dtype not in HALF_DTYPES or torch.version.cuda is None:
            return False
        if torch.cuda.get_device_capability(q_BTHK.device) < (9, 0):
            return False  # the flash kernels were written for what came before
        if torch.are_deterministic_algorithms_enabled():
            return False  # only in some versions is its backward
        whole = _allows(q_BTHK, x.k_BTGK, x.v_BTGV, True)
        return whole and (not x.has_prefix or _allows(q_BTHK, x.k_prefix_BSGK, x.v_prefix_BSGV, False))

    def forward(self, q_BTHK, k_BSGK, v_BSGV, causal, scale):
        output_BHTV, lse_BHT1, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
            *(x.transpose(1, 2) for x in (q_BTHK, k_BSGK, v_BSGV)), None, True, 0.0, causal, False, scale=scale
        )
        # Some versions leave out the last dimension.
        lse_BHT = lse_BHT1 if lse_BHT1.dim() == 3 else lse_BHT1[..., 0]
        return output_BHTV.transpose(1, 2), lse_BHT

    def backward(self, grad_o_BTHV, q_BTHK, k_BSGK, v_BSGV, output_BTHV, lse_BHT, causal, scale):
        # Without dropout the kernel does not read its random state.
        nothing = torch.empty((), dtype=torch.int64, device=q_BTHK.device)
        tensors = (grad_o_BTHV, q_BTHK, k_BSGK, v_BSGV, output_BTHV)
        grads = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
            *(x.transpose(1, 2) for x in tensors), lse_BHT[..., None], nothing, nothing, None, None, None,
            q_BTHK.shape[1], k_BSGK.shape[1], 0.0, causal, scale=scale,
        )  # fmt: skip
        return tuple(grad.transpose(1, 2) for grad in grads)


def _allows(q_BTHK: Tensor, k_BSGK: Tensor, v_BSGV: Tensor, causal: bool) -> bool:
    """torch's own opinion on cuDNN for this call; `torch.backends.cuda.enable_cudnn_sdp(False)` makes it no."""
    q, k, v = (x.transpose(1, 2) for x in (q_BTHK, k_BSGK, v_BSGV))
    grouped = q.shape[1] != k.shape[1]
    params = torch.backends.cuda.SDPAParams(q, k, v, None, 0.0, causal, grouped)
    return torch.backends.cuda.can_use_cudnn_attention(params)


FLASH, CUDNN = Flash(), Cudnn()
_refused: set = set()  # shapes that cuDNN did not take after all


def _key(x: Operands) -> tuple:
    return tuple(x.q_BTHK.shape), tuple(x.k_prefix_BSGK.shape), x.q_BTHK.dtype


def choose(x: Operands, doc_start_BT: Tensor | None) -> Part | None:
    """What computes this shape here: cuDNN, else flash, else nothing. With documents nothing does."""
    if doc_start_BT is not None:
        return None
    if CUDNN.fits(x) and _key(x) not in _refused:
        return CUDNN
    return FLASH if FLASH.fits(x) else None


def run(part: Part, function, x: Operands, *arguments):
    """`function(part, ...)`, by flash where cuDNN finds out that it has no kernel for the shape."""
    try:
        return function(part, *arguments)
    except RuntimeError as error:
        if part is not CUDNN or "cuDNN Frontend error" not in str(error) or not FLASH.fits(x):
            raise
        _refused.add(_key(x))
        warnings.warn(f"cuDNN has no attention kernel for {_key(x)}, flash is used: {error}", stacklevel=2)
        return function(FLASH, *arguments)
