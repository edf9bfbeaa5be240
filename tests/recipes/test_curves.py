"""Curves of runs: what is read from a log, what is drawn of it, and the page that has several runs."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from pathlib import Path

import pytest
from recipe_helpers import RECIPES, TINY_DATA
from recipe_tools import pictures
from recipe_tools.comparison_page import ComparedRun, comparison_page, find_runs
from recipe_tools.curves import draw_curves, draw_run, read_curves
from results import main as results

KEPT = RECIPES / "results"

LOG = """epoch,eps,examples,step,test/auc,train/window_ne,val/auc,val/ne
0,1000.0,50,4,,1.1,,
0,,,9,,,0.6,0.95
0,2000.0,100.0,9,,1.0,,
1,,,19,,,0.7,0.9
1,3000.0,200.0,19,,0.8,,
0,,,0,0.71,,,
"""


@pytest.fixture
def log(tmp_path):
    path = tmp_path / "curves" / "metrics.csv"
    path.parent.mkdir()
    path.write_text(LOG)
    return path


def test_log_when_read_then_validations_stand_at_the_examples_that_training_says_of_their_steps(log):
    assert read_curves(log) == {
        "NE": {"validation": [(100, 0.95), (200, 0.9)], "training": [(50, 1.1), (100, 1.0), (200, 0.8)]},
        "AUC": {"validation": [(100, 0.6), (200, 0.7)]},
        "examples per second": {"training": [(50, 1000), (100, 2000), (200, 3000)]},
    }


def test_log_when_it_counts_no_examples_then_steps_are_as_large_as_is_said(log):
    log.write_text("step,val/ne\n9,0.9\n19,0.8\n")
    assert read_curves(log) == {}
    assert read_curves(log, examples_per_step=32) == {"NE": {"validation": [(320, 0.9), (640, 0.8)]}}


def test_log_when_a_run_diverged_or_was_cut_off_then_its_finite_numbers_are_read_and_the_page_is_made(log):
    log.write_text("step,examples,val/ne\n9,100,0.9\n19,200,nan\n29,300,inf\n39,400,0.8\n,")
    curves = read_curves(log)
    assert curves == {"NE": {"validation": [(100, 0.9), (400, 0.8)]}}
    assert "NE by examples" in comparison_page([run("diverged", curves)])


def test_picture_when_it_cannot_be_written_then_a_warning_says_so_and_the_run_has_ended_well(log, drawn, caplog):
    log.with_name("curves.png").mkdir()
    assert draw_run(log.parents[1]) is None
    assert "curves.png was not drawn: " in caplog.text
    assert len(drawn) == 1


@pytest.fixture
def drawn(monkeypatch):
    """The figures that were drawn, as they are closed."""
    plt = pytest.importorskip("matplotlib.pyplot")
    figures = []
    close = plt.close
    monkeypatch.setattr(plt, "close", lambda figure: (figures.append(figure), close(figure)))
    return figures


def test_run_when_drawn_then_each_panel_has_its_lines_and_validations_are_marked(log, drawn):
    assert draw_run(log.parents[1]) == log.with_name("curves.png")
    assert log.with_name("curves.png").read_bytes().startswith(b"\x89PNG")
    (figure,) = drawn
    panels = {axes.get_ylabel(): axes for axes in figure.axes}
    assert list(panels) == ["NE", "AUC", "examples per second"]
    assert {axes.get_xlabel() for axes in figure.axes} == {"examples"}
    validation, training = panels["NE"].lines
    assert (validation.get_label(), validation.get_marker()) == ("validation", "o")
    assert (training.get_label(), training.get_marker()) == ("training", "None")
    assert training.get_xydata().tolist() == [[50, 1.1], [100, 1.0], [200, 0.8]]
    assert panels["examples per second"].get_ylim() == pytest.approx((0, 3150))  # room above the fastest


def test_runs_when_drawn_together_then_the_legend_names_each_once_and_its_lines_have_its_color(log, tmp_path, drawn):
    curves = read_curves(log)
    assert draw_curves({"model=lr": curves, "model=fm": curves, "no curves": {}}, tmp_path / "x.png")
    axes = drawn[0].axes[0]
    assert [x.get_text() for x in axes.get_legend().get_texts()] == ["model=lr", "model=fm"]
    first, its_training, second, _ = axes.lines
    assert first.get_color() == its_training.get_color() != second.get_color()


def test_run_when_no_line_has_two_points_then_there_is_no_picture(log):
    log.write_text("step,examples,val/ne\n9,100,0.9\n")
    assert draw_run(log.parents[1]) is None
    assert not log.with_name("curves.png").exists()
    assert draw_run(log.parent) is None  # nothing is logged there


def test_run_when_matplotlib_is_missing_then_there_is_no_picture(log, monkeypatch):
    monkeypatch.setattr("recipe_tools.curves.pyplot", lambda: None)
    assert draw_run(log.parents[1]) is None
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    assert pictures.pyplot() is None


# --- The page --------------------------------------------------------------------------------------------------------


class Read(HTMLParser):
    """What a page has: its text, its tags by name, and what it would load from elsewhere."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open, self.texts, self.tags, self.loads = [], [], [], []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        self.loads += [value for name, value in attributes if name in ("src", "href", "srcset")]
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, text):
        if self.open and self.open[-1] != "style":
            self.texts.append(text)


