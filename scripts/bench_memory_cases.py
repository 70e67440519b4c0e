"""The cases of `bench_memory.py`, as one of its workers runs them: the model, and how its bytes are counted.

torch and the library under test are imported inside the functions: the parent process, which only asks for figures and
prints them, reads the names from here and loads neither.
"""

import functools
import gc
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from bench_common import one_line, sac_contexts

PLAIN = "no checkpointing"
TORCH = "torch.utils.checkpoint"
SAC = "selective (SAC): matmuls, attention saved"
SAVED = "five regions saved"
ANNOTATED = "five regions saved, annotated"
STEPS = 4


@dataclass(frozen=True)
class Shape:
    """Sizes of the model, in elements, and of an element, in bytes."""

    batch: int = 2
    seq: int = 128
    dim: int = 256
    heads: int = 4
    hidden: int = 688
    layers: int = 4
    element_bytes: int = 4

    @property
    def token_bytes(self) -> int:
        """Bytes of one `[batch, seq]` of elements."""
        return self.batch * self.seq * self.element_bytes

    @property
    def residual_bytes(self) -> int:
        """Bytes of one `[batch, seq, dim]` tensor."""
        return self.token_bytes * self.dim


@dataclass(frozen=True)
class Measured:
    """One case's figures, in bytes.

    Attributes:
        kept: kept bytes of the last step.
        first_kept: kept bytes of the first step.
        peak: peak in backward.
    """

    kept: int
    first_kept: int
    peak: int


def _layer(shape: Shape, save: Callable[..., Any], needed: Callable[..., Any]) -> Any:
    """One layer: core and projections go through `save`; `needed` gets what a replay of the whole layer reads."""
    import torch.nn.functional as F  # noqa: N812  (torch's own name for it)
    from torch import Tensor, nn

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            linear = functools.partial(nn.Linear, bias=False)
            self.norm1, self.norm2 = nn.RMSNorm(shape.dim), nn.RMSNorm(shape.dim)
            self.wq, self.wk, self.wv, self.wo = (linear(shape.dim, shape.dim) for _ in range(4))
            self.w1, self.w3 = linear(shape.dim, shape.hidden), linear(shape.dim, shape.hidden)
            self.w2 = linear(shape.hidden, shape.dim)

        def forward(self, x: Tensor) -> Tensor:
            h = self.norm1(x)
            heads = (shape.batch, shape.seq, shape.heads, -1)
            q, k, v = (project(h).view(heads).transpose(1, 2) for project in (self.wq, self.wk, self.wv))
            core = save(functools.partial(F.scaled_dot_product_attention, is_causal=True), "core")(q, k, v)
            attended = save(self.wo, "wo")(core.transpose(1, 2).reshape(x.shape))
            needed(attended)
            x = x + attended
            h = self.norm2(x)
            gate, up = save(self.w1, "w1")(h), save(self.w3, "w3")(h)
            needed(gate, up)
            down = save(self.w2, "w2")(F.silu(gate) * up)
            needed(down)
            return x + down

    return Layer()


class Model:
    """The layers of one case and its calls."""

    def __init__(self, case: str, shape: Shape) -> None:
        import torch

        import torch_remat as remat

        save, needed = (lambda function, name: function), (lambda *tensors: None)
        if case in (SAVED, ANNOTATED):
            save = lambda function, name: remat.region(function, name, recompute=False)
        if case == ANNOTATED:
            needed = remat.recompute_needs_tensor
        torch.manual_seed(0)
        dtype = {4: torch.float32, 2: torch.bfloat16}[shape.element_bytes]
        self._case = case
        self._layers = [_layer(shape, save, needed).to(dtype) for _ in range(shape.layers)]
        self.x = torch.randn(shape.batch, shape.seq, shape.dim, dtype=dtype, requires_grad=True)
        self.parameters = [parameter for layer in self._layers for parameter in layer.parameters()]

    def forward(self) -> Any:
        """The model's output."""
        x = self.x
        for index, layer in enumerate(self._layers):
            x = self._call(index, layer, x)
        return x

    def gradients(self) -> list[Any]:
        """Of the input and of every parameter."""
        return [leaf.grad for leaf in (self.x, *self.parameters)]

    def _call(self, index: int, layer: Any, x: Any) -> Any:
        if self._case == PLAIN:
            return layer(x)
        if self._case in (SAVED, ANNOTATED):
            import torch_remat as remat

            return remat.checkpoint(region_name=f"layers.{index}")(layer)(x)
        from torch.utils.checkpoint import checkpoint

        if self._case == TORCH:
            return checkpoint(layer, x, use_reentrant=False)
        return checkpoint(layer, x, use_reentrant=False, context_fn=sac_contexts())


