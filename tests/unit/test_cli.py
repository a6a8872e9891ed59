"""The command line with a library that answers at once."""

from __future__ import annotations

import json
import subprocess
import sys
import types
import warnings

import pytest
from click.testing import CliRunner
from reports import batch_report, training_report

from fxmem.cli import main
from fxmem.device import all_devices
from fxmem.errors import DoesNotFitError, TraceError, UsageError
from fxmem.workload import ConvWorkspace, InputSpec, Mode, Vary, ZeroGrad


class Answer:
    """Stands for an Estimate."""

    def __init__(self, report):
        self.report = report

    def to_dict(self):
        return self.report


class BatchAnswer(Answer):
    """Stands for a BatchReport."""

    fits = False


class Library(types.ModuleType):
    """Stands for ``fxmem.api``: notes its call, then answers or raises."""

    def __init__(self):
        super().__init__("fxmem.api")
        self.answer = training_report()
        self.call = None

    def estimate(self, target, **options):
        self.call = {"target": target, **options}
        sys.stdout.write("the model prints\n")
        warnings.warn("the library warns", stacklevel=1)
        if isinstance(self.answer, Exception):
            raise self.answer
        return Answer(self.answer)

    def max_batch(self, target, **options):
        self.call = {"target": target, **options}
        return BatchAnswer(batch_report())


@pytest.fixture
def library(monkeypatch):
    fake = Library()
    monkeypatch.setitem(sys.modules, "fxmem.api", fake)
    monkeypatch.setattr("fxmem.api", fake, raising=False)
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    return fake


def run(*arguments, **options):
    return CliRunner().invoke(main, [*arguments], prog_name="fxmem", **options)


@pytest.mark.parametrize("command", [[], ["estimate"], ["batch"], ["diff"], ["calibrate"], ["verify"], ["devices"]])
def test_help_golden(golden, command):
    result = run(*command, "--help", terminal_width=100)
    golden(f"help_{'_'.join(command) or 'fxmem'}.txt", result.output)
    assert result.exit_code == 0


def test_version():
    assert run("--version").output.startswith("fxmem 0.")


def test_devices_lists_all():
    lines = run("devices").stdout.splitlines()
    assert [line.split()[0] for line in lines[1:]] == [device.name for device in all_devices()]


def test_defaults(library):
    assert run("estimate", "model.py").exit_code == 0
    workload, device = library.call.pop("workload"), library.call.pop("device")
    assert library.call == {"target": "model.py", "alloc_conf": None}
    assert (workload.mode, workload.batch, workload.optimizer) == (Mode.INFERENCE, 1, "adamw")
    assert (workload.image, workload.image_given, workload.foreach) == (224, False, True)
    assert (device.name, device.capacity_bytes) == ("h200", None)


def test_every_option_arrives(library):
    flags = "--channels-last --checkpoint --clip --no-foreach"
    words = (
        "--batch 8 --mode training --dtype bfloat16 --amp float16 --optimizer sgd --input x=3x4:int64 --input 5"
        " --image 64 --seq 99 --model-arg depth=3 --model-arg act=gelu --attn eager --accumulate 2 --steps 4"
        " --conv-workspace none --prompt 7 --new-tokens 9 --zero-grad in-place --device t4 --arch sm_80 --context 1MiB"
        " --safety 0.1 --reserve 1GiB"
    )
    result = run("estimate", "m:f", *flags.split(), *words.split())
    assert result.exit_code == 0, result.output
    workload, device = library.call["workload"], library.call["device"]
    assert workload.inputs == (InputSpec("x", (3, 4), "int64"), InputSpec(None, (5,), None))
    assert workload.model_args == (("depth", 3), ("act", "gelu"))
    assert (workload.mode, workload.batch, workload.dtype, workload.amp) == (Mode.TRAINING, 8, "bfloat16", "float16")
    assert (workload.optimizer, workload.image, workload.image_given, workload.seq) == ("sgd", 64, True, 99)
    assert (workload.attn, workload.accumulate, workload.steps) == ("eager", 2, 4)
    assert (workload.conv_workspace, workload.prompt, workload.new_tokens) == (ConvWorkspace.NONE, 7, 9)
    assert workload.zero_grad is ZeroGrad.IN_PLACE
    assert workload.channels_last
    assert workload.checkpoint
    assert workload.clip
    assert not workload.foreach
    assert (device.name, device.arch, device.context_bytes) == ("t4", "sm_80", 2**20)
    assert (library.call["safety"], library.call["reserve_bytes"]) == (0.1, 2**30)


