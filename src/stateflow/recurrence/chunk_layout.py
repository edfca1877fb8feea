"""What the chunk forms of the recurrences share: how chunks are laid out, products over them, decays within them."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class ChunkLayout(NamedTuple):
    """How [B, T, H, X] is laid out to compute: [N, B * H, C, X], chunks first, the last one padded."""

    batch: int
    num_tokens: int
    num_heads: int
    num_chunks: int
    chunk_size: int
    dtype: torch.dtype

    @classmethod
    def of(cls, v_BTHV: Tensor, chunk_size: int, dtype: torch.dtype) -> "ChunkLayout":
        # Never a smaller chunk for a short input: a piece after a cut takes the same products as without it.
        batch, num_tokens, num_heads = v_BTHV.shape[:3]
        return cls(batch, num_tokens, num_heads, -(-num_tokens // chunk_size), chunk_size, dtype)

    @property
    def padding(self) -> int:
        return self.num_chunks * self.chunk_size - self.num_tokens

    def split(self, x_BTHX: Tensor) -> Tensor:
        """[B, T, H, ...] -> [N, B * H, C, ...], padded with zeros."""
        x = x_BTHX.to(self.dtype)
        if self.padding:
            x = F.pad(x, (0, 0) * (x.dim() - 2) + (0, self.padding))
        x = x.unflatten(1, (self.num_chunks, self.chunk_size)).transpose(2, 3).transpose(0, 1)
        return x.flatten(1, 2).contiguous()

    def merge(self, x_NXCY: Tensor, dtype: torch.dtype) -> Tensor:
        """The inverse of `split`, without the padding."""
        x = x_NXCY.unflatten(1, (self.batch, self.num_heads)).transpose(0, 1).transpose(2, 3)
        return x.to(dtype).flatten(1, 2)[:, : self.num_tokens].contiguous()

    def doc_starts(self, doc_start_BT: Tensor) -> Tensor:
        """[N, B * H, C]: the first token of each token's document, relative to the first token of its chunk.

        Padding belongs to the last token's document: what a chunk leaves at its last row must be that document's.
        """
        starts = torch.cat([doc_start_BT, doc_start_BT[:, -1:].expand(-1, self.padding)], dim=1)
        starts = starts.unflatten(1, (self.num_chunks, self.chunk_size)).transpose(0, 1)
        starts = starts - self.chunk_size * torch.arange(self.num_chunks, device=starts.device)[:, None, None]
        return starts[:, :, None].expand(-1, -1, self.num_heads, -1).flatten(1, 2)


def matmul_by_chunk(left_NXIJ: Tensor, right_NXJK: Tensor) -> Tensor:
    """left @ right for every chunk and head, with bits that do not depend on the number of chunks.

    MKL shares out a batch among threads by its length, and that choice can change the last bit: on the CPU
    every chunk is a call of its own. A GPU gets one call: launches would cost more there than the products.
    """
    if left_NXIJ.is_cuda:
        return left_NXIJ @ right_NXJK
    out = left_NXIJ.new_empty(*left_NXIJ.shape[:3], right_NXJK.shape[-1])
    for left, right, out_n in zip(left_NXIJ, right_NXJK, out, strict=True):
        torch.bmm(left, right, out=out_n)
    return out


def decays(g_NXC: Tensor, starts_NXC: Tensor | None) -> tuple[Tensor, Tensor]:
    """The decay D [N, X, C, C] from token s to token t, and gam [N, X, C] from the chunk's incoming state to t.

    D_ts = exp(sum of g_r over s < r <= t) where t >= s and both are of one document, else 0; gam_t = exp(g_1 +
    .. + g_t) up to the chunk's first document start, from there on 0. Each sum is taken as such, never as a
    difference of two running sums, so nothing cancels.
    """
    size = g_NXC.shape[-1]
    # Row t, column s: the terms g_r with s < r, summed over r <= t.
    log_pair = g_NXC[..., :, None].expand(*g_NXC.shape, size).tril(-1).cumsum(-2)
    log_from_start = g_NXC.cumsum(-1)
    token_C = torch.arange(size, device=g_NXC.device)
    visible = token_C[:, None] >= token_C
    if starts_NXC is not None:
        visible = visible & (token_C >= starts_NXC[..., None])
        log_from_start = log_from_start.masked_fill(starts_NXC >= 0, -torch.inf)
    return log_pair.masked_fill(~visible, -torch.inf).exp(), log_from_start.exp()


def decays_backward(grad_log_pair_NXCC: Tensor, grad_log_start_NXC: Tensor) -> Tensor:
    """The gradient of g: g_r is in every log D_ts with s < r <= t, and in every log gam_t with t >= r."""
    grad_g = grad_log_pair_NXCC.flip(-2).cumsum(-2).flip(-2).tril(-1).sum(-1)
    return grad_g + grad_log_start_NXC.flip(-1).cumsum(-1).flip(-1)
