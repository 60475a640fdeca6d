"""The report of a run: what it says, and that it needs nothing else."""

import html.parser
import json
import re

import pytest

import tf_adaptive_dp as dp
from tf_adaptive_dp import report
from tf_adaptive_dp.auditing import bounds

N, DELTA = 1_000, 1e-4
HISTORY = [
    {
        "epoch": epoch,
        "releases": 10 * (epoch + 1),
        "logs": {"epsilon": 0.5 + epoch, "learning_rate": 0.1, "loss": 1.0, "val_accuracy": 0.9},
        "figures": {"clipped_share": 0.25},
    }
    for epoch in range(3)
]
SAMPLING = dp.PoissonSampling.for_batch_size(100, N, steps=30)


def optimizer(noise_multiplier=1.0, **kwargs):
    made = dp.ADADP(1.0, noise_multiplier, expected_batch_size=100.0, **kwargs)
    made.ledger.restore([(noise_multiplier, 100.0, 30)], [(30, 0, 0, 0.0)])
    return made


def facts(**kwargs):
    arguments = {"history": HISTORY, "sampling": SAMPLING, "epsilon": 9.0, **kwargs}
    return report.facts(optimizer(arguments.pop("noise", 1.0)), N, DELTA, **arguments)


class Reader(html.parser.HTMLParser):
    """Collects the text of a page and the addresses that it would load."""

    def __init__(self, page):
        super().__init__()
        self.text, self.loaded, self.open = [], [], []
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        if tag not in ("meta", "path", "use", "br"):
            self.open.append(tag)
        for name, value in attributes:
            if name in ("src", "href", "xlink:href") and not value.startswith("#"):
                self.loaded.append(value)

    def handle_startendtag(self, tag, attributes):
        pass

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def test_the_page_says_what_the_statement_says_and_loads_nothing():
    data = facts()
    page = report.page(data)
    reader = Reader(page)
    text = " ".join(" ".join(reader.text).split())
    statement = dp.privacy_statement(optimizer(), N, DELTA, sampling=SAMPLING)
    for paragraph in statement.replace("  - ", "\n\n").split("\n\n"):
        assert " ".join(paragraph.split()) in text
    assert not reader.loaded and not reader.open and "<script" not in page
    assert "url(http" not in page and "@import" not in page
    assert page.count("<svg") == 4  # epsilon, val_accuracy, learning rate, clipped share
    assert "val_accuracy 0.9" in text and "30 of 30" in text
    assert page == report.page(facts())


@pytest.mark.slow_on(2)
def test_figures_without_noise_stand_apart_and_only_if_there_are_some():
    page = report.page(facts())
    private, raw = page.split('<section class="raw">')
    assert "clipped" in raw and "do not publish" in raw
    assert "clipped" not in private.split("<h1>")[1]
    # The JSON file holds losses, too.
    data = facts()
    marked = data.pop("history_NOT_PRIVATE")
    assert marked[0]["logs"]["loss"] == 1.0
    assert "clipped_share" not in json.dumps(data) and '"loss"' not in json.dumps(data)
    quiet = [{**row, "figures": {}} for row in HISTORY]
    assert "Not private" not in report.page(facts(history=quiet))


def test_rates_that_are_all_zero_are_shown_without_a_warning(recwarn):
    """As those of `UntunedSGD` are if all of its batches measured."""
    still = [{**row, "logs": {**row["logs"], "learning_rate": 0.0}} for row in HISTORY]
    assert report.page(facts(history=still)).count("<svg") == 4
    assert not [w for w in recwarn if "log-scaled" in str(w.message)]


def test_text_is_escaped():
    data = facts()
    data["optimizer"]["class"] = "<script>alert(1)</script>"
    assert "<script" not in report.page(data)
    data["optimizer"]["class"] = "a | b"
    assert "a \\| b" in report.model_card(data)


def test_the_json_file_is_strict_json_even_without_privacy(tmp_path):
    data = report.facts(optimizer(0.0), N, DELTA, history=HISTORY)
    report.write(tmp_path / "new" / "report.html", data)

    def refuse(constant):
        raise AssertionError(constant)

    text = (tmp_path / "new" / "report.json").read_text()
    data = json.loads(text, parse_constant=refuse)
    assert data["privacy"]["epsilon"] == "inf"
    card = (tmp_path / "new" / "report.md").read_text()
    assert card.startswith("## Privacy\n\nNOT PRIVATE") and "| epsilon | infinite" in card
    assert "infinite: NOT PRIVATE" in (tmp_path / "new" / "report.html").read_text()


