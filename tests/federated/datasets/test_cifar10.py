"""CIFAR-10 divided between clients."""

import os
import pathlib

import numpy as np
import pandas
import pytest
import tensorflow as tf

from federated.datasets import cifar10
from federated.datasets.clients import ClientBatches, random_clients, subset

LABELS = np.repeat(np.arange(10), 100)[np.random.default_rng(0).permutation(1000)]
OWN = [{1, 9}, {0, 8}, {3, 5}, {2, 6}, {4, 7}]

needs_images = pytest.mark.skipif(
    not list(pathlib.Path(os.environ.get("TFDS_DATA_DIR") or "/nowhere").glob("cifar10/*/*.json")),
    reason="needs CIFAR-10: set TFDS_DATA_DIR to a tensorflow-datasets folder that has cifar10",
)


def assert_each_once(partition, number):
    rows = np.concatenate(list(partition.values()))
    np.testing.assert_array_equal(np.sort(rows), np.arange(number))


def own_share(partition):
    """Of each client, the share of its images that are of its own two classes."""
    pairs = zip(partition.values(), OWN)
    return np.array([np.isin(LABELS[rows], list(own)).mean() for rows, own in pairs])


@pytest.mark.parametrize("randomness", [0, 0.33, 1.0])
def test_the_paper_s_clients_keep_their_numbers_and_each_image_is_dealt_once(randomness):
    partition = cifar10.paper_partition(LABELS, randomness, seed=1)
    assert list(partition) == [f"client_{k}" for k in range(1, 6)]
    assert [len(rows) for rows in partition.values()] == [200] * 5
    assert_each_once(partition, 1000)


def test_without_randomness_each_client_has_its_two_classes():
    partition = cifar10.paper_partition(LABELS, 0.0, seed=1)
    assert [set(LABELS[rows]) for rows in partition.values()] == OWN


@pytest.mark.parametrize("randomness", [0.33, 0.67, 1.0])
def test_randomness_is_the_share_of_images_that_are_dealt_out_again(randomness):
    shares = [own_share(cifar10.paper_partition(LABELS, randomness, seed)) for seed in range(40)]
    # A client keeps 1 - r for certain and gets a fifth of what it gave back; 40 draws of 200.
    np.testing.assert_allclose(np.mean(shares, 0), 1 - 0.8 * randomness, atol=0.02)


def test_partitions_are_functions_of_their_seed():
    for make in (
        lambda seed: cifar10.paper_partition(LABELS, 0.5, seed),
        lambda seed: cifar10.dirichlet_partition(LABELS, 7, 1.0, seed),
    ):
        one, same, other = (np.concatenate(list(make(seed).values())) for seed in (1, 1, 2))
        np.testing.assert_array_equal(one, same)
        assert (one != other).any()


@pytest.mark.parametrize("alpha", [1e-300, 1e-3, 1.0, 100.0, 1e300])
@pytest.mark.parametrize("num_clients", [1, 7, 300, 1000])
def test_dirichlet_deals_each_image_once_and_leaves_no_client_empty(num_clients, alpha):
    partition = cifar10.dirichlet_partition(LABELS, num_clients, alpha, seed=3)
    assert list(partition) == [f"client_{k + 1}" for k in range(num_clients)]
    assert_each_once(partition, 1000)
    sizes = [len(rows) for rows in partition.values()]
    assert min(sizes) >= 1 and max(sizes) - min(sizes) <= 1


def test_dirichlet_goes_from_one_class_a_client_to_the_shares_of_all_data():
    def largest_share(alpha):
        partition = cifar10.dirichlet_partition(LABELS, 10, alpha, seed=3)
        return np.mean([np.bincount(LABELS[r]).max() / len(r) for r in partition.values()])

    few, some, many = (largest_share(alpha) for alpha in (0.01, 5.0, 1e5))
    assert few > 0.7 > some > 0.25 > many