def test_batch(library):
    words = "--batch 4 --device t4,24GiB --processes 2 --multiple-of 8 --safety 0.8 --reserve 1GiB --context 0"
    result = run("batch", "m:f", *words.split())
    assert result.exit_code == 0, result.output
    assert "Largest batch on" in result.stdout
    assert [device.name for device in library.call["device"]] == ["t4", "24GiB"]
    assert {device.context_bytes for device in library.call["device"]} == {0}
    assert library.call["workload"].batch == 4
    assert (library.call["processes"], library.call["multiple_of"], library.call["vary"]) == (2, 8, None)
    assert (library.call["safety"], library.call["reserve_bytes"]) == (0.8, 2**30)


def test_batch_vary(library):
    assert run("batch", "m:f", "--device", "t4", "--vary", "seq=128..4096").exit_code == 0
    assert library.call["vary"] == Vary("seq", 128, 4096)


def test_batch_plot(library, tmp_path):
    pytest.importorskip("matplotlib")
    assert run("batch", "m:f", "--device", "t4", "--plot", str(tmp_path / "no" / "a.svg")).exit_code == 2
    assert library.call is None
    result = run("batch", "m:f", "--device", "t4", "--plot", str(tmp_path / "a.svg"))
    assert library.call["curve"]
    assert "nothing to draw" in result.stderr


@pytest.mark.parametrize(("name", "message"), [("a.jpg", "neither .svg nor .png"), ("a.svg", "need matplotlib")])
def test_a_plot_that_cannot_be_drawn_is_said_before_the_work(library, tmp_path, monkeypatch, name, message):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    result = run("batch", "m:f", "--device", "t4", "--plot", str(tmp_path / name))
    assert result.exit_code in (1, 2)
    assert message in result.stderr
    assert library.call is None


def test_batch_check(library):
    assert run("batch", "m:f", "--device", "t4", "--check").exit_code == 3
    assert json.loads(run("batch", "m:f", "--device", "t4", "--format", "json").stdout) == batch_report()


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_the_environment_is_read_here(library, monkeypatch, name):
    monkeypatch.setenv(name, "expandable_segments:True")
    run("estimate", "model.py")
    assert library.call["alloc_conf"] == "expandable_segments:True"


def test_stdout_is_the_report_only(library):
    result = run("estimate", "model.py", "--format", "json")
    assert json.loads(result.stdout) == library.answer
    assert result.stderr == "the model prints\n"


def test_output_file(library, tmp_path):
    path = tmp_path / "report.json"
    result = run("estimate", "model.py", "--format", "json", "--output", str(path))
    assert (result.exit_code, result.stdout) == (0, "")
    assert json.loads(path.read_text()) == library.answer


def test_output_folder_must_exist(library, tmp_path):
    result = run("estimate", "model.py", "--output", str(tmp_path / "no" / "report"))
    assert result.exit_code == 2
    assert library.call is None


def test_depth(library):
    assert "layer1.0 " in run("estimate", "model.py", "--depth", "2").stdout
    assert "Modules" not in run("estimate", "model.py").stdout


@pytest.mark.parametrize(("capacity", "status"), [(2**40, 0), (2**20, 3)])
def test_check(library, capacity, status):
    library.answer["device"]["capacity_bytes"] = capacity
    result = run("estimate", "model.py", "--check", "--device", "t4")
    assert result.exit_code == status
    assert "Peak memory" in result.stdout
    assert run("estimate", "model.py", "--device", "t4").exit_code == 0


