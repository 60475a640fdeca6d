"""Each message that docs/troubleshooting.md explains is one of the library's, or of Keras."""

import ast
import re
import subprocess
import sys

import numpy as np
import pytest
import tensorflow as tf

import tf_adaptive_dp as dp
from tests.helpers import ROOT
from tests.helpers.zoo import floats
from tf_adaptive_dp._keras.generation import GENERATION

PAGE = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
QUOTES = re.findall(r"^> (.+)$", PAGE, re.M)
# What Keras says of a regularizer beside a loss with `reduction="none"`.
FROM_KERAS = "Shapes must be equal rank, but are 1 and 0 …"
FROM_PYTHON = "too many values to unpack (expected 2)"
FROM_TENSORFLOW = "triggered tf.function retracing. Tracing is expensive"
# What Keras says in a process that does not import this library; tests/docs/test_serving.py has it.
FROM_LOADING = "Could not locate class 'ADADP'"
# What Keras 3 says before this library runs.
OF_STRINGS = "Invalid dtype: str96"
OF_REMAT = (
    "The custom_gradient decorator currently supports keywords arguments only when eager execution "
    "is enabled."
)
OF_SEVERAL = "LossScaleOptimizer cannot be used inside an MultiOptimizer."
ELSEWHERE = (
    *(FROM_KERAS, FROM_LOADING, FROM_PYTHON, FROM_TENSORFLOW),
    *(OF_STRINGS, OF_REMAT, OF_SEVERAL),
)
OF_LIBRARY = [quote for quote in QUOTES if quote not in ELSEWHERE]


def text(node):
    """A message in the sources, with … for what is put in."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(text(part) for part in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return text(node.left) + text(node.right)
    return "…"


def messages():
    for path in (ROOT / "tf_adaptive_dp").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, (ast.Constant, ast.JoinedStr, ast.BinOp)):
                found = text(node)
                if len(found) > 20:
                    yield re.sub(r"\{[^{}]*\}", "…", found)


MESSAGES = set(messages())


@pytest.mark.parametrize("quote", OF_LIBRARY, ids=[q[:50].strip() for q in OF_LIBRARY])
def test_each_quoted_message_is_in_the_sources(quote):
    parts = [re.escape(part.strip()) for part in quote.split("…") if part.strip()]
    pattern = re.compile(r"\s*…\s*".join(parts))
    assert any(pattern.search(message) for message in MESSAGES), quote


def fitted(reduction):
    """The optimizer of a model with a regularizer after one step of `fit`."""
    regularized = tf.keras.layers.Dense(1, kernel_regularizer="l2")
    model = tf.keras.Sequential([tf.keras.Input([2]), regularized])
    model.compile(dp.DPSGD(1.0, 1.0), tf.keras.losses.MeanSquaredError(**reduction))
    model.fit(np.ones([4, 2], "float32"), np.ones([4, 1]), batch_size=4, verbose=0)
    return model.optimizer


def test_keras_says_what_is_quoted_of_it_and_the_fix_helps():
    assert FROM_KERAS in QUOTES
    with pytest.raises(ValueError, match=re.escape(FROM_KERAS.rstrip(" …"))):
        fitted({"reduction": "none"})
    assert fitted({}).ledger.num_releases == 1


keras_3 = pytest.mark.skipif(GENERATION == 2, reason="Keras 2 takes strings and has no remat")


@keras_3
def test_keras_takes_strings_as_a_tensor_only():
    texts = np.array(["cat", "dog", "dog", "cat"])
    assert texts.dtype.name == OF_STRINGS.rpartition(" ")[2] and OF_STRINGS in QUOTES
    lookup = tf.keras.layers.StringLookup(vocabulary=["cat", "dog"], output_mode="one_hot")
    model = tf.keras.Sequential(
        [tf.keras.Input([], dtype="string"), lookup, tf.keras.layers.Dense(2)]
    )
    for optimizer in ("sgd", dp.DPSGD(1.0, 1.0)):
        model.compile(optimizer, "mse")
        with pytest.raises(ValueError, match=OF_STRINGS):
            model.fit(texts, np.ones([4, 2]), verbose=0)
    model.fit(tf.constant(texts), np.ones([4, 2]), verbose=0)
    assert model.optimizer.ledger.num_releases == 1
    assert np.searchsorted(["cat", "dog"], texts).tolist() == [0, 1, 1, 0]


@keras_3
@pytest.mark.parametrize("optimizer", ["sgd", dp.DPSGD(1.0, 1.0)], ids=["keras", "private"])
def test_keras_recomputes_no_whole_model(optimizer):
    assert OF_REMAT in QUOTES
    with tf.keras.RematScope(mode="full"):
        model = tf.keras.Sequential([tf.keras.Input([2]), tf.keras.layers.Dense(1)])
    model.compile(optimizer, "mse")
    with pytest.raises(ValueError, match=re.escape(OF_REMAT)):
        model.fit(np.ones([4, 2], "float32"), np.ones([4, 1]), verbose=0)


@keras_3
def test_keras_says_what_is_quoted_of_private_optimizers_inside_of_another():
    assert OF_SEVERAL in QUOTES
    rules = tf.keras.optimizers.OptimizerMap(dp.DPSGD(1.0, 1.0))
    model = tf.keras.Sequential([tf.keras.Input([2]), tf.keras.layers.Dense(1)])
    model.compile(tf.keras.optimizers.MultiOptimizer(rules), "mse")
    with pytest.raises(ValueError, match=re.escape(OF_SEVERAL)):
        model.fit(np.ones([4, 2], "float32"), np.ones([4, 1]), verbose=0)


LOOP = """
import tensorflow as tf
import tf_adaptive_dp as dp

