"""What calls in several threads change of the process is put back by the last of them."""

from __future__ import annotations

import threading
import warnings

import torch
import torch._dynamo.eval_frame as dynamo

import brim
from brim._state.uncompiled import run_uncompiled
from brim._state.undoing import Undoing
from brim.adapt._split_check import _eagerly

from .patience import FOR_EVER
from .test_threads_and_forks import in_child


def test_checks_in_two_threads_leave_no_setting() -> None:
    before = dynamo._stance, list(warnings.filters)
    both = threading.Barrier(2, timeout=FOR_EVER)
    first_has_ended = threading.Event()

    def step(is_first: bool) -> None:
        model, calls = torch.nn.Linear(4, 1), [0]

        def loss_fn(part: torch.Tensor) -> torch.Tensor:
            calls[0] += 1
            if calls[0] == 1:
                assert dynamo._stance.stance == "force_eager"
                both.wait()  # both are in the check
                if not is_first:
                    first_has_ended.wait(FOR_EVER)
                    assert dynamo._stance.stance == "force_eager"
            return model(part).square().mean()

        brim.Microbatches(loss_fn, model=model, size=2)(torch.rand(8, 4))
        if is_first:
            first_has_ended.set()

    errors: list[BaseException] = []

    def run(is_first: bool) -> None:
        try:
            step(is_first)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(each,)) for each in (True, False)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert (dynamo._stance, list(warnings.filters)) == before


def test_a_check_that_ends_beside_catch_warnings_leaves_no_silence() -> None:
    before = list(warnings.filters)
    begun, may_end = threading.Event(), threading.Event()

    def first() -> str:
        begun.set()
        may_end.wait(FOR_EVER)
        return ""

    thread = threading.Thread(target=_eagerly, args=(first,))
    thread.start()
    assert begun.wait(FOR_EVER)

    def second() -> str:
        with warnings.catch_warnings():  # which puts back what there is now
            may_end.set()
            thread.join()
        return ""

    _eagerly(second)
    assert list(warnings.filters) == before


def test_a_child_does_not_wait_for_threads_that_it_does_not_have() -> None:
    before = dynamo._stance
    inside, done = threading.Event(), threading.Event()

    def hold() -> None:
        with Undoing() as undo:
            run_uncompiled(undo)
            inside.set()
            done.wait(FOR_EVER)

    thread = threading.Thread(target=hold)
    thread.start()
    assert inside.wait(FOR_EVER)

    def work() -> None:
        assert dynamo._stance is before

    in_child(work)
    with Undoing() as undo:
        run_uncompiled(undo)

        def inherit() -> None:
            assert dynamo._stance.stance == "force_eager"

        in_child(inherit)
    done.set()
    thread.join()
    assert dynamo._stance is before