@pytest.mark.slow_on(2)
def test_noise_with_a_seed_is_called_not_private():
    data = report.facts(optimizer(seed=1234567), N, DELTA, sampling=SAMPLING)
    assert data["privacy"]["seeded_noise"] and not facts()["privacy"]["seeded_noise"]
    for text in (report.page(data), report.model_card(data)):
        assert text.count("NOT PRIVATE, the noise had a seed") >= 1
        assert "NOT PRIVATE unless the seed of the noise is secret" in " ".join(text.split())
        assert "1234567" not in text
    assert "NOT PRIVATE" not in report.page(facts())


def test_repeated_batches_are_not_called_verified():
    made = optimizer()
    made.ledger.restore([(1.0, 100.0, 30)], [(30, 4, 1, 0.0)])
    data = report.facts(made, N, DELTA, sampling=SAMPLING)
    assert "| batches verified as fresh draws | 26 of 30 |" in report.model_card(data)


def test_an_audit_is_reported():
    audit = bounds.OneRunReport(0.75, DELTA, 0.95, 100, 40, 30, 1)
    card = report.model_card(facts(audit=audit))
    assert "| audit: epsilon is at least | 0.75 with probability 0.95 |" in card


def test_the_metric_can_be_chosen():
    assert facts()["test_metric"] == "val_accuracy"
    losses = [{**row, "logs": {**row["logs"], "val_loss": 1.0}} for row in HISTORY]
    assert facts(history=losses, test_metric="val_loss")["test_metric"] == "val_loss"
    assert facts(history=[])["test_metric"] is None
    with pytest.raises(ValueError, match="test_metric='f1'; there are val_accuracy"):
        facts(test_metric="f1")


def test_a_metric_of_the_training_data_is_not_shown_as_if_it_were_private():
    with pytest.raises(ValueError, match="begins with 'val_'.*test_metric='loss'; there are val_a"):
        facts(test_metric="loss")


@pytest.mark.slow_on(2)
def test_no_file_of_a_report_takes_the_place_of_another(tmp_path):
    for name in ("report.json", "report.md"):
        with pytest.raises(ValueError, match=r"`path` must be .* Pass '.*report\.html'"):
            report.write(tmp_path / name, facts())
    assert not list(tmp_path.iterdir())
    report.write(tmp_path / "v1.2", facts())
    assert {p.name for p in tmp_path.iterdir()} == {"v1.2", "v1.2.json", "v1.2.md"}
    assert (tmp_path / "v1.2").read_text().startswith("<!doctype html>")


def test_settings_and_versions_are_listed():
    card = report.model_card(facts())
    assert "| optimizer: class | ADADP |" in card and "| optimizer: l2_norm_clip | 1.0 |" in card
    assert re.search(r"\| version: tf_adaptive_dp \| \d", card)
    assert "ledger" not in card.split("| --- |")[1] and "seed" not in card.split("| --- |")[1]
    assert "steps_per_epoch" not in card and "decay_after_freeze" not in card  # they do nothing


def test_settings_of_a_frozen_rate_are_listed_if_it_freezes():
    frozen = optimizer(freeze_learning_rate_after=4, steps_per_epoch=10)
    card = report.model_card(report.facts(frozen, N, DELTA, history=HISTORY, sampling=SAMPLING))
    assert "| optimizer: freeze_learning_rate_after | 4 |" in card
    assert "steps_per_epoch | 10 |" in card and "decay_after_freeze | 0.1 |" in card


def test_the_noise_is_compared_with_the_largest_signal():
    import tensorflow as tf

    model = tf.keras.Sequential([tf.keras.Input([24]), tf.keras.layers.Dense(100)])
    card = report.model_card(facts(model=model, noise=2.0))
    assert "largest norm of its signal | 1 |" in card  # 2 · √2500 / 100


@pytest.mark.slow_on(2)
def test_no_figure_of_a_report_hides_the_search_that_chose_the_model():
    made = optimizer()
    made.ledger.chosen_by_search = True
    data = report.facts(made, N, DELTA, history=HISTORY, sampling=SAMPLING, epsilon=9.0)
    assert data["privacy"]["chosen_by_search"] and not facts()["privacy"]["chosen_by_search"]
    assert "chosen_by_search" not in data["optimizer"]
    said = "for this training alone, without the search that chose the model"
    epsilon = re.search(r"epsilon = ([\d.]+) ", data["privacy"]["statement"]).group(1)
    for text in (report.page(data), report.model_card(data)):
        assert text.count(f"{epsilon} {said}") >= 1 and "NOT THE WHOLE COST" in text
    assert f"<div>{epsilon} {said}<span>" in report.page(data)
    assert said not in report.page(facts())
