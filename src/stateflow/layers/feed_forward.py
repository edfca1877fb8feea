"""The position-wise part of a block."""

from torch import Tensor, nn

from ..projections import project
from ..recurrence import swiglu
from . import initialize
from .initialize import Initializer


class FeedForward(nn.Module):
    """SwiGLU: w2(silu(w1 x) * w3 x), [..., dim] -> [..., dim] through `hidden_dim`.

    `backend`: see `stateflow.recurrence.backends`.
    """

    # As in a mixer (see `Mixer.sharding`): each hidden unit is a head of its own.
    sharding = {"w1.weight": "heads", "w3.weight": "heads", "w2.weight": "heads_in"}

    def __init__(self, dim: int, hidden_dim: int, backend: str = "chunk"):
        super().__init__()
        self.backend = backend
        self.w1 = nn.Linear(dim, hidden_dim, bias=False)
        self.w2 = nn.Linear(hidden_dim, dim, bias=False)
        self.w3 = nn.Linear(dim, hidden_dim, bias=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        initialize.apply(self, self.initializers(std=0.02, out_std=0.02))

    def initializers(self, std: float, out_std: float) -> dict[str, Initializer]:
        return {
            "w1.weight": initialize.normal(std),
            "w2.weight": initialize.normal(out_std),
            "w3.weight": initialize.normal(std),
        }

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(self.hidden(x))

    def hidden(self, x: Tensor) -> Tensor:
        """What w2 projects back, [..., hidden_dim]."""
        return swiglu(*project(x, self.w1, self.w3), backend=self.backend)
