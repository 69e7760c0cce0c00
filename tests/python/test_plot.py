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
    layers = [torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 16), torch.nn.ReLU()]
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


@pytest.mark.parametrize(
    ("name", "file"),
    [("name", "name.png"), ("name.", "name.png"), (".png", ".png.png"), ("a.b.svg", "a.b.svg")],
)
def test_a_name_without_a_kind_gets_the_usual_one(name: str, file: str, tmp_path: Path) -> None:
    PackedBatchSampler([5, 2], 10).report().plot(tmp_path / name)
    assert [each.name for each in tmp_path.iterdir()] == [file]


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
    assert {"measured", "foreseen"} <= set(texts(axes))
    beyond = "foreseen beyond what was measured"
    assert beyond not in texts(axes)
    assert beyond in texts(model.plot(budget="16MiB").axes[0])
    measured = next(line for line in axes.lines if line.get_label() == "measured")
    times = figure.axes[1].lines[0]
    assert [line.get_linestyle() for line in (measured, times)] == ["None"] * 2, "points only"
    assert measured.get_xdata().tolist() == [1, 16, 256, 4096]
    agg.FigureCanvasAgg(figure).draw()
    labels = [label.get_text() for label in axes.get_yticklabels()]
    numbers, units = zip(*(label.split() for label in labels), strict=True)
    assert set(numbers) <= {str(2**n) for n in range(10)}  # which of them, matplotlib decides
    assert list(dict.fromkeys(units)) == ["B", "KiB", "MiB"]
    sizes = {label.get_text() for label in axes.get_xticklabels()}
    assert sizes & {"1,024", "2,048", "4,096", "8,192"}
    assert sizes <= {f"{2.0**n:,.10g}" for n in range(-10, 20)}


@pytest.mark.parametrize(
    ("sizes", "scale"),
    [
        ([64, 128, 256, 1024, 2048, 4096, 8192], "linear"),
        ([1, 4, 15, 56, 215, 1050, 4096], "linear"),
        ([1, 16, 256, 4096], "log"),
    ],
)
def test_sizes_have_a_linear_axis_if_that_tells_three_of_them_apart(
    sizes: list[int], scale: str
) -> None:
    model = brim.MemoryModel().fit(sizes, [1000 * size for size in sizes])
    axes = model.plot().axes[0]
    assert (axes.get_xscale(), axes.get_yscale()) == (scale, scale)
    if scale == "linear":  # then it shows that memory is proportional
        assert (axes.get_xlim()[0], axes.get_ylim()[0]) == (0, 0)


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
    assert drops.get_xydata().tolist() == [[pytest.approx(2 / 6), 900]]
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
    assert axes.yaxis_inverted(), "the first row is at the top"
    keeping = [each for each in audit.layers if each.torch_nn or each.brim or each.least]
    keeping.sort(key=lambda each: -each.torch_nn)
    assert keeping != [each for each in audit.layers if each in keeping], "sorting matters here"
    assert names == [f"{each.name} ({each.type})" for each in keeping]
    widths = [bar.get_width() for bars in axes.containers for bar in bars]
    figures = [[e.torch_nn for e in keeping], [e.brim for e in keeping]]
    assert widths[: 2 * len(names)] == [*figures[0], *figures[1]]
    assert f"torch.nn: {brim.format_bytes(audit.torch_nn)}" in texts(axes)
    shown = [text.get_text() for text in axes.texts]
    assert shown == [brim.format_bytes(int(width)) for width in widths]


def test_many_layers_are_drawn_as_others() -> None:
    model = torch.nn.Sequential(*(torch.nn.Linear(width, width + 1) for width in range(8, 28)))
    found = brim.audit(model, torch.ones(4, 8))
    axes = found.plot().axes[0]
    assert axes.get_yticklabels()[-1].get_text().endswith(" others")
    assert sum(bar.get_width() for bar in axes.containers[0]) == found.torch_nn


