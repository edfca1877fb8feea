"""On a Hopper GPU: which kernel of the gated delta rule does not repeat its bits, on the same inputs?

    python studies/repeated_launches.py 2000          (repeats; about two minutes)

Prints which output of which kernel changed, and where.
"""

import sys

import pytest
import torch
from tests.kernels.test_gated_delta_kernels import run
from tests.kernels.test_gated_delta_on_gpu import TRITON, make, use_default_with
from tests.recurrence.op_testing import documents

from stateflow_kernels import hopper

if not torch.cuda.is_available():
    sys.exit("studies/repeated_launches.py runs kernels on a GPU and there is none here")
REPEATS = int(sys.argv[1]) if len(sys.argv) > 1 else 2000
# How many of the last arguments each launch writes.
OUTPUTS = {"transition": 3, "transition_backward": 3, "gradients": 5}
faults = {}


def repeating(name, launch, key):
    def repeated(*args):
        count = OUTPUTS[name]
        aliased = any(x is y for x in args[:-count] for y in args[-count:])  # in place: not repeatable
        launch(*args)
        if aliased:
            return
        first = [x.clone() for x in args[-count:]]
        for _ in range(REPEATS):
            for x in args[-count:]:
                x.fill_(float("nan"))
            launch(*args)
            for i, (x, y) in enumerate(zip(args[-count:], first, strict=True)):
                if not torch.equal(x, y):
                    where = (x != y).nonzero()
                    low, high = where.min(0).values.tolist(), where.max(0).values.tolist()
                    faults.setdefault((*key, name, i), []).append((len(where), low, high, where[:4].tolist()))
        for x, y in zip(args[-count:], first, strict=True):
            x.copy_(y)

    return repeated


use_default_with(pytest.MonkeyPatch(), gradient_chunks=8)
launches = {name: getattr(hopper, name) for name in OUTPUTS}
for sizes in ((64, 128), (64, 64), (128, 64), (128, 128)):
    for dtype in (torch.float16, torch.bfloat16):
        for with_docs in (False, True):
            torch.manual_seed(0)
            inputs = make(1, 1000, 3, 1, *sizes, dtype=dtype)
            docs = documents(1, 1000, rate=0.005) if with_docs else None
            key = (sizes, str(dtype), with_docs)
            for name, launch in launches.items():
                setattr(hopper, name, repeating(name, launch, key))
            run(inputs, docs, **TRITON)
            print(key, {k[3:]: (len(v), v[:3]) for k, v in faults.items() if k[:3] == key}, flush=True)
