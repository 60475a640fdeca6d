"""The models in plain JAX: parameters as nested dictionaries, outputs as functions of them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks.steps import problems

ACTIVATIONS = {"relu": jax.nn.relu, "sigmoid": jax.nn.sigmoid, None: lambda x: x}
ATTENTION = ("query", "key", "value", "output")


def _layer(generator: np.random.Generator, *shape: int) -> dict:
    """A kernel and a bias; the fan-in is the product of all axes but the last."""
    scale = np.sqrt(1 / np.prod(shape[:-1]))
    kernel = scale * generator.standard_normal(shape)
    return {"kernel": jnp.array(kernel, jnp.float32), "bias": jnp.zeros(shape[-1])}


def _table(generator: np.random.Generator, *shape: int) -> jax.Array:
    return jnp.array(0.05 * generator.standard_normal(shape), jnp.float32)


def _apply(layer: dict, x: jax.Array) -> jax.Array:
    return x @ layer["kernel"] + layer["bias"]


def init(problem: problems.Problem, width: int) -> dict:
    """Initial parameters."""
    generator = np.random.default_rng(1)
    sizes = problem.layer_sizes(width)
    parameters: dict = {"dense": [_layer(generator, *pair) for pair in zip(sizes, sizes[1:])]}
    if problem.name == "cnn":
        channels = (problems.IMAGE[-1], problems.FILTERS, problems.FILTERS)
        parameters["conv"] = [
            _layer(generator, 3, 3, *pair) for pair in zip(channels, channels[1:])
        ]
    elif problem.name == "bow":
        parameters["tokens"] = _table(generator, problems.BOW_VOCABULARY, problems.BOW_DIM)
    elif problem.name == "transformer":
        dim, inner = problems.DIM, problems.FEED_FORWARD
        parameters["tokens"] = _table(generator, problems.VOCABULARY, dim)
        parameters["positions"] = _table(generator, problems.LENGTH, dim)
        parameters["attention"] = {name: _layer(generator, dim, dim) for name in ATTENTION}
        parameters["norms"] = [{"scale": jnp.ones(dim), "bias": jnp.zeros(dim)} for _ in range(2)]
        parameters["feed_forward"] = [
            _layer(generator, dim, inner),
            _layer(generator, inner, dim),
        ]
    return parameters


def _convolutions(layers: list[dict], x: jax.Array) -> jax.Array:
    for layer in layers:
        x = jax.lax.conv_general_dilated(
            x, layer["kernel"], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        x = jax.nn.relu(x + layer["bias"])
        window = (1, 2, 2, 1)
        x = jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, window, window, "VALID")
    return x.reshape(len(x), -1)


def _normalize(norm: dict, x: jax.Array) -> jax.Array:
    return jax.nn.standardize(x, epsilon=1e-5) * norm["scale"] + norm["bias"]


def _encoder(parameters: dict, tokens: jax.Array) -> jax.Array:
    x = parameters["tokens"][tokens] + parameters["positions"]
    heads = (*tokens.shape, problems.HEADS, -1)
    query, key, value = (
        _apply(parameters["attention"][name], x).reshape(heads) for name in ATTENTION[:3]
    )
    mixed = jax.nn.dot_product_attention(query, key, value).reshape(x.shape)
    first, second = parameters["norms"]
    x = _normalize(first, x + _apply(parameters["attention"]["output"], mixed))
    into, out_of = parameters["feed_forward"]
    x = _normalize(second, x + _apply(out_of, jax.nn.relu(_apply(into, x))))
    return x.mean(1)


def outputs(problem: problems.Problem, parameters: dict, x: jax.Array) -> jax.Array:
    """What the model says about a batch."""
    if problem.name == "cnn":
        x = _convolutions(parameters["conv"], x)
    elif problem.name == "transformer":
        x = _encoder(parameters, x)
    elif problem.name == "bow":
        x = parameters["tokens"][x].mean(1)
    *hidden, last = parameters["dense"]
    for layer in hidden:
        x = ACTIVATIONS[problem.activation](_apply(layer, x))
    return ACTIVATIONS[problem.output_activation](_apply(last, x))


def mean_loss(problem: problems.Problem, parameters: dict, x: jax.Array, y: jax.Array):
    """The mean loss of a batch."""
    predicted = outputs(problem, parameters, x)
    if problem.loss == "softmax":
        return optax.softmax_cross_entropy_with_integer_labels(predicted, y).mean()
    if problem.loss == "sigmoid":
        return optax.sigmoid_binary_cross_entropy(predicted, y).mean()
    return jnp.square(predicted - y).mean()