def test_check_needs_a_limit(library):
    result = run("estimate", "model.py", "--check")
    assert result.exit_code == 2
    assert "--device" in result.stderr


@pytest.mark.parametrize(
    "words",
    [
        "estimate",
        "nonsense",
        "estimate m --batch 0",
        "estimate m --batch many",
        "estimate m --mode flying",
        "estimate m --dtype float8",
        "estimate m --device h20x",
        "estimate m --arch 90",
        "estimate m --context much",
        "estimate m --reserve much",
        "estimate m --safety 0",
        "estimate m --safety 1.1",
        "batch m",
        "batch m --device t4,h20x",
        "batch m --device t4 --processes 0",
        "batch m --device t4 --vary width=1..2",
        "batch m --device t4 --vary seq=9..2",
        "batch m --device t4 --multiple-of 0",
        "estimate m --input 3xq",
        "estimate m --input x=1 --input x=2",
        "estimate m --model-arg depth",
        "estimate m --depth -1",
        "estimate m --format xml",
        "estimate m --unknown",
        "estimate m more",
    ],
)
def test_usage_errors(library, words):
    result = run(*words.split())
    assert result.exit_code == 2
    assert result.stdout == ""
    assert "Error: " in result.stderr
    assert library.call is None


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (TraceError("it failed", where="model.py:3", hint="mend it"), 1),
        (UsageError("it failed", where="model.py:3", hint="mend it"), 2),
        (DoesNotFitError("it failed", where="model.py:3", hint="mend it"), 3),
    ],
)
def test_errors_are_one_message(library, error, status):
    library.answer = error
    result = run("estimate", "model.py")
    assert result.exit_code == status
    assert result.stdout == ""
    assert result.stderr == "the model prints\nError: model.py:3: it failed\n  next: mend it\n"


def test_unexpected_errors_are_one_message(library):
    library.answer = ZeroDivisionError("division by zero")
    result = run("estimate", "model.py")
    assert result.exit_code == 1
    assert "internal error: ZeroDivisionError: division by zero\n  next: please report this" in result.stderr
    assert "Traceback" not in result.output


def test_debug_shows_the_traceback(library):
    library.answer = TraceError("it failed")
    with pytest.warns(UserWarning, match="the library warns"):
        result = run("estimate", "model.py", "--debug")
    assert result.exit_code == 1
    assert "Traceback" in result.stderr
    assert result.stderr.endswith("Error: it failed\n")


def test_interrupt(library):
    library.answer = KeyboardInterrupt()
    library.estimate = lambda *_, **__: (_ for _ in ()).throw(KeyboardInterrupt)
    result = run("estimate", "model.py")
    assert result.exit_code == 1
    assert "Aborted!" in result.stderr


@pytest.mark.parametrize("words", [["--help"], ["estimate", "--help"], ["devices"], ["estimate", "m", "--device", "x"]])
def test_the_command_line_alone_loads_no_torch(words):
    code = f"import sys; sys.argv[1:] = {words!r}\nimport fxmem.cli\ntry: fxmem.cli.main()\n"
    code += "finally: assert 'torch' not in sys.modules"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert "AssertionError" not in result.stderr
    assert result.returncode in (0, 2)


def test_python_m():
    result = subprocess.run(
        [sys.executable, "-m", "fxmem", "--version"], capture_output=True, text=True, check=True, timeout=60
    )
    assert result.stdout.startswith("fxmem 0.")


@pytest.mark.parametrize("command", ["estimate", "batch", "calibrate"])
def test_allocator_options_are_read_before_torch_aborts_on_them(command, monkeypatch):
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "garbage")
    words = ["--device", "t4"] if command == "batch" else []
    result = run(command, "torchvision:resnet18", *words)
    assert result.exit_code == 2
    assert "PYTORCH_ALLOC_CONF: 'garbage' has no value" in result.output + result.stderr
