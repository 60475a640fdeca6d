"""What Python and Keras know the optimizers by: signatures, names, `repr`."""

import inspect
import pydoc

import pytest
import tensorflow as tf

import tf_adaptive_dp as dp
from tests.helpers import catalogue
from tf_adaptive_dp._keras.generation import GENERATION, keras
from tf_adaptive_dp.optimizers import baselines

FIXED = dp.side_information.FixedPreconditioner({}, provenance="public")
GRADIENTS = dp.side_information.PublicGradients(
    catalogue.PUBLIC, rule="gradient", provenance="public"
)
PRIVATE = [
    dp.ADADP,
    dp.AdaDPS,
    dp.DPAdamWOSM,
    dp.DPSGD,
    dp.DPAdam,
    dp.DPAdamW,
    dp.DPRMSprop,
    dp.DPAdagrad,
    baselines.DPRPub,
    baselines.DPAdamPub,
    baselines.PDADPMD,
]
every_private = pytest.mark.parametrize("optimizer_class", PRIVATE, ids=lambda c: c.__name__)


def needed(optimizer_class):
    """Values of the arguments without a default."""
    values = {"l2_norm_clip": 1.0, "noise_multiplier": 1.1, "mixing": 0.5}
    side_information = GRADIENTS if optimizer_class is baselines.PDADPMD else FIXED
    values["side_information"] = side_information
    parameters = inspect.signature(optimizer_class).parameters.values()
    return {
        p.name: values[p.name]
        for p in parameters
        if p.default is p.empty and p.kind != p.VAR_KEYWORD
    }


@pytest.mark.parametrize(
    "optimizer_class", [*PRIVATE, baselines.AdaS], ids=lambda cls: cls.__name__
)
def test_every_argument_of_the_signature_is_taken_with_the_default_it_shows(optimizer_class):
    parameters = inspect.signature(optimizer_class).parameters
    shown = {
        p.name: p.default
        for p in parameters.values()
        if p.default is not p.empty and p.kind != p.VAR_KEYWORD
    }
    made = optimizer_class(**needed(optimizer_class), **shown)
    short = optimizer_class(**needed(optimizer_class))
    if optimizer_class is not baselines.AdaS:
        assert made.get_config() == short.get_config()
    assert {"learning_rate", "weight_decay", "use_ema", "name"} <= set(parameters)
    # Keras's own have no annotations either.
    assert all(p.annotation is p.empty for p in parameters.values())


def test_the_signature_lists_what_the_mechanism_takes_and_what_keras_takes():
    ours, theirs = (inspect.signature(c).parameters for c in (dp.DPAdam, tf.keras.optimizers.Adam))
    assert list(ours)[:3] == ["l2_norm_clip", "noise_multiplier", "num_microbatches"]
    assert set(theirs) - {"loss_scale_factor"} <= set(ours)
    assert {"expected_batch_size", "clipping", "secure_noise", "side_information"} < set(ours)
    assert ours["beta_2"].default == theirs["beta_2"].default
    assert ours["name"].default == "DPAdam"
    assert "loss_scale_factor" not in ours
    assert "order" not in inspect.signature(baselines.DPRPub).parameters


def test_help_and_the_classes_of_users_and_of_the_factory_have_the_signature():
    class Doubled(dp.DPSGD):
        def __init__(self, *args, twice=2, **kwargs):
            super().__init__(*args, **kwargs)

    class Narrow(dp.DPSGD):
        def __init__(self, clip):
            super().__init__(clip, 1.1)

    text = "".join(pydoc.render_doc(dp.ADADP, renderer=pydoc.plaintext).replace("|", "").split())
    assert "ADADP(l2_norm_clip,noise_multiplier,num_microbatches=None,*,learning_rate=" in text
    assert list(inspect.signature(Doubled).parameters)[:2] == ["l2_norm_clip", "noise_multiplier"]
    assert inspect.signature(Doubled).parameters["twice"].default == 2
    assert str(inspect.signature(Narrow)) == "(clip)"
    nadam = dp.make_dp_optimizer_class(tf.keras.optimizers.Nadam)
    assert {"beta_2", "clipping"} < set(inspect.signature(nadam).parameters)


@every_private
def test_keras_finds_an_optimizer_by_its_names(optimizer_class):
    name = optimizer_class.__name__
    for known_as in (name, name.lower(), f"tf_adaptive_dp>{name}"):
        assert keras.saving.get_registered_object(known_as) is optimizer_class
    assert keras.saving.get_registered_name(optimizer_class) == f"tf_adaptive_dp>{name}"
    made = optimizer_class(**needed(optimizer_class))
    again = keras.optimizers.deserialize(keras.optimizers.serialize(made))
    assert type(again) is optimizer_class
    assert again.l2_norm_clip == 1.0


@pytest.mark.parametrize("name", ["ADADP", "adadp", "tf_adaptive_dp>ADADP"])
def test_keras_makes_an_optimizer_from_a_name_and_its_arguments(name):
    config = {"l2_norm_clip": 0.5, "noise_multiplier": 1.1, "tolerance": 0.3}
    made = keras.optimizers.get({"class_name": name, "config": config})
    assert isinstance(made, dp.ADADP)
    assert (made.l2_norm_clip, made.noise_multiplier, made.tolerance) == (0.5, 1.1, 0.3)
    assert made.ledger.num_releases == 0