def run(name, curves=None, *, lr=0.1, auc=0.7):
    places = {"trainer": {"default_root_dir": f"/runs/{name}"}, "logger": {"csv": {"save_dir": f"/runs/{name}/log"}}}
    config = {"model": {"dim": 8}, "optim": {"lr": lr}, "paths": {"data": name}, "name": name, **places}
    return ComparedRun(name, {"metrics": {"test/auc": auc}, "wall_time_s": 2.0}, config, curves or {})


def test_page_then_it_has_results_settings_that_differ_and_curves_and_loads_nothing(log):
    curves = read_curves(log)
    page = comparison_page([run("first", curves), run("second", curves, lr=0.2, auc=0.8123), run("third")])
    read = Read(page)
    assert read.open == []
    assert read.loads == []
    assert "@import" not in page
    assert "url(" not in page
    assert {"first", "second", "third", "AUC", "0.7000", "0.8123", "2.0", "optim.lr", "0.2"} <= set(read.texts)
    same_or_of_a_run = {"model.dim", "paths.data", "name", "trainer.default_root_dir", "logger.csv.save_dir"}
    assert not same_or_of_a_run & set(read.texts)
    assert [attributes["aria-label"] for tag, attributes in read.tags if tag == "svg"] == [
        "NE by examples",
        "AUC by examples",
        "examples per second by examples",
    ]
    lines = [x for tag, x in read.tags if tag == "path" and x["class"].startswith("line")]
    assert len(lines) == 2 * 4
    assert len({x["stroke"] for x in lines}) == 2
    assert len([tag for tag, _ in read.tags if tag == "circle"]) == 2 * 4  # two validations, of NE and AUC
    assert "No curves were logged by third." in read.texts


def test_page_when_a_curve_goes_up_then_it_does_on_the_page_within_the_picture():
    curves = {"AUC": {"validation": [(100.0, 0.6), (200.0, 0.7)]}}
    circles = [x for tag, x in Read(comparison_page([run("a", curves)])).tags if tag == "circle"]
    (x0, y0), (x1, y1) = [(float(c["cx"]), float(c["cy"])) for c in circles]
    assert 62 < x0 < x1 <= 448  # from no example on
    assert 260 >= y0 > y1 >= 12  # SVG counts from above


def test_page_when_names_and_settings_are_markup_then_they_are_text():
    evil = "<script>alert(1)</script>"
    page = comparison_page([run(evil, lr=evil), run("b")])
    read = Read(page)
    assert "script" not in [tag for tag, _ in read.tags]
    assert evil in read.texts


def finished(folder: Path, *, status: str = "completed", **config):
    folder.mkdir(parents=True)
    record = {"status": status, "metrics": {"test/auc": 0.75}, "wall_time_s": 1.0, "config": config}
    (folder / "metrics.json").write_text(json.dumps(record))


def test_command_when_given_runs_sweeps_and_kept_ones_then_one_file_has_them_all(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    finished(tmp_path / "alone", seed=1)
    finished(tmp_path / "sweep" / "0_lr", seed=2)
    finished(tmp_path / "sweep" / "1_fm", seed=3)
    finished(tmp_path / "sweep" / "2_dlrm", status="failed")
    monkeypatch.setattr("sys.argv", ["results.py", "compare", "alone", "sweep", "adult/lr", "--out", "x.html"])
    results()
    texts = Read((tmp_path / "x.html").read_text()).texts
    seeds = sorted(int(path.stem.removeprefix("seed-")) for path in (KEPT / "adult" / "lr").glob("seed-*.json"))
    assert {"alone", "0_lr", "1_fm", *(f"adult/lr, seed {seed}" for seed in seeds)} <= set(texts)
    assert "2_dlrm" not in texts
    assert f"{3 + len(seeds)} runs in x.html" in capsys.readouterr().out


def test_kept_run_then_its_curves_are_by_examples():
    first, *_ = find_runs("adult/deepfm", KEPT)
    (x, _), *_ = first.curves["NE"]["validation"]
    assert x == 115 * first.config["data"]["batch_size"]  # validated first behind step 114, counted from 0


@pytest.mark.parametrize(
    ("name", "message"),
    [("nosuch", "nosuch is neither the folder of a run"), ("cut", "cut has no run that was completed")],
)
def test_command_when_there_is_no_such_run_then_says_so(tmp_path, monkeypatch, capsys, name, message):
    monkeypatch.chdir(tmp_path)
    finished(tmp_path / "cut" / "0", status="interrupted")
    monkeypatch.setattr("sys.argv", ["results.py", "compare", name])
    with pytest.raises(SystemExit, match="2"):
        results()
    assert message in capsys.readouterr().err
    assert not (tmp_path / "comparison.html").exists()


# --- Where runs end --------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_run_and_sweep_when_of_two_epochs_then_each_leaves_one_picture(run_forked, tmp_path):
    pytest.importorskip("matplotlib")
    settings = (*TINY_DATA, "model=lr", "trainer.max_epochs=2", "trainer=cpu")
    alone = run_forked("train.py", *settings, "hydra.run.dir=alone", folder=tmp_path)
    assert alone.returncode == 0, alone.stderr
    sweep = run_forked("train.py", "-m", *settings, "seed=0,1", "hydra.sweep.dir=sweep", folder=tmp_path)
    assert sweep.returncode == 0, sweep.stderr
    pictures = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.png")}
    assert pictures == {"alone/curves/curves.png", "sweep/comparison.png"}
    assert "comparison.md and comparison.png" in sweep.stdout
