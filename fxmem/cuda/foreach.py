"""Where torch decides between fused, foreach and single-tensor code: fake tensors count as native CUDA tensors."""

from __future__ import annotations

import importlib
import types
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

_BUCKETS = 13
"""Buckets of a ``std::unordered_map`` of libstdc++ that holds one to thirteen entries."""

Key = tuple[torch.device, torch.dtype]
Lists = list[list[torch.Tensor | None]]


def foreach_functions() -> list[tuple[Any, str, Any]]:
    """What to replace in torch: the types that foreach kernels take, and how lists of tensors are grouped."""
    name = "_foreach_supported_types"
    owners = [importlib.import_module(module) for module in ("torch.optim.optimizer", "torch.utils._foreach_utils")]
    patches: list[tuple[Any, str, Any]] = [(owner, name, [*getattr(owner, name), FakeTensor]) for owner in owners]
    core: types.ModuleType = torch._C
    return [*patches, (core, "_group_tensors_by_device_and_dtype", _grouped)]


def _grouped(lists: Sequence[Sequence[Any]], with_indices: bool = False) -> dict[Key, Any]:
    """``_group_tensors_by_first_tensors_device_and_dtype`` of aten/src/ATen/native/ForeachUtils.h.

    torch's own sees CPU tensors; this one asks for the device as user code does.
    """
    groups: dict[Key, tuple[Lists, list[int]]] = {}
    for i, first in enumerate(lists[0]):
        key = (first.device, first.dtype)
        if key not in groups:
            groups[key] = ([[] for _ in lists], [])
        members, indices = groups[key]
        for member, tensors in zip(members, lists, strict=True):
            if len(tensors):
                member.append(tensors[i])
        if with_indices:
            indices.append(i)
    return {key: groups[key] for key in _map_order(groups)}


def _map_order(keys: Iterable[Key]) -> list[Key]:
    """The order in which ``std::unordered_map`` gives back keys that were inserted in this order.

    A key whose bucket is empty comes to the front of all, otherwise to the front of its bucket.
    """
    order: list[Key] = []
    for key in keys:
        bucket = _hash(key) % _BUCKETS
        same = [i for i, other in enumerate(order) if _hash(other) % _BUCKETS == bucket]
        order.insert(same[0] if same else 0, key)
    return order


def _hash(key: Key) -> int:
    """``ParamsHash`` (aten/src/ATen/native/utils/ParamsHash.h), FNV over device type, device index and dtype."""
    device, dtype = key
    kind = {"cpu": 0, "cuda": 1}.get(device.type, 0)
    index: int | None = device.index
    value = 0x811C9DC5
    for byte in (kind, 0xFF if index is None else index, _SCALAR_TYPES.get(dtype, 0)):
        value = ((value ^ byte) * 0x01000193) & 0xFFFFFFFF
    return value


_SCALAR_TYPES = {
    torch.uint8: 0, torch.int8: 1, torch.int16: 2, torch.int32: 3, torch.int64: 4, torch.float16: 5,
    torch.float32: 6, torch.float64: 7, torch.complex32: 8, torch.complex64: 9, torch.complex128: 10, torch.bool: 11,
    torch.bfloat16: 15,
}  # fmt: skip
"""``c10::ScalarType``."""
