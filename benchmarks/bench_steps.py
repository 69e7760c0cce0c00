"""The time of a whole training step of 13 networks: brim's beside torch's.

A step is forward, backward and AdamW's step, at the usual batch size and at a quarter of it, where
the accelerator waits for the host. Weights are random. Each figure is a ratio to torch's median
time; the ways take turns. A ratio above its bound is marked with "(!)".

    ./dev bench steps                       all networks, on the accelerator
    ./dev bench steps -- Swin BART          rows whose name has this in it
    ./dev bench steps -- --rounds 40        steadier figures
"""

from __future__ import annotations

import copy
import gc
import time
import traceback
from collections.abc import Callable, Mapping
from typing import Any

import torch
from harness import Work, medians, network_options
from nn_models import MODELS, Case, Setting, language_model, torchvision_model
from results import Panel, Table
from torch import Tensor, nn

import brim

WAYS: Mapping[str, str | None] = {
    "brim": None,
    "cheap": "cheap",
    "products": "products",
    "auto": "auto",  # without a limit
}
BOUNDS = {"brim": 1.02, "cheap": 1.06, "products": 1.12, "auto": 1.03}
SCALES = {"the usual batch": 1.0, "a quarter of the usual batch": 0.25}

# -- Networks --------------------------------------------------------------------------------------


def small_or(setting: Setting, small: Mapping[str, Any], usual: Mapping[str, Any]) -> Any:
    return dict(small if setting.small else usual)


def bart(setting: Setting) -> Case:
    from transformers import BartConfig, BartForConditionalGeneration

    narrow = {"d_model": 64, "encoder_layers": 2, "decoder_layers": 2}
    base = {"d_model": 768, "encoder_layers": 6, "decoder_layers": 6}
    heads = {"encoder_attention_heads": 12, "decoder_attention_heads": 12}
    base |= heads | {"encoder_ffn_dim": 3072, "decoder_ffn_dim": 3072}
    narrow |= dict.fromkeys(heads, 2) | {"encoder_ffn_dim": 128, "decoder_ffn_dim": 128}
    config = BartConfig(**small_or(setting, narrow, base))
    shape = (setting.batch(2, 16), 16 if setting.small else 256)
    return language_model(
        setting, lambda: BartForConditionalGeneration(config), shape, "BartEncoderLayer"
    )


def neox(setting: Setting) -> Case:
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    narrow = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    usual = {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12}
    narrow["intermediate_size"], usual["intermediate_size"] = 128, 3072
    config = GPTNeoXConfig(**small_or(setting, narrow, usual))
    shape = (setting.batch(2, 8), 16 if setting.small else 512)
    return language_model(setting, lambda: GPTNeoXForCausalLM(config), shape, "GPTNeoXLayer")


def roberta(setting: Setting) -> Case:
    from transformers import RobertaConfig, RobertaForSequenceClassification

    narrow = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = RobertaConfig(**small_or(setting, narrow, {"vocab_size": 50265}))
    ids = setting.ids(config.vocab_size, (setting.batch(2, 32), 16 if setting.small else 128))
    target = setting.ids(2, ids.shape[:1])

    def forward(model: nn.Module) -> Tensor:
        with setting.autocast():
            return model(input_ids=ids, labels=target).loss

    model = setting.build(lambda: RobertaForSequenceClassification(config))
    return Case(model, forward, ["RobertaLayer"])


def whisper(setting: Setting) -> Case:
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    narrow = {"d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "max_source_positions": 32}
    usual = {"d_model": 512, "encoder_layers": 6, "decoder_layers": 6}  # "base"
    heads = {"encoder_attention_heads": 8, "decoder_attention_heads": 8}
    usual |= heads | {"encoder_ffn_dim": 2048, "decoder_ffn_dim": 2048}
    narrow |= dict.fromkeys(heads, 2) | {"encoder_ffn_dim": 128, "decoder_ffn_dim": 128}
    config = WhisperConfig(**small_or(setting, narrow, usual))
    batch = setting.batch(2, 8)
    sound = torch.randn(
        batch, config.num_mel_bins, 2 * config.max_source_positions, device=setting.device
    )
    ids = setting.ids(config.vocab_size, (batch, 16 if setting.small else 128))

    def forward(model: nn.Module) -> Tensor:
        with setting.autocast():
            return model(input_features=sound, labels=ids, use_cache=False).loss

    model = setting.build(lambda: WhisperForConditionalGeneration(config))
    return Case(model, forward, ["WhisperEncoderLayer"])


Make = Callable[[Setting], Case]
NETWORKS: Mapping[str, tuple[Make, str]] = {
    "EfficientNetV2-S": (torchvision_model("efficientnet_v2_s"), "float32"),
    "Swin-T": (torchvision_model("swin_t"), "autocast"),
    "BART": (bart, "autocast"),
    "DenseNet-121": (torchvision_model("densenet121"), "float32"),
    "RegNet": (torchvision_model("regnet_y_3_2gf"), "float32"),
    "GPT-NeoX": (neox, "autocast"),
    "Whisper": (whisper, "float32"),
    "RoBERTa": (roberta, "autocast"),
    "ResNet-50": (MODELS["ResNet-50"].make, "autocast"),
    "ViT-B": (MODELS["ViT-B"].make, "autocast"),
    "BERT": (MODELS["BERT"].make, "autocast"),
    "Llama": (MODELS["Llama"].make, "bf16"),
    "GPT-2": (MODELS["GPT-2"].make, "autocast"),
}

# -- Times -----------------------------------------------------------------------------------------


def steps(case: Case) -> dict[str, Work]:
    """A training step of each way, each with a model of its own."""
    models = {"torch": case.model}
    for way, recompute in WAYS.items():
        models[way] = copy.deepcopy(case.model)
        brim.convert(models[way], recompute=recompute)

    def work(model: nn.Module) -> Work:
        optimizer = torch.optim.AdamW(model.parameters(), 1e-5, fused=True)

        def step() -> None:
            case.forward(model).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

        return step

    return {way: work(model) for way, model in models.items()}


def run_row(name: str, scale: float, device: str, rounds: int, table: Table) -> None:
    make, precision = NETWORKS[name]
    torch.manual_seed(0)
    try:
        case = make(Setting(device, "full", precision, scale))
        times = medians(steps(case), rounds, calls=2, warmup=2, device=device)
    except Exception:  # the others go on
        print(f"{name}: failed\n{traceback.format_exc(limit=-3)}", flush=True)
        return
    ratios = {way: times[way] / times["torch"] for way in WAYS}
    cells = [f"{ratio:.2f}{' (!)' * (ratio > BOUNDS[way])}" for way, ratio in ratios.items()]
    table.row(f"{name}, {precision}", f"{times['torch'] * 1e3:.1f}", *cells)


def main() -> None:
    options = network_options(__doc__, NETWORKS, 12, "turns of each way")
    panels = [Panel("time, of torch's", list(WAYS), baseline=1)]
    begin = time.perf_counter()
    for batch, scale in SCALES.items():
        title = f"Time of a training step, of torch's, with {batch}"
        head = ("network", "torch, ms", *WAYS)
        table = Table(title, head, device=options.device, width=26, panels=panels)
        for name in options.networks:
            run_row(name, scale, options.device, options.rounds, table)
            gc.collect()
            brim.release_cached(options.device)
    print(f"{time.perf_counter() - begin:.0f} s in all")


if __name__ == "__main__":
    main()
