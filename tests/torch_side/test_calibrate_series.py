"""The series of a calibration with the measuring process played by the test."""

from __future__ import annotations

import pytest

from fxmem import calibrate as module
from fxmem import receipt
from fxmem.calibrate import Series, calibrate
from fxmem.errors import FxmemError, UsageError
from fxmem.measure import read_request, request_text
from fxmem.workload import ConvWorkspace, InputSpec, Mode, Workload

GPU = {"name": "GPU", "arch": "sm_90", "sm_count": 132, "capacity_bytes": 2**36, "phantom": True}
PLACE = {"gpu": GPU, "driver": "1", "cuda": "13", "cudnn": 1, "torch": "2", "free_bytes": 2**36, "total_bytes": 2**36}
STEP = {"allocated_bytes": 1000, "reserved_bytes": 2**21, "left_bytes": 900}
RUN = {
    "model_bytes": 512, "inputs_bytes": 512, "workspaces_bytes": 0, "left_bytes": 900, "allocated_bytes": 1000,
    "reserved_bytes": 2**21, "steps": [STEP, STEP], "retries": 0, "context_bytes": None,
}  # fmt: skip
GOOD = {"status": "measured", "repeats": [RUN]} | PLACE


@pytest.fixture
def series(tmp_path):
    (tmp_path / "model.py").write_text(
        "import torch\nmodel = torch.nn.Linear(8, 4)\ndef inputs(batch):\n    return torch.zeros(batch, 8)\n"
    )
    return Series(target=str(tmp_path / "model.py"), workload=Workload())


@pytest.fixture
def asked(monkeypatch):
    """What each batch answers; a test fills it in."""
    answers, batches = {}, []

    def ask(self, batch):
        batches.append(batch)
        answer = answers.get(batch, GOOD)
        if isinstance(answer, BaseException):
            raise answer
        return answer

    monkeypatch.setattr(module._Calibration, "_ask", ask)
    return answers, batches


def statuses(found):
    return [(entry["batch"], entry["status"]) for entry in found["entries"]]


def test_smallest_first(series, asked, tmp_path):
    seen = []
    found = calibrate(series, tmp_path / "r.json", lambda: seen.append(1))
    assert asked[1] == [1, 2, 4, 8]
    assert len(seen) == 4
    assert receipt.read(tmp_path / "r.json") == found
    assert not (tmp_path / "r.json.partial").exists()


def test_an_out_of_memory_ends_the_series(series, asked, tmp_path):
    asked[0][4] = {"status": "oom", "reason": "CUDA out of memory"}
    found = calibrate(series, tmp_path / "r.json")
    assert statuses(found) == [(1, "measured"), (2, "measured"), (4, "oom"), (8, "skipped")]


def test_what_would_not_fit_is_not_tried(series, asked, tmp_path, monkeypatch):
    asked[0][1] = GOOD | {"free_bytes": 2**21 - 1}
    found = calibrate(series, tmp_path / "r.json")
    assert asked[1] == [1]
    assert {status for _, status in statuses(found)[1:]} == {"skipped"}


def test_an_interrupted_run_goes_on(series, asked, tmp_path):
    asked[0][4] = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        calibrate(series, tmp_path / "r.json")
    assert not (tmp_path / "r.json").exists()
    del asked[0][4]
    asked[1].clear()
    found = calibrate(series, tmp_path / "r.json")
    assert asked[1] == [4, 8]
    assert {status for _, status in statuses(found)} == {"measured"}


def test_another_series_starts_anew(series, asked, tmp_path):
    asked[0][2] = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        calibrate(series, tmp_path / "r.json")
    del asked[0][2]
    asked[1].clear()
    other = Series(target=series.target, workload=Workload(steps=3), batches=(1, 2))
    calibrate(other, tmp_path / "r.json")
    assert asked[1] == [1, 2]


def test_no_gpu(series, asked, tmp_path):
    asked[0][1] = {"status": "failed", "reason": "RuntimeError: no NVIDIA driver"}
    with pytest.raises(FxmemError, match="no NVIDIA driver"):
        calibrate(series, tmp_path / "r.json")
    assert not (tmp_path / "r.json").exists()


def test_nothing_measured_leaves_no_receipt(series, asked, tmp_path):
    asked[0][1] = {"status": "oom", "reason": "full"} | PLACE
    with pytest.raises(FxmemError, match="nothing was measured: full"):
        calibrate(series, tmp_path / "r.json")
    assert [path.name for path in tmp_path.iterdir() if "r.json" in path.name] == []


def test_the_limit(series, monkeypatch, tmp_path):
    found = module._Calibration(series, tmp_path / "r.json")
    found.ends = 0
    assert found._ask(1)["status"] == "timeout"


def test_the_request_survives():
    workload = Workload(
        mode=Mode.TRAINING, batch=3, inputs=(InputSpec("x", (3, 4), None),), model_args=(("a", [1, None]),),
        conv_workspace=ConvWorkspace.NONE, zero_grad="in-place",
    )  # fmt: skip
    assert read_request(request_text("m:f", workload, "cuda:0", 2)) == ("m:f", workload, "cuda:0", 2)


def test_bad_batches():
    with pytest.raises(UsageError):
        Series(target="x", workload=Workload(), batches=())
