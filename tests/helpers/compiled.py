"""``torch.compile`` under test: backends that show the graphs they were given."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition

from helpers.engine import EagerEngine


class Ready(EagerEngine):
    """An engine for a body that is wrapped and compiled already."""

    name = "ready"

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call

    def checkpoint(self, body: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        """What the engine was made with."""
        return self._call


class Graphs:
    """A backend that partitions as Inductor does, runs the graphs as they stand, and keeps them to be read."""

    def __init__(self) -> None:
        self.forward: list[torch.fx.GraphModule] = []
        self.backward: list[torch.fx.GraphModule] = []
        self.backend = aot_autograd(
            fw_compiler=self._keep(self.forward),
            bw_compiler=self._keep(self.backward),
            partition_fn=min_cut_rematerialization_partition,
            keep_inference_input_mutations=True,
        )

    @staticmethod
    def _keep(graphs: list[torch.fx.GraphModule]) -> Any:
        def compiler(graph: torch.fx.GraphModule, example_inputs: Any) -> Callable[[list[Any]], Any]:
            graphs.append(graph)

            def run(arguments: list[Any]) -> Any:
                taken = list(arguments)
                arguments.clear()  # boxed: the graph owns what it is given
                return graph(*taken)

            run._boxed_call = True  # type: ignore[attr-defined]
            return run

        return compiler

    def compile(self, function: Callable[..., Any], *, fullgraph: bool = True, **options: Any) -> Callable[..., Any]:
        """Compile ``function`` with this backend."""
        return torch.compile(function, backend=self.backend, fullgraph=fullgraph, **options)

    def clear(self) -> None:
        """Forget the graphs seen so far."""
        self.forward.clear()
        self.backward.clear()

    @property
    def recomputed(self) -> list[str]:
        """The operations of the forward graphs that the backward graphs run as well, by name of the node."""
        forward = {node.name for graph in self.forward for node in operations(graph)}
        return [node.name for graph in self.backward for node in operations(graph) if node.name in forward]

    @property
    def kept(self) -> dict[str, int]:
        """Name and bytes of what the backward graphs get from the forward graphs; parameters and inputs not counted."""
        found = {}
        for graph in self.backward:
            for node in graph.graph.nodes:
                if node.op == "placeholder" and not node.name.startswith(("primals", "tangents")):
                    value = node.meta["val"]
                    found[node.name] = int(value.untyped_storage().nbytes()) if isinstance(value, torch.Tensor) else 8
        return found


def operations(graph: torch.fx.GraphModule) -> list[torch.fx.Node]:
    """The nodes that compute."""
    return [node for node in graph.graph.nodes if node.op == "call_function" and node.target is not operator.getitem]


def names(graphs: list[torch.fx.GraphModule]) -> list[str]:
    """The operations of ``graphs`` without overloads: ``sin``, ``mm`` ..."""
    found = []
    for graph in graphs:
        for node in operations(graph):
            packet = getattr(node.target, "overloadpacket", None)
            found.append(getattr(node.target, "__name__", str(node.target)) if packet is None else packet.__name__)
    return found
