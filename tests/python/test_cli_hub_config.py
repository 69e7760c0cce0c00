"""`brim estimate --hub-config`: what training a model takes, from its config file alone."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import brim
from brim.cli import main

transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.filterwarnings("ignore:::transformers")

TEXT = {"vocab_size": 512, "max_position_embeddings": 64}
SMALL = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}


def config_of(architecture: str, kind: str, **settings: Any) -> dict[str, Any]:
    return {"architectures": [architecture], "model_type": kind, **settings}


LLAMA = config_of("LlamaForCausalLM", "llama", intermediate_size=128, **SMALL, **TEXT)
GPT2 = config_of("GPT2LMHeadModel", "gpt2", n_embd=64, n_layer=2, n_head=4, n_positions=64)
BERT = config_of("BertForSequenceClassification", "bert", intermediate_size=128, **SMALL, **TEXT)
VIT = config_of("ViTForImageClassification", "vit", intermediate_size=128, image_size=64, **SMALL)
T5 = config_of(
    *("T5ForConditionalGeneration", "t5"),
    d_model=64,
    d_kv=16,
    d_ff=128,
    num_layers=2,
    num_heads=4,
    vocab_size=512,
    decoder_start_token_id=0,
)


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Writes a config file into the working directory and returns its name."""
    monkeypatch.chdir(tmp_path)

    def write(config: object) -> str:
        Path("config.json").write_text(json.dumps(config))
        return "config.json"

    return write


