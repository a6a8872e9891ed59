"""Optimizers under the CUDA personality: torch's own code decides and allocates as on a GPU."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import fxmem
from fxmem.cuda import personality
from fxmem.device import find_device
from fxmem.errors import UsageError
from fxmem.kernels import Target, expand
from fxmem.optimizers import make_optimizer, optimizer_names
from fxmem.recording.notes import to_tape
from fxmem.recording.recorder import Recorder
from fxmem.tape import Phase, Tape

LARGE = (1100, 1009)
TARGET = Target(sm=90, sm_count=132)


def traced(run: Callable[[], None]) -> Tape:
    """The tape of ``run`` on an H200, with the memory of its kernels."""
    gpu = find_device("h200")
    recorder = Recorder(FakeTensorMode(allow_non_fake_inputs=True))
    recorder.phase = Phase.OPTIMIZER
    with personality(recorder, gpu), recorder:
        recorder.begin_step(1)
        run()
        recorder.end_steps()
    return expand(to_tape(recorder, batch=1, training=True, modules=()), TARGET)


def parameters(*shapes: tuple[int, ...], **options: object) -> list[nn.Parameter]:
    made = [nn.Parameter(torch.empty(*shape, device="cuda", **options)) for shape in shapes]
    for p in made:
        p.grad = torch.empty_like(p)
    return made


def names(tape: Tape) -> set[str]:
    return {op.name.split(".", maxsplit=1)[0] for op in tape.ops}


@pytest.mark.parametrize("shape", [LARGE, (3, 5)], ids=["fake", "real"])
def test_a_script_that_asks_for_nothing_gets_foreach(shape):
    tape = traced(lambda: torch.optim.Adam(parameters(shape)).step())
    assert "_foreach_lerp_" in names(tape)


@pytest.mark.parametrize(
    ("options", "expected", "absent"),
    [
        ({"foreach": False}, "addcdiv_", "_foreach_sqrt"),
        ({"fused": True}, "_fused_adamw_", "_foreach_sqrt"),
        ({"capturable": True}, "_foreach_pow", "_fused_adamw_"),
    ],
)
def test_an_implementation_that_is_asked_for_runs(options, expected, absent):
    tape = traced(lambda: torch.optim.AdamW(parameters(LARGE), **options).step())
    assert expected in names(tape)
    assert absent not in names(tape)


def test_parameters_on_the_host_take_the_single_tensor_code():
    def run() -> None:
        p = nn.Parameter(torch.empty(3, 5))
        p.grad = torch.empty_like(p)
        torch.optim.Adam([p]).step()

    tape = traced(run)
    assert not any(name.startswith("_foreach") for name in names(tape))
    assert not tape.events


def test_a_subclass_of_parameter_takes_the_single_tensor_code():
    class Special(nn.Parameter):
        pass

    def run() -> None:
        p = Special(torch.empty(3, 5, device="cuda"))
        p.grad = torch.empty_like(p)
        torch.optim.Adam([p]).step()

    assert not any(name.startswith("_foreach") for name in names(traced(run)))


@pytest.mark.parametrize(("capturable", "on_device"), [(False, 0), (True, 2)])
def test_step_counters_are_on_the_device_only_if_capturable(capturable, on_device):
    tape = traced(lambda: torch.optim.Adam(parameters((7, 3), (5, 3)), capturable=capturable).step())
    counters = [s for s in tape.storages if s.nbytes == 4 and s.shape == () and tape.ops[s.op].name == "zeros.default"]
    assert len(counters) == on_device


def test_groups_come_in_the_order_of_the_map():
    def run() -> None:
        params = [
            *parameters((7, 3)),
            *parameters((7, 3), dtype=torch.float16),
            *parameters((7, 3), dtype=torch.bfloat16),
        ]
        nn.utils.clip_grad_norm_(params, 1.0)

    found = [op.outputs[0].dtype for op in traced(run).ops if op.name == "_foreach_norm.Scalar"]
    assert found == ["bfloat16", "float16", "float32"]  # as torch 2.14 on the phantom device


def test_the_norm_of_a_list_keeps_partial_results():
    def run() -> None:
        torch._foreach_norm([p.grad for p in parameters(LARGE, (37, 13))])

    tape = traced(run)
    op = next(op for op in tape.ops if op.name == "_foreach_norm.Scalar")
    chunks = -(-LARGE[0] * LARGE[1] // 65536)
    events = tape.events[op.start : op.stop]
    assert [tape.storages[e if e >= 0 else ~e].nbytes for e in events] == [2 * chunks * 4, 4, 4, 2 * chunks * 4]
    assert events[3] == ~events[0]


def test_as_tensor_copies_a_number_to_the_device():
    def run() -> None:
        a = torch.as_tensor(1.0, device="cuda")
        b = torch.as_tensor(a, device="cuda")
        assert a.is_cuda
        assert a.data_ptr() == b.data_ptr()
        assert not torch.as_tensor(a, device="cpu").is_cuda

    assert [e for e in traced(run).events if e >= 0] == [0]


@pytest.mark.parametrize("name", optimizer_names())
def test_every_name_makes_an_optimizer_that_steps(name):
    params = [nn.Parameter(torch.zeros(3, 5))]
    params[0].grad = torch.zeros(3, 5)
    made = make_optimizer(name, params, foreach=True)
    assert made is not None
    made.step()


def test_options_follow_from_the_name():
    params = [nn.Parameter(torch.zeros(3, 5))]
    made = make_optimizer("sgd-momentum-foreach", params, foreach=True)
    assert made is not None
    assert (made.defaults["momentum"], made.defaults["foreach"]) == (0.9, True)
    single = make_optimizer("adam", params, foreach=False)
    assert single is not None
    assert single.defaults["foreach"] is False
    default = make_optimizer("adam", params, foreach=True)
    assert default is not None
    assert default.defaults["foreach"] is None
    assert make_optimizer("none", params, foreach=True) is None


needs_muon = pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch has Muon from 2.9 on")


@pytest.mark.parametrize(
    ("name", "message", "hint"),
    [
        ("sgdd", "is unknown", "did you mean sgd, asgd?"),
        ("lbfgs", "needs a closure", "another"),
        ("sparseadam", "sparse gradients", "another"),
        ("adagrad-capturable", "no capturable option", None),
        pytest.param("muon", "2D parameters", "another", marks=needs_muon),
        ("builtins:list", "gave list, not a torch.optim.Optimizer", "package.module:NAME"),
        ("torch.optim:LBFGS", "needs a closure", "another"),
        ("torch.optim:Nothing", "AttributeError", "package.module:NAME"),
        ("no_such_module:Lion", "ModuleNotFoundError", "package.module:NAME"),
    ],
)
def test_refusals_say_what_next(name, message, hint):
    with pytest.raises(UsageError, match=message) as caught:
        make_optimizer(name, [nn.Parameter(torch.zeros(3))], foreach=True)
    assert hint is None or hint in str(caught.value.hint)


@pytest.mark.parametrize("name", ["momentum_only:Signed", "momentum_only.py:Signed"])
def test_an_optimizer_of_ones_own_lies_beside_the_model(tmp_path, name):
    (tmp_path / "model.py").write_text("from torch import nn\ndef model():\n    return nn.Linear(300, 300)\n")
    (tmp_path / "momentum_only.py").write_text(
        "import torch\n"
        "class Signed(torch.optim.Optimizer):\n"
        "    def __init__(self, params):\n"
        "        super().__init__(params, {})\n"
        "    @torch.no_grad()\n"
        "    def step(self):\n"
        "        for p in self.param_groups[0]['params']:\n"
        "            m = self.state[p].setdefault('momentum', torch.zeros_like(p))\n"
        "            p.sub_(m.add_(p.grad).sign())\n"
    )
    found = fxmem.estimate(
        str(tmp_path / "model.py"), mode="training", optimizer=name, law=False,
        inputs=lambda batch: torch.zeros(batch, 300),
    )  # fmt: skip
    assert found.breakdown.optimizer_state == found.breakdown.parameters > 300 * 300 * 4
