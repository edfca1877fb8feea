"""The torchtitan plug-in: ``[job] custom_config_module = "stateflow.titan"`` in a train.toml is all it takes.

Importing this module adds the ``[stateflow]`` section, registers the model under ``[model] name = "stateflow"``, lets
torchtitan run on a host without an accelerator, and lets ranks share GPUs where that is asked for.
"""

from stateflow.titan import cpu_host, shared_gpus

cpu_host.enable_if_needed()  # before torchtitan modules copy the device type
shared_gpus.enable_if_asked()

from torchtitan.components.lr_scheduler import build_lr_schedulers  # noqa: E402
from torchtitan.components.optimizer import build_optimizers  # noqa: E402
from torchtitan.protocols.train_spec import TrainSpec, register_train_spec  # noqa: E402

from stateflow.loss import CrossEntropySum  # noqa: E402
from stateflow.titan import resume  # noqa: E402
from stateflow.titan.config import MODEL_NAME, JobConfig, install  # noqa: E402
from stateflow.titan.data import build_dataloader, build_validator  # noqa: E402
from stateflow.titan.flavors import FLAVORS, KERNEL_BACKENDS  # noqa: E402
from stateflow.titan.model import TitanModel  # noqa: E402
from stateflow.titan.parallelize import parallelize  # noqa: E402
from stateflow.titan.pipeline import pipeline  # noqa: E402
from stateflow.titan.tokenizer import build_tokenizer  # noqa: E402

__all__ = ["JobConfig", "MODEL_NAME"]


def build_loss(job_config, **kwargs):
    """The chunk loss takes the head along, so that logits of a whole sequence never exist."""
    backend = KERNEL_BACKENDS[job_config.stateflow.kernels]
    # As for attention: "triton" insists on kernels of the layers.
    return CrossEntropySum("auto" if backend == "triton" else backend)


install()
resume.install()
register_train_spec(
    MODEL_NAME,
    TrainSpec(
        model_cls=TitanModel,
        model_args=FLAVORS,
        parallelize_fn=parallelize,
        pipelining_fn=pipeline,
        build_optimizers_fn=build_optimizers,
        build_lr_schedulers_fn=build_lr_schedulers,
        build_dataloader_fn=build_dataloader,
        build_tokenizer_fn=build_tokenizer,
        build_loss_fn=build_loss,
        build_validator_fn=build_validator,
    ),
)
