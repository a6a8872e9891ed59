from __future__ import annotations

import re

import pytest

from fxmem.device import DEFAULT, Device, all_devices, as_device, find_device
from fxmem.errors import UsageError

GIB = 2**30


def test_default_is_the_h200_without_a_limit():
    h200 = find_device("h200")
    assert find_device() == DEFAULT
    assert (DEFAULT.name, DEFAULT.arch, DEFAULT.sm_count) == ("h200", h200.arch, h200.sm_count)
    assert DEFAULT.capacity_bytes is None
    assert DEFAULT.context_bytes is None


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("h200", "h200"),
        ("a100-80gb", "a100-80gb"),
        ("A100", "a100-80gb"),
        ("NVIDIA A100 80GB", "a100-80gb"),
        ("a6000", "rtx-a6000"),
        ("NVIDIA RTX A6000", "rtx-a6000"),
        ("Tesla T4", "t4"),
        ("rtx_4090", "rtx-4090"),
        ("NVIDIA GeForce RTX 4090", "rtx-4090"),
        ("3090", "rtx-3090"),
        ("V100", "v100-32gb"),
    ],
)
def test_people_write_names_differently(text, name):
    assert find_device(text).name == name


@pytest.mark.parametrize(
    ("name", "gib"), [("t4", 14.58), ("rtx-4090", 23.64), ("a100-80gb", 79.25), ("h200", 139.81), ("rtx-a6000", 47.41)]
)
def test_capacity_is_what_the_driver_reports(name, gib):
    capacity = find_device(name).capacity_bytes
    assert 0 <= capacity - gib * GIB < 65536


def test_a_size_has_h200s_rules():
    device = find_device("24GiB")
    assert (device.name, device.capacity_bytes, device.arch) == ("24GiB", 24 * GIB, "sm_90")
    assert device.context_bytes is None


def test_arch_picks_the_rules_of_a_size():
    device = find_device("24GiB", arch="sm_86")
    assert (device.arch, device.sm_count) == ("sm_86", 84)
    assert find_device("24GiB", arch="sm_103").arch == "sm_103"


def test_arch_overrides_a_name():
    device = find_device("t4", arch="sm_89")
    assert (device.arch, device.capacity_bytes) == ("sm_89", find_device("t4").capacity_bytes)


def test_context_overrides_the_table():
    assert find_device("t4", context=0).context_bytes == 0
    assert find_device("rtx-6000-ada").context_bytes == 426 * 2**20
    assert find_device("rtx-6000-ada", context=5).context_source == "given with --context"


def test_unknown_name_names_the_nearest():
    with pytest.raises(UsageError, match="no device is called 'h20x'") as caught:
        find_device("h20x")
    assert "h200" in caught.value.hint


@pytest.mark.parametrize(
    ("text", "hint"),
    [("8", "write the unit: 8GiB"), ("0GiB", "such as 24GiB"), ("0", "such as 24GiB"), ("5kB", "such as")],
)
def test_too_small_a_size_says_why(text, hint):
    with pytest.raises(UsageError, match="bytes") as caught:
        find_device(text)
    assert hint in caught.value.hint


@pytest.mark.parametrize("text", ["", "24 apples", "GiB", "-5GiB"])
def test_no_device(text):
    with pytest.raises(UsageError, match="no device is called"):
        find_device(text)


def test_a_forgotten_unit():
    with pytest.raises(UsageError, match="'24' is 24 bytes") as caught:
        find_device("24")
    assert "24GiB" in caught.value.hint


@pytest.mark.parametrize("arch", ["90", "sm90", "sm_9", "gfx90a", "sm_999", "sm_85"])
def test_no_architecture(arch):
    with pytest.raises(UsageError, match=r"is (not an|no) architecture"):
        find_device("24GiB", arch=arch)


def test_compute_capability():
    assert find_device("t4").compute_capability == (7, 5)
    assert find_device("b200").compute_capability == (10, 0)


def test_values_out_of_range():
    values = {"name": "x", "title": "x", "arch": "sm_90", "sm_count": 1, "capacity_bytes": 0, "context_bytes": None}
    with pytest.raises(UsageError, match="capacity"):
        Device(**values)
    with pytest.raises(UsageError, match="context"):
        Device(**{**values, "capacity_bytes": None, "context_bytes": -1})


def test_every_row_is_sound():
    names = [name for device in all_devices() for name in (device.name, *device.aliases)]
    assert len(names) == len(set(names))
    for device in all_devices():
        assert find_device(device.name) is device
        assert find_device(device.title) is device
        assert re.match("driver|nominal", device.source)
        assert GIB < device.capacity_bytes < 256 * GIB
        assert (device.context_bytes is None) == (device.context_source == "")
        assert device.shared_memory == device.name.startswith("jetson")


def test_what_python_may_give_as_a_device():
    t4 = find_device("t4")
    assert as_device(t4) == as_device("T4") == t4
    assert as_device("24GiB").capacity_bytes == 24 * 2**30
    assert as_device(None).capacity_bytes is None
    with pytest.raises(UsageError, match=r"device: the device is 24\n  next: give a name"):
        as_device(24)
