"""Runs the package's Gluon kernels on the CPU, which Triton's interpreter does not: their source, with another `gluon`.

A program's partitions are threads, its barriers block them, its tiles are tensors that start as NaN. What differs from
a GPU: copies are done at once, nothing is known of layouts and fences. What is checked beside the results: that
barriers get as many bytes as they expect, that nobody waits forever, and that a product's operands are the same when it
is issued and when it is waited for.
"""

import contextlib
import importlib.util
import operator
import sys
import threading
import types
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

import stateflow_kernels

# Those with kernels for Hopper; what imports from another comes after it.
MODULES = (
    *("hopper_common", "hopper_transition", "hopper_gradients", "hopper_segments", "hopper_outputs", "hopper_prepare"),
    *("hopper_mamba3_tiles", "hopper_mamba3_rows", "hopper_mamba3_local", "hopper_mamba3_out", "hopper_mamba3_both"),
    *("hopper_mamba3_groups", "hopper_mamba3_gradients"),
)
SECONDS = 10  # no barrier takes longer: then it is a deadlock


def plain(x):
    """The tensor or number in a register, or a `constexpr`."""
    if isinstance(x, Registers):
        return x.data
    return getattr(x, "value", x)


class Registers:
    """A tensor, or a scalar, that a thread group holds."""

    def __init__(self, data):
        self.data = data if isinstance(data, Tensor) else torch.tensor(plain(data))

    def to(self, dtype: torch.dtype) -> "Registers":
        return Registers(self.data.to(dtype))

    def __getitem__(self, where) -> "Registers":
        return Registers(self.data[where])

    def __index__(self) -> int:
        return int(self.data)

    def reshape(self, shape) -> "Registers":
        return Registers(self.data.reshape(shape))

    def permute(self, order) -> "Registers":
        return Registers(self.data.permute(order))

    def split(self) -> tuple["Registers", "Registers"]:
        return tuple(Registers(x) for x in self.data.unbind(-1))

    def __bool__(self) -> bool:
        return bool(self.data)

    def __neg__(self) -> "Registers":
        return Registers(-self.data)

    @property
    def type(self):
        return types.SimpleNamespace(layout=None)

    @property
    def dtype(self) -> torch.dtype:
        return self.data.dtype

    @property
    def shape(self) -> list[int]:
        return list(self.data.shape)


def _operator(function, swapped: bool):
    def apply(self, other):
        if isinstance(other, Pointer):
            return NotImplemented
        pair = (plain(other), self.data) if swapped else (self.data, plain(other))
        return Registers(function(*pair))

    return apply


for _name in (
    "add", "sub", "mul", "floordiv", "mod", "and_", "or_", "xor", "rshift", "lt", "le", "gt", "ge", "eq", "ne",
):  # fmt: skip
    _function = getattr(operator, _name)
    setattr(Registers, f"__{_name.strip('_')}__", _operator(_function, swapped=False))
    if _name in ("add", "sub", "mul", "floordiv", "mod", "and_", "or_"):
        setattr(Registers, f"__r{_name.strip('_')}__", _operator(_function, swapped=True))


class Pointer:
    """Into a contiguous tensor."""

    def __init__(self, flat: Tensor, offset=0):
        self.flat, self.offset = flat, offset

    def to(self, dtype: torch.dtype) -> Registers:
        """Its address, to fetch into a cache that there is none of."""
        return Registers(torch.zeros((), dtype=dtype))

    def __add__(self, offset) -> "Pointer":
        return Pointer(self.flat, self.offset + plain(offset))


