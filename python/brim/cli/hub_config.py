"""A training step of a Hugging Face model, from its config file alone: no weights, no network."""

from __future__ import annotations

import functools
import itertools
import json
import re
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn.modules.module import register_module_module_registration_hook

import brim
from brim._arguments import shown
from brim._state.undoing import Undoing, set_attribute
from brim._table import Part, Table
from brim.memory import is_out_of_memory

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": torch.optim.AdamW,
    "adafactor": torch.optim.Adafactor,
    "sgd": torch.optim.SGD,
    "momentum": functools.partial(torch.optim.SGD, momentum=0.9),
}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
OPTIONS = ("batch", "length", "dtype", "autocast", "optimizer", "checkpointing")

# What a model takes for its loss, by the end of its name: one number per sample or per token.
_TARGETS: dict[str, tuple[tuple[str, ...], bool]] = {
    "ForCausalLM": (("labels",), True),
    "LMHeadModel": (("labels",), True),
    "ForMaskedLM": (("labels",), True),
    "ForConditionalGeneration": (("labels",), True),
    "ForTokenClassification": (("labels",), True),
    "ForSequenceClassification": (("labels",), False),
    "ForImageClassification": (("labels",), False),
    "ForQuestionAnswering": (("start_positions", "end_positions"), False),
    "Model": ((), False),
}

# More than any model has. Layers are made, if without memory: a number decides how long it takes.
_MOST_LAYERS = 4096
_COUNTS_LAYERS = re.compile(r"(layers?|depths?|blocks)$")
_MOST_MODULES = 200_000


@dataclass
class Training:
    """What a training step needs, all of it on the meta device.

    Attributes:
        name: the model's class.
        arguments: of `step`.
        samples: what a batch consists of, in words.
    """

    name: str
    arguments: tuple[Any, ...]
    samples: str

    def figures(self, found: brim.Estimate) -> dict[str, Any]:
        """What training takes, of an estimate of two steps, in bytes but for the parameters."""
        model = self.arguments[0]
        trained = [each for each in model.parameters() if each.requires_grad]
        kept = (*model.parameters(), *model.buffers())
        return {
            "model": self.name,
            "parameters": sum(each.numel() for each in model.parameters()),
            "weights": sum(each.nbytes for each in kept),
            "gradients": sum(each.nbytes for each in trained),
            "optimizer_state": found.by_kind.get("optimizer state", 0),
            "peak": found.held_before + found.peak,
        }

    def lines(self, found: brim.Estimate) -> list[Part]:
        """The same for people."""
        figures = self.figures(found)
        count = figures["parameters"]
        names = {"weights": "weights", "gradients": "gradients", "optimizer_state": "optimizer"}
        rows = [[text, brim.format_bytes(figures[name])] for name, text in names.items()]
        last = ["peak of a step, all included", brim.format_bytes(figures["peak"])]
        return [
            f"{self.name}, {count:,} parameters; a batch of {self.samples}",
            "",
            Table(["training", "bytes"], rows, last=last),
        ]


def step(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    inputs: dict[str, torch.Tensor],
    autocast: torch.dtype | None,
) -> None:
    """One step: forward, backward, optimizer."""
    device = next(model.parameters()).device.type
    with nullcontext() if autocast is None else torch.autocast(device, autocast):
        output: Any = model(**inputs)
        loss = output["loss"] if "loss" in output else output[0].mean()
    del output  # as in transformers' Trainer: backward then needs no logits
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def training(
    file: Path,
    *,
    batch: int | None = None,
    length: int | None = None,
    dtype: str | None = None,
    autocast: str | None = None,
    optimizer: str | None = None,
    checkpointing: bool = False,
) -> Training:
    """Build the model that a config file describes, and what a step takes.

    Args:
        file: `config.json`, as models on the Hugging Face hub have it.
        batch: how many samples; None for 8.
        length: their tokens; None for 512, or fewer if the model takes no more.
        dtype: of the weights; None for what the file says, else float32.
        autocast: the type of mixed precision in the forward; None for none.
        optimizer: a name of `OPTIMIZERS`; None for AdamW.
        checkpointing: whether layers are computed again in backward.

    Raises:
        ImportError: without transformers.
        ValueError: if the file is no config, or not of a model that brim makes inputs for.
    """
    given = _read(file)
    try:
        import transformers
    except ImportError:
        raise ImportError(
            "--hub-config needs transformers: pip install 'brim[transformers]'"
        ) from None
    for key, known in (("model_type", transformers.CONFIG_MAPPING), ("architectures", None)):
        if not given.get(key):
            raise ValueError(f"{file} has no {key!r}, which says what model it is of")
        if known is not None and (not isinstance(given[key], str) or given[key] not in known):
            raise ValueError(
                f"transformers {transformers.__version__} knows no model of the type "
                f"{shown(given[key])}, which {file} names"
            )
    _check(file, given)
    name = given["architectures"][0]
    kind = getattr(transformers, name, None)
    if not isinstance(kind, type) or not issubclass(kind, transformers.PreTrainedModel):
        raise ValueError(f"transformers {transformers.__version__} has no {name}, named by {file}")
    try:
        model = _model(transformers.CONFIG_MAPPING[given["model_type"]], kind, given, dtype)
        if checkpointing:
            # Its name from transformers 5.23 on, and before.
            getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
    # Whatever its numbers lead to: a division by zero, a missing attribute, a size that overflows.
    except Exception as error:
        # A size that overflows counts as out of memory, and is one of the file's numbers here.
        short = is_out_of_memory(error) and "overflow" not in str(error)
        if short or isinstance(error, ImportError):
            raise
        raise ValueError(f"{file} is not of a {name} that can be made: {error!s:.300}") from error
    inputs, samples = _inputs(model, name, batch or 8, length)
    made = OPTIMIZERS[optimizer or "adamw"](model.parameters())
    mixed = DTYPES[autocast] if autocast else None
    return Training(name, (model, made, inputs, mixed), samples)


