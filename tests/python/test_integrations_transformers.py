"""`BrimCallback` beside the plain Trainer of transformers: the same training, in parts."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import brim

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from brim.integrations.transformers import BrimCallback  # noqa: E402

pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore:.*pin_memory.*:UserWarning"
)

Sample = dict[str, torch.Tensor]
Run = Callable[..., tuple[Any, list[torch.Tensor], list[float]]]


def llama(**changes: Any) -> Any:
    torch.manual_seed(0)
    shape = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 64}
    layers = {"num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.LlamaConfig(**{**shape, **layers, **changes})
    return transformers.LlamaForCausalLM(config).double()


def tokens(count: int = 12) -> list[Sample]:
    """Texts with different numbers of labels, one without any."""
    generator = torch.Generator().manual_seed(0)

    def text(i: int) -> Sample:
        ids = torch.randint(0, 50, (12,), generator=generator)
        end = 0 if i == 3 else int(torch.randint(3, 12, (), generator=generator))
        labels = torch.where(torch.arange(12) < end, ids, -100)
        return {"input_ids": ids, "labels": labels}

    return [text(i) for i in range(count)]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    def train(
        callback: BrimCallback | None = None,
        model: Any = None,
        samples: list[Sample] | None = None,
        kind: Any = transformers.Trainer,
        budget: int | None = None,
        resume: bool = False,
        **settings: Any,
    ) -> tuple[Any, list[torch.Tensor], list[float]]:
        quiet = {"report_to": [], "disable_tqdm": True, "use_cpu": True, "save_strategy": "no"}
        steps = {"per_device_train_batch_size": 6, "num_train_epochs": 2, "logging_steps": 1}
        # Adam would make much of the rounding of small gradients.
        optimizer = {"optim": "sgd", "learning_rate": 0.1, "lr_scheduler_type": "constant"}
        arguments = transformers.TrainingArguments(
            str(tmp_path), **{**quiet, **steps, **optimizer, **settings}
        )
        model = llama() if model is None else model
        trainer = kind(
            model,
            arguments,
            train_dataset=tokens() if samples is None else samples,
            callbacks=[] if callback is None else [callback],
        )
        trainer.remove_callback(transformers.PrinterCallback)
        if budget is None:
            trainer.train(resume_from_checkpoint=resume)
        else:
            with brim.budget(brim.memory_stats("cpu").allocated + budget, device="cpu"):
                trainer.train()
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        return trainer, [p.detach().clone() for p in model.parameters()], losses

    return train


def assert_close(ours: Any, plain: Any) -> None:
    for a, b in zip(ours[1], plain[1], strict=True):
        assert torch.allclose(a, b, rtol=1e-6, atol=1e-9)
    assert ours[2] == pytest.approx(plain[2], rel=1e-6)


def assert_same(ours: Any, plain: Any) -> None:
    assert all(torch.equal(a, b) for a, b in zip(ours[1], plain[1], strict=True))
    assert ours[2] == plain[2]


SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulation": {"gradient_accumulation_steps": 2},
    "label smoothing": {"label_smoothing_factor": 0.1},
    "mean of each batch": {"gradient_accumulation_steps": 2, "kind": "mean"},
}


class MeanOfBatch(transformers.Trainer):  # type: ignore[misc]
    """A trainer of a user's, whose loss is a mean over the labels of the batch."""

    loss_is_scaled_for_ga = False

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        return super().compute_loss(model, inputs)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param(each, id=name, marks=[pytest.mark.slow] * (name != "accumulation"))
        for name, each in SETTINGS.items()
    ],
)
def test_training_in_parts_is_the_same_training(run: Run, settings: dict[str, Any]) -> None:
    kind = MeanOfBatch if settings.get("kind") else transformers.Trainer
    settings = {**settings, "kind": kind}
    plain = run(**settings)
    assert_same(run(BrimCallback(convert=False), **settings), plain)
    assert_same(run(BrimCallback(), **settings), plain)
    for size in (1, 4):
        callback = BrimCallback(recompute="cheap", size=size)
        assert_close(run(callback, **settings), plain)
        assert callback.step is not None
        assert callback.step.size == size


def test_a_batch_that_does_not_fit_is_split(run: Run, held: int) -> None:
    model, plain = llama(), run(model=llama())
    with brim.PeakMeter("cpu") as meter:
        run(model=llama(), num_train_epochs=1)
    callback = BrimCallback(convert=False)
    ours = run(callback, model=model, budget=int(meter.peak * 0.7))
    assert callback.step is not None
    assert callback.step.size < 6
    assert_close(ours, plain)
    assert "training_step" not in vars(ours[0])


