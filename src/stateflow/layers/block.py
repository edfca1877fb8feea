"""One layer of the model: a mixer and a feed-forward part, each behind a norm, added to the residual."""

from torch import Tensor, nn

from . import initialize
from .feed_forward import FeedForward
from .initialize import Initializer
from .mixer import Mixer, State


class Block(nn.Module):
    """x += mixer(mixer_norm(x)); x += feed_forward(ffn_norm(x)).

    The unit that activation checkpointing, torch.compile and FSDP2 wrap: a pure function of tensors and
    tuples of tensors.
    """

    def __init__(self, dim: int, mixer: Mixer, ffn_dim: int, norm_eps: float = 1e-6, backend: str = "chunk"):
        super().__init__()
        self.mixer_norm = nn.RMSNorm(dim, eps=norm_eps)
        self.mixer = mixer
        self.ffn_norm = nn.RMSNorm(dim, eps=norm_eps)
        self.feed_forward = FeedForward(dim, ffn_dim, backend)

    def initializers(self, std: float, out_std: float) -> dict[str, Initializer]:
        return {
            "mixer_norm.weight": initialize.ones(),
            **initialize.prefixed("mixer", self.mixer.initializers(std, out_std)),
            "ffn_norm.weight": initialize.ones(),
            **initialize.prefixed("feed_forward", self.feed_forward.initializers(std, out_std)),
        }

    def forward(self, x_BTD: Tensor, state: State, docs: Tensor | None) -> tuple[Tensor, State]:
        """The new residual stream, and the update of the mixer's state as `Mixer.update` defines it."""
        residual_BTD, hidden_BTF, update = self.up_to_last(x_BTD, state, docs)
        return residual_BTD + self.feed_forward.w2(hidden_BTF), update

    def up_to_last(self, x_BTD: Tensor, state: State, docs: Tensor | None) -> tuple[Tensor, Tensor, State]:
        """All but the last projection w2: what is added to its output, its input, and the update of the state."""
        mixed_BTD, update = self.mixer.update(self.mixer_norm(x_BTD), state, docs)
        x_BTD = x_BTD + mixed_BTD
        return x_BTD, self.feed_forward.hidden(self.ffn_norm(x_BTD)), update
