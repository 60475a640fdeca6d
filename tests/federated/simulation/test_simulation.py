"""The simulation programs: what they plan and show, and whole runs with data."""

import dataclasses
import math
import os

import dp_accounting
import pytest
import tensorflow as tf

from federated.clients.client_optimizers import build_adadp
from federated.datasets import cifar10
from federated.privacy.user_level import UserLevelPrivacy
from federated.simulation import cifar10_adaptive, stackoverflow_dp, tag_trials, trials


@pytest.mark.parametrize("program", [cifar10_adaptive, stackoverflow_dp])
def test_help_says_what_is_done_and_what_is_private(program, capsys):
    with pytest.raises(SystemExit) as ended:
        program.main(["--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    scales = "small,medium,long" if program is cifar10_adaptive else "small"
    choice = f"--scale {{smoke,{scales},paper}}"
    for word in ("Privacy claim", choice, "| small |", "paper's figure"):
        assert word in text


def test_the_network_is_that_of_the_paper():
    model = cifar10_adaptive.network(0)
    flat = next(layer for layer in model.layers if layer.name.startswith("flatten"))
    assert flat.output_shape == (None, 1600) and model.output_shape == (None, 10)
    again, other = cifar10_adaptive.network(0), cifar10_adaptive.network(1)
    same = [(a.numpy() == b.numpy()).all() for a, b in zip(model.weights, again.weights)]
    assert all(same)
    assert not (model.weights[0].numpy() == other.weights[0].numpy()).all()


def cifar_trials():
    def accuracy(s):
        of_method = {"adadp": 0.5, "adadp_paper": 0.4, "adam": 0.1}
        return of_method.get(s["method"], 0.2 + s["rate"])

    return [
        trials.Trial(s, {"test/accuracy": [math.nan, accuracy(s)]}, {})
        for s in cifar10_adaptive.plan("small")
    ]


def test_sgd_is_shown_with_its_best_rate_and_adadp_with_its_default():
    found = cifar10_adaptive.groups(cifar_trials())
    assert cifar10_adaptive.best_rate(found, 0.0, "sgd") == 0.1
    for method in ("adadp", "adadp_paper"):
        assert cifar10_adaptive.best_rate(found, 0.0, method) == cifar10_adaptive.DEFAULT_RATE
    assert cifar10_adaptive.best_rate(found, 0.0, "adam") is None
    assert cifar10_adaptive.best_rate(found, 0.33, "adam") is not None
    assert "| 0% | SGD | **0.1** | 0.300 |  | ∞ | 1 |" in cifar10_adaptive.table(cifar_trials())


def test_both_forms_of_adadp_are_in_the_settings_of_their_trials_and_are_what_they_say():
    weights = tf.TensorSpec([4])
    for settings in cifar10_adaptive.plan("small"):
        made = cifar10_adaptive.client_optimizer(settings)
        hparams = made.get_hparams(made.initialize(weights))
        assert hparams["learning_rate"] == pytest.approx(settings["rate"])
        if settings["method"] == "adadp":
            default = build_adadp(settings["rate"])
            assert hparams == default.get_hparams(default.initialize(weights))
            assert (settings["tolerance"], settings["discard"]) == (hparams["tolerance"], False)
        if settings["method"] == "adadp_paper":
            assert hparams["tolerance"] == settings["tolerance"] == 0.1 and settings["discard"]
            state, w = made.initialize(weights), tf.zeros([4])
            for gradient in (1.0, 1e6):
                state, w = made.next(state, w, tf.fill([4], gradient))
            assert not w.numpy().any() and made.report(state)["discarded_steps"] == 1


def test_a_medium_run_compares_both_forms_with_the_rates_around_the_best():
    plan = cifar10_adaptive.plan("medium")
    assert {(s["rounds"], s["images_per_client"]) for s in plan} == {(40, 10_000)}
    for share, adam in ((0.0, 0), (0.33, 2)):
        methods = [s["method"] for s in plan if s["randomness"] == share]
        expected = {"adadp": 1, "adadp_paper": 1, "sgd": 3, "adam": adam}
        assert {name: methods.count(name) for name in expected} == expected
    assert {s["randomness"] for s in plan} == {0.0, 0.33}


def test_a_long_run_takes_the_best_of_a_medium_one_through_the_rounds_of_the_paper():
    plan = cifar10_adaptive.plan("long")
    assert [(s["method"], s["rate"]) for s in plan] == [
        ("adadp", 0.1),
        ("adadp_paper", 0.1),
        ("sgd", 0.0316),
    ]
    medium = [{**s, "rounds": 200} for s in cifar10_adaptive.plan("medium")]
    assert all(s in medium and s["randomness"] == 0 for s in plan)


def test_runs_without_an_accepted_step_are_named_below_the_table():
    settings = [s for s in cifar10_adaptive.plan("smoke") if s["method"] != "sgd"]
    shares = {("adadp", 0.0): [0.0, 1.0], ("adadp_paper", 0.0): [1.0, 1.0]}
    finished = [
        trials.Trial(
            s,
            {
                "test/accuracy": [0.1, 0.1],
                "optimizer/discarded_share": shares.get((s["method"], s["randomness"]), [0.5] * 2),
            },
            {},
        )
        for s in settings
    ]
    text = cifar10_adaptive.table(finished)
    assert text.count("No step was accepted") == 1
    assert "by ADADP of the paper from 0.1 at 0% in 1 of 1 runs" in text
    assert "No step was accepted" not in cifar10_adaptive.table(cifar_trials())


def test_cifar10_is_read_once_for_all_trials(monkeypatch):
    read = []
    monkeypatch.setattr(cifar10, "load_cifar10", lambda folder: read.append(folder) or (folder, 0))
    assert cifar10_adaptive.load("a") is cifar10_adaptive.load("a")
    cifar10_adaptive.load("b")
    assert read == ["a", "b"]
    cifar10_adaptive.load.cache_clear()


def test_a_small_round_is_long_enough_to_come_down_from_the_largest_initial_rate():
    small = cifar10_adaptive.SCALES["small"]
    judged = small.images_per_client // 10 // 2  # each takes two minibatches of 10
    down = math.log(max(small.rates["adadp"]) / 0.01) / -math.log(0.9)
    assert down < judged / 4


def tag_trial(settings):
    score = settings["rate"] * settings["clip"]
    return trials.Trial(
        settings,
        {"test/accuracy": [score / 10, math.nan, score], "privacy/epsilon": [1.0, 1.5, 1.75]},
        # A round of others was lost.
        {"epsilon": 1.75 + settings["seed"] / 8, "delta": 0.0025, "majority": 0.25},
    )


def test_adam_tries_the_length_of_its_own_steps_and_others_the_clip_norm():
    for scale, lengths in (("small", [0.3, 1.0, 3.0]), ("paper", [0.3, 1.0, 3.0])):
        plan = stackoverflow_dp.plan(scale, [])
        adam = [s for s in plan if s["method"] == "fed_adam"]
        assert {s["clip"] for s in adam} == {1.0}
        assert sorted({s["server_adam_rate"] for s in adam}) == [0.09, 0.3, 0.9]
        for method in ("fed_avg", "adadps", "ftrl"):
            assert sorted({s["clip"] for s in plan if s["method"] == method}) == lengths
            assert not any("server_adam_rate" in s for s in plan if s["method"] == method)


def test_the_best_pair_of_each_method_gets_more_seeds():
    grid = stackoverflow_dp.plan("small", [])
    assert {s["seed"] for s in grid} == {0}
    wanted = stackoverflow_dp.plan("small", [*map(tag_trial, grid)])
    more = [s for s in wanted if s["seed"]]
    methods = sum(map(len, tag_trials.METHODS.values()))
    assert len(grid) == 4 * methods and len(more) == 2 * methods
    for settings in more:
        rivals = [
            s["rate"] * s["clip"]
            for s in grid
            if (s["method"], s["setting"]) == (settings["method"], settings["setting"])
        ]
        assert settings["rate"] * settings["clip"] == max(rivals)


def test_the_table_has_the_chosen_pair_the_mean_and_the_largest_epsilon_with_lost_rounds():
    grid = stackoverflow_dp.plan("small", [])
    wanted = stackoverflow_dp.plan("small", [*map(tag_trial, grid)])
    text = stackoverflow_dp.table([*map(tag_trial, wanted)])
    assert text.count("| 2.00 | 0.0025 | 3 |") == sum(map(len, tag_trials.METHODS.values()))


def test_constants_that_change_make_new_trials(monkeypatch):
    before = stackoverflow_dp.plan("small", [])
    private = {**tag_trials.SETTINGS["private"], "tree_sigma": 9.0}
    monkeypatch.setitem(tag_trials.SETTINGS, "private", private)
    monkeypatch.setattr(tag_trials, "SERVER_ADAM_RATE", 0.125)
    after = stackoverflow_dp.plan("small", [])
    changed = {new["method"] for old, new in zip(before, after) if old != new}
    assert changed == {"ftrl", "ftrl_adadps", "fed_adam"}
    for name, value in (("clients", 300), ("clients_per_round", 30), ("sigma", 0.5)):
        paper = {**tag_trials.SETTINGS["paper"], name: value}
        monkeypatch.setitem(tag_trials.SETTINGS, "paper", paper)
        changed = [s["method"] for s in stackoverflow_dp.plan("small", []) if s not in after]
        assert set(changed) == set(tag_trials.METHODS["paper"])


@pytest.mark.slow
def test_both_mechanisms_of_the_private_setting_promise_about_the_same():
    users, rounds = 966, 100
    promised = {}
    for settings in stackoverflow_dp.plan("small", []):
        if settings["setting"] == "private":
            assert settings["rounds"] == rounds
            cohort, tree = settings["clients_per_round"], settings["mechanism"] == "tree"
            privacy = UserLevelPrivacy(
                settings["sigma"], cohort, users, clip=1.0, mechanism=settings["mechanism"]
            )
            event, relation = (
                dp_accounting.PoissonSampledDpEvent(
                    cohort / users, dp_accounting.GaussianDpEvent(settings["sigma"])
                ),
                dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE,
            )
            releases = [(event, rounds)]
            if tree:  # five passes of nineteen rounds, and five rounds more
                relation = dp_accounting.NeighboringRelation.REPLACE_SPECIAL
                steps = [(19, 5), (5, 1)]
                assert privacy.rounds_per_pass == 19
                releases = [
                    (dp_accounting.SingleEpochTreeAggregationDpEvent(settings["sigma"], s), n)
                    for s, n in steps
                ]
            accountant = dp_accounting.rdp.RdpAccountant(neighboring_relation=relation)
            for event, number in releases:
                accountant.compose(event, number)
            promised[settings["mechanism"]] = accountant.get_epsilon(1 / users)
    assert promised["tree"] == pytest.approx(promised["gaussian"], rel=0.05)
    assert promised["gaussian"] == pytest.approx(6.39, abs=0.01)  # what the docstring says
    assert promised["tree"] == pytest.approx(6.33, abs=0.01)


@pytest.mark.parametrize(
    "module, made",
    [
        (cifar10_adaptive, cifar_trials),
        (cifar10_adaptive, lambda: [t for t in cifar_trials() if not t.settings["randomness"]]),
        (stackoverflow_dp, lambda: None),
    ],
    ids=["cifar10", "one share", "stackoverflow"],
)
def test_a_figure_is_drawn(module, made, tmp_path):
    pytest.importorskip("matplotlib")
    finished = made() or [*map(tag_trial, stackoverflow_dp.plan("small", []))]
    figure = module.plot(finished)
    figure.savefig(tmp_path / "shown.png")
    assert (tmp_path / "shown.png").stat().st_size > 1000
    for axis in figure.axes:
        drawn = [line for line in axis.lines if line.get_label()[0] != "_"]
        looks = {(str(line._dash_pattern), line.get_marker(), line.get_color()) for line in drawn}
        assert len(looks) == len(drawn) > 1  # curves that coincide can be told apart
        # What a constant answer reaches is a line across the panel.
        assert any(
            len(set(line.get_ydata())) == 1 and line.get_marker() == "None" for line in drawn
        )
        if axis.get_xlabel() == "round":
            assert all(float(tick).is_integer() for tick in axis.get_xticks())


@pytest.mark.parametrize("kept", [True, False])
def test_delta_and_epsilon_are_in_the_table(kept):
    finished = [tag_trial(s) for s in stackoverflow_dp.plan("smoke", [])]
    if not kept:  # by an earlier version
        finished = [t._replace(final={"epsilon": t.final["epsilon"]}) for t in finished]
    row = stackoverflow_dp.table(finished).splitlines()[2]
    assert row.endswith(f"| 1.75 | {'0.0025' if kept else '1 / users'} | 1 |")
    stackoverflow_dp.plot(finished)


def test_a_trial_without_figures_is_not_the_best_of_its_method():
    lost, *others = [tag_trial(s) for s in stackoverflow_dp.plan("small", [])]
    lost = lost._replace(figures={})
    chosen = tag_trials.best_runs([lost, *others])
    assert lost not in [run for runs in chosen.values() for run in runs]


def test_seeds_with_unequal_numbers_of_evaluations_have_a_curve_each():
    pytest.importorskip("matplotlib")
    grid = [*map(tag_trial, stackoverflow_dp.plan("small", []))]
    first, *more = [
        tag_trial(s) for s in stackoverflow_dp.plan("small", grid) if s["method"] == "fed_adam"
    ][-3:]
    killed = more[0]._replace(figures={"test/accuracy": [0.25]})
    lost = more[1]._replace(figures={})
    axis = stackoverflow_dp.plot([*grid, killed, lost]).axes[0]
    curves = [line for line in axis.lines if line.get_color() == "C1"]
    assert [len(line.get_xdata()) for line in curves] == [2, 1, 0, 2]  # the last is their mean
    mean = [(accuracy + 0.25) / 2 for accuracy in curves[0].get_ydata()]
    assert list(curves[-1].get_ydata()) == mean
    (label,) = [t.get_text() for t in axis.get_legend().texts if "Adam" in t.get_text()]
    assert label == "DP-FedAdam, ε = 2"


def test_each_rate_of_adam_has_its_curve():
    pytest.importorskip("matplotlib")
    axes = cifar10_adaptive.plot(cifar_trials()).axes
    labels = [[text.get_text() for text in axis.get_legend().texts] for axis in axes[:4]]
    both = ["ADADP, 0.1", "ADADP of the paper, 0.1", "SGD, 0.1"]
    assert labels[0] == [*both, "chance"]
    assert labels[1] == [*both, "Adam, 0.0001", "Adam, 0.001", "chance"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "module, variable",
    [(cifar10_adaptive, "TFDS_DATA_DIR"), (stackoverflow_dp, "TFF_CACHE_DIR")],
    ids=["cifar10", "stackoverflow"],
)
def test_a_program_runs_at_smoke_scale_and_has_nothing_left_to_do(
    module, variable, tmp_path, capfd
):
    if variable not in os.environ:
        pytest.skip(f"{variable} does not name a folder with the data")
    module.main(["--scale", "smoke", "--output_dir", str(tmp_path)])
    first = capfd.readouterr().out
    assert "ε is infinite" in first or "Differential privacy with epsilon" in first
    module.main(["--scale", "smoke", "--output_dir", str(tmp_path)])
    assert "[1/" not in capfd.readouterr().out
    assert not [*tmp_path.rglob("states")] and [*tmp_path.rglob("journal")]


@pytest.mark.slow
def test_the_medium_scale_runs_with_fewer_images_and_rounds(monkeypatch, tmp_path, capfd):
    if "TFDS_DATA_DIR" not in os.environ:
        pytest.skip("TFDS_DATA_DIR does not name a folder with the data")
    medium = cifar10_adaptive.SCALES["medium"]
    fewer = dataclasses.replace(
        medium, rounds=1, images_per_client=40, test_images=100, randomness=(0.33,)
    )
    monkeypatch.setitem(cifar10_adaptive.SCALES, "medium", fewer)
    cifar10_adaptive.main(["--scale", "medium", "--output_dir", str(tmp_path)])
    out = capfd.readouterr().out
    assert "[7/7]" in out and "| 33% | ADADP | **0.1** |" in out
    # Of four minibatches a client the paper's form discards all, and ours none.
    assert "No step was accepted** by ADADP of the paper from 0.1 at 33% in 1 of 1 runs" in out
    assert "No step was accepted** by ADADP from" not in out