def test_dirichlet_has_the_spread_of_hsu_et_al():
    # The first class of the client that draws first: Beta(a p, a (1 - p)), then n draws.
    labels, alpha, p, n = np.repeat([0, 1], [3000, 7000]), 4.0, 0.3, 100
    rng = np.random.default_rng(0)
    q = np.array([cifar10._dirichlet(rng, alpha * np.array([p, 1 - p]))[0] for _ in range(4000)])
    assert abs(q.mean() - p) < 0.015
    assert abs(q.var() / (p * (1 - p) / (alpha + 1)) - 1) < 0.1
    parts = cifar10.dirichlet_partition(labels, len(labels) // n, alpha, seed=0).values()
    shares = np.array([np.mean(labels[rows] == 0) for rows in parts])
    assert 0.5 < shares.var() / (p * (1 - p) / (alpha + 1)) < 1.5


def test_draws_stop_at_what_is_left():
    rng = np.random.default_rng(0)
    left = np.array([3, 0, 50])
    taken = cifar10._draw_counts(rng, np.array([1.0, 0.0, 0.0]), left, 10)
    assert taken.tolist() == [3, 0, 7]


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: cifar10.paper_partition(LABELS, 1.5, 0), ValueError, "randomness=1.5"),
        (lambda: cifar10.paper_partition(LABELS, -0.1, 0), ValueError, "randomness=-0.1"),
        (lambda: cifar10.paper_partition(LABELS, float("nan"), 0), ValueError, "randomness=nan"),
        (lambda: cifar10.paper_partition(LABELS, "0", 0), TypeError, "`randomness`"),
        (lambda: cifar10.paper_partition(LABELS, 0, -1), ValueError, "seed=-1"),
        (lambda: cifar10.paper_partition(LABELS + 1, 0, 0), ValueError, "0 to 9"),
        (lambda: cifar10.paper_partition(LABELS / 2, 0, 0), ValueError, "whole numbers"),
        (lambda: cifar10.paper_partition(LABELS[:, None], 0, 0), ValueError, "one per image"),
        (lambda: cifar10.dirichlet_partition(LABELS, 0, 1, 0), ValueError, "num_clients=0"),
        (lambda: cifar10.dirichlet_partition(LABELS, 1001, 1, 0), ValueError, "ask for fewer"),
        (lambda: cifar10.dirichlet_partition(LABELS, 5, 0, 0), ValueError, "alpha=0"),
        (lambda: cifar10.dirichlet_partition(LABELS, 2.5, 1, 0), TypeError, "num_clients=2.5"),
        (lambda: ClientBatches(0), ValueError, "batch_size=0"),
        (lambda: ClientBatches(1, epochs=0), ValueError, "epochs=0"),
        (lambda: ClientBatches(1, max_examples=0), ValueError, "max_examples=0"),
        (lambda: ClientBatches(1, max_batches=1.5), TypeError, "max_batches=1.5"),
        (lambda: random_clients(["a"], 2, 0), ValueError, "at most 1.*num_clients=2"),
        (lambda: random_clients(["a"], 0, 0), ValueError, "num_clients=0"),
    ],
)
def test_wrong_arguments_are_named(call, error, text):
    with pytest.raises(error, match=text):
        call()


@pytest.fixture
def images():
    return np.random.default_rng(0).integers(0, 256, [6, 32, 32, 3], np.uint8)


def test_clients_have_their_own_images_however_they_are_asked(images):
    labels = np.arange(6, dtype=np.int32)
    data = cifar10.client_data(images, labels, {"a": np.array([4, 1]), "b": np.array([0, 2, 3])})
    assert data.client_ids == ["a", "b"]
    for name, rows in (("a", [4, 1]), ("b", [0, 2, 3])):
        traced = tf.data.Dataset.from_tensors(name).flat_map(data.serializable_dataset_fn)
        for dataset in (data.create_tf_dataset_for_client(name), traced):
            pairs = list(dataset.as_numpy_iterator())
            assert [label for _, label in pairs] == rows
            np.testing.assert_array_equal([image for image, _ in pairs], images[rows])
    assert data.element_type_structure[0] == tf.TensorSpec([32, 32, 3], tf.uint8)
    with pytest.raises(tf.errors.InvalidArgumentError, match="There is no client"):
        list(tf.data.Dataset.from_tensors("z").flat_map(data.serializable_dataset_fn))
    only = subset(data, ["b"])
    assert only.client_ids == ["b"]
    assert len(list(only.create_tf_dataset_for_client("b"))) == 3
    for names in (["z"], []):
        with pytest.raises(ValueError, match="`client_ids`"):
            subset(data, names)


def test_images_are_normalised_while_they_are_read(images):
    data = cifar10.client_data(images, np.arange(6), {"a": np.arange(5)})
    preprocess = cifar10.normalized_images(ClientBatches(3, shuffle_buffer=1))
    batches = list(data.preprocess(preprocess).create_tf_dataset_for_client("a"))
    x, y = batches[0]
    mean, std = [0.4914, 0.4822, 0.4465], [0.2023, 0.1994, 0.2010]
    np.testing.assert_allclose(x, (images[:3] / 255 - mean) / std, rtol=1e-4, atol=1e-5)
    assert (x.dtype, y.dtype) == (tf.float32, tf.int32)
    assert [len(labels) for _, labels in batches] == [3, 2]


def test_images_and_labels_may_be_lists_and_tables():
    tables = pandas.DataFrame([[1.5, 2.0], [3.0, 4.5]]), pandas.Series([0, 1], index=[7, 8])
    for images, labels in (([[1.5, 2.0], [3.0, 4.5]], [0, 1]), tables):
        data = cifar10.client_data(images, labels, {"a": [1]})
        ((image, label),) = data.create_tf_dataset_for_client("a").as_numpy_iterator()
        assert image.tolist() == [3.0, 4.5] and label == 1


