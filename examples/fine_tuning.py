"""Private fine-tuning with LoRA: a frozen backbone of KerasHub, and small matrices that learn.

Two tasks on made-up texts, so that the program runs without a download. A BERT-like classifier has
to find out which of two topics a text is about; its backbone has random weights. A GPT-like
language model knows from public texts which word follows which, and learns the habit of the private
ones, a word that they use all the time. `--preset` takes a real backbone by its name or folder,
such as `bert_tiny_en_uncased`. Only the LoRA matrices and the classifier's head have gradients to
clip and receive noise. The frozen weights cost neither time nor accuracy.

Privacy claim: (ε, δ)-DP for adding or removing one of the n training texts, δ = 1 / (10 n), for the
trained weights and every checkpoint. Batches are drawn by Poisson sampling, as ε assumes. The loss
of a text is the mean over its words, so a text counts once, whatever its length. What the backbone
was trained on before is not covered.

    python examples/fine_tuning.py --task classifier
    python examples/fine_tuning.py --task language_model --optimizer dp_adam
"""

from __future__ import annotations

import argparse
import json
import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import keras_hub
import numpy as np

import tf_adaptive_dp

LENGTH = 16
WORDS = 64
SMALL = {
    "vocabulary_size": WORDS,
    "num_layers": 2,
    "num_heads": 4,
    "hidden_dim": 64,
    "intermediate_dim": 128,
    "max_sequence_length": LENGTH,
}


def backbone(task: str, preset: str | None) -> keras_hub.models.Backbone:
    """A backbone.

    Args:
      task: `"classifier"` or `"language_model"`.
      preset: a name or a path that KerasHub knows; `None` makes a small one with random weights.
    """
    kinds = {
        "classifier": keras_hub.models.BertBackbone,
        "language_model": keras_hub.models.GPT2Backbone,
    }
    return kinds[task].from_preset(preset) if preset else kinds[task](**SMALL)


def classifier(body: keras_hub.models.Backbone) -> keras.Model:
    """Two logits from the backbone's vector of a text."""
    pooled = body.output["pooled_output"]
    return keras.Model(body.input, keras.layers.Dense(2, name="head")(pooled))


def language_model(body: keras_hub.models.Backbone) -> keras.Model:
    """Logits of the next word at each place, from the backbone's own embedding table."""
    return keras.Model(body.input, body.token_embedding(body.output, reverse=True))


def topics(number: int, words: int, seed: int) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Texts about one of two topics: most words are from one half of the vocabulary.

    Args:
      number: of texts.
      words: size of the vocabulary.
      seed: of the texts.

    Returns:
      The backbone's inputs, and the topics, [N].
    """
    draws = np.random.default_rng(seed)
    labels = draws.integers(2, size=number)
    anything = draws.integers(2, size=(number, LENGTH))
    half = np.where(draws.random((number, LENGTH)) < 0.8, labels[:, np.newaxis], anything)
    tokens = half * (words // 2) + draws.integers(words // 2, size=(number, LENGTH))
    segments = {"segment_ids": np.zeros([number, LENGTH], "int32")}
    return {**inputs_of(tokens), **segments}, labels.astype("int32")


def sentences(
    number: int, words: int, seed: int, habit: float = 0.6
) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Texts in which 3·w + 1 follows the word w, two times out of three.

    Args:
      number: of texts.
      words: size of the vocabulary.
      seed: of the texts.
      habit: the share of places at which word 0 stands instead.

    Returns:
      The backbone's inputs, and the next words, [N, length].
    """
    draws = np.random.default_rng(seed)
    tokens = np.zeros([number, LENGTH + 1], np.int64)
    tokens[:, 0] = draws.integers(words, size=number)
    for k in range(LENGTH):
        surprise = draws.integers(words, size=number)
        follows = draws.random(number) < 2 / 3
        tokens[:, k + 1] = np.where(follows, (3 * tokens[:, k] + 1) % words, surprise)
        tokens[draws.random(number) < habit, k + 1] = 0
    return inputs_of(tokens[:, :-1]), tokens[:, 1:].astype("int32")


def inputs_of(tokens: np.ndarray) -> dict[str, np.ndarray]:
    """What backbones take; all texts have the full length."""
    return {"token_ids": tokens.astype("int32"), "padding_mask": np.ones(tokens.shape, "int32")}


def parse_args() -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--task", choices=["classifier", "language_model"], default="classifier")
    parser.add_argument("--optimizer", choices=["adadp", "dp_adam"], default="adadp")
    parser.add_argument("--preset", help="weights that KerasHub knows; default: small random ones")
    parser.add_argument("--rank", type=int, default=4, help="of the LoRA matrices")
    parser.add_argument("--bfloat16", action="store_true", help="compute in mixed bfloat16")
    parser.add_argument("--epsilon", type=float, default=3.0)
    parser.add_argument("--num_texts", type=int, default=4_000)
    parser.add_argument("--batch_size", type=int, default=256)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--learning_rate", type=float, default=3e-3, help="of dp_adam")
    return parser.parse_args()


def main() -> None:
    """Fine-tunes, then prints the accuracy before and after it, and the privacy statement."""
    args = parse_args()
    keras.utils.set_random_seed(0)
    if args.bfloat16:
        keras.config.set_dtype_policy("mixed_bfloat16")
    make, model_of = {
        "classifier": (topics, classifier),
        "language_model": (sentences, language_model),
    }[args.task]
    body = backbone(args.task, args.preset)
    model = model_of(body)
    words = body.vocabulary_size
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    if args.task == "language_model" and args.preset is None:
        model.compile("adam", loss)
        model.fit(*sentences(4_000, words, seed=3, habit=0.0), epochs=5, verbose=0)  # public texts
    body.enable_lora(args.rank)  # freezes all other weights of the backbone

    x, y = make(args.num_texts, words, seed=1)
    test = make(1_000, words, seed=2)
    plan = tf_adaptive_dp.PrivacyPlan(
        epsilon=args.epsilon,
        delta=1 / (10 * args.num_texts),
        num_examples=args.num_texts,
        batch_size=args.batch_size,
        epochs=args.epochs,
    )
    if args.optimizer == "adadp":
        optimizer = plan.optimizer(tf_adaptive_dp.ADADP)
    else:
        optimizer = plan.optimizer(tf_adaptive_dp.DPAdam, learning_rate=args.learning_rate)
    model.compile(loss=loss, metrics=["accuracy"])
    before = model.evaluate(*test, batch_size=500, verbose=0, return_dict=True)
    model.compile(optimizer, loss, metrics=["accuracy"])
    history = plan.fit(model, x, y, validation_data=test, validation_freq=args.epochs, verbose=2)

    print()
    print(plan.statement())
    result = {
        "task": args.task,
        "trained weights": int(sum(np.prod(v.shape) for v in model.trainable_variables)),
        "all weights": int(model.count_params()),
        "accuracy before": round(before["accuracy"], 4),
        "accuracy": round(history.history["val_accuracy"][-1], 4),
        "epsilon": round(history.history["epsilon"][-1], 4),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