def _storage_mode() -> Any:
    """A dispatch mode that watches the storages its operations return, and the peak of their sum."""
    import torch
    from torch.multiprocessing.reductions import StorageWeakRef
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    class Storages(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            # Identity of a storage -> (weak reference, bytes). The reference keeps the identity from being reused.
            self._seen: dict[int, tuple[StorageWeakRef, int]] = {}
            self._ignored: dict[int, StorageWeakRef] = {}
            self.peak = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            for leaf in tree_leaves(result):
                if isinstance(leaf, torch.Tensor):
                    self.watch(leaf)
            self.peak = max(self.peak, self.alive_bytes())
            return result

        def watch(self, tensor: torch.Tensor) -> None:
            """Count the storage of `tensor` while it is alive; what stands in for a tensor without memory has none."""
            if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
                return
            storage = tensor.untyped_storage()
            reference = StorageWeakRef(storage)
            if reference.cdata not in self._ignored and reference.cdata not in self._seen and _has_memory(storage):
                self._seen[reference.cdata] = reference, storage.nbytes()

        def ignore(self, tensor: torch.Tensor) -> None:
            """Never count the storage of `tensor`."""
            reference = StorageWeakRef(tensor.untyped_storage())
            self._ignored[reference.cdata] = reference
            self._seen.pop(reference.cdata, None)

        def alive_bytes(self) -> int:
            """Bytes of the watched storages that are alive; forgets the others."""
            self._seen = {key: entry for key, entry in self._seen.items() if not entry[0].expired()}
            return sum(size for _, size in self._seen.values())

    return Storages()


def _has_memory(storage: Any) -> bool:
    try:
        return storage.data_ptr() != 0
    except RuntimeError:  # reading the pointer is refused: there is nothing behind it
        return False


def measure(model: Model) -> Measured:
    """Run the steps of a case; its gradients are left on the model."""
    import torch

    kept: list[int] = []
    peak = 0
    for parameter in model.parameters:
        parameter.grad = torch.zeros_like(parameter)
    gc.collect()
    gc.disable()
    try:
        for _ in range(STEPS):
            model.x.grad = None
            for parameter in model.parameters:
                if parameter.grad is not None:
                    parameter.grad.zero_()
            mode = _storage_mode()
            for parameter in model.parameters:
                mode.ignore(parameter)
                mode.ignore(parameter.grad)
            mode.watch(model.x)
            with mode:
                output = model.forward()
            gradient = torch.ones_like(output)
            mode.ignore(output)
            mode.ignore(gradient)
            kept.append(mode.alive_bytes())
            mode.peak = 0
            with mode:
                output.backward(gradient)
            peak = mode.peak
            del output
    finally:
        gc.enable()
    return Measured(kept[-1], kept[0], peak)


def worker(side: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """What a worker answers: the figures of a case, or why there are none."""
    expected: dict[Shape, list[Any]] = {}

    def handle(request: dict[str, Any]) -> dict[str, Any]:
        import torch

        case, shape = request["case"], Shape(**request["shape"])
        if shape not in expected:
            plain = Model(PLAIN, shape)
            measure(plain)
            expected[shape] = plain.gradients()
        model = Model(case, shape)
        try:
            figures = measure(model)
        except Exception as error:  # noqa: BLE001  (whatever a library raises is what its row shows)
            return {"failed": one_line(error)}
        gradients = model.gradients()
        if not all(map(torch.equal, gradients, expected[shape])):
            return {"failed": "its gradients differ from those without checkpointing"}
        return asdict(figures)

    return handle
