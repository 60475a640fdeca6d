"""The figures of a round, and where they go."""

import asyncio
import csv
import math
from collections import OrderedDict

import numpy as np
import pytest
import tensorflow as tf

from federated.clients.client_work import LEARNING_RATE_EDGES
from federated.privacy.user_level import UserLevelPrivacy
from federated.training import monitor

FIXED = UserLevelPrivacy(2.0, 10, 100, clip=0.5)
ADAPTIVE = UserLevelPrivacy(0.5, 10, 100)


def metrics(**clip):
    """Those of a process that reports everything."""
    counts = np.zeros(len(LEARNING_RATE_EDGES) + 1, np.int32)
    counts[[0, 7, -1]] = 1, 2, 1
    return OrderedDict(
        distributor=(),
        client_work=OrderedDict(
            train=OrderedDict(
                loss=np.float32(0.25), accuracy=np.float32(0.5), num_examples=8, num_batches=4
            ),
            optimizer=OrderedDict(
                clients=np.int32(4),
                log10_learning_rate_mean=np.float32(-2.0),
                log10_learning_rate_stddev=np.float32(0.75),
                learning_rate_histogram=counts,
                discarded_share=np.float32(0.125),
            ),
        ),
        aggregator=OrderedDict(dp_query_metrics=OrderedDict(clip), dp=()),
        finalizer=OrderedDict(update_non_finite=np.int32(0)),
    )


HISTOGRAM = [-6.25] * 25 + [-2.75] * 50 + [2.25] * 25
EXACT = {
    "train/loss": 0.25,
    "train/accuracy": 0.5,
    "optimizer/learning_rate": 0.01,
    "optimizer/log10_learning_rate_stddev": 0.75,
    "optimizer/log10_learning_rate_histogram": pytest.approx(HISTOGRAM),
    "optimizer/discarded_share": 0.125,
}


def test_a_run_without_privacy_shows_all_figures():
    counts = {"train/num_examples": 8, "train/num_batches": 4, "optimizer/clients": 4}
    assert monitor.scalars(metrics()) == EXACT | counts | {"finalizer/update_non_finite": 0}


def test_private_figures_are_told_from_others_and_no_count_is_shown():
    assert monitor.scalars(metrics(), FIXED) == {
        "privacy/clip_norm": 0.5,
        "privacy/noise_stddev": pytest.approx(2.0 * 0.5 / 10),
        "finalizer/update_non_finite": 0,
        **{f"not_private/{name}": value for name, value in EXACT.items()},
    }


@pytest.mark.parametrize("name", ["clip", "current_clip", "tree_agg_dpftrl_clip"])
def test_an_adaptive_clip_is_that_of_the_aggregator(name):
    figures = monitor.scalars(metrics(**{name: np.float32(0.125)}), ADAPTIVE)
    assert figures["privacy/clip_norm"] == 0.125
    # z of the sum: 1 / z² = 1 / z_sum² + 1 / (2 · 5% · 10)².
    z = (0.5**-2 - 1.0**-2) ** -0.5
    assert figures["privacy/noise_stddev"] == pytest.approx(z * 0.125 / 10)


@pytest.mark.parametrize("private", [None, FIXED])
def test_a_cohort_without_clients_has_no_histogram(private):
    empty = metrics()
    report = empty["client_work"]["optimizer"]
    report["learning_rate_histogram"] = np.zeros_like(report["learning_rate_histogram"])
    report["log10_learning_rate_mean"] = np.float32(np.nan)
    figures = monitor.scalars(empty, private)
    name = "not_private/" * (private is not None) + "optimizer/"
    assert math.isnan(figures[f"{name}learning_rate"])
    assert f"{name}log10_learning_rate_histogram" not in figures


def release(managers, **figures_by_round):
    async def go():
        for name, figures in figures_by_round.items():
            for manager in managers:
                await manager.release(OrderedDict(figures), int(name[1:]))

    asyncio.run(go())


def table(folder):
    with open(folder / "figures.csv") as file:
        return list(csv.DictReader(file))


def events(folder):
    """(step, tag, value) of TensorBoard's files, lists for histograms."""
    found = []
    for file in sorted((folder / "tensorboard").iterdir()):
        for event in tf.compat.v1.train.summary_iterator(str(file)):
            for value in event.summary.value:
                found.append((event.step, value.tag, tf.make_ndarray(value.tensor).tolist()))
    return found


def test_figures_are_in_both_files_at_once(tmp_path):
    managers = monitor.monitors(tmp_path)
    figures = {"privacy/epsilon": 0.5, "optimizer/log10_learning_rate_histogram": np.ones(2)}
    release(managers, r1=figures)
    assert table(tmp_path) == [{"round": "1", "privacy/epsilon": "0.5"}]
    shown = {tag: (step, value) for step, tag, value in events(tmp_path)}
    assert shown.pop("privacy/epsilon") == (1, 0.5)
    ((name, (step, buckets)),) = shown.items()
    assert (name, step) == ("optimizer/log10_learning_rate_histogram", 1)
    assert sum(bucket[2] for bucket in buckets) == 2


def test_a_run_that_goes_on_adds_rows_and_repeats_none(tmp_path):
    release(monitor.monitors(tmp_path), r1={"a": 1.0}, r2={"a": 2.0, "test/b": 0.5})
    # Round 2 is released again, round 3 was lost.
    release(monitor.monitors(tmp_path), r2={"a": 2.0, "test/b": 0.5}, r4={"a": 4.0})
    assert table(tmp_path) == [
        {"round": "1", "a": "1.0", "test/b": ""},
        {"round": "2", "a": "2.0", "test/b": "0.5"},
        {"round": "4", "a": "4.0", "test/b": ""},
    ]
    assert [e[:2] for e in events(tmp_path) if e[1] == "a"] == [
        (1, "a"),
        (2, "a"),
        (2, "a"),
        (4, "a"),
    ]


def test_the_bar_shows_chosen_figures(tmp_path, capsys):
    release(monitor.monitors(tmp_path, 3)[2:], r2={"privacy/epsilon": 0.5, "other": 1.0})
    shown = capsys.readouterr().out
    assert "2/3" in shown and "privacy/epsilon: 0.5" in shown and "other" not in shown
