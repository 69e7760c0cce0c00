"""Pictures: what they show, where they go, and what they leave alone."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import brim
from brim import plot
from brim.data import PackedBatchSampler, SizeAwareBatchSampler

figure_module = pytest.importorskip("matplotlib.figure")
agg = pytest.importorskip("matplotlib.backends.backend_agg")


def texts(axes: Any) -> list[str]:
    legend = axes.get_legend()
    return [axes.get_title("left"), *(text.get_text() for text in legend.get_texts())]


@pytest.fixture(scope="module")
def model() -> brim.MemoryModel:
    sizes = [1, 16, 256, 4096]
    return brim.MemoryModel().fit(sizes, [1000 * size for size in sizes])


@pytest.fixture(scope="module")
def audit() -> brim.Audit:
    layers = [torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 8)]
    return brim.audit(torch.nn.Sequential(*layers), torch.ones(4, 8))


@pytest.fixture(scope="module")
def estimate() -> brim.Estimate:
    weight = torch.ones(64, 64, requires_grad=True)

    def step(x: torch.Tensor) -> None:
        torch.relu(x @ weight).sum().backward()

    return brim.estimate(step, torch.ones(128, 64), device="cpu", capacity="200KiB")


@pytest.fixture(scope="module")
def attempts() -> Any:
    @brim.maximize("batch_size")
    def work(batch_size: int) -> int:
        return torch.zeros(batch_size, 1024).numel()

    with brim.budget(brim.memory_stats("cpu").allocated + 2**20, "cpu"):
        return work.record(batch_size=2048)[1]


@pytest.fixture(scope="module")
def pressure() -> brim.nn.PressureRecord:
    moments = [(100, 0, 0, 0), (900, 0, 0, 0), (900, 300, 300, 0), (600, 300, 0, 0)]
    moments += [(800, 300, 0, 0), (800, 0, 0, 300), (100, 0, 0, 0)]
    return brim.nn.PressureRecord(tuple(map(brim.nn.PressureMoment._make, moments)), limit=1000)


@pytest.mark.parametrize("kind", ["model", "audit", "estimate", "attempts", "report", "pressure"])
def test_each_draws_into_axes_and_files_without_pyplot(
    kind: str, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)  # type: ignore[arg-type]
    drawn = (
        PackedBatchSampler([5, 2, 8, 3], 10).report()
        if kind == "report"
        else request.getfixturevalue(kind)
    )
    figure = figure_module.Figure()
    axes = figure.subplots()
    assert drawn.plot(axes) is figure
    assert axes.get_title("left")
    assert drawn.plot(tmp_path / "picture.png").axes
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")
    drawn.plot(str(tmp_path / "picture.svg"))
    assert "<svg" in (tmp_path / "picture.svg").read_text()


def test_a_model_with_a_budget_shows_the_largest_size(model: brim.MemoryModel) -> None:
    seconds = {(size,): 0.001 * size for size in (1, 16, 256, 4096)}
    figure = model.plot(budget="1MiB", seconds=seconds)
    assert len(figure.axes) == 2, "memory on the left, time on the right"
    axes = figure.axes[0]
    largest = model.largest_size("1MiB")
    assert f"largest size that surely fits: {largest}" in texts(axes)
    assert "budget 1.00 MiB" in texts(axes)
    assert not any("margin" in text for text in texts(axes))  # the text has another figure for it
    star = next(line for line in axes.lines if line.get_marker() == "*")
    assert star.get_xydata().tolist() == [[largest, model.safe_peak(largest)]]
    measured = next(line for line in axes.lines if line.get_label() == "measured")
    assert measured.get_xdata().tolist() == [1, 16, 256, 4096]
    agg.FigureCanvasAgg(figure).draw()
    labels = [label.get_text() for label in axes.get_yticklabels()]
    assert {"64 KiB", "1 MiB"} <= set(labels)
    sizes = [label.get_text() for label in axes.get_xticklabels()]
    assert {"256", "1,024", "4,096"} <= set(sizes)


def test_a_model_of_batches_and_failures() -> None:
    sizes = [(1, 16), (2, 32), (32, 16), (1, 512), (8, 128), (32, 512)]
    peaks = [10_000 + 64 * n * length + n * length**2 for n, length in sizes]
    model = brim.MemoryModel().fit(sizes, peaks, [False] * 5 + [True])
    axes = model.plot(budget="1MiB").axes[0]
    most = "most samples within 1.00 MiB"
    assert {"measured", "out of memory above", most} <= set(texts(axes))
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("length", "samples")
    line = next(line for line in axes.lines if line.get_label() == most)
    for length, n in line.get_xydata()[::10]:
        assert model.safe_peak(n, length) <= 2**20 < model.safe_peak(n + 1, length)
    assert most not in texts(model.plot(budget=1).axes[0]), "nothing fits"
    axes = model.plot(budget="100MiB").axes[0]  # far more samples than were measured
    line = next(line for line in axes.lines if "within 100.00 MiB" in line.get_label())
    (left, right), (low, high) = axes.get_xlim(), axes.get_ylim()
    assert len(line.get_xydata()) > 10
    for length, n in line.get_xydata():
        assert left <= length <= right
        assert low <= n <= high
    assert most not in texts(model.plot().axes[0])
    with pytest.raises(ValueError, match="must be fitted"):
        brim.MemoryModel().plot()


def test_a_step_under_pressure_shows_what_was_given_up(pressure: brim.nn.PressureRecord) -> None:
    axes = pressure.plot().axes[0]
    assert texts(axes)[0] == "Peak 900 B where 1.17 KiB would be held: up to 300 B given up"
    assert {"held", "limit 1000 B", "dropped for an allocation", "computed again"} <= {*texts(axes)}
    drops = next(line for line in axes.lines if line.get_marker() == "v")
    assert drops.get_xydata().tolist() == [[pytest.approx(200 / 6), 900]]
    long = brim.nn.PressureRecord(pressure.moments * 1000, limit=10**9)
    axes = long.plot().axes[0]
    assert max(len(line.get_xdata()) for line in axes.lines) <= 1000
    assert texts(axes)[0] == texts(pressure.plot().axes[0])[0]
    assert not any("limit" in text for text in texts(axes)), "far above"
    nothing = brim.nn.PressureRecord(pressure.moments[:2], limit=1000)
    assert texts(nothing.plot().axes[0])[0] == "Peak 900 B: nothing was given up"


def test_an_audit_has_a_bar_per_layer_and_column(audit: brim.Audit) -> None:
    axes = audit.plot().axes[0]
    names = [label.get_text() for label in axes.get_yticklabels()]
    keeping = [each for each in audit.layers if each.torch_nn or each.brim or each.least]
    assert names == [f"{each.name} ({each.type})" for each in keeping]
    widths = [bar.get_width() for bars in axes.containers for bar in bars]
    figures = [[e.torch_nn for e in keeping], [e.brim for e in keeping]]
    assert widths[: 2 * len(names)] == [*figures[0], *figures[1]]
    assert f"torch.nn: {brim.format_bytes(audit.torch_nn)}" in texts(axes)


def test_many_layers_are_drawn_as_others() -> None:
    model = torch.nn.Sequential(*(torch.nn.Linear(width, width + 1) for width in range(8, 28)))
    found = brim.audit(model, torch.ones(4, 8))
    axes = found.plot().axes[0]
    assert axes.get_yticklabels()[-1].get_text().endswith(" others")
    assert sum(bar.get_width() for bar in axes.containers[0]) == found.torch_nn


def test_an_estimate_reaches_its_peak_and_its_capacity(estimate: brim.Estimate) -> None:
    figure = estimate.plot(beside={"again": estimate})
    axes = figure.axes[0]
    tops = [path.vertices[:, 1].max() for each in axes.collections for path in each.get_paths()]
    assert max(tops) == estimate.held_before + estimate.peak
    line = next(line for line in axes.lines if line.get_label().startswith("again"))
    assert max(line.get_ydata()) == estimate.held_before + estimate.peak
    assert "capacity 200.00 KiB" in texts(axes)
    assert axes.get_title("left")[1:] == str(estimate).splitlines()[0][1:]
    assert set(estimate.by_kind) <= set(texts(axes))


def test_attempts_are_bars_in_order(attempts: Any) -> None:
    axes = attempts.plot(budget=2**20).axes[0]
    assert [label.get_text() for label in axes.get_xticklabels()] == [
        str(attempt.size) for attempt in attempts
    ]
    assert {"fitted", "did not fit: held and asked for", "budget 1.00 MiB"} <= set(texts(axes))
    with pytest.raises(ValueError, match="there are no attempts to draw"):
        plot.attempts([])


def test_a_plan_has_the_report_s_histograms() -> None:
    lengths = [5, 2, 8, 3, 7, 1, 4] * 20
    report = SizeAwareBatchSampler(range(len(lengths)), lengths, 16, cost="padded").report()
    axes = report.plot().axes[0]
    fill, padding = (patch.get_data().values for patch in axes.patches)
    assert fill.tolist() == report.fill_histogram
    assert padding.tolist() == report.padding_histogram
    assert sum(report.fill_histogram) == report.batches == sum(report.padding_histogram)


def test_without_matplotlib_one_sentence_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, audit: brim.Audit
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)  # type: ignore[arg-type]
    with pytest.raises(ImportError, match=r"^pictures need matplotlib: pip install 'brim\[plot\]'"):
        audit.plot()


def test_labels_do_not_overlap(
    model: brim.MemoryModel, audit: brim.Audit, estimate: brim.Estimate, attempts: Any
) -> None:
    report = PackedBatchSampler([5, 2, 8, 3], 10).report()
    pictures: list[Callable[[], Any]] = [
        lambda: model.plot(budget="1MiB", seconds={(1,): 1.0, (4096,): 2.0}),
        audit.plot,
        estimate.plot,
        lambda: attempts.plot(budget=2**20),
        report.plot,
    ]
    for draw in pictures:
        figure = draw()
        agg.FigureCanvasAgg(figure).draw()
        renderer = figure.canvas.get_renderer()
        axes = figure.axes[0]
        legend = axes.get_legend().get_window_extent(renderer)
        for other in (axes.xaxis.get_tightbbox(renderer), axes.get_window_extent(renderer)):
            assert not legend.overlaps(other)
        assert figure.bbox.x0 <= legend.x0
        assert legend.x1 <= figure.bbox.x1


@pytest.mark.parametrize("most", [1.05 * 2**20, 1.9 * 2**30, 30 * 2**30])
def test_axes_of_bytes_have_several_ticks_also_where_they_are_enlarged(most: float) -> None:
    from matplotlib.figure import Figure

    from brim.plot._canvas import byte_ticks, bytes_on

    axes = Figure().subplots()
    bytes_on(axes.yaxis, most)
    for low, high in ((0, most), (0.5 * most, 0.7 * most)):
        axes.set_ylim(low, high)
        shown = [tick for tick in axes.get_yticks() if low <= tick <= high]
        assert 3 <= len(shown) <= 8
    assert 3 <= len(byte_ticks(most)) <= 7
