"""Private fine-tuning with LoRA: a frozen backbone of KerasHub, and small matrices that learn.

Two tasks on made-up texts, so that the program runs without a download: a BERT-like classifier has
to find out which of two topics a text is about, and a GPT-like language model which word follows
which. Without `--preset` the backbones are small and have random weights; with it they have those
of a preset or of a folder, such as `--preset bert_tiny_en_uncased`. Only the LoRA matrices and the
classifier's head have gradients to clip and receive noise. The frozen weights cost neither time nor
accuracy.

Privacy claim: (ε, δ)-DP for adding or removing one of the training texts, δ = 1 / (number of
texts), for the trained weights and every checkpoint. Batches are drawn by Poisson sampling, as ε
assumes. The loss of a text is the mean over its words, so a text counts once, whatever its length.
What the backbone was trained on before is not covered.

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


def backbone(task: str, preset: str | None, rank: int) -> keras_hub.models.Backbone:
    """A frozen backbone with LoRA matrices in its attention layers.

    Args:
      task: `"classifier"` or `"language_model"`.
      preset: a name or a path that KerasHub knows; `None` makes a small one with random weights.
      rank: of the LoRA matrices.
    """
    kinds = {
        "classifier": keras_hub.models.BertBackbone,
        "language_model": keras_hub.models.GPT2Backbone,
    }
    made = kinds[task].from_preset(preset) if preset else kinds[task](**SMALL)
    made.enable_lora(rank)
    return made


def classifier(frozen: keras_hub.models.Backbone) -> keras.Model:
    """Two logits from the backbone's vector of a text."""
    pooled = frozen.output["pooled_output"]
    return keras.Model(frozen.input, keras.layers.Dense(2, name="head")(pooled))


def language_model(frozen: keras_hub.models.Backbone) -> keras.Model:
    """Logits of the next word at each place, from the backbone's own embedding table."""
    logits = frozen.token_embedding(frozen.output, reverse=True)
    return keras.Model(frozen.input, logits)


def texts(
    task: str, number: int, words: int, seed: int
) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Made-up texts as token ids, and what is to be learned from them.

    Args:
      task: a classifier's labels say which half of the vocabulary most words of a text are from. A
        language model's are the next words: two times out of three, 3·w + 1 follows w.
      number: of texts.
      words: size of the vocabulary.
      seed: of the texts.

    Returns:
      The backbone's inputs, and labels [N] or [N, length].
    """
    draws = np.random.default_rng(seed)
    if task == "classifier":
        labels = draws.integers(2, size=number)
        from_topic = draws.random((number, LENGTH)) < 0.8
        half = np.where(from_topic, labels[:, np.newaxis], draws.integers(2, size=(number, LENGTH)))
        tokens = half * (words // 2) + draws.integers(words // 2, size=(number, LENGTH))
    else:
        tokens = np.zeros([number, LENGTH + 1], np.int64)
        tokens[:, 0] = draws.integers(words, size=number)
        for k in range(LENGTH):
            surprise = draws.integers(words, size=number)
            expected = (3 * tokens[:, k] + 1) % words
            tokens[:, k + 1] = np.where(draws.random(number) < 2 / 3, expected, surprise)
        tokens, labels = tokens[:, :-1], tokens[:, 1:]
    inputs = {
        "token_ids": tokens.astype("int32"),
        "padding_mask": np.ones([number, LENGTH], "int32"),
    }
    if task == "classifier":
        inputs["segment_ids"] = np.zeros([number, LENGTH], "int32")
    return inputs, labels.astype("int32")


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
    frozen = backbone(args.task, args.preset, args.rank)
    model = {"classifier": classifier, "language_model": language_model}[args.task](frozen)
    x, y = texts(args.task, args.num_texts, frozen.vocabulary_size, seed=1)
    test = texts(args.task, 1_000, frozen.vocabulary_size, seed=2)

    plan = tf_adaptive_dp.PrivacyPlan(
        epsilon=args.epsilon,
        delta=1 / args.num_texts,
        num_examples=args.num_texts,
        batch_size=args.batch_size,
        epochs=args.epochs,
    )
    if args.optimizer == "adadp":
        optimizer = plan.optimizer(tf_adaptive_dp.ADADP)
    else:
        optimizer = plan.optimizer(tf_adaptive_dp.DPAdam, learning_rate=args.learning_rate)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
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