def _check(file: Path, given: dict[str, Any]) -> None:
    """Refuse what would make transformers load code or weights, or build without end."""
    architectures = given["architectures"]
    if not isinstance(architectures, list) or not isinstance(architectures[0], str):
        raise ValueError(f"{file} must name a model in 'architectures', got {shown(architectures)}")
    for key, value in _members(given):
        if key.endswith("attn_implementation") and value not in (None, "eager", "sdpa"):
            raise ValueError(f"{file}: {key} must be eager or sdpa here, got {shown(value)}")
        if key in ("backbone", "architecture") and not re.fullmatch(r"[\w.]+", str(value)):
            raise ValueError(f"{file}: {key} must be a plain name here, got {shown(value)}")
        if key in ("model_args", "backbone_kwargs") and any(
            isinstance(each, str) or (each and name.startswith("pretrained"))
            for name, each in _members(value or {})
        ):
            raise ValueError(f"{file}: {key} must not name files here, got {shown(value)}")
        numbers = value if isinstance(value, list) else [value]
        if _COUNTS_LAYERS.search(key) and any(
            isinstance(each, int) and each > _MOST_LAYERS for each in numbers
        ):
            raise ValueError(f"{file}: {key} must be at most {_MOST_LAYERS}, got {shown(value)}")


def _members(given: Any) -> Iterator[tuple[str, Any]]:
    """All members of a config, also of those inside."""
    if isinstance(given, dict):
        yield from given.items()
    for value in given.values() if isinstance(given, dict) else given:
        if isinstance(value, (dict, list)):
            yield from _members(value)


def _without_weights(given: Any) -> Any:
    """The same config, but that no backbone inside loads weights."""
    if isinstance(given, dict):
        kept = {key: _without_weights(value) for key, value in given.items()}
        return kept | ({"use_pretrained_backbone": False} if "backbone" in kept else {})
    return [_without_weights(each) for each in given] if isinstance(given, list) else given


def _model(config_class: Any, kind: Any, given: dict[str, Any], dtype: str | None) -> Any:
    """The model on the meta device, in training mode."""
    from huggingface_hub import constants

    made = itertools.count(1)

    def count(*_: object) -> None:
        if next(made) > _MOST_MODULES:
            raise ValueError(f"it has more than {_MOST_MODULES} modules")

    with Undoing() as undo:
        set_attribute(undo, constants, "HF_HUB_OFFLINE", True)
        config = config_class.from_dict(_without_weights(given))
        config.use_cache = False  # as its Trainer does
        if getattr(config, "use_pretrained_backbone", False):
            config.use_pretrained_backbone = False  # the default of some
        if chosen := DTYPES[dtype] if dtype else getattr(config, "dtype", None):
            undo.callback(functools.partial(torch.set_default_dtype, torch.get_default_dtype()))
            torch.set_default_dtype(chosen)
        undo.callback(register_module_module_registration_hook(count).remove)
        with torch.device("meta"):
            return kind(config).train()


def _read(file: Path) -> dict[str, Any]:
    try:
        given = json.loads(file.read_text())
    except OSError:
        raise FileNotFoundError(f"there is no file {file}") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is no JSON: {error}") from None
    if not isinstance(given, dict):
        raise ValueError(f"{file} must hold a JSON object, got a {type(given).__name__}")
    return given


def _inputs(
    model: Any, name: str, batch: int, length: int | None
) -> tuple[dict[str, torch.Tensor], str]:
    """A batch for the model, with what its loss needs, and what it consists of."""
    targets = next((found for end, found in _TARGETS.items() if name.endswith(end)), None)
    main, config = model.main_input_name, model.config
    if targets is None or main not in ("input_ids", "pixel_values"):
        raise ValueError(
            f"brim makes no inputs for {name}: write a function with a step of it, and call "
            "brim estimate file.py:function"
        )
    names, per_token = targets
    with torch.device("meta"):
        if main == "pixel_values":
            if length is not None:
                raise ValueError(f"--length is for tokens, and {name} takes images")
            size = getattr(config, "image_size", 224)
            height, width = (size, size) if isinstance(size, int) else size
            inputs = {main: torch.empty(batch, config.num_channels, height, width)}
            samples = f"{batch} images of {height} × {width}"
        else:
            most = getattr(config.get_text_config(), "max_position_embeddings", None) or 2**63
            if length is not None and length > most:
                raise ValueError(f"--length must be at most {most} for this {name}, got {length}")
            length = min(512, most) if length is None else length
            inputs = {main: torch.empty(batch, length, dtype=torch.int64)}
            if config.is_encoder_decoder and not names:
                inputs["decoder_input_ids"] = inputs[main]
            samples = f"{batch} × {length} tokens"
        shape = (batch, length) if per_token and length else (batch,)
        inputs |= {each: torch.empty(shape, dtype=torch.int64) for each in names}
    return inputs, samples