def test_an_estimate_reaches_its_peak_and_its_capacity(estimate: brim.Estimate) -> None:
    figure = estimate.plot(beside={"again": estimate})
    axes = figure.axes[0]
    most = estimate.held_before + estimate.peak
    *areas, line = (patch.get_data().values for patch in axes.patches)
    assert max(max(area) for area in areas) == max(line) == most
    assert "capacity 200.00 KiB" in texts(axes)
    held = brim.format_bytes(most)  # the title, the legend and the axis have one reference
    assert texts(axes)[0].startswith(f"At most {held} held, ")
    assert f"again: at most {held}" in texts(axes)
    assert set(estimate.by_kind) <= set(texts(axes))
    assert borders(axes) == [], "one call"


def borders(axes: Any) -> list[float]:
    """Where lines stand that go from the bottom to the top of the picture."""
    return [line.get_xdata()[0] for line in axes.lines if list(line.get_ydata()) == [0, 1]]


def test_a_line_stands_between_two_calls_which_are_as_wide_as_each_other() -> None:
    weight = torch.ones(64, 64, requires_grad=True)
    optimizer = torch.optim.Adam([weight])

    def step(x: torch.Tensor, power: int = 1) -> None:
        optimizer.zero_grad()
        for _ in range(power):
            x = torch.relu(x @ weight)
        x.sum().backward()
        optimizer.step()

    found, longer = (
        brim.estimate(step, torch.ones(128, 64), power, device="cpu", calls=2) for power in (1, 9)
    )
    axes = found.plot(beside={"longer": longer}).axes[0]
    assert borders(axes) == [1]
    assert [label.get_text() for label in axes.get_xticklabels()] == ["call 1", "call 2"]
    assert axes.get_xlim() == (0, 2)
    state = next(patch for patch in axes.patches if patch.get_label() == "optimizer state")
    values, edges, below = state.get_data()
    made = [high - low for high, low in zip(values, below, strict=True)]
    in_the_second = [size for size, edge in zip(made, edges, strict=False) if edge >= 1]
    assert made[0] == 0, "the first call makes the optimizer's state"
    assert min(in_the_second) == max(made)
    line = axes.patches[-1].get_data()
    assert edges[-1] == line.edges[-1] == 2
    assert 1 in edges
    assert 1 in line.edges


def test_attempts_are_bars_in_order(attempts: Any) -> None:
    figure = attempts.plot(budget=2**20)
    (axes,) = figure.axes
    labels = [label.get_text().split("\n") for label in axes.get_xticklabels()]
    assert [size for size, _ in labels] == [f"{attempt.size:,}" for attempt in attempts]
    assert [time == "failed" for _, time in labels] == [not each.fitted for each in attempts]
    assert {each.fitted for each in attempts} == {True, False}
    assert [line.get_label() for line in axes.lines] == ["budget 1.00 MiB"], "none joins attempts"
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
        below = axes.xaxis.get_tightbbox(renderer)
        for other in filter(None, (below, axes.get_window_extent(renderer))):
            assert not legend.overlaps(other)
        assert figure.bbox.x0 <= legend.x0
        assert legend.x1 <= figure.bbox.x1


@pytest.mark.parametrize("most", [1.05 * 2**20, 1.9 * 2**30, 30 * 2**30])
def test_axes_of_bytes_have_several_ticks_also_where_they_are_enlarged(most: float) -> None:
    from matplotlib.figure import Figure

    from brim.plot._canvas import byte_ticks, bytes_on

    axes = Figure().subplots()
    bytes_on(axes.yaxis)
    for low, high in ((0, most), (0.5 * most, 0.7 * most)):
        axes.set_ylim(low, high)
        shown = [tick for tick in axes.get_yticks() if low <= tick <= high]
        assert 3 <= len(shown) <= 8
    assert 3 <= len(byte_ticks(0, most)) <= 7
