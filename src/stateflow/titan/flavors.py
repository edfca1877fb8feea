"""Model flavors: the demo's and the paper's sizes, and the torchtitan model arguments made from a config."""

from __future__ import annotations

import dataclasses
import difflib
from dataclasses import dataclass

from stateflow.model import LanguageModel, ModelConfig, count_parameters, flops_per_token

# Three recurrent layers to one attention layer.
HYBRID = ["gdn", "gdn", "gdn", "attention"]
MAMBA3_HYBRID = ["mamba3", "mamba3", "mamba3", "attention"]


@dataclass
class ModelArgs(ModelConfig):
    """``ModelConfig`` with what torchtitan's Trainer asks of model arguments."""

    # "varlen" makes the Trainer call get_attention_masks on every rank, the route of document boundaries.
    attn_type: str = "varlen"

    @property
    def n_layers(self) -> int:
        return self.num_layers

    def update_from_config(self, job_config, **kwargs) -> None:
        """Takes the run's overrides; called by the Trainer with the whole merged config."""
        for name, value in resolve_model(job_config).__dict__.items():
            setattr(self, name, value)

    def get_nparams_and_flops(self, model: LanguageModel, seq_len: int) -> tuple[int, int]:
        return count_parameters(self), int(flops_per_token(self, seq_len))


def _paper(num_layers: int, dim: int, num_heads: int, group: int, ffn_dim: int, *, fla_dims: bool = False):
    """A size of the paper's table; ``fla_dims`` is the reading with FLA's rule (keys 0.75 * dim, values 1.5 * dim)."""
    head = dim // num_heads
    k_dim, v_dim = (head * 3 // 4, head * 3 // 2) if fla_dims else (head, head)
    return dict(
        dim=dim, num_layers=num_layers, vocab_size=50_304, num_heads=num_heads, head_k_dim=k_dim, head_v_dim=v_dim,
        num_attention_heads=num_heads, num_kv_heads=num_heads // group, attention_head_dim=head, ffn_dim=ffn_dim,
        num_mamba_heads=2 * dim // 64,
    )


# ffn_dim is 8/3 of dim, rounded up to a multiple of 256.
_SIZES = {
    "3b": dict(num_layers=32, dim=2560, num_heads=20, group=4, ffn_dim=6912),
    "15b": dict(num_layers=40, dim=5120, num_heads=40, group=5, ffn_dim=13_824),
    "32b": dict(num_layers=64, dim=6144, num_heads=64, group=4, ffn_dim=16_384),
}


def _flavors() -> dict[str, ModelArgs]:
    flavors = {
        "demo": ModelArgs(
            dim=160, num_layers=8, pattern=list(HYBRID), vocab_size=258, num_heads=4, head_k_dim=32, head_v_dim=40,
            num_attention_heads=4, num_kv_heads=2, attention_head_dim=40, ffn_dim=432,
        ),
        "tiny": ModelArgs(
            dim=32, num_layers=4, pattern=list(HYBRID), vocab_size=258, num_heads=2, head_k_dim=8, head_v_dim=12,
            num_mamba_heads=4, mamba_head_dim=12, mamba_state_dim=8, mamba_num_angles=2,
            num_attention_heads=4, num_kv_heads=2, attention_head_dim=8, ffn_dim=64,
        ),
        "demo_mamba3": ModelArgs(
            dim=160, num_layers=8, pattern=list(MAMBA3_HYBRID), vocab_size=258, num_mamba_heads=8, mamba_head_dim=40,
            mamba_state_dim=32, mamba_num_angles=8, num_attention_heads=4, num_kv_heads=2, attention_head_dim=40,
            ffn_dim=432,
        ),
    }
    for size, shape in _SIZES.items():
        flavors[f"mamba3_{size}"] = ModelArgs(pattern=["mamba3"], **_paper(**shape))
        flavors[f"mamba3_{size}_hybrid"] = ModelArgs(pattern=list(MAMBA3_HYBRID), **_paper(**shape))
        for suffix, fla_dims in (("", False), ("_fla_dims", True)):
            flavors[f"gdn_{size}{suffix}"] = ModelArgs(pattern=["gdn"], **_paper(**shape, fla_dims=fla_dims))
            flavors[f"gdn_{size}_hybrid{suffix}"] = ModelArgs(
                pattern=list(HYBRID), **_paper(**shape, fla_dims=fla_dims)
            )
    return flavors


FLAVORS = _flavors()

# [stateflow] kernels, and the backend of the model that it means.
KERNEL_BACKENDS = {"auto": "auto", "triton": "triton", "reference": "chunk"}


def resolve_model(job_config) -> ModelArgs:
    """The flavor of the config with its ``[stateflow.model]`` overrides, the run's seed, and validated.

    Raises ValueError naming the flavor or the field.
    """
    name = job_config.model.flavor
    if name not in FLAVORS:
        near = difflib.get_close_matches(name.lower(), FLAVORS, n=1)
        hint = f"did you mean {near[0]!r}? known:" if near else "choose one of"
        raise ValueError(f"[model] flavor = {name!r} is unknown; {hint} {', '.join(sorted(FLAVORS))}")
    options = job_config.stateflow
    given = {k: v for k, v in vars(options.model).items() if v is not None}
    if "pattern" in given:
        given["pattern"] = given["pattern"].replace(",", " ").split()
    if "init_seed" not in given and job_config.debug.seed is not None:
        given["init_seed"] = job_config.debug.seed
    if options.rope_reset:
        given["rope_reset"] = True
    given["backend"] = KERNEL_BACKENDS[options.kernels]
    given["overlap_projections"] = options.overlap_projections
    given["exact_order"] = options.exact_order
    attn_type = "varlen" if options.reset_at_documents else "sdpa"
    args = dataclasses.replace(_pristine(name), attn_type=attn_type, **given)
    args.validate()
    return args


def _pristine(name: str) -> ModelArgs:
    # FLAVORS entries are updated in place by the Trainer; start from the definition each time.
    return _flavors()[name]
