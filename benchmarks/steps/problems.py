"""The benchmarked models, described once for all frameworks, and their random data.

Needs NumPy alone, since the peers' environments have no TensorFlow.
"""

from __future__ import annotations

import dataclasses

import numpy as np

# The transformer: one encoder block on short texts.
VOCABULARY, LENGTH, DIM, HEADS, FEED_FORWARD = 5_000, 64, 64, 4, 128
# The bag of words: an average of embeddings.
BOW_VOCABULARY, BOW_LENGTH, BOW_DIM = 10_000, 256, 16
# The same with a large vocabulary.
LARGE_VOCABULARY, LARGE_LENGTH, LARGE_DIM = 100_000, 64, 64
# Fine-tuning: a BERT whose attention layers have LoRA matrices beside frozen weights.
BERT = {
    "vocabulary_size": 5_000,
    "num_layers": 4,
    "num_heads": 4,
    "hidden_dim": 128,
    "intermediate_dim": 512,
    "max_sequence_length": 64,
}
LORA_RANK = 4
# The convolutional network.
IMAGE, FILTERS = (32, 32, 3), 64


@dataclasses.dataclass(frozen=True)
class Problem:
    """A model and its training task.

    Args:
      name: The name on the command line.
      description: The description in the report.
      batch_size: The default of B.
      loss: `"softmax"` (integer labels), `"sigmoid"` (several tags per example) or
        `"squared_error"` (the target is the input).
      sizes: The sizes of the dense layers, starting with the input.
      activation: The activation of the hidden dense layers.
      output_activation: The activation of the last layer.
      scalable: Whether `width` multiplies the hidden sizes.
      families: The families of `catalogue.FAMILIES` that have the model; empty if all have it.
    """

    name: str
    description: str
    batch_size: int
    loss: str = "softmax"
    sizes: tuple[int, ...] = ()
    activation: str = "relu"
    output_activation: str | None = None
    scalable: bool = False
    families: tuple[str, ...] = ()

    def layer_sizes(self, width: int) -> tuple[int, ...]:
        """The sizes of the dense layers with the hidden ones multiplied by `width`."""
        if not self.scalable:
            return self.sizes
        return (self.sizes[0], *(size * width for size in self.sizes[1:-1]), self.sizes[-1])


AUTOENCODER_SIZES = (784, 1000, 500, 250, 30, 250, 500, 1000, 784)
PROBLEMS = {
    problem.name: problem
    for problem in (
        Problem(
            "logistic",
            "logistic regression, 10,000 words to 500 tags",
            64,
            "sigmoid",
            (10_000, 500),
        ),
        Problem("mlp", "784-256-256-10, relu", 250, sizes=(784, 256, 256, 10), scalable=True),
        Problem(
            "cnn",
            "two convolutions of 64 filters with 2x2 pools, then 500-500-10, on 32x32x3",
            100,
            sizes=(4096, 500, 500, 10),
        ),
        Problem(
            "transformer",
            "one encoder block (64 tokens, dimension 64, 4 heads), 2 classes",
            64,
            sizes=(DIM, 2),
        ),
        Problem("bow", "mean of 256 embeddings (10,000 x 16), 2 classes", 64, sizes=(BOW_DIM, 2)),
        Problem(
            "large_vocabulary",
            "mean of 64 embeddings (100,000 x 64), 2 classes",
            64,
            sizes=(LARGE_DIM, 2),
            families=("tensorflow", "keras3"),
        ),
        Problem(
            "lora",
            "KerasHub's BERT of 4 layers (64 tokens, dimension 128, 4 heads), frozen but for LoRA "
            "matrices of rank 4, 2 classes; Keras 3",
            32,
            sizes=(BERT["hidden_dim"], 2),
            families=("keras3",),
        ),
        Problem(
            "autoencoder",
            "784-1000-500-250-30 and back, sigmoid",
            64,
            "squared_error",
            AUTOENCODER_SIZES,
            "sigmoid",
            "sigmoid",
        ),
    )
}


def make_data(name: str, batch_size: int) -> tuple[np.ndarray, np.ndarray]:
    """One batch of random data, the same in every process.

    Args:
      name: the problem's name.
      batch_size: B.

    Returns:
      Inputs and targets with B rows each.
    """
    generator = np.random.default_rng(0)
    problem = PROBLEMS[name]
    if name == "logistic":
        x = (generator.random((batch_size, problem.sizes[0])) < 0.01).astype(np.float32)
        return x, (generator.random((batch_size, problem.sizes[-1])) < 0.01).astype(np.float32)
    if name == "autoencoder":
        x = generator.random((batch_size, problem.sizes[0]), dtype=np.float32)
        return x, x
    texts = {
        "transformer": (VOCABULARY, LENGTH),
        "bow": (BOW_VOCABULARY, BOW_LENGTH),
        "large_vocabulary": (LARGE_VOCABULARY, LARGE_LENGTH),
        "lora": (BERT["vocabulary_size"], BERT["max_sequence_length"]),
    }
    if name in texts:
        words, length = texts[name]
        x = generator.integers(words, size=(batch_size, length), dtype=np.int32)
    else:
        shape = IMAGE if name == "cnn" else problem.sizes[:1]
        x = generator.standard_normal((batch_size, *shape), dtype=np.float32)
    return x, generator.integers(problem.sizes[-1], size=batch_size, dtype=np.int32)
