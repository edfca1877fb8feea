"""The language model: embedding, a pattern of blocks, norm and head; whole, or the part of one stage."""

import difflib
import hashlib
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from .layers import Attention, Block, GatedDeltaNet, Mamba3, Mixer, State, StateSpec, initialize
from .layers.attention import nearest_divisor
from .layers.mamba3_overlap import MODES as OVERLAP_MODES
from .recurrence.backends import BACKENDS


def _gated_delta_net(config: "ModelConfig") -> Mixer:
    return GatedDeltaNet(
        config.dim,
        config.num_heads,
        config.num_v_heads,
        head_k_dim=config.head_k_dim,
        head_v_dim=config.head_v_dim,
        conv_size=config.conv_size,
        allow_neg_eigval=config.allow_neg_eigval,
        norm_eps=config.norm_eps,
        backend=config.backend,
        exact_order=config.exact_order,
    )


def _mamba3(config: "ModelConfig") -> Mixer:
    return Mamba3(
        config.dim,
        config.num_mamba_heads,
        head_dim=config.mamba_head_dim,
        state_dim=config.mamba_state_dim,
        num_angles=config.mamba_num_angles,
        backend=config.backend,
        overlap_projections=config.overlap_projections,
    )


def _attention(config: "ModelConfig") -> Mixer:
    return Attention(
        config.dim,
        config.num_attention_heads,
        config.num_kv_heads,
        head_dim=config.attention_head_dim,
        rope_theta=config.rope_theta,
        rope_reset=config.rope_reset,
        # Attention has no kernels of its own to insist on.
        backend="auto" if config.backend == "triton" else config.backend,
    )


MIXERS: dict[str, Callable[["ModelConfig"], Mixer]] = {
    "gdn": _gated_delta_net,
    "mamba3": _mamba3,
    "attention": _attention,
}

_COUNTS = (
    "dim",
    "num_layers",
    "vocab_size",
    "num_heads",
    "num_v_heads",
    "head_k_dim",
    "head_v_dim",
    "conv_size",
    "num_mamba_heads",
    "mamba_head_dim",
    "mamba_state_dim",
    "mamba_num_angles",
    "num_attention_heads",
    "num_kv_heads",
    "attention_head_dim",
    "ffn_dim",
)


@dataclass
class ModelConfig:
    """Sizes of a model; plain fields that `dataclasses.asdict` turns into JSON.

    Attributes:
        pattern: mixer names, tiled over the layers: ["gdn", "gdn", "gdn", "attention"] makes every fourth
            layer softmax attention.
        num_heads, num_v_heads, head_k_dim, head_v_dim, conv_size, allow_neg_eigval: of `GatedDeltaNet`.
        num_mamba_heads, mamba_head_dim, mamba_state_dim, mamba_num_angles: of `Mamba3`.
        num_attention_heads, num_kv_heads, attention_head_dim, rope_theta, rope_reset: of `Attention`.
        init_std: of the projections; those back into the residual stream get init_std / sqrt(2 num_layers).
        init_seed: seed of the parameters; None is torch.initial_seed() at the time of `init_weights`.
        backend: "auto" for hand-written kernels where they can run, "triton" to insist on them, "chunk" for
            PyTorch, or "reference" for token-by-token recurrences and full-mask attention, to verify.
        overlap_projections: of `Mamba3`.
        exact_order: False lets kernels sum in another order where that is faster, see `gated_delta_rule`.
    """

    dim: int = 256
    num_layers: int = 4
    pattern: tuple[str, ...] | list[str] = ("gdn", "gdn", "gdn", "attention")
    vocab_size: int = 256
    num_heads: int = 4
    num_v_heads: int | None = None
    head_k_dim: int = 64
    head_v_dim: int = 64
    conv_size: int = 4
    allow_neg_eigval: bool = False
    num_mamba_heads: int = 8
    mamba_head_dim: int = 64
    mamba_state_dim: int = 128
    mamba_num_angles: int = 32
    num_attention_heads: int = 4
    num_kv_heads: int = 4
    attention_head_dim: int = 64
    rope_theta: float = 10000.0
    rope_reset: bool = False
    ffn_dim: int = 704
    norm_eps: float = 1e-6
    init_std: float = 0.02
    init_seed: int | None = None
    backend: str = "auto"
    overlap_projections: str = "auto"
    exact_order: bool = True

    def validate(self) -> None:
        """Raises ValueError, naming the field, its value and the least change that works."""
        for name in _COUNTS:
            value = getattr(self, name)
            if name == "num_v_heads" and value is None:
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name} = {value!r}: must be an integer of at least 1")
        for name in ("rope_theta", "norm_eps", "init_std"):
            value = getattr(self, name)
            if not isinstance(value, int | float) or isinstance(value, bool) or not value > 0:
                raise ValueError(f"{name} = {value!r}: must be a number above 0")
        if isinstance(self.pattern, str) or not self.pattern:
            raise ValueError(
                f"pattern = {self.pattern!r}: must be a list of one or more of {', '.join(MIXERS)}"
            )
        for mixer in self.pattern:
            _check_choice("pattern", mixer, MIXERS)
        _check_choice("backend", self.backend, BACKENDS)
        _check_choice("overlap_projections", self.overlap_projections, OVERLAP_MODES)
        num_v_heads = self.num_heads if self.num_v_heads is None else self.num_v_heads
        if num_v_heads % self.num_heads:
            nearest = max(1, round(num_v_heads / self.num_heads)) * self.num_heads
            raise ValueError(
                f"num_v_heads = {num_v_heads}: must be a multiple of num_heads = {self.num_heads}; "
                f"use {nearest}"
            )
        if 2 * self.mamba_num_angles > self.mamba_state_dim:
            raise ValueError(
                f"mamba_num_angles = {self.mamba_num_angles}: each turns a pair of the mamba_state_dim = "
                f"{self.mamba_state_dim} dimensions, so it must be at most half of them; "
                f"use {max(1, self.mamba_state_dim // 4)}"
            )
        num_heads = self.num_attention_heads
        if num_heads % self.num_kv_heads:
            nearest = nearest_divisor(num_heads, self.num_kv_heads)
            raise ValueError(
                f"num_kv_heads = {self.num_kv_heads}: must divide num_attention_heads = {num_heads}; "
                f"use {nearest}"
            )
        if self.attention_head_dim % 2:
            raise ValueError(
                f"attention_head_dim = {self.attention_head_dim}: must be even for rotary positions; "
                f"use {self.attention_head_dim + 1}"
            )

    def layer_kinds(self) -> list[str]:
        """The mixer name of every layer."""
        return [self.pattern[i % len(self.pattern)] for i in range(self.num_layers)]


