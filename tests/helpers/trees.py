"""Walks over the containers that tests hand to bodies and get back: tuples, lists, dicts, dataclasses, tensors."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import torch


def tensors_of(tree: Any) -> list[torch.Tensor]:
    """Every tensor of ``tree`` in order, containers and dataclass fields included."""
    return [leaf for _, leaf in walk(tree) if isinstance(leaf, torch.Tensor)]


def walk(tree: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield ``(path, leaf)`` for every leaf of ``tree``; a leaf is whatever is no container."""
    if isinstance(tree, torch.Tensor):
        yield path, tree
    elif isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from walk(value, f"{path}[{key!r}]")
    elif isinstance(tree, (tuple, list)):
        for index, value in enumerate(tree):
            yield from walk(value, f"{path}[{index}]")
    elif dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        for field in dataclasses.fields(tree):
            yield from walk(getattr(tree, field.name), f"{path}.{field.name}")
    else:
        yield path, tree


def clone_tree(tree: Any, memo: dict[int, Any] | None = None) -> Any:
    """A copy of ``tree`` with fresh leaves (same ``requires_grad``); one tensor in two places stays one tensor."""
    memo = {} if memo is None else memo
    if id(tree) in memo:
        return memo[id(tree)]
    copy: Any
    if isinstance(tree, torch.Tensor):
        copy = tree.detach().clone().requires_grad_(tree.requires_grad)
    elif isinstance(tree, Mapping):
        copy = type(tree)({key: clone_tree(value, memo) for key, value in tree.items()})  # type: ignore[call-arg]
    elif isinstance(tree, tuple) and hasattr(tree, "_fields"):
        copy = type(tree)(*(clone_tree(value, memo) for value in tree))
    elif isinstance(tree, (tuple, list)):
        copy = type(tree)(clone_tree(value, memo) for value in tree)
    elif dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        changes = {field.name: clone_tree(getattr(tree, field.name), memo) for field in dataclasses.fields(tree)}
        copy = dataclasses.replace(tree, **changes)
    else:
        copy = tree
    memo[id(tree)] = copy
    return copy


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    """``torch.equal`` that also takes NaN for equal to NaN, and knows sparse, nested and conjugate tensors."""
    if left.layout != right.layout or left.dtype != right.dtype:
        return False
    if left.layout == torch.jagged:
        return same_bits(left.values(), right.values()) and same_bits(left.offsets(), right.offsets())
    if left.layout != torch.strided:
        left, right = left.to_dense(), right.to_dense()
    if left.shape != right.shape:
        return False
    if torch.equal(left, right):
        return True
    if not (left.is_floating_point() or left.is_complex()):
        return False
    left, right = left.resolve_conj().resolve_neg(), right.resolve_conj().resolve_neg()
    return bool(torch.allclose(left, right, rtol=0.0, atol=0.0, equal_nan=True))


def assert_same_tree(expected: Any, actual: Any, where: str = "result", *, ulps: int = 0) -> None:
    """Require equal containers, equal bits and equal autograd flags in two trees."""
    assert type(expected) is type(actual), f"{where}: {type(expected)} expected, got {type(actual)}"
    if isinstance(expected, torch.Tensor):
        assert_same_tensor(expected, actual, where, ulps)
    elif isinstance(expected, Mapping):
        assert list(expected) == list(actual), f"{where}: keys {list(expected)} expected, got {list(actual)}"
        for key in expected:
            assert_same_tree(expected[key], actual[key], f"{where}[{key!r}]", ulps=ulps)
    elif isinstance(expected, (tuple, list)):
        assert len(expected) == len(actual), f"{where}: length {len(expected)} expected, got {len(actual)}"
        for index, (left, right) in enumerate(zip(expected, actual, strict=True)):
            assert_same_tree(left, right, f"{where}[{index}]", ulps=ulps)
    elif dataclasses.is_dataclass(expected) and not isinstance(expected, type):
        for field in dataclasses.fields(expected):
            left, right = getattr(expected, field.name), getattr(actual, field.name)
            assert_same_tree(left, right, f"{where}.{field.name}", ulps=ulps)
    elif isinstance(expected, (int, float, complex, str, bytes, bool, type(None))):
        assert expected == actual, f"{where}: {expected!r} expected, got {actual!r}"
    else:
        assert expected is actual, f"{where}: another object of type {type(expected)}"


def assert_same_tensor(expected: torch.Tensor, actual: torch.Tensor, where: str, ulps: int = 0) -> None:
    """Require equal bits, dtype, device, layout, strides and autograd flags.

    With ``ulps``, floating point may differ by so many units in the last place of the largest number.
    """
    for name in ("dtype", "device", "layout", "shape", "requires_grad", "is_leaf"):
        left, right = getattr(expected, name), getattr(actual, name)
        assert left == right, f"{where}: {name} {left} expected, got {right}"
    if expected.layout == torch.strided:
        assert expected.stride() == actual.stride(), (
            f"{where}: strides {expected.stride()} expected, got {actual.stride()}"
        )
        assert expected._is_view() == actual._is_view(), f"{where}: view-ness differs"
    if expected.device.type != "meta":
        same = same_bits(expected.detach(), actual.detach()) or (ulps and _nearly(expected, actual, ulps))
        assert same, f"{where}: values differ\n{expected}\n{actual}"


def _nearly(left: torch.Tensor, right: torch.Tensor, ulps: int) -> bool:
    if not (left.is_floating_point() or left.is_complex()) or left.layout != torch.strided or not left.numel():
        return False
    left, right = left.detach(), right.detach()
    most = ulps * torch.finfo(left.dtype).eps * float(left.abs().nan_to_num(0, 0, 0).max())
    return torch.allclose(left, right, rtol=0.0, atol=most, equal_nan=True)