def test_a_callback_that_was_interrupted_and_removed_runs_no_more(tmp_path: Path) -> None:
    class Stop(transformers.TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *_: Any, **__: Any) -> None:
            raise KeyboardInterrupt

    options = {"report_to": [], "disable_tqdm": True, "use_cpu": True, "save_strategy": "no"}
    arguments = transformers.TrainingArguments(str(tmp_path), max_steps=1, **options)
    callback = BrimCallback(size=4)
    trainer = transformers.Trainer(
        llama(num_hidden_layers=1), arguments, train_dataset=tokens(), callbacks=[callback, Stop()]
    )
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    trainer.remove_callback(Stop)
    trainer.remove_callback(callback)
    trainer.train()
    assert "training_step" not in vars(trainer)


@pytest.mark.slow
def test_autocast_and_a_gradient_scaler(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_same(
        run(BrimCallback(convert=False), llama().float(), bf16=True),
        run(None, llama().float(), bf16=True),
    )

    class Scaled(transformers.Trainer):  # type: ignore[misc]
        def create_accelerator_and_postprocess(self) -> None:
            super().create_accelerator_and_postprocess()
            self.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)

    plain = run(kind=Scaled, max_grad_norm=0)
    assert_same(run(BrimCallback(), kind=Scaled, max_grad_norm=0), plain)
    assert_close(run(BrimCallback(size=2), kind=Scaled, max_grad_norm=0), plain)


def classifier(**changes: Any) -> Any:
    torch.manual_seed(0)
    shape = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 64}
    layers = {"num_hidden_layers": 1, "num_attention_heads": 4}
    config = transformers.BertConfig(**shape, **layers, **changes)
    config.hidden_dropout_prob = config.attention_probs_dropout_prob = 0.0
    return transformers.BertForSequenceClassification(config).double()