class Shared:
    """Of shared memory, or a barrier, or some of them."""

    def __init__(self, data: Tensor, barriers=None):
        self.data, self.barriers = data, barriers

    @property
    def shape(self) -> list[int]:
        return list(self.data.shape)

    @property
    def dtype(self) -> torch.dtype:
        return self.data.dtype

    @property
    def type(self):
        return types.SimpleNamespace(layout=None)

    def index(self, i) -> "Shared":
        i = int(plain(i))
        return Shared(self.data[i], self.barriers and self.barriers[i])

    def slice(self, start, length, dim: int = 0) -> "Shared":
        return Shared(self.data.narrow(dim, int(plain(start)), int(plain(length))))

    def permute(self, order) -> "Shared":
        return Shared(self.data.permute(order))

    def _reinterpret(self, dtype, shape, layout) -> "Shared":
        return Shared(self.data.view(dtype).view(shape))

    def _keep_alive(self) -> None:
        pass

    def load(self, layout) -> Registers:
        return Registers(self.data.clone())

    def store(self, value: Registers) -> None:
        assert value.data.dtype == self.data.dtype and value.data.shape == self.data.shape
        self.data.copy_(value.data)


class Barrier:
    def __init__(self):
        self.changed = threading.Condition()
        self.count = self.phase = self.arrived = self.missing_bytes = 0

    def update(self, arrivals: int, num_bytes: int) -> None:
        with self.changed:
            self.arrived += arrivals
            self.missing_bytes += num_bytes
            assert self.count and self.arrived <= self.count, "more arrivals than the barrier counts"
            if self.arrived == self.count and self.missing_bytes == 0:
                self.phase, self.arrived = self.phase ^ 1, 0
                self.changed.notify_all()

    def wait(self, phase: int) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: self.phase != phase, SECONDS), "a barrier that nobody completes"


class Descriptor:
    """A matrix in tiles."""

    def __init__(self, matrix: Tensor, rows: int, columns: int):
        self.matrix, self.dtype, self.layout = matrix, matrix.dtype, None
        size = rows * columns * matrix.element_size()
        self.block_type = types.SimpleNamespace(shape=[rows, columns], nbytes=size)

    def parts(self, coordinates) -> tuple[Tensor, tuple[slice, slice]]:
        """What there is of the tile, and where in the tile that is."""
        row, column = (int(plain(x)) for x in coordinates)
        rows, columns = self.block_type.shape
        inside = self.matrix[row : row + rows, column : column + columns]
        return inside, (slice(inside.shape[0]), slice(inside.shape[1]))


def _load_tile(descriptor: Descriptor, coordinates, barrier: Shared, place: Shared) -> None:
    inside, where = descriptor.parts(coordinates)
    place.data.zero_()
    place.data[where] = inside
    barrier.barriers.update(0, -place.data.numel() * place.data.element_size())


def _store_tile(descriptor: Descriptor, coordinates, place: Shared) -> None:
    inside, where = descriptor.parts(coordinates)
    assert not place.data[where].isnan().any(), "stores what nobody wrote"
    inside.copy_(place.data[where])


_group = threading.local()  # the products that a group of warps has under way


def _operand(x) -> Tensor:
    assert x.data.dtype in (torch.bfloat16, torch.float16)
    return x.data.float()


def _multiply(a, b, acc, use_acc=True, is_async=False) -> Registers:
    assert a.data.dtype == b.data.dtype, "a product's operands are of one type"
    operands = _operand(a).clone(), _operand(b).clone()
    result = Registers(operands[0] @ operands[1] + (acc.data if use_acc else 0.0))
    assert is_async
    _group.products.append((a, b, operands))
    return result


def _multiply_in_registers(a, b, acc) -> Registers:
    return Registers(_operand(a) @ _operand(b) + acc.data)


def _wait_for_products(num_outstanding: int, deps):
    while len(_group.products) > num_outstanding:
        a, b, operands = _group.products.pop(0)
        same = torch.equal(_operand(a), operands[0]) and torch.equal(_operand(b), operands[1])
        assert same, "an operand was overwritten under its product"
    return deps[0] if len(deps) == 1 else tuple(deps)


def _specialize(functions_and_args, num_warps, num_registers) -> None:
    failures = []

    def partition(function, args) -> None:
        _group.products = []
        try:
            with torch.no_grad():  # each thread has a mode of its own
                function(*args)
            assert not _group.products, "products that nobody waits for"
        except BaseException as failure:
            failures.append(failure)

    threads = [threading.Thread(target=partition, args=pair) for pair in functions_and_args]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


