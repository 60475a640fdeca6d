"""Backbones of KerasHub at toy size: their gradients are exact, and need no Jacobian."""

import numpy as np
import pytest
import tensorflow as tf

import tf_adaptive_dp as dp
from tests.helpers import zoo
from tests.helpers.gradients_asked import squared_norms
from tf_adaptive_dp._keras.generation import GENERATION, keras

if GENERATION != 3:
    pytest.skip("KerasHub needs Keras 3", allow_module_level=True)
keras_hub = pytest.importorskip("keras_hub")

pytestmark = pytest.mark.slow
BATCH, LENGTH, WORDS = 4, 6, 19
TOKENS = np.random.default_rng(0).integers(1, WORDS, [BATCH, LENGTH]).astype("int32")
PADDING = np.array([[1] * 6, [1, 1, 1, 1, 0, 0], [1, 1, 1, 0, 0, 0], [1] * 6], "int32")
SEGMENTS = np.tile(np.array([0, 0, 0, 1, 1, 1], "int32"), [BATCH, 1])

SIZES = {"vocabulary_size": WORDS, "num_layers": 2, "hidden_dim": 8, "intermediate_dim": 12}
HEADS = {"num_heads": 2, "max_sequence_length": 8, "dropout": 0.0}
QUERIES = {"num_query_heads": 2, "num_key_value_heads": 1}
# name: (class, further arguments, the vector of each example)
BACKBONES = {
    "BERT": ("BertBackbone", HEADS, lambda outputs: outputs["pooled_output"]),
    "DistilBERT": ("DistilBertBackbone", HEADS, lambda outputs: outputs[:, 0]),
    "DeBERTa v3": (
        "DebertaV3Backbone",
        {**HEADS, "bucket_size": 4},
        lambda outputs: outputs[:, 0],
    ),
    "GPT-2": ("GPT2Backbone", HEADS, lambda outputs: outputs[:, -1]),
    "Gemma": ("GemmaBackbone", {**QUERIES, "head_dim": 4}, lambda outputs: outputs[:, -1]),
    "Llama 3": ("Llama3Backbone", QUERIES, lambda outputs: outputs[:, -1]),
}


def model_of(name, lora):
    """A backbone with three logits, and its inputs."""
    kind, arguments, vector = BACKBONES[name]
    keras.utils.set_random_seed(1)
    backbone = getattr(keras_hub.models, kind)(**SIZES, **arguments)
    if lora:
        backbone.enable_lora(2)
    model = keras.Model(backbone.input, keras.layers.Dense(3)(vector(backbone.output)))
    zoo.shake([v.value for v in model.trainable_variables])
    inputs = {"token_ids": TOKENS, "padding_mask": PADDING}
    if name == "BERT":
        inputs["segment_ids"] = SEGMENTS
    return model, inputs


def classifier(name, lora):
    """The model as a problem of the zoo."""
    model, inputs = model_of(name, lora)

    def losses(*batch):
        return zoo.cross_entropy(batch[-1], model(dict(zip(inputs, batch)), training=True))

    variables = [v.value for v in model.trainable_variables]
    return zoo.Problem(variables, losses, (*inputs.values(), zoo.labels(BATCH)))


@pytest.mark.parametrize("lora", [False, True], ids=["all weights", "LoRA"])
@pytest.mark.parametrize("name", BACKBONES)
def test_gradients_of_backbones_are_exact_and_traced(name, lora):
    problem = classifier(name, lora)

    def step(*batch):
        source = zoo.source(problem, *batch, method="traced")
        sums = source.weighted_sum(np.ones(BATCH, "float32"))
        # Llama 3 has a table for outputs that the backbone does not use.
        return source.squared_norms(), [
            tf.zeros(v.shape) if s is None else s for s, v in zip(sums, problem.variables)
        ]

    norms, sums = zoo.in_mode("graph", step, problem.batch)(*problem.batch)
    rows = zoo.batch_of_one_gradients(problem)
    np.testing.assert_allclose(norms, squared_norms(rows), rtol=2e-5)
    size = max(np.abs(r).max() for r in rows)
    for actual, expected in zip(sums, rows):
        np.testing.assert_allclose(actual, expected.sum(axis=0), atol=1e-5 * size)


@pytest.mark.parametrize("name", BACKBONES)
def test_the_optimizer_is_the_only_change(name):
    model, inputs = model_of(name, lora=False)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    start, after = model.get_weights(), []
    ours = dp.DPSGD(1e6, 0.0, learning_rate=1.0, gradients="traced")
    for optimizer in (keras.optimizers.SGD(1.0), ours):
        model.set_weights(start)
        model.compile(optimizer, loss)
        model.fit(inputs, zoo.labels(BATCH), batch_size=BATCH, verbose=0)
        after.append(model.get_weights())
    for own, of_keras in zip(*after):
        np.testing.assert_allclose(own, of_keras, rtol=1e-4, atol=1e-5)
    assert any(np.abs(a - b).max() > 1e-3 for a, b in zip(start, after[0]))
    assert ours.ledger.segments == [(0.0, float(BATCH), 1)]


@pytest.mark.parametrize("weights", [None, np.ones([BATCH, 1], "float32")], ids=["plain", "[B, 1]"])
def test_a_text_of_a_language_model_is_clipped_once(weights):
    """The loss of a text is the mean over its tokens; LoRA alone is trained."""
    keras.utils.set_random_seed(1)
    backbone = keras_hub.models.GPT2Backbone(**SIZES, **HEADS)
    backbone.enable_lora(2)
    logits = backbone.token_embedding(backbone.output, reverse=True)
    model = keras.Model(backbone.input, logits)
    zoo.shake([v.value for v in model.trainable_variables])
    inputs, labels = {"token_ids": TOKENS, "padding_mask": PADDING}, np.roll(TOKENS, -1, axis=1)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    start = model.get_weights()

    def moved(optimizer, rows):
        model.set_weights(start)
        model.compile(optimizer, loss)
        part = {name: array[rows] for name, array in inputs.items()}
        model.train_on_batch(part, labels[rows], None if weights is None else weights[rows])
        return [a - b for a, b in zip(start, model.get_weights())]

    single = [moved(keras.optimizers.SGD(1.0), slice(i, i + 1)) for i in range(BATCH)]
    norms = [np.sqrt(sum(np.sum(np.square(g)) for g in each)) for each in single]
    clip = float(np.median(norms))
    shares = [min(1.0, clip / norm) / BATCH for norm in norms]
    expected = [sum(s * g for s, g in zip(shares, each)) for each in zip(*single)]
    ours = moved(dp.DPSGD(clip, 0.0, learning_rate=1.0, gradients="traced"), slice(BATCH))
    size = max(np.abs(e).max() for e in expected)
    for actual, wanted in zip(ours, expected):
        np.testing.assert_allclose(actual, wanted, atol=2e-5 * size)
    assert sum(np.any(e != 0) for e in expected) == len(model.trainable_variables)