model = tf.keras.Sequential([tf.keras.Input([2]), tf.keras.layers.Dense(1)])
optimizer = dp.DPSGD(1.0, 1.0, learning_rate=0.1)

def step(x):
    with tf.GradientTape() as tape:
        losses = tf.reduce_sum(tf.square(model(x)), axis=1)
    optimizer.minimize(losses, model.trainable_variables, tape)

for run in (tf.function(step), step):
    for _ in range(6):
        run(tf.ones([4, 2]))
    print(optimizer.ledger.num_releases, flush=True)
"""


@pytest.mark.slow
def test_tensorflow_says_what_is_quoted_of_it_and_the_fix_helps():
    assert FROM_TENSORFLOW in QUOTES
    # In a process of its own, since TensorFlow says it only twice in each.
    ran = subprocess.run(
        [sys.executable, "-c", LOOP],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        check=True,
    )
    compiled, eager, end = re.split(r"^\d+$", ran.stdout.decode(), flags=re.M)
    assert FROM_TENSORFLOW in eager and FROM_TENSORFLOW not in compiled + end


def test_the_page_explains_the_messages_that_users_meet():
    assert len(QUOTES) > 30


class UnpacksTwo(tf.keras.Sequential):
    def train_step(self, data):
        x, y = data
        return super().train_step((x, y))


class UnpacksThree(tf.keras.Sequential):
    def train_step(self, data):
        x, y, sample_weight = tf.keras.utils.unpack_x_y_sample_weight(data)
        return super().train_step((x, y, sample_weight))


def test_a_step_that_unpacks_two_parts_fails_as_quoted_and_the_fix_helps():
    assert FROM_PYTHON in QUOTES
    plan = dp.PrivacyPlan(
        noise_multiplier=1.0, delta=1e-3, num_examples=32, batch_size=4, epochs=1, accountant="rdp"
    )
    for kind in (UnpacksTwo, UnpacksThree):
        model = kind([tf.keras.Input([2]), tf.keras.layers.Dense(1)])
        model.compile(plan.optimizer(dp.DPSGD), "mse")
        arguments = {"x": np.ones([32, 2], "float32"), "y": np.ones([32, 1]), "verbose": 0}
        if kind is UnpacksTwo:
            with pytest.raises(ValueError, match=re.escape(FROM_PYTHON)):
                plan.fit(model, **arguments)
        else:
            plan.fit(model, **arguments)
            assert "drawn by Poisson sampling" in " ".join(plan.statement().split())


def test_the_ctc_loss_is_that_of_tensorflow_and_keeps_examples_apart():
    (block,) = re.findall(r"^```python\n([^`]*def ctc_loss.*?)^```$", PAGE, re.M | re.S)
    program = {}
    exec(block, program)  # noqa: S102, the page is ours
    labels = np.array([[2, 2, 1], [1, 2, 3], [3, 0, 0], [1, 1, 0]])
    logits = tf.constant(floats(4, 7, 5))
    lengths = tf.math.count_nonzero(labels, axis=1, dtype=tf.int32), tf.fill([4], 7)
    found = []
    for loss in (
        lambda: program["ctc_loss"](labels, logits),
        lambda: tf.nn.ctc_loss(labels, logits, *lengths, logits_time_major=False, blank_index=0),
    ):
        with tf.GradientTape() as tape:
            tape.watch(logits)
            losses = loss()
        found.append((losses, tape.gradient(losses, logits)))
    for actual, expected in zip(*found):
        np.testing.assert_allclose(actual, expected, atol=1e-5)

    model = tf.keras.Sequential([tf.keras.Input([7, 3]), tf.keras.layers.Dense(5)])
    model.compile("sgd", program["ctc_loss"])
    report = dp.validation.check_per_example(model, (floats(4, 7, 3), labels))
    assert report.norm_error < 1e-5 and report.without_rules == ()