def _check_choice(field: str, value: object, choices: Iterable[str]) -> None:
    if value not in list(choices):
        nearest = difflib.get_close_matches(str(value), list(choices), n=1, cutoff=0.0)[0]
        raise ValueError(f"{field} = {value!r}: unknown; use {nearest!r} (there are {', '.join(choices)})")


class LMHead(nn.Module):
    """The head. It does not multiply: the loss takes its weight and never forms a whole chunk's logits."""

    def __init__(self, dim: int, vocab_size: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab_size, dim))
        initialize.apply(self, {"weight": initialize.normal(0.02)})

    def forward(self, hidden_BTD: Tensor) -> tuple[Tensor, Tensor]:
        # An alias, so that wrappers see an output of this call and not the parameter itself.
        return hidden_BTD, self.weight.view_as(self.weight)


def logits(output: tuple[Tensor, Tensor]) -> Tensor:
    """The logits [B, T, V] of what a model with a head returned; under tensor parallelism a collective call."""
    hidden_BTD, weight_VD = output
    if isinstance(weight_VD, DTensor):
        weight_VD = weight_VD.full_tensor()
    return hidden_BTD @ weight_VD.t()


class LanguageModel(nn.Module):
    """A hybrid of linear-recurrent and attention blocks.

    Children are `tok_embeddings`, `layers` (a ModuleDict "0" .. "L-1"), `norm` and `output`. A pipeline stage
    keeps its part: any of them may be None and any layer missing; names stay those of the whole model.
    """

    def __init__(self, config: ModelConfig):
        super().__init__()
        config.validate()
        self.config = config
        self.tok_embeddings = nn.Embedding(config.vocab_size, config.dim)
        self.layers = nn.ModuleDict(
            {
                str(i): Block(config.dim, MIXERS[kind](config), config.ffn_dim, config.norm_eps, config.backend)
                for i, kind in enumerate(config.layer_kinds())
            }
        )
        self.norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.output = LMHead(config.dim, config.vocab_size)

    def state_spec(self, dtype: torch.dtype) -> dict[str, tuple[StateSpec, ...]]:
        """The boundary state of every layer present, by name "layers.i", for activations of `dtype`."""
        return {f"layers.{name}": block.mixer.state_spec(dtype) for name, block in self.layers.items()}

    def initial_state(
        self, batch_size: int, device: torch.device | str, dtype: torch.dtype
    ) -> tuple[State, ...]:
        """The state before a sequence, one flat tuple for every layer that is present, in order."""
        return tuple(block.mixer.initial_state(batch_size, device, dtype) for block in self.layers.values())

    def forward(
        self, x: Tensor, attention_masks: Tensor | None = None, state: tuple[State, ...] | None = None
    ) -> Tensor | tuple:
        """One chunk of a sequence, or a whole sequence.

        Args:
            x: token ids [B, T] where the model has an embedding, else hidden states [B, T, D].
            attention_masks: None, or `doc_start` int64 [B, T]: the position, relative to x's first token, of
                the first token of each token's document (negative: before it).
            state: one flat tuple for every layer that is present, as from `initial_state`; windows may be
                views.

        Returns:
            The output: hidden states [B, T, D], or with a head the pair (hidden after the norm, weight [V,
            D]) for the loss. If a state was given, the pair (output, updates), where `updates` nests as
            `state` does and holds new values of carries and only this chunk's entries of windows
            (`Mixer.update`).
        """
        h_BTD = x if self.tok_embeddings is None else self.tok_embeddings(x)
        given = state
        if state is None:
            state = self.initial_state(h_BTD.shape[0], h_BTD.device, h_BTD.dtype)
        if len(state) != len(self.layers):
            raise ValueError(
                f"state has {len(state)} entries but this part of the model has {len(self.layers)} layers"
            )
        updates = []
        for block, block_state in zip(self.layers.values(), state, strict=True):
            h_BTD, update = block(h_BTD, block_state, attention_masks)
            updates.append(update)
        if self.norm is not None:
            h_BTD = self.norm(h_BTD)
        output = h_BTD if self.output is None else self.output(h_BTD)
        return output if given is None else (output, tuple(updates))

    def _initializers(self) -> dict[str, initialize.Initializer]:
        std = self.config.init_std
        out_std = std / math.sqrt(2 * self.config.num_layers)
        rules = {
            "tok_embeddings.weight": initialize.normal(std),
            "norm.weight": initialize.ones(),
            "output.weight": initialize.normal(std),
        }
        for name, block in self.layers.items():
            rules |= initialize.prefixed(f"layers.{name}", block.initializers(std, out_std))
        return rules

    @torch.no_grad()
    def init_weights(self, buffer_device: torch.device | None = None) -> None:
        """Fills every parameter from a generator of its own, seeded by (the seed, the parameter's full name).

        So the weights do not depend on which rank holds which layers, on sharding, or on wrappers for
        compilation and checkpointing. A DTensor gets its slice of the tensor that an unsharded run would have
        drawn. The generator is of the parameter's device, and CPU and GPU draw different numbers.
        """
        seed = torch.initial_seed() if self.config.init_seed is None else self.config.init_seed
        rules = self._initializers()
        for name, parameter in self.named_parameters():
            name = global_name(name)
            local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            full = torch.empty(parameter.shape, dtype=parameter.dtype, device=local.device)
            rules[name](full, parameter_generator(seed, name, local.device))
            if isinstance(parameter, DTensor):
                # No source rank: every rank has drawn the same full tensor, so nothing needs to be sent.
                mesh, placements = parameter.device_mesh, parameter.placements
                full = distribute_tensor(full, mesh, placements, src_data_rank=None).to_local()
            local.copy_(full)