def figures_of(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    capsys.readouterr()
    command = ["estimate", "--hub-config", *words, "--device", "cpu", "--capacity", "1GiB"]
    assert main([*command, "--json"]) == 0
    figures: dict[str, Any] = json.loads(capsys.readouterr().out)
    return figures


def real_step(
    config: dict[str, Any], inputs: Callable[[], dict[str, torch.Tensor]], optimizer: Any
) -> tuple[torch.nn.Module, Callable[[], None]]:
    """A training step of the model with weights, as a user would write it."""
    known = transformers.AutoConfig.for_model(config["model_type"]).__class__.from_dict(config)
    model = getattr(transformers, config["architectures"][0])(known).train()
    model.config.use_cache = False
    made, batch = optimizer(model.parameters()), inputs()

    def step() -> None:
        loss = model(**batch).loss
        loss.backward()
        made.step()
        made.zero_grad()

    return model, step


def tokens(targets: tuple[int, ...], samples: int = 4, length: int = 64) -> Any:
    return lambda: {
        "input_ids": torch.randint(512, (samples, length)),
        "labels": torch.zeros(targets, dtype=torch.int64),
    }


@pytest.mark.parametrize(
    ("config", "words", "inputs", "optimizer"),
    [
        (GPT2, ["--length", "64"], tokens((4, 64)), torch.optim.AdamW),
        (LLAMA, ["--optimizer", "sgd"], tokens((4, 64)), torch.optim.SGD),
        (BERT, ["--length", "32"], tokens((4,), length=32), torch.optim.AdamW),
        (T5, ["--length", "32"], tokens((4, 32), length=32), torch.optim.AdamW),
        (
            VIT,
            [],
            lambda: {
                "pixel_values": torch.rand(4, 3, 64, 64),
                "labels": torch.zeros(4, dtype=torch.int64),
            },
            torch.optim.AdamW,
        ),
    ],
    ids=["gpt2", "llama", "bert", "t5", "vit"],
)
def test_the_figures_are_those_of_a_model_with_weights(
    config: dict[str, Any],
    words: list[str],
    inputs: Any,
    optimizer: Any,
    write: Callable[..., str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    told = figures_of(capsys, write(config), "--batch", "4", *words)
    model, step = real_step(config, inputs, optimizer)
    found = brim.estimate(step, device="cpu", calls=2)
    assert told["peak"] == found.peak
    assert told["held_before"] == found.held_before
    training = told["training"]
    assert training["peak"] == found.peak + found.held_before
    assert training["parameters"] == sum(each.numel() for each in model.parameters())
    assert training["gradients"] == 4 * training["parameters"]
    states = 0 if optimizer is torch.optim.SGD else 2
    assert training["optimizer_state"] == pytest.approx(states * training["gradients"], rel=0.01)
    if config is not VIT:  # workspaces of convolutions on the CPU are approximations
        step()
        with brim.PeakMeter("cpu") as meter:
            step()
        measured = found.held_before + training["optimizer_state"] + meter.peak
        assert training["peak"] == pytest.approx(measured, rel=0.02)


def test_types_optimizers_and_checkpoints_count(
    write: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    file = write(LLAMA)
    plain = figures_of(capsys, file)["training"]
    assert figures_of(capsys, file, "--batch", "8", "--length", "64")["training"] == plain

    def with_options(*words: str) -> dict[str, Any]:
        training: dict[str, Any] = figures_of(capsys, file, *words)["training"]
        return training

    half = with_options("--dtype", "bfloat16")
    assert half["gradients"] * 2 == plain["gradients"]
    assert with_options("--autocast", "bfloat16")["weights"] == plain["weights"]
    assert with_options("--checkpointing")["peak"] < 0.9 * plain["peak"]
    momentum = with_options("--optimizer", "momentum")["optimizer_state"]
    assert momentum == pytest.approx(plain["gradients"], rel=0.01)
    assert with_options("--optimizer", "adafactor")["optimizer_state"] < momentum / 4
    assert torch.get_default_dtype() is torch.float32
    file = write({**LLAMA, "dtype": "bfloat16"})
    assert with_options() == half  # what the file says


def test_the_table_for_people_and_the_exit_status(
    write: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["estimate", "--hub-config", write(GPT2), "--device", "cuda", "--capacity"]
    assert main([*command, "1GiB"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("GPT2LMHeadModel, 3,")
    assert lines[0].endswith(" parameters; a batch of 8 × 64 tokens")
    assert lines[-1].startswith("- cuBLAS keeps a workspace")
    assert any(line.startswith("peak of a step, all included") for line in lines)
    assert main([*command, "1MiB"]) == 1


@pytest.mark.parametrize(
    ("content", "words", "text"),
    [
        (None, [], "there is no file config.json"),
        ("{", [], "config.json is no JSON: "),
        ("[]", [], "config.json must hold a JSON object, got a list"),
        ({"model_type": "bert"}, [], "config.json has no 'architectures', which says what model"),
        ({"architectures": ["BertModel"]}, [], "config.json has no 'model_type'"),
        (config_of("XModel", "x"), [], "knows no model of the type 'x', which config.json names"),
        (config_of("XModel", "bert"), [], "has no XModel, named by config.json"),
        ({**BERT, "architectures": ["BertForPreTraining"]}, [], "no inputs for BertForPreTraining"),
        (GPT2, ["--length", "65"], "--length must be at most 64 for this GPT2LMHeadModel, got 65"),
        (VIT, ["--length", "9"], "--length is for tokens, and ViTForImageClassification takes"),
        (GPT2, ["--batch", "0"], "argument --batch: must be a whole number of at least 1, got 0"),
        (GPT2, ["train.py:step"], "train.py was not found"),
        (GPT2, ["torch:empty"], "give either a function or --hub-config, not both"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(
    content: object,
    words: list[str],
    text: str,
    write: Callable[..., str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    if isinstance(content, str):
        Path("config.json").write_text(content)
    elif content is not None:
        write(content)
    assert main(["estimate", "--hub-config", "config.json", "--device", "cpu", *words]) == 2
    errors = capsys.readouterr().err
    assert text in errors
    assert len(errors.splitlines()) == 1


def test_its_options_need_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["estimate", "torch:empty", "4", "--batch", "2"]) == 2
    assert "--batch goes with --hub-config" in capsys.readouterr().err
    assert main(["estimate"]) == 2
    assert "a function is missing, or a model with --hub-config" in capsys.readouterr().err


def test_transformers_is_asked_for(
    write: Callable[..., str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write(GPT2)
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert main(["estimate", "--hub-config", file]) == 2
    assert "needs transformers: pip install 'brim[transformers]'" in capsys.readouterr().err
