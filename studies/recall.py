"""Does training by chunks learn what lies more than a chunk back?  Associative recall with Gated DeltaNet alone.

    python studies/recall.py --seeds 0 1 2 --json outputs/recall.json --plot outputs/recall.svg

A sequence has three chunks.  The first holds key-value pairs, the second noise, the third only keys; at each of them
the model must name the value.  Three trainings start from the same weights and see the same batches:

    unchunked   whole sequences in one process, plain autograd
    chunked     the chunks pass through a pipeline of two stages (run_local), states and their gradients cross the cuts
    detached    the same, but the gradient of every state is dropped at the cut: truncated back-propagation
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import statistics
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from stateflow.chunks import ChunkPlan
from stateflow.faults import drop_state_grad
from stateflow.loss import cross_entropy_sum
from stateflow.model import LanguageModel, ModelConfig, logits
from stateflow.pipeline.local import run_local
from stateflow.pipeline.policies import build_schedule
from stateflow.pipeline.split import split_model
from stateflow.pipeline.stage import ChunkStage

VARIANTS = ("unchunked", "chunked", "detached")
IGNORE = -100
CHUNK_LEN = 32
NUM_CHUNKS = 3  # pairs, noise, queries
SEQ_LEN = NUM_CHUNKS * CHUNK_LEN
THREE_CHUNKS = ChunkPlan.explicit(SEQ_LEN, [CHUNK_LEN] * NUM_CHUNKS)
NUM_STAGES = 2
# Keys are tokens 0 .. NUM_PAIRS - 1, values the next NUM_PAIRS, then the filler, then the kinds of noise.
NUM_PAIRS = 4
NUM_NOISE_KINDS = 16
FILLER = 2 * NUM_PAIRS
VOCAB = FILLER + 1 + NUM_NOISE_KINDS
CHANCE = 1 / NUM_PAIRS


@dataclass(frozen=True)
class Settings:
    """One training.  The middle chunk's noise grows from no token to all of them over the steps of ``noise_ramp``."""

    num_steps: int = 180
    noise_ramp: tuple[int, int] = (40, 120)
    batch_size: int = 32
    lr: float = 1e-2
    warmup_steps: int = 20
    eval_every: int = 20
    eval_sequences: int = 256
    dtype: str = "float32"

    def noise_len(self, step: int) -> int:
        start, stop = self.noise_ramp
        return max(0, min(CHUNK_LEN, (step - start) * CHUNK_LEN // (stop - start)))

    def lr_at(self, step: int) -> float:
        """Linear warm-up, then half a cosine down to 0."""
        return self.lr * min(1, (step + 1) / self.warmup_steps) * 0.5 * (1 + math.cos(math.pi * step / self.num_steps))


@dataclass
class Result:
    """What one training gave: the mean loss of every step, and the accuracy on held-out sequences with all noise.

    ``without_recurrent`` and ``without_conv``: the final accuracy if these states are set to zero at each cut.
    """

    variant: str
    seed: int
    losses: list[float]
    eval_steps: list[int]
    accuracies: list[float]
    without_recurrent: float
    without_conv: float
    cpu_seconds: float


def make_batch(num_sequences: int, noise_len: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Tokens and labels int64 [B, SEQ_LEN]; labels are IGNORE but at the queries.

    Every key and every value is in a sequence once and no answer is shown, so that counting values or elimination does
    not help: who cannot connect a query with its pair is right with probability CHANCE.  Nothing is asked in the chunk
    of the pairs either: a task that can be solved inside a chunk would train the same weights without any state.
    """

    def permutation() -> Tensor:
        return torch.rand(num_sequences, NUM_PAIRS, generator=generator).argsort(dim=1)

    keys, values, order = permutation(), NUM_PAIRS + permutation(), permutation()
    tokens = torch.full((num_sequences, SEQ_LEN), FILLER)
    tokens[:, 0 : 2 * NUM_PAIRS : 2] = keys
    tokens[:, 1 : 2 * NUM_PAIRS : 2] = values
    noise = torch.randint(NUM_NOISE_KINDS, (num_sequences, CHUNK_LEN), generator=generator)
    tokens[:, CHUNK_LEN : CHUNK_LEN + noise_len] = (FILLER + 1 + noise)[:, :noise_len]
    labels = torch.full_like(tokens, IGNORE)
    queries = slice(SEQ_LEN - CHUNK_LEN, SEQ_LEN, CHUNK_LEN // NUM_PAIRS)  # filler after each
    tokens[:, queries] = keys.gather(1, order)
    labels[:, queries] = values.gather(1, order)
    return tokens, labels


def make_model(seed: int, dtype: torch.dtype) -> LanguageModel:
    """Two blocks of Gated DeltaNet; no attention that could look past the state."""
    config = ModelConfig(
        dim=32, num_layers=2, pattern=["gdn"], vocab_size=VOCAB, num_heads=2, head_k_dim=16, head_v_dim=16, ffn_dim=32,
        init_std=0.1, init_seed=seed,
    )  # fmt: skip
    # What convolutions alone can carry forward must be less than the chunk between pairs and queries.
    assert config.num_layers * (config.conv_size - 1) < CHUNK_LEN
    model = LanguageModel(config)
    model.init_weights()
    for block in model.layers.values():
        block.mixer.chunk_size = CHUNK_LEN  # the kernel's; its default of 64 would compute padding
        # A slow start, e^-0.0067 a token. By default a head may forget within a few tokens, and then it depends on the
        # seed when learning begins.
        nn.init.zeros_(block.mixer.decay.A_log)
        nn.init.constant_(block.mixer.decay.dt_bias, -5.0)
    return model.to(dtype)


class Trainer:
    """The forward and backward of one variant, on the whole model or on the parts of a pipeline."""

    def __init__(self, variant: str, seed: int, dtype: torch.dtype):
        if variant not in VARIANTS:
            raise ValueError(f"unknown variant {variant!r}: use one of {', '.join(VARIANTS)}")
        self.variant = variant
        model = make_model(seed, dtype)
        if variant == "unchunked":
            self.parts = [model]
            return
        self.parts = split_model(model, NUM_STAGES)
        self.stages = [
            ChunkStage(part, THREE_CHUNKS, dtype, is_last=s == NUM_STAGES - 1, name=f"stage {s}")
            for s, part in enumerate(self.parts)
        ]
        self.stages[-1].loss_fn = cross_entropy_sum
        self.schedule = build_schedule("1f1b", NUM_STAGES, num_microbatches=1, num_chunks=NUM_CHUNKS)

    def parameters(self) -> list[nn.Parameter]:
        return [parameter for part in self.parts for parameter in part.parameters()]

    def loss_and_gradients(self, tokens_BT: Tensor, labels_BT: Tensor) -> float:
        """The mean loss over the queries; gradients are added to the parameters' ``.grad``."""
        num_queries = (labels_BT != IGNORE).sum().item()
        if self.variant == "unchunked":
            loss_sum = cross_entropy_sum(self.parts[0](tokens_BT), labels_BT)
            (loss_sum / num_queries).backward()
            return loss_sum.item() / num_queries
        with drop_state_grad() if self.variant == "detached" else nullcontext():
            loss_sums = run_local(
                self.schedule, self.stages, THREE_CHUNKS, tokens_BT, labels_BT, loss_scale=1 / num_queries
            )
        return sum(loss_sums).item() / num_queries

    @torch.no_grad()
    def logits(
        self, tokens_BT: Tensor, zero_at_cuts: str | None = None, plan: ChunkPlan = THREE_CHUNKS
    ) -> Tensor:
        """[B, T, V], forward chunk by chunk; states whose names start with ``zero_at_cuts`` are zeros at each cut."""
        dtype = next(self.parts[0].parameters()).dtype
        states = [part.initial_state(len(tokens_BT), tokens_BT.device, dtype) for part in self.parts]
        chunks = []
        for x in plan.split(tokens_BT):
            for s, part in enumerate(self.parts):
                # All states of GDN are carries: the update is the next chunk's state.
                x, states[s] = part(x, state=states[s])
                if zero_at_cuts is not None:
                    states[s] = _zero_states(part, states[s], zero_at_cuts)
            chunks.append(logits(x))
        return torch.cat(chunks, dim=1)

    def accuracy(self, tokens_BT: Tensor, labels_BT: Tensor, zero_at_cuts: str | None = None) -> float:
        """The share of queries that are answered right."""
        right = self.logits(tokens_BT, zero_at_cuts).argmax(-1) == labels_BT
        return right.sum().item() / (labels_BT != IGNORE).sum().item()


def _zero_states(part: LanguageModel, states: tuple, prefix: str) -> tuple:
    specs = part.state_spec(torch.float32).values()
    return tuple(
        tuple(
            torch.zeros_like(tensor) if spec.name.startswith(prefix) else tensor
            for spec, tensor in zip(layer_specs, layer, strict=True)
        )
        for layer_specs, layer in zip(specs, states, strict=True)
    )


def train(variant: str, seed: int, settings: Settings) -> Result:
    trainer = Trainer(variant, seed, getattr(torch, settings.dtype))
    parameters = trainer.parameters()
    optimizer = torch.optim.AdamW(parameters, betas=(0.9, 0.95), weight_decay=0.0)
    generator = torch.Generator().manual_seed(seed)
    held_out = make_batch(settings.eval_sequences, CHUNK_LEN, torch.Generator().manual_seed(10_000 + seed))
    losses, eval_steps, accuracies = [], [0], [trainer.accuracy(*held_out)]
    start = time.process_time()
    for step in range(settings.num_steps):
        for group in optimizer.param_groups:
            group["lr"] = settings.lr_at(step)
        batch = make_batch(settings.batch_size, settings.noise_len(step), generator)
        optimizer.zero_grad()
        losses.append(trainer.loss_and_gradients(*batch))
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        if (step + 1) % settings.eval_every == 0 or step + 1 == settings.num_steps:
            eval_steps.append(step + 1)
            accuracies.append(trainer.accuracy(*held_out))
    return Result(
        variant, seed, losses, eval_steps, accuracies,
        without_recurrent=trainer.accuracy(*held_out, zero_at_cuts="recurrent"),
        without_conv=trainer.accuracy(*held_out, zero_at_cuts="conv"),
        cpu_seconds=time.process_time() - start,
    )  # fmt: skip


def loss_difference(results: Sequence[Result], seed: int, num_steps: int | None = None) -> float:
    """The largest difference of chunked and unchunked losses over the first ``num_steps`` steps (all of them)."""
    of = {r.variant: r.losses[:num_steps] for r in results if r.seed == seed}
    return max(abs(a - b) for a, b in zip(of["chunked"], of["unchunked"], strict=True))


def markdown_table(results: Sequence[Result]) -> str:
    lines = [
        "| seed | training | final loss | accuracy | recurrent states zeroed at cuts | conv tails zeroed at cuts |",
        "|---|---|---|---|---|---|",
    ]
    for r in sorted(results, key=lambda r: (r.seed, VARIANTS.index(r.variant))):
        final_loss = statistics.mean(r.losses[-10:])
        shares = (r.accuracies[-1], r.without_recurrent, r.without_conv)
        lines.append(
            f"| {r.seed} | {r.variant} | {final_loss:.3f} | " + " | ".join(f"{100 * s:.1f} %" for s in shares) + " |"
        )
    return "\n".join(lines)


def plot(results: Sequence[Result], path: Path) -> None:
    """Accuracy over steps, one line a seed.  Needs matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    # The same bytes for the same numbers.
    matplotlib.rcParams |= {"svg.hashsalt": "recall", "font.size": 9}
    from matplotlib import pyplot as plt

    styles = {
        "unchunked": {"color": "#9aa5b1", "linewidth": 4},
        "chunked": {"color": "#1f5fa8", "linewidth": 1.4},
        "detached": {"color": "#c2452d", "linewidth": 1.4},
    }
    figure, axes = plt.subplots(figsize=(6.4, 3.4), layout="constrained")
    axes.axhline(100 * CHANCE, color="black", linestyle=":", linewidth=1, label=f"chance, {100 * CHANCE:g} %")
    for variant, style in styles.items():
        runs = [r for r in results if r.variant == variant]
        for i, r in enumerate(runs):
            label = f"{variant} ({len(runs)} seeds)" if i == 0 else None
            axes.plot(r.eval_steps, [100 * a for a in r.accuracies], label=label, **style)
    axes.set(xlabel="optimizer steps", ylabel="right answers, %", ylim=(0, 102))
    axes.margins(x=0)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="center right", bbox_to_anchor=(1, 0.66))
    metadata = {"Date": None} if path.suffix == ".svg" else None
    figure.savefig(path, metadata=metadata, dpi=150)
    plt.close(figure)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--steps", type=int, default=Settings.num_steps)
    parser.add_argument("--dtype", choices=("float32", "float64"), default=Settings.dtype)
    parser.add_argument("--json", type=Path, default=Path("outputs/recall.json"))
    parser.add_argument("--plot", type=Path, default=Path("outputs/recall.svg"), help=".svg or .png; needs matplotlib")
    args = parser.parse_args(argv)

    torch.set_num_threads(1)  # the tensors are tiny: more threads only wait for each other
    settings = Settings(num_steps=args.steps, dtype=args.dtype)
    results = []
    for seed in args.seeds:
        for variant in args.variants:
            results.append(r := train(variant, seed, settings))
            print(f"seed {seed} {variant}: accuracy {100 * r.accuracies[-1]:.1f} %, {r.cpu_seconds:.0f} s", flush=True)
    report = {
        "settings": asdict(settings),
        "chance": CHANCE,
        "versions": {"torch": torch.__version__, "python": platform.python_version(), "machine": platform.machine()},
        "results": [asdict(r) for r in results],
    }
    if {"unchunked", "chunked"} <= set(args.variants):
        for num_steps in (20, None):
            difference = max(loss_difference(results, seed, num_steps) for seed in args.seeds)
            print(f"chunked - unchunked loss, {num_steps or 'all'} steps: at most {difference:.1e}")
            report[f"loss_difference_{num_steps or 'all'}_steps"] = difference
    print(markdown_table(results))
    args.json.parent.mkdir(parents=True, exist_ok=True)
    args.json.write_text(json.dumps(report, indent=1) + "\n")
    try:
        args.plot.parent.mkdir(parents=True, exist_ok=True)
        plot(results, args.plot)
    except ModuleNotFoundError as error:
        print(f"no plot: {error}; pip install matplotlib")


if __name__ == "__main__":
    main()