def _allocate(dtype: torch.dtype, shape, layout) -> Shared:
    if layout == "barriers":
        return Shared(torch.zeros(shape), [Barrier() for _ in range(shape[0])])
    return Shared(torch.full(shape, float("nan"), dtype=dtype))


def _store(pointer: Pointer, value: Registers, mask=None) -> None:
    offset, data = torch.broadcast_tensors(torch.as_tensor(pointer.offset), value.data)
    mask = torch.ones((), dtype=torch.bool) if mask is None else mask.data
    mask = mask.expand(offset.shape)
    assert pointer.flat.dtype == data.dtype and not data[mask].isnan().any()
    pointer.flat[offset[mask]] = data[mask]


def _load(pointer: Pointer, mask=None, other=None) -> Registers:
    if mask is None:
        return Registers(pointer.flat[pointer.offset])
    offset, mask = torch.broadcast_tensors(torch.as_tensor(pointer.offset), mask.data)
    return Registers(torch.where(mask, pointer.flat[offset * mask], torch.tensor(other, dtype=pointer.flat.dtype)))


def _scan(x, axis: int, combine):
    """One tensor or several, along an axis."""
    parts = [part.data.unbind(axis) for part in (x if isinstance(x, tuple) else (x,))]
    sums = [[Registers(part[0]) for part in parts]]
    for step in list(zip(*parts, strict=True))[1:]:
        total = combine(*sums[-1], *map(Registers, step))
        sums.append(list(total) if isinstance(total, tuple) else [total])
    results = tuple(Registers(torch.stack([step.data for step in part], axis)) for part in zip(*sums, strict=True))
    return results if isinstance(x, tuple) else results[0]


_INSTRUCTIONS = {
    "sin": torch.sin, "cos": torch.cos, "ex2": torch.exp2, "lg2": torch.log2, "rcp": torch.reciprocal,
    "and": lambda x: (x.view(torch.int32) & -(2**16)).view(torch.float32),
    "shl": torch.Tensor.float,
}  # fmt: skip


def _inline(code: str, constraints: str, args, dtype, is_pure: bool, pack: int) -> Registers | None:
    if "prefetch" in code:
        return None
    return Registers(_INSTRUCTIONS[code.split(".")[0]](args[0].data))


class _Kernel:
    program: int
    programs: int

    def __init__(self, function):
        self.function = function

    def __call__(self, *args):
        return self.function(*args)

    def __getitem__(self, grid):
        def launch(*args, num_warps: int, maxnreg: int | None = None, **constants) -> None:
            _group.products = []
            args = [Pointer(x.view(-1)) if isinstance(x, Tensor) else x for x in args]
            _Kernel.programs = grid[0]
            for _Kernel.program in range(grid[0]):
                _group.products = []
                self.function(*args, **constants)
                assert not _group.products, "products that nobody waits for"

        return launch


def _jit(function=None, **_):
    return _Kernel if function is None else _Kernel(function)


def _init_barrier(barrier: Shared, count: int) -> None:
    barrier.barriers.count = count


