"""Scikit-learn's digits by simulated client, and the names that the package offers."""

import importlib
import subprocess
import sys

import numpy as np
import pytest
import tensorflow as tf
from sklearn import datasets

import federated
from federated.datasets.digits import load_digits


def images_of(data):
    clients = {
        name: [
            (image.tobytes(), int(label))
            for image, label in data.create_tf_dataset_for_client(name).as_numpy_iterator()
        ]
        for name in data.client_ids
    }
    return clients, [example for mine in clients.values() for example in mine]


def test_each_image_belongs_to_one_client_and_no_held_out_one_is_trained_on():
    train, held_out = load_digits(num_clients=50)
    clients, trained = images_of(train)
    others, judged = images_of(held_out)
    assert (len(clients), len(others)) == (50, 10)
    assert (len(trained), len(judged)) == (1438, 359)
    assert set(clients) & set(others) == set()
    images, labels = datasets.load_digits(return_X_y=True)
    assert sorted(label for _, label in trained + judged) == sorted(labels)
    found = np.stack([np.frombuffer(image, np.float32) for image, _ in trained + judged])
    np.testing.assert_allclose(found.mean(axis=1), 0, atol=1e-6)
    np.testing.assert_allclose(found.std(axis=1), 1, atol=1e-5)
    scaled = (images - images.mean(1, keepdims=True)) / images.std(1, keepdims=True)
    np.testing.assert_allclose(
        found[np.lexsort(found.T)], scaled[np.lexsort(scaled.astype(np.float32).T)], atol=1e-6
    )


def test_a_seed_repeats_the_division_and_alpha_shapes_it():
    first, again, other = (images_of(load_digits(20, seed=s)[0])[0] for s in (1, 1, 2))
    assert first == again != other

    def largest_share(alpha):
        clients, _ = images_of(load_digits(20, alpha=alpha)[0])
        counts = [
            np.bincount([label for _, label in mine], minlength=10) for mine in clients.values()
        ]
        return np.mean([count.max() / count.sum() for count in counts])

    assert largest_share(0.5) > 0.6 > 0.25 > largest_share(1e4)


def test_batches_are_made_where_tff_traces_them():
    train, _ = load_digits(20)
    batches = train.preprocess(federated.datasets.ClientBatches(batch_size=8, max_batches=2))
    assert batches.element_type_structure[0] == tf.TensorSpec([None, 64], tf.float32)
    sizes = [len(y) for _, y in batches.create_tf_dataset_for_client("client_3")]
    assert sizes == [8, 8]


@pytest.mark.parametrize("number", [4, 1439])
def test_a_number_of_clients_that_cannot_be_is_refused(number):
    with pytest.raises(ValueError, match="`num_clients` must be at"):
        load_digits(number)


def test_the_package_offers_its_loaders_and_imports_them_when_they_are_used():
    for name in federated.datasets.__all__:
        made = getattr(federated.datasets, name)
        module = importlib.import_module(
            f"federated.datasets.{federated.datasets._MODULE_OF[name]}"
        )
        assert made is getattr(module, name) and made.__module__ == module.__name__
    assert {n for n in federated.datasets.__all__ if n.startswith("load_")} == {
        "load_cifar10",
        "load_counts",
        "load_digits",
        "load_stackoverflow",
    }
    assert set(federated.datasets.__all__) <= set(dir(federated.datasets))
    with pytest.raises(AttributeError, match="has no attribute 'load_mnist'"):
        _ = federated.datasets.load_mnist
    code = "import sys, federated; federated.datasets; assert 'tensorflow' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
