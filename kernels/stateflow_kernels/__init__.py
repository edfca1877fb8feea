"""Hand-written Triton kernels of StateFlow. Imports torch and triton only.

Each module holds the kernels of one operation and the functions that launch them on plain tensors; autograd and
the choice between kernel and reference are `stateflow.recurrence`'s.
"""

from . import assembler

assembler.choose()