def global_name(parameter_name: str) -> str:
    """A parameter's name without what activation checkpointing and torch.compile insert into it."""
    return parameter_name.replace("_checkpoint_wrapped_module.", "").replace("_orig_mod.", "")


def parameter_generator(seed: int, name: str, device: torch.device) -> torch.Generator:
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return torch.Generator(device).manual_seed(int.from_bytes(digest[:8], "big") >> 1)


def _on_meta(config: ModelConfig) -> LanguageModel:
    with torch.device("meta"):
        return LanguageModel(config)


def count_parameters(config: ModelConfig) -> int:
    """The number of parameters of the whole model, embedding and head included."""
    return sum(parameter.numel() for parameter in _on_meta(config).parameters())


def flops_per_token(config: ModelConfig, seq_len: int) -> float:
    """Floating point operations of forward and backward a token, averaged over a sequence, no recomputation:

        6 * (weights of projections, convolutions, feed-forward and head; not the embedding, not vectors)
        + 6 * num_attention_layers * num_attention_heads * attention_head_dim * seq_len
        + 18 * num_gdn_layers * num_v_heads * head_k_dim * head_v_dim
        + 12 * num_mamba3_layers * num_mamba_heads * mamba_state_dim * mamba_head_dim

    The second term is the usual 12 H K T of the two attention products, halved since a token sees on average
    half of the sequence. The others are the recurrences as defined, whatever a chunk form does beside them.
    Gated delta rule: reading with k, writing the outer product and reading with q are 2 K V each, and the
    backward takes twice that. Mamba-3: writing and reading; the two outer products of the trapezoidal rule count
    as one, since each token's k v^T can be written once, with the sum of its weights.
    """
    weights = sum(
        parameter.numel()
        for name, parameter in _on_meta(config).named_parameters()
        if parameter.dim() >= 2 and not name.startswith("tok_embeddings.") and not name.endswith("_bias")
    )
    kinds = config.layer_kinds()
    attention = 6 * config.num_attention_heads * config.attention_head_dim * seq_len
    num_v_heads = config.num_heads if config.num_v_heads is None else config.num_v_heads
    gdn = 18 * num_v_heads * config.head_k_dim * config.head_v_dim
    mamba3 = 12 * config.num_mamba_heads * config.mamba_state_dim * config.mamba_head_dim
    by_kind = {"attention": attention, "gdn": gdn, "mamba3": mamba3}
    return 6 * weights + sum(by_kind[kind] for kind in kinds)
