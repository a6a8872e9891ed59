from __future__ import annotations

import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from fxmem.errors import InputError, MissingExtraError, SourceError, UsageError
from fxmem.source import Kind, Source, load
from fxmem.workload import InputSpec, Mode, Workload

NET = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.layer = nn.Linear(3, width)

    def forward(self, x):
        return self.layer(x)
"""


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., str]:
    def write(text: str, name: str = "model.py") -> str:
        (tmp_path / name).write_text(textwrap.dedent(text), encoding="utf-8")
        return str(tmp_path / name)

    return write


def made(target: object, *, inputs: object = None, **options: object) -> Source:
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    return load(target, Workload(**options), mode, inputs=inputs)  # type: ignore[arg-type]


def refused(target: object, error: type[Exception] = SourceError, **options: object) -> str:
    with pytest.raises(error) as caught:
        made(target, **options)
    return str(caught.value)


X = (InputSpec(None, (3,), None),)


# ------------------------------------------------------------------ files
def test_file_with_a_factory(write):
    functions = """
def model(width=4):
    return Net(width)

def inputs(batch):
    return torch.ones(batch, 3)

def loss(output):
    return output.sum()
"""
    source = made(write(NET + functions), model_args=(("width", 9),))
    assert source.kind is Kind.FILE
    assert not source.live
    assert source.loss is not None
    assert source.module.layer.out_features == 9
    assert all(isinstance(p, FakeTensor) for p in source.module.parameters())
    inputs = source.inputs(5)
    assert inputs.args[0].shape == (5, 3)
    assert inputs.kwargs == {}
    assert inputs.target is None
    assert source.loss(torch.ones(2)) == 2


@pytest.mark.parametrize("extra", ["", "\nnet = Net(5)\n", "\ndef build():\n    return Net(5)\n"])
def test_what_counts_as_a_model(write, extra):
    path = write(NET + extra)
    target = f"{path}:build" if "build" in extra else path
    assert made(target, inputs=lambda b: torch.ones(b, 3)).module.layer.out_features == (5 if extra else 4)


def test_loading_leaves_no_trace(write, tmp_path):
    write("WIDTH = 6\n", "sizes.py")
    target = write(NET + "\nfrom sizes import WIDTH\ndef model():\n    print('hello')\n    return Net(WIDTH)\n")
    path, modules, flag = list(sys.path), set(sys.modules), sys.dont_write_bytecode
    source = made(target, inputs=X)
    assert source.module.layer.out_features == 6
    assert sys.path == path
    assert sys.dont_write_bytecode == flag
    assert not any(m == "sizes" or m.startswith("_fxmem") for m in set(sys.modules) - modules)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model.py", "sizes.py"]


def test_siblings_of_two_targets_do_not_meet(tmp_path):
    for name, width in (("a", 6), ("b", 7)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "sizes.py").write_text(f"WIDTH = {width}\n")
        (tmp_path / name / "model.py").write_text(
            NET + "\ndef model():\n    import sizes\n    return Net(sizes.WIDTH)\n"
        )
    sources = [made(str(tmp_path / name / "model.py"), inputs=lambda b: torch.ones(b, 3)) for name in "ab"]
    assert [s.module.layer.out_features for s in sources] == [6, 7]


def test_late_imports_and_pickles_find_the_file(write):
    write("def double(x):\n    return x + x\n", "late.py")
    text = NET.replace("        return self.layer(x)", "        import late\n        return late.double(self.layer(x))")
    source = made(write(text), inputs=lambda b: torch.ones(b, 3))
    with source.opened() as module:
        assert sys.modules[type(module).__module__].Net is type(module)
        assert module(torch.ones(1, 3)).shape == (1, 4)
    assert "late" not in sys.modules


def test_output_of_the_file_goes_to_stderr(write, capsys):
    made(write(NET + "print('hello')\n"), inputs=X)
    assert capsys.readouterr() == ("", "hello\n")


@pytest.mark.parametrize(
    ("text", "attribute", "parts"),
    [
        ("def model(:\n    pass\n", "", ["model.py:1: syntax error", "next:"]),
        ("import torch\n\nx = 1 / 0\n", "", ["model.py:3: importing the file raised ZeroDivisionError: division"]),
        ("import no_such_package\n", "", ["model.py:1:", "ModuleNotFoundError", "install no_such_package"]),
        ("import sys\nsys.exit(3)\n", "", ["model.py:2: importing the file raised SystemExit"]),
        ("def model():\n    return help_me()\n", "", ["model.py:2: calling model() raised NameError: name 'help_me'"]),
        ("def build():\n    pass\n", "", ["no model found", "function model()", "defines build", "model.py:NAME"]),
        ("", "", ["no model found", "defines nothing"]),
        (NET + "class Other(Net):\n    pass\n", "", ["several models: Net, Other", "model.py:Other"]),
        (NET + "a = Net()\nb = Net()\n", "", ["several models: a, b", "model.py:b"]),
        (NET, ":Nat", ["defines no 'Nat'", "did you mean Net?"]),
        (NET + "X = 3\n", ":X", ["the model is an int"]),
        ("def model():\n    return 1, 2\n", "", ["model() returned a tuple of 2, not an nn.Module", "module alone"]),
        ("def model():\n    pass\n", "", ["model() returned None"]),
        ("def model(size, depth):\n    pass\n", "", ["model() needs size, depth", "--model-arg size=VALUE"]),
        (NET + "inputs = 3\n", "", ["inputs is no function"]),
        (
            "import torch\ndef model():\n    return torch.zeros(10**7).sum().item()\n",
            "",
            ["model.py:3:", "DataDependentOutputException", "builds models without them"],
        ),
        (
            "import torch\ndef model():\n    return torch.nn.LazyLinear(3)\n",
            "",
            ["weight has no shape yet", "Linear(in, out)"],
        ),
    ],
)  # fmt: skip
def test_messages_about_files(write, text, attribute, parts):
    message = refused(write(text) + attribute)
    assert all(part in message for part in parts), message


def test_the_innermost_own_line_is_named(write):
    write("def deep(x):\n    raise KeyError('weights')\n", "sibling.py")
    assert "sibling.py:2: calling model() raised KeyError" in refused(
        write("def model():\n    from sibling import deep\n    deep(1)\n")
    )


def test_missing_file(tmp_path, write):
    write(NET, "modle.py")
    message = refused(str(tmp_path / "model.py"))
    assert "there is no such file" in message
    assert "did you mean modle.py?" in message


def test_a_folder_and_a_file_of_weights(tmp_path):
    assert "this is a folder" in refused(f"{tmp_path}/")
    (tmp_path / "w.pt").touch()
    assert "not its weights" in refused(str(tmp_path / "w.pt"))


def test_bad_model_argument(write):
    message = refused(write(NET), model_args=(("widht", 3),))
    assert "Net() has no argument 'widht'" in message
    assert "did you mean width?" in message
    assert "instance" in refused(write(NET + "net = Net()\n"), model_args=(("width", 3),))


def test_half_stays_half_and_the_rest_is_cast(write):
    path = write(
        NET + "\ndef model():\n    net = Net()\n    net.add_module('b', nn.BatchNorm1d(4).bfloat16())\n    return net\n"
    )
    module = made(path, dtype="float16", inputs=X).module
    assert module.layer.weight.dtype == torch.float16
    assert module.b.weight.dtype == torch.bfloat16
    assert module.b.num_batches_tracked.dtype == torch.int64


# ------------------------------------------------------------------ other targets
def test_package_and_callables():
    def build(width: int = 2) -> nn.Module:
        return nn.Linear(3, width)

    source = made(
        "torch.nn:Linear", model_args=(("in_features", 3), ("out_features", 2)), inputs=lambda b: torch.ones(b, 3)
    )
    assert source.kind is Kind.PACKAGE
    assert isinstance(source.module.weight, FakeTensor)
    assert made(build, model_args=(("width", 7),), inputs=lambda b: torch.ones(b, 3)).module.out_features == 7
    assert "did you mean width?" in refused(build, model_args=(("widt", 7),))


@pytest.mark.parametrize(
    ("target", "part"),
    [
        ("no.such_module:f", "no module 'no.such_module' can be imported"),
        ("torch.nn:Linnear", "did you mean"),
        ("a b:c", "'a b:c' is no target"),
        ("hf:", "hf:gpt2"),
    ],
)
def test_unknown_targets(target, part):
    assert part in refused(target)


def test_live_module_is_only_borrowed():
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU())
    weight = net[0].weight
    source = made(net, dtype="float16", channels_last=True, inputs=lambda b: torch.ones(b, 3, 8, 8))
    assert source.live
    assert source.module is net
    assert net[0].weight is weight
    assert weight.dtype == torch.float32
    with source.opened() as module:
        assert module[0].weight.dtype == torch.float16
        assert isinstance(module[0].weight, FakeTensor)
        assert module[0].weight.is_contiguous(memory_format=torch.channels_last)
    assert net[0].weight is weight
    assert weight.is_contiguous()
    assert weight.dtype == torch.float32
    assert "factory" in refused(net, model_args=(("a", 1),))


def test_each_opening_starts_afresh(write):
    source = made(write(NET), inputs=lambda b: torch.ones(b, 3))
    for _ in range(2):
        with source.opened() as module:
            assert module.layer.weight.grad is None
            module(torch.ones(1, 3)).sum().backward()
            assert module.layer.weight.grad is not None
            module.train()
            module.layer.extra = 1
    assert not hasattr(source.module.layer, "extra")


@pytest.mark.filterwarnings("ignore")  # torch deprecates TorchScript
def test_script_modules_are_refused():
    scripted = torch.jit.trace(nn.Linear(2, 2), torch.zeros(1, 2))
    assert "eager model" in refused(scripted, inputs=lambda b: torch.ones(b, 2))


# ------------------------------------------------------------------ inputs
def test_inputs_of_the_user(write):
    def inputs(batch: int) -> dict[str, object]:
        x = torch.randn(batch, 3, device="cuda")
        return {"x": x, "again": [x], "lengths": torch.ones(batch, dtype=torch.int64, device="cpu"), "flag": True}

    found = made(write(NET), inputs=inputs, dtype="bfloat16").inputs(2)
    assert found.args == ()
    assert list(found.kwargs) == ["x", "again", "lengths", "flag"]
    assert found.kwargs["x"].dtype == torch.bfloat16
    assert found.kwargs["again"][0] is found.kwargs["x"]
    assert found.host == {id(found.kwargs["lengths"])}
    assert found.kwargs["lengths"].tolist() == [1, 1]


def test_inputs_on_a_machine_without_cuda_are_not_taken_for_host_tensors(write):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    assert made(write(NET), inputs=lambda b: torch.ones(b, 3, device=device)).inputs(1).host == frozenset()


def test_large_inputs_are_fake_small_ones_real(write):
    source = made(write(NET), inputs=lambda b: (torch.randn(b, 3, 512, 512), torch.randint(0, 9, (b, 7))))
    image, ids = source.inputs(64).args
    assert isinstance(image, FakeTensor)
    assert not isinstance(ids, FakeTensor)


def test_given_shapes(write):
    specs = (InputSpec(None, (3, 8), None), InputSpec("ids", (5,), "int64"), InputSpec("mask", (), "bool"))
    source = load(write(NET), Workload(inputs=specs, dtype="float16"), FakeTensorMode())
    got = source.inputs(2)
    assert got.args[0].shape == (2, 3, 8)
    assert got.args[0].dtype == torch.float16
    assert got.kwargs["ids"].tolist() == [[0] * 5] * 2
    assert got.kwargs["mask"].dtype == torch.bool
    under_amp = load(write(NET), Workload(inputs=specs, dtype="float16", amp="float16"), FakeTensorMode())
    assert under_amp.inputs(2).args[0].dtype == torch.float32


def test_messages_about_inputs(write):
    message = refused(write(NET), InputError)
    assert "no inputs are known for Net.forward(x)" in message
    assert "--input 3;" in message

    def broken(batch: int) -> None:
        raise ValueError("no data")

    for function, part in (
        (broken, "raised ValueError: no data"),
        (lambda b: None, "returned None"),
        (lambda: 1, "takes"),
    ):
        with pytest.raises(InputError, match=part):
            made(write(NET), inputs=function).inputs(2)
    spec = (InputSpec(None, (3,), "floaty"),)
    with pytest.raises(InputError, match="'floaty' is no dtype"):
        load(write(NET), Workload(inputs=spec), FakeTensorMode()).inputs(1)


def test_the_example_fits_the_first_layer():
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(1, 2, 3)

        def forward(self, left, right, scale=1.0):
            return left

    message = refused(Pair, InputError)
    assert "--input left=1x224x224 --input right=1x224x224" in message


# ------------------------------------------------------------------ checkpointing, layout
class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
        self.calls = 0

    def forward(self, x, scale=1.0):
        return self.inner(x) * scale


def test_repeated_blocks_are_checkpointed():
    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(3, 3), Block(), Block(), nn.Sequential(Block()))

    source = made(build, checkpoint=True, inputs=lambda b: torch.ones(b, 3))
    wrapped = [name for name, m in source.module.named_modules() if "forward" in vars(m)]
    assert wrapped == ["1", "2"]
    calls: list[int] = []
    with source.opened() as module:
        module[1].inner[0].register_forward_hook(lambda *_: calls.append(1))
        module(torch.ones(2, 3)).sum().backward()
    assert calls == [1, 1]
    assert "no repeated block" in refused(lambda: nn.Linear(3, 3), checkpoint=True, inputs=lambda b: torch.ones(b, 3))


def test_channels_last(write):
    source = made(lambda: nn.Conv2d(3, 4, 3), channels_last=True, inputs=lambda b: torch.ones(b, 3, 8, 8))
    assert source.module.weight.is_contiguous(memory_format=torch.channels_last)
    assert source.inputs(2).args[0].is_contiguous(memory_format=torch.channels_last)
    assert "5-D" in refused(lambda: nn.Conv3d(3, 4, 3), UsageError, channels_last=True, inputs=torch.ones)


# ------------------------------------------------------------------ model zoos
@pytest.mark.parametrize(
    ("target", "package", "extra"),
    [("torchvision:x", "torchvision", "torchvision"), ("timm:x", "timm", "timm"), ("hf:gpt2", "transformers", "hf")],
)
def test_missing_extras(monkeypatch, target, package, extra):
    monkeypatch.setitem(sys.modules, package, None)
    assert f'pip install "fxmem[{extra}]"' in refused(target, MissingExtraError)


def test_torchvision():
    pytest.importorskip("torchvision")
    source = made("torchvision:resnet18", dtype="float16", model_args=(("num_classes", 10),), channels_last=True)
    assert source.kind is Kind.TORCHVISION
    assert source.module.fc.out_features == 10
    assert {p.dtype for p in source.module.parameters()} == {torch.float16}
    found = source.inputs(2)
    assert found.args[0].shape == (2, 3, 224, 224)
    assert found.args[0].stride()[1] == 1
    assert found.target.tolist() == [0, 0]
    assert found.target.dtype == torch.int64
    assert "did you mean resnet18" in refused("torchvision:resnet_18")
    assert "--model-arg" in refused("torchvision:resnet18", model_args=(("nope", 1),))


def test_torchvision_checkpoints_the_measured_blocks():
    pytest.importorskip("torchvision")
    source = made("torchvision:mobilenet_v2", checkpoint=True)
    wrapped = {type(m).__name__ for m in source.module.modules() if "forward" in vars(m)}
    assert wrapped == {"InvertedResidual"}


@pytest.mark.parametrize(
    ("name", "training", "shape"),
    [
        ("vit_b_16", True, (2, 3, 224, 224)),
        ("r3d_18", False, (2, 3, 16, 112, 112)),
        ("raft_small", False, (2, 3, 256, 256)),
        ("fcn_resnet50", True, (2, 3, 224, 224)),
    ],
)
def test_torchvision_families(name, training, shape):
    pytest.importorskip("torchvision")
    mode = Mode.TRAINING if training else Mode.INFERENCE
    assert made(f"torchvision:{name}", mode=mode).inputs(2).args[0].shape == shape


def test_torchvision_detection():
    pytest.importorskip("torchvision")
    source = made("torchvision:maskrcnn_resnet50_fpn", mode=Mode.TRAINING, image=128, image_given=True)
    images, targets = source.inputs(2).args
    assert [x.shape for x in images] == [(3, 128, 128)] * 2
    assert set(targets[0]) == {"boxes", "labels", "masks"}
    assert targets[0]["boxes"].dtype == torch.float32
    assert len(made("torchvision:fasterrcnn_resnet50_fpn").inputs(2).args) == 1


def test_timm():
    pytest.importorskip("timm")
    source = made("timm:vit_tiny_patch16_384", mode=Mode.TRAINING, checkpoint=True, model_args=(("in_chans", 1),))
    assert source.kind is Kind.TIMM
    assert source.module.grad_checkpointing
    assert source.inputs(2).args[0].shape == (2, 1, 384, 384)
    assert "did you mean resnet18" in refused("timm:resnet_18")


def test_hf_language_model():
    pytest.importorskip("transformers")
    small = (("n_layer", 2), ("n_embd", 32), ("n_head", 2))
    source = made(
        "hf:gpt2", mode=Mode.TRAINING, seq=16, model_args=small, dtype="bfloat16", attn="eager", checkpoint=True
    )
    model = source.module
    assert type(model).__name__ == "GPT2LMHeadModel"
    assert model.config._attn_implementation == "eager"
    assert model.lm_head.weight is model.transformer.wte.weight
    assert model.is_gradient_checkpointing
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    kwargs = source.inputs(2).kwargs
    assert kwargs["labels"] is kwargs["input_ids"]
    assert kwargs["input_ids"].tolist() == [[0] * 16] * 2
    prompt = made("hf:gpt2", mode=Mode.GENERATION, prompt=5, model_args=small).inputs(1).kwargs
    assert list(prompt) == ["input_ids"]
    assert prompt["input_ids"].shape == (1, 5)


def test_hf_families():
    pytest.importorskip("transformers")
    small = (
        ("num_hidden_layers", 1),
        ("hidden_size", 24),
        ("num_attention_heads", 2),
        ("image_size", 48),
        ("patch_size", 8),
    )
    assert made("hf:vit", model_args=small).inputs(2).kwargs["pixel_values"].shape == (2, 3, 48, 48)
    t5 = made("hf:t5", mode=Mode.TRAINING, seq=8, model_args=(("num_layers", 1), ("d_model", 16))).inputs(2).kwargs
    assert list(t5) == ["input_ids", "decoder_input_ids"]
    clip = made("hf:clip").inputs(2).kwargs
    assert list(clip) == ["input_ids", "pixel_values"]
    assert clip["input_ids"].shape == (2, 77)
    audio = made("hf:wav2vec2", model_args=(("num_hidden_layers", 1),)).inputs(2).kwargs
    assert audio["input_values"].shape == (2, 16_000)


def test_hf_configuration_file(tmp_path):
    pytest.importorskip("transformers")
    path = tmp_path / "config.json"
    path.write_text(
        '{"model_type": "bert", "architectures": ["BertForMaskedLM"], "num_hidden_layers": 1,'
        ' "hidden_size": 24, "num_attention_heads": 2}'
    )
    source = made(f"hf:{path}", model_args=(("vocab_size", 50),))
    assert type(source.module).__name__ == "BertForMaskedLM"
    assert source.module.config.vocab_size == 50
    path.write_text("{oops")
    assert "is no JSON" in refused(f"hf:{path}")
    path.write_text('{"hidden_size": 3}')
    assert "no model_type" in refused(f"hf:{path}")


def test_messages_about_hf():
    pytest.importorskip("transformers")
    assert "did you mean gpt2" in refused("hf:gptt2")
    assert "did you mean n_layer" in refused("hf:gpt2", model_args=(("n_layers", 3),))
    assert "downloads nothing" in refused("hf:meta/llama")
    message = refused("hf:gpt2", checkpoint=True, model_args=(("n_head", 7),))
    assert "building the model raised ValueError" in message
    assert "--model-arg" in message