@pytest.mark.parametrize(
    ("images", "labels", "partition", "text"),
    [
        (6, 5, {"a": [0]}, "6 images, 5 labels"),
        (6, 6, {"a": [0], "b": []}, "'b'"),
        (6, 6, {"a": [6]}, r"\[0, 6\)"),
        (6, 6, {"a": [-1]}, r"\[0, 6\)"),
    ],
)
def test_partitions_that_do_not_fit_are_refused(images, labels, partition, text):
    with pytest.raises(ValueError, match=text):
        cifar10.client_data(np.zeros([images, 2]), np.zeros(labels), partition)


def values(batches, number=20):
    return [batch.tolist() for batch in batches(tf.data.Dataset.range(number)).as_numpy_iterator()]


def test_batches_cover_each_epoch_once_and_stop_at_the_limits():
    read = values(ClientBatches(8, epochs=2))
    assert [len(batch) for batch in read] == [8, 8, 4] * 2
    epochs = [sum(read[:3], []), sum(read[3:], [])]
    assert [sorted(epoch) for epoch in epochs] == [list(range(20))] * 2
    assert epochs[0] != epochs[1]
    limited = values(ClientBatches(8, epochs=2, max_examples=10))
    assert [len(batch) for batch in limited] == [8, 2] * 2
    assert (
        len(set(sum(values(ClientBatches(8, epochs=9, max_examples=10)), []))) > 10
    )  # each epoch chooses anew
    assert [len(batch) for batch in values(ClientBatches(8, epochs=3, max_batches=4))] == [
        8,
        8,
        4,
        8,
    ]


def test_shuffling_has_a_seed_and_can_be_turned_off():
    assert values(ClientBatches(20, seed=1)) == values(ClientBatches(20, seed=1))
    assert values(ClientBatches(20, seed=1)) != values(ClientBatches(20, seed=2))
    assert values(ClientBatches(20, shuffle_buffer=1)) == [list(range(20))]


def test_random_clients_look_at_nothing_but_the_ids():
    ids = [f"user{k}" for k in range(30)]
    chosen = random_clients(ids, 10, seed=5)
    assert len(set(chosen)) == 10 and set(chosen) <= set(ids)
    assert chosen == random_clients(ids[::-1], 10, seed=5) != random_clients(ids, 10, seed=6)
    often = np.zeros(30)
    for seed in range(900):
        often[[ids.index(name) for name in random_clients(ids, 10, seed)]] += 1
    assert np.abs(often / 900 - 1 / 3).max() < 0.08  # five deviations of a uniform choice


def test_a_folder_without_cifar10_is_named_and_nothing_is_downloaded(tmp_path, monkeypatch):
    monkeypatch.delenv("TFDS_DATA_DIR", raising=False)
    with pytest.raises(FileNotFoundError, match="`data_dir`.*TFDS_DATA_DIR.*tfds build.*None"):
        cifar10.load_cifar10()
    with pytest.raises(FileNotFoundError, match="nowhere"):
        cifar10.load_cifar10(str(tmp_path / "nowhere"))
    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path))
    with pytest.raises(FileNotFoundError, match=f"tfds build cifar10.*{tmp_path}"):
        cifar10.load_cifar10()
    (tmp_path / "cifar10" / "3.0.2").mkdir(parents=True)
    (tmp_path / "cifar10" / "3.0.2" / "dataset_info.json").write_text('{"name": "cifar10"}')
    with pytest.raises(FileNotFoundError, match="tfds build cifar10"):
        cifar10.load_cifar10()


@needs_images
def test_the_real_images():
    (images, labels), (test_images, test_labels) = cifar10.load_cifar10()
    assert images.shape == (50_000, 32, 32, 3) and test_images.shape == (10_000, 32, 32, 3)
    assert images.dtype == np.uint8 and labels.dtype == np.int32
    assert np.bincount(labels).tolist() == [5000] * 10
    assert np.bincount(test_labels).tolist() == [1000] * 10
    partition = cifar10.paper_partition(labels, 0.33, seed=0)
    assert [len(rows) for rows in partition.values()] == [10_000] * 5
    data = cifar10.client_data(images, labels, partition)
    preprocess = cifar10.normalized_images(ClientBatches(500, max_batches=4))
    batches = list(data.preprocess(preprocess).create_tf_dataset_for_client("client_1"))
    pixels = np.concatenate([x for x, _ in batches])
    assert pixels.shape == (2000, 32, 32, 3)
    # The published deviations are means over images, smaller than that of all pixels.
    assert abs(pixels.mean()) < 0.2 and 1 < pixels.std() < 1.5