@pytest.mark.parametrize("name", ["ADADP", "dpsgd"])
def test_a_name_alone_says_what_to_write(name):
    model = catalogue.mlp()
    with pytest.raises(ValueError, match=r"has no default for `l2_norm_clip`.*l2_norm_clip=1\.0"):
        model.compile(name, loss=catalogue.loss())
    with pytest.raises(ValueError, match="`side_information`.*AdaDPS.side_information=..."):
        keras.optimizers.get("AdaDPS")


nadam = dp.make_dp_optimizer_class(tf.keras.optimizers.Nadam)
BY_PLACE = "By position it takes `l2_norm_clip`, `noise_multiplier`, `num_microbatches`, in this"
# As optimizers of Keras are made, or those of TF Privacy with all arguments by position.
MISFITS = {
    "none": (
        lambda: dp.ADADP(),
        r"`ADADP\(l2_norm_clip=1.0, noise_multiplier=1.1\)`.*ADADP\(\): m",
    ),
    "a rate": (
        lambda: dp.DPAdam(1e-3),
        r"`DPAdam\(.*, noise_multiplier=1.1, learning_rate=0.1\)`.*ed: DPAdam\(0.001\): .*'noise_m",
    ),
    "a rate first": (
        lambda: dp.DPSGD(0.5, l2_norm_clip=1.0, noise_multiplier=1.1),
        rf"{BY_PLACE}.*DPSGD\(0.5, l2_norm_clip=1.0, .*\): multiple values for .*'l2_norm_clip'",
    ),
    "a rate last": (
        lambda: dp.DPSGD(1.0, 1.1, 250, 0.15),
        rf"{BY_PLACE}.*DPSGD\(1.0, 1.1, 250, 0.15\): too many positional arguments",
    ),
    "of the factory": (lambda: nadam(1e-3), r"`DPNadam\(l2_norm_clip=1.0, .*DPNadam\(0.001\): "),
    "untuned": (
        lambda: dp.UntunedSGD(0.1),  # a rate, which must not be taken for σ
        r"`UntunedSGD\(noise_multiplier=1.1\)`. It takes none by position. A `Priv.*SGD\(0.1\): ",
    ),
    "with side information": (
        lambda: dp.AdaDPS(1.0, 1.1),
        r"`AdaDPS\(side_information=..., l2_norm_clip=1.0, .*AdaDPS\(1.0, 1.1\): missing",
    ),
}


@pytest.mark.parametrize("case", MISFITS)
def test_arguments_that_do_not_fit_are_refused_with_what_to_write(case):
    make, message = MISFITS[case]
    with pytest.raises(TypeError, match=message):
        make()


def test_a_class_of_the_users_takes_its_own_arguments():
    class OfRate(dp.DPSGD):
        def __init__(self, learning_rate):
            super().__init__(1.0, 1.1, learning_rate=learning_rate)

    assert OfRate(0.5).learning_rate == 0.5
    with pytest.raises(TypeError, match=r"By position it takes only `learning_rate`.*OfRate\(\)"):
        OfRate()


def test_a_class_that_a_user_names_alike_wins_in_custom_objects():
    class ADADP(tf.keras.optimizers.SGD):
        pass

    with keras.saving.custom_object_scope({"ADADP": ADADP}):
        assert keras.saving.get_registered_object("ADADP") is ADADP
    assert keras.saving.get_registered_object("ADADP") is dp.ADADP


def test_the_representation_says_what_an_optimizer_spent():
    model = catalogue.mlp()
    optimizer = dp.ADADP(1.0, 1.1, expected_batch_size=8)
    text = "<ADADP l2_norm_clip=1.0, noise_multiplier=1.1, expected_batch_size=8.0, "
    assert repr(optimizer) == text + "learning_rate=0.1, num_releases=0>"
    assert repr(optimizer.ledger) == "<Ledger segments=[]>"
    model.compile(optimizer, loss=catalogue.loss())
    catalogue.fit(model)
    assert repr(optimizer).startswith(text) and repr(optimizer).endswith("num_releases=4>")
    segment = "Segment(noise_multiplier=1.1, batch_size=8.0, num_releases=4)"
    assert repr(optimizer.ledger) == f"<Ledger segments=[{segment}]>"


def test_the_representation_is_there_while_a_step_is_traced():
    schedule = tf.keras.optimizers.schedules.ExponentialDecay(0.5, 10, 0.9)
    optimizer = dp.DPSGD(1.0, 1.1, learning_rate=schedule, name="sgd" if GENERATION == 3 else "s")
    seen = []

    @tf.function
    def step():
        seen.append((repr(optimizer), repr(optimizer.ledger)))

    step()
    assert "learning_rate=0.5, num_releases=0" in seen[0][0]
    assert seen[0][1] == "<Ledger segments=[]>"