@pytest.mark.parametrize("labels", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_losses_that_are_means_over_samples(run: Run, labels: int) -> None:
    """Those of regression are, although the trainer passes num_items_in_batch."""
    targets = torch.rand(12).double() if labels == 1 else torch.arange(12) % 3
    samples = [
        {"input_ids": text["input_ids"], "labels": target}
        for text, target in zip(tokens(), targets, strict=True)
    ]
    plain = run(model=classifier(num_labels=labels), samples=samples)
    ours = run(BrimCallback(size=4), classifier(num_labels=labels), samples)
    assert_close(ours, plain)


def test_losses_that_have_no_parts_are_refused(run: Run) -> None:
    class Contrast(transformers.Trainer):  # type: ignore[misc]
        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
            logits = model(input_ids=inputs["input_ids"]).logits.mean(1)
            return (logits @ logits.T).softmax(0).diagonal().log().mean()  # type: ignore[no-any-return]

    run(BrimCallback(), kind=Contrast)  # fits
    with pytest.raises(ValueError, match="cannot be run in parts: the loss of two samples"):
        run(BrimCallback(size=2), kind=Contrast)
    with pytest.raises(ValueError, match=r"a mean over count\(inputs\)"):
        run(BrimCallback(size=2, count=lambda inputs: len(inputs["labels"])))


def test_losses_that_draw_random_numbers(run: Run) -> None:
    class Noise(transformers.Trainer):  # type: ignore[misc]
        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
            logits = model(input_ids=inputs["input_ids"]).logits
            return (logits - torch.randn_like(logits)).square().mean()

    with pytest.raises(ValueError, match="the loss is random"):
        run(BrimCallback(size=2), kind=Noise)
    callback = BrimCallback(size=2, count=lambda inputs: len(inputs["labels"]), check=False)
    run(callback, kind=Noise, max_steps=1)
    assert callback.step is not None
    assert callback.step.size == 2


@pytest.mark.parametrize("times", [0, 2])
def test_steps_with_other_than_one_backward_are_refused(run: Run, times: int) -> None:
    class Own(transformers.Trainer):  # type: ignore[misc]
        def training_step(self, model: Any, inputs: Any, *args: Any) -> torch.Tensor:
            loss = self.compute_loss(model, inputs)
            for _ in range(times):
                self.accelerator.backward(loss)
            return loss.detach()  # type: ignore[no-any-return]

    with pytest.raises(ValueError, match=f"training_step of Own .* {times} times"):
        run(BrimCallback(), kind=Own)


def test_checkpoints_are_those_of_the_plain_trainer(run: Run, tmp_path: Path) -> None:
    files = {}
    whole = run(num_train_epochs=3)
    for name, callback in (("plain", None), ("brim", BrimCallback(recompute="cheap", size=4))):
        trainer, *_ = run(callback, save_strategy="epoch")
        saved = tmp_path / name
        trainer.save_model(str(saved))
        header, _, _ = (saved / "model.safetensors").read_bytes()[8:].partition(b"}}")
        files[name] = (json.loads((saved / "config.json").read_text()), header)
        loaded = transformers.LlamaForCausalLM.from_pretrained(saved)
        assert type(loaded) is transformers.LlamaForCausalLM
    assert files["plain"] == files["brim"]
    resumed = run(BrimCallback(size=4), resume=True, num_train_epochs=3)
    assert resumed[0].state.global_step == 6
    assert_close((None, resumed[1], resumed[2][-2:]), (None, whole[1], whole[2][-2:]))


@pytest.mark.slow
def test_peft(run: Run) -> None:
    peft = pytest.importorskip("peft")

    def adapted() -> Any:
        config = peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
        return peft.get_peft_model(llama(), config).double()

    plain = run(model=adapted(), label_smoothing_factor=0.1)
    ours = run(BrimCallback(size=4), adapted(), label_smoothing_factor=0.1)
    assert_close(ours, plain)
    keys = [list(peft.get_peft_model_state_dict(each[0].model)) for each in (ours, plain)]
    assert keys[0] == keys[1]


def test_wrong_arguments() -> None:
    with pytest.raises(ValueError, match="size is for microbatches, which are switched off"):
        BrimCallback(microbatches=False, size=3)
    for name in ("reduction", "model", "scaler"):
        with pytest.raises(TypeError, match=f"BrimCallback sets {name} itself"):
            BrimCallback(**{name: None})
    with pytest.raises(ValueError, match="check=False needs count="):
        BrimCallback(check=False)
    with pytest.raises(ValueError, match="size must be at least 1, got 0"):
        BrimCallback(size=0)
    with pytest.raises(RuntimeError, match=r"must be called by a transformers\.Trainer"):
        BrimCallback(convert=False).on_train_begin()


def test_layers_that_see_the_whole_batch_are_refused(run: Run) -> None:
    model = llama()
    model.extra = torch.nn.BatchNorm1d(2)
    with pytest.raises(ValueError, match=r"extra \(BatchNorm1d\)"):
        run(BrimCallback(), model)
    run(BrimCallback(microbatches=False), model)


JOB = """
import json, os, sys, torch
sys.path.insert(0, sys.argv[2])
torch.set_num_threads(1)
from test_integrations_transformers import llama, tokens
from transformers import PrinterCallback, Trainer, TrainingArguments
from brim.integrations.transformers import BrimCallback
import brim

result = []
for callback in (None, BrimCallback(convert=False), BrimCallback(size=2)):
    arguments = TrainingArguments(
        sys.argv[1], num_train_epochs=1, report_to=[], save_strategy="no", use_cpu=True,
        disable_tqdm=True, logging_steps=1,
        per_device_train_batch_size=3, gradient_accumulation_steps=2,
    )
    model = llama()
    callbacks = [callback] if callback else []
    trainer = Trainer(model, arguments, train_dataset=tokens(), callbacks=callbacks)
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    result.append([[float(p.double().norm()) for p in model.parameters()], losses])
    assert callback is None or callback.step.size == (callback.step._most or 3)
with open(f"{sys.argv[1]}/{os.environ['RANK']}.json", "w") as file:
    json.dump(result, file)
torch.distributed.barrier()
os._exit(0)  # gloo's threads can outlive the interpreter
"""


@pytest.mark.slow
def test_two_ranks_train_as_under_ddp(tmp_path: Path) -> None:
    from .torchrun import results_of, torchrun  # the job imports this file by itself

    program = tmp_path / "train.py"
    program.write_text(JOB)
    torchrun(program, tmp_path, Path(__file__).parent)
    for plain, whole, parts in results_of(tmp_path):
        for ours in (whole, parts):
            assert ours[0] == pytest.approx(plain[0], rel=1e-9)
            assert ours[1] == pytest.approx(plain[1], rel=1e-5)


@pytest.mark.cuda
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_a_batch_is_split_on_a_gpu(run: Run, precision: str) -> None:
    settings = {"use_cpu": False, precision: True}
    plain = run(None, llama().float(), **settings)
    whole = run(BrimCallback(convert=False), llama().float(), **settings)
    assert_same(whole, plain)
    callback = BrimCallback(size=4)
    parts = run(callback, llama().float(), **settings)
    assert callback.step is not None
    assert callback.step.size == 4
    for ours, theirs in zip(parts[1], plain[1], strict=True):
        assert torch.allclose(ours, theirs, rtol=0.05, atol=1e-3)
    assert parts[2] == pytest.approx(plain[2], rel=1e-2)