def _language() -> dict[str, types.ModuleType]:
    """Modules in the place of Gluon's, by name."""
    language = types.ModuleType("language")
    vars(language).update(
        constexpr=lambda x: x,
        **{name: getattr(torch, name) for name in ("float32", "float16", "bfloat16", "int8", "int32", "int64")},
        **dict.fromkeys(
            ("SliceLayout", "BlockedLayout", "NVMMADistributedLayout", "DotOperandLayout"), lambda *_, **__: None
        ),
        SwizzledSharedLayout=lambda *_, **__: None,
        SharedLinearLayout=lambda *_, **__: None,
        NVMMASharedLayout=types.SimpleNamespace(get_default_for=lambda *_: None),
        allocate_shared_memory=_allocate,
        num_warps=lambda: 4,
        program_id=lambda _: Registers(_Kernel.program),
        num_programs=lambda _: Registers(_Kernel.programs),
        thread_barrier=lambda: None,
        static_range=range,
        arange=lambda start, end, layout: Registers(torch.arange(start, end)),
        zeros=lambda shape, dtype, layout: Registers(torch.zeros(shape, dtype=dtype)),
        expand_dims=lambda x, axis: Registers(x.data.unsqueeze(axis)),
        convert_layout=lambda x, layout: x,
        exp=lambda x: Registers(x.data.exp()),
        where=lambda condition, x, y: Registers(torch.where(torch.as_tensor(plain(condition)), plain(x), plain(y))),
        sum=lambda x, axis: Registers(x.data.sum(axis)),
        max=lambda x, axis: Registers(x.data.amax(axis)),
        rsqrt=lambda x: Registers(x.data.rsqrt()),
        zeros_like=lambda x: Registers(torch.zeros_like(x.data)),
        minimum=lambda x, y: Registers(torch.minimum(*map(torch.as_tensor, (plain(x), plain(y))))),
        maximum=lambda x, y: Registers(torch.maximum(*map(torch.as_tensor, (plain(x), plain(y))))),
        full=lambda shape, value, dtype, layout: Registers(torch.full(shape, value, dtype=dtype)),
        broadcast=lambda x, y: tuple(map(Registers, torch.broadcast_tensors(x.data, y.data))),
        join=lambda x, y: Registers(torch.stack([x.data, y.data], -1)),
        permute=lambda x, order: Registers(x.data.permute(order)),
        split=lambda x: tuple(map(Registers, x.data.unbind(-1))),
        reshape=lambda x, shape: Registers(x.data.reshape(shape)),
        associative_scan=_scan,
        inline_asm_elementwise=_inline,
        load=_load,
        store=_store,
        warp_specialize=_specialize,
    )
    gluon = types.ModuleType("triton.experimental.gluon")
    gluon.jit, gluon.language = _jit, language
    gluon.constexpr_function = lambda function: function
    hopper = types.ModuleType("triton.experimental.gluon.language.nvidia.hopper")
    hopper.fence_async_shared = lambda: None
    hopper.mma_v2 = _multiply_in_registers
    hopper.warpgroup_mma, hopper.warpgroup_mma_wait = _multiply, _wait_for_products
    hopper.mbarrier = types.SimpleNamespace(
        MBarrierLayout=lambda: "barriers",
        init=_init_barrier,
        expect=lambda barrier, num_bytes: barrier.barriers.update(1, num_bytes),
        arrive=lambda barrier: barrier.barriers.update(1, 0),
        wait=lambda barrier, phase: barrier.barriers.wait(int(plain(phase))),
    )
    hopper.tma = types.SimpleNamespace(
        async_copy_global_to_shared=_load_tile,
        async_copy_shared_to_global=_store_tile,
        store_wait=lambda pendings: None,
    )
    experimental = types.ModuleType("triton.experimental")
    experimental.gluon = gluon
    modules = {module.__name__: module for module in (experimental, gluon, hopper)}
    return modules | {gluon.__name__ + ".language": language}


def emulated(name: str) -> types.ModuleType:
    """The module of this name in `stateflow_kernels`, its kernels launched as ever but on the CPU."""
    path = Path(stateflow_kernels.__file__).parent / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"stateflow_kernels.{name}", path)
    module = importlib.util.module_from_spec(spec)
    fakes = _language()
    before = {key: sys.modules.get(key) for key in fakes}
    sys.modules.update(fakes)
    try:
        spec.loader.exec_module(module)
    finally:
        for key, value in before.items():
            if value is None:
                del sys.modules[key]
            else:
                sys.modules[key] = value
    return module


@contextlib.contextmanager
def hopper_on_the_cpu(monkeypatch) -> Iterator[None]:
    """Within, what would be launched on Hopper is emulated."""
    from stateflow_kernels import hopper

    with monkeypatch.context() as patch:
        patch.setattr(hopper, "available", lambda device: True)
        patch.setattr(hopper, "_tiles", Descriptor)
        for name in MODULES:
            module = emulated(name)
            patch.setitem(sys.modules, module.__name__, module)
            patch.setattr(stateflow_kernels, name, module, raising=False)
        yield
