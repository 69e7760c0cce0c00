"""What leaves the process holds torch's operators alone, and loads where there is no brim."""

from __future__ import annotations

import copy
import io
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.ao.quantization
import torch.fx
import torch.nn.functional as F  # noqa: N812
from torch import nn

import brim

from .nn_cases import Case, pair
from .nn_steps import ALL, IMAGES, small_net

# torch deprecates what is tested here, and says so.
pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning",
    "ignore::FutureWarning",
    "ignore::UserWarning",
    "ignore::torch.jit.TracerWarning",
)

WITHOUT_BRIM = """
import sys
sys.modules["brim"] = None  # importing it fails
import torch
traced, exported, data = sys.argv[1:]
x, y = torch.load(data)
for model in (torch.jit.load(traced), torch.export.load(exported).module()):
    assert torch.equal(model(x), y)
"""


def every_kind(of: Any) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        of.Conv2d(3, 4, 4, padding="same"),
        of.BatchNorm2d(4),
        of.ReLU(inplace=True),
        of.MaxPool2d(2),
        of.ConvTranspose2d(4, 4, 2),
        of.GroupNorm(2, 4),
        of.LeakyReLU(),
        of.AvgPool2d(2),
        of.Dropout(0.1),
        of.GELU(),
        of.SiLU(),
        of.Hardtanh(inplace=True),
        of.ReLU6(),
        of.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        of.Linear(16, 4),
        of.LayerNorm(4),
        of.RMSNorm(4),
    )


def names_of(program: torch.export.ExportedProgram) -> set[str]:
    return {str(node.target) for node in program.graph.nodes if node.op == "call_function"}


@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("strict", [False, True], ids=["not strict", "strict"])
def test_an_exported_program_holds_torchs_operators(strict: bool, training: bool) -> None:
    nets = [every_kind(of).train(training) for of in (brim.nn, nn)]
    mine, theirs = (torch.export.export(net, (IMAGES,), strict=strict) for net in nets)
    assert not any("brim" in name for name in names_of(mine))
    # A padding that is more on one side is written out, and dropout does nothing in eval mode.
    assert names_of(mine) ^ names_of(theirs) <= {
        "aten.pad.default",
        "aten.conv2d.default",
        "aten.conv2d.padding",
        "aten.dropout.default",
    }


@pytest.mark.parametrize("case", ALL)
def test_a_traced_layer_holds_torchs_operators(case: Case) -> None:
    ours, torchs = pair(case, torch.float32)
    x = case.input(torch.float32)
    kinds = []
    for layer in (ours.eval(), torchs.eval()):
        graph = torch.jit.trace(layer, x).inlined_graph  # type: ignore[no-untyped-call]
        kinds.append({node.kind() for node in graph.nodes()})
    assert not any(kind.startswith("brim::") for kind in kinds[0])
    if case.layer != "Dropout":  # which does nothing in eval mode
        assert kinds[0] == kinds[1]


@pytest.mark.slow
def test_the_files_load_without_brim(tmp_path: Path) -> None:
    net = every_kind(brim.nn).eval()
    files = [str(tmp_path / name) for name in ("model.pt", "model.pt2", "data.pt")]
    torch.jit.save(torch.jit.trace(net, IMAGES), files[0])  # type: ignore[no-untyped-call]
    torch.export.save(torch.export.export(net, (IMAGES,)), files[1])
    torch.save((IMAGES, net(IMAGES).detach()), files[2])
    command = [sys.executable, "-W", "ignore", "-c", WITHOUT_BRIM, *files]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_graph_for_onnx_is_that_of_torchs_layers() -> None:
    """As the exporter that traces gets it; the other one starts from an exported program."""
    graphs = []
    for of in (brim.nn, nn):
        graph, *_ = torch.jit._get_trace_graph(
            every_kind(of)[4:8], IMAGES[:, :1].expand(2, 4, 8, 8)
        )
        graphs.append([node.kind() for node in graph.nodes()])
    assert graphs[0] == graphs[1]


def test_the_onnx_file_is_that_of_torchs_layers() -> None:
    onnx = pytest.importorskip("onnx")
    found = []
    for net in (small_net(), small_net(nn)):
        file = io.BytesIO()
        torch.onnx.export(net.eval(), (IMAGES,), file, dynamo=False)
        nodes = onnx.load_from_string(file.getvalue()).graph.node
        found.append([(node.op_type, node.domain) for node in nodes])
    assert found[0] == found[1]


def test_fx_finds_torchs_functions() -> None:
    """So do the tools on top of it, such as prepare_fx of torch.ao.quantization."""
    net = nn.Sequential(brim.nn.Linear(4, 4), brim.nn.ReLU(), brim.nn.LayerNorm(4))
    traced = torch.fx.symbolic_trace(net)
    found = [node.target for node in traced.graph.nodes if node.op == "call_function"]
    assert found == [F.linear, F.relu, F.layer_norm]


# -- torch.ao.quantization ------------------------------------------------------------------------


def _dynamic(net: nn.Module) -> None:
    torch.ao.quantization.quantize_dynamic(net, {nn.Linear})


def _prepared(net: nn.Module, prepare: Any) -> None:
    net.qconfig = torch.ao.quantization.get_default_qat_qconfig("qnnpack")
    prepare(net)


def _qat(net: nn.Module) -> None:
    _prepared(net.train(), torch.ao.quantization.prepare_qat)


def _static(net: nn.Module) -> None:
    _prepared(net.eval(), torch.ao.quantization.prepare)


@pytest.mark.parametrize("quantize", [_dynamic, _qat, _static])
def test_quantizing_converted_layers_is_refused(quantize: Any) -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    brim.convert(net)
    with pytest.raises(TypeError, match=r"call brim\.restore\(model\) before quantizing"):
        quantize(copy.deepcopy(net))


def test_a_restored_model_is_quantized() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    brim.convert(net)
    net.qconfig = torch.ao.quantization.get_default_qat_qconfig("qnnpack")
    ready = torch.ao.quantization.prepare_qat(brim.restore(net).train())
    assert type(ready[0]) is torch.ao.nn.qat.Linear


def test_a_layer_that_is_prepared_for_quantization_is_not_converted() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    net[0].qconfig = torch.ao.quantization.get_default_qconfig("qnnpack")
    report = brim.convert(net)
    assert [layer.name for layer in report.kept] == ["0"]
    assert report.kept[0].reason == "it is prepared for quantization"
    assert type(net[0]) is nn.Linear
    assert not hasattr(net[1], "qconfig")
