"""Stack Overflow's users, posts, words and tags."""

import io
import json
import os
import pathlib
import sqlite3
import tarfile

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff

import tf_adaptive_dp
from federated.datasets import stackoverflow
from federated.datasets.clients import ClientBatches, in_memory, random_clients, subset
from federated.datasets.vocabulary import UserCounts, Vocabulary, count_users, load_counts
from tests.helpers.posts import write

POSTS = [
    ("train", "a", "a qubit", "spin", "physics"),
    ("train", "a", "a a qubit zzz", "", "taste|unheard-of"),
    ("train", "a", "zzz zzz", "", "unheard-of"),
    ("train", "b", "brew it hot", "a coffee", "brewing|taste"),
    ("heldout", "d", "a qubit brew", "a", "taste"),
    ("heldout", "d", "a a a", "", "taste"),
    ("heldout", "e", "a brew", "", "taste|brewing"),
    ("test", "a", "brew", "qubit", "brewing"),
]
KNOWN = Vocabulary(words=("a", "brew", "qubit"), tags=("taste", "brewing", "physics"))
IN_ORDER = ClientBatches(batch_size=2, shuffle_buffer=1)

needs_posts = pytest.mark.skipif(
    not (
        pathlib.Path(os.environ.get("TFF_CACHE_DIR") or "/nowhere") / "stackoverflow.sqlite"
    ).is_file(),
    reason="needs posts: set TFF_CACHE_DIR to a folder that has stackoverflow.sqlite",
)


@pytest.fixture(scope="module")
def cache_dir(tmp_path_factory):
    return write(tmp_path_factory.mktemp("stackoverflow"), POSTS)


@pytest.fixture(scope="module")
def splits(cache_dir):
    return stackoverflow.load_stackoverflow(cache_dir)


def read(dataset):
    pairs = list(dataset.as_numpy_iterator())
    return np.concatenate([x for x, _ in pairs]), np.concatenate([y for _, y in pairs])


def test_each_split_has_its_users(splits):
    assert [split.client_ids for split in splits] == [["a", "b"], ["d", "e"], ["a"]]


def test_bags_are_shares_of_known_words_and_tags_are_all_that_are_known(splits):
    data = splits[0].preprocess(stackoverflow.bags_of_words(KNOWN, IN_ORDER))
    assert data.element_type_structure == (
        tf.TensorSpec([None, 3], tf.float32),
        tf.TensorSpec([None, 3], tf.float32),
    )
    bags, tags = read(data.create_tf_dataset_for_client("a"))
    np.testing.assert_allclose(bags, [[1 / 2, 0, 1 / 2], [2 / 3, 0, 1 / 3], [0, 0, 0]])
    np.testing.assert_array_equal(tags, [[0, 0, 1], [1, 0, 0], [0, 0, 0]])


def test_a_single_label_is_the_most_frequent_known_tag(splits):
    preprocess = stackoverflow.bags_of_words(KNOWN, IN_ORDER, labels="most_frequent")
    data = splits[0].preprocess(preprocess)
    assert data.element_type_structure[1] == tf.TensorSpec([None], tf.int32)
    bags, tags = read(data.create_tf_dataset_for_client("a"))
    assert tags.tolist() == [2, 0] and len(bags) == 2  # no tag of the third post is known
    assert read(data.create_tf_dataset_for_client("b"))[1].tolist() == [0]


def test_bags_and_tags_are_those_of_tff_s_own_task():
    posts = tff.simulation.datasets.stackoverflow.get_synthetic()
    known = [
        tuple(counts())
        for counts in (
            tff.simulation.datasets.stackoverflow.get_synthetic_word_counts,
            tff.simulation.datasets.stackoverflow.get_synthetic_tag_counts,
        )
    ]
    known = Vocabulary(known[0][:40], known[1][:9])
    spec = tff.simulation.baselines.ClientSpec(num_epochs=1, batch_size=4, shuffle_buffer_size=1)
    baseline = tff.simulation.baselines.stackoverflow.tag_prediction_preprocessing
    theirs = baseline.create_preprocess_fn(spec, list(known.words), list(known.tags))
    ours = stackoverflow.bags_of_words(known, ClientBatches(4, shuffle_buffer=1))
    for client in posts.client_ids:
        dataset = posts.create_tf_dataset_for_client(client)
        for mine, wanted in zip(read(ours(dataset)), read(theirs(dataset))):
            assert wanted.any()
            np.testing.assert_allclose(mine, wanted, rtol=1e-6)


def test_limits_epochs_and_the_choice_of_users_reach_the_dataset(splits):
    batches = ClientBatches(1, epochs=3, max_examples=2, max_batches=5)
    only = subset(splits[0], ["a"])
    data = only.preprocess(stackoverflow.bags_of_words(KNOWN, batches))
    assert data.client_ids == ["a"]
    assert len(list(data.create_tf_dataset_for_client("a"))) == 5


@pytest.mark.parametrize("labels", stackoverflow.LABELS)
def test_all_clients_can_be_read_as_one(splits, labels):
    preprocess = stackoverflow.bags_of_words(KNOWN, IN_ORDER, labels=labels)
    train = splits[0]
    dataset = train.preprocess(preprocess).create_tf_dataset_from_all_clients(seed=0)
    wanted = {"multi_hot": 4, "most_frequent": 3}[labels]
    assert len(read(dataset)[0]) == wanted
    assert len(read(preprocess(train.create_tf_dataset_from_all_clients()))[1]) == wanted


def test_tff_sends_the_datasets_to_its_workers(splits, context):
    data = splits[0].preprocess(stackoverflow.bags_of_words(KNOWN, IN_ORDER))
    shape = tff.TensorType(np.float32, [None, 3])
    batches = tff.SequenceType((shape, shape))

    @tff.tensorflow.computation(batches)
    def total(dataset):
        return dataset.reduce(tf.zeros([2, 3]), lambda s, xy: s + tf.reduce_sum(tf.stack(xy), 1))

    @tff.federated_computation(tff.FederatedType(batches, tff.CLIENTS))
    def over_all(datasets):
        return tff.federated_sum(tff.federated_map(total, datasets))

    found = over_all([data.create_tf_dataset_for_client(name) for name in data.client_ids])
    np.testing.assert_allclose(found, [[5 / 3, 1 / 2, 5 / 6], [2, 1, 1]], rtol=1e-6)


def test_users_of_words_and_tags_are_counted_once_each(splits):
    counts = count_users(splits[1], ["d", "e"])
    assert list(counts.words.items()) == [("a", 2), ("brew", 2), ("qubit", 1)]
    assert list(counts.tags.items()) == [("taste", 2), ("brewing", 1)]
    assert counts.users == ("d", "e") and "2 users of the heldout split" in counts.source
    assert counts.vocabulary(2, 1) == Vocabulary(("a", "brew"), ("taste",))
    assert count_users(splits[1], ["e"]).words == {"a": 1, "brew": 1}
    for names in (["a"], []):
        with pytest.raises(ValueError, match="`client_ids`"):
            count_users(splits[1], names)


def test_counts_of_users_who_are_trained_on_are_refused(splits):
    counts = count_users(splits[1], ["d", "e"])
    assert counts.require_other_users(splits[0].client_ids) is counts
    with pytest.raises(tf_adaptive_dp.NotPrivateError, match="1 such users.*'e'"):
        counts.require_other_users(["a", "e"])
    unknown = UserCounts({"a": 1}, {"b": 1}, "TFF's counts", None)
    with pytest.raises(tf_adaptive_dp.NotPrivateError, match="TFF's counts"):
        unknown.require_other_users(["a"])


def test_counts_are_side_information_for_the_kernel_of_bags(splits):
    counts = count_users(splits[1], ["d", "e"])
    known = Vocabulary(("qubit", "never", "a"), ("taste",))
    side_information = tf_adaptive_dp.side_information.token_frequencies(
        counts.words, vocabulary=known.words, provenance="public"
    )
    np.testing.assert_array_equal(side_information.values, [2, 1, 3])


WORD_COUNT, TAG_COUNT = "a 5\nbrew 9\n, 5\n", json.dumps({"x": 1, "y": 7, "z": 1})


def write_counts(folder, words=WORD_COUNT, tags=TAG_COUNT, packed=False):
    folder.mkdir(exist_ok=True)
    for name, text in (("stackoverflow.word_count", words), ("stackoverflow.tag_count", tags)):
        if not packed:
            (folder / name).write_text(text)
            continue
        with tarfile.open(folder / f"{name}.tar.bz2", "w:bz2") as archive:
            member = tarfile.TarInfo(name)
            member.size = len(text)
            archive.addfile(member, io.BytesIO(text.encode()))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("sub", ["", "datasets"])
def test_tff_s_counts_are_found_unpacked_and_packed(tmp_path, monkeypatch, sub, packed):
    write_counts(tmp_path / sub, packed=packed)
    monkeypatch.setenv("TFF_CACHE_DIR", str(tmp_path))
    counts = load_counts()
    assert list(counts.words.items()) == [("brew", 9), ("a", 5), (",", 5)]
    assert list(counts.tags) == ["y", "x", "z"]
    assert counts.users is None and "train" in counts.source


@pytest.mark.parametrize(
    "bad",
    [{"words": "a five\n"}, {"words": "a -1\n"}, {"words": ""}, {"tags": "{"}, {"tags": "[]"}],
)
def test_counts_in_another_format_are_refused(tmp_path, bad):
    write_counts(tmp_path, **bad)
    with pytest.raises(ValueError, match="stackoverflow.*not in TFF's format.*_counts"):
        load_counts(str(tmp_path))


def test_packed_counts_that_are_broken_are_refused(tmp_path):
    write_counts(tmp_path, packed=True)
    (tmp_path / "stackoverflow.word_count.tar.bz2").write_bytes(b"no archive")
    with pytest.raises(ValueError, match="not in TFF's format"):
        load_counts(str(tmp_path))


def test_missing_data_are_named_and_nothing_is_downloaded(tmp_path, monkeypatch):
    monkeypatch.delenv("TFF_CACHE_DIR", raising=False)
    for load in (stackoverflow.load_stackoverflow, load_counts):
        with pytest.raises(FileNotFoundError, match="`cache_dir`.*TFF_CACHE_DIR.*None"):
            load()
        with pytest.raises(FileNotFoundError, match=f"tff.simulation.datasets.*{tmp_path}"):
            load(str(tmp_path))
    assert not list(tmp_path.iterdir())


def test_a_file_in_another_format_is_refused(tmp_path):
    (tmp_path / "stackoverflow.sqlite").write_bytes(b"no database at all, but long enough" * 9)
    with pytest.raises(ValueError, match="`cache_dir`.*not in TFF's format"):
        stackoverflow.load_stackoverflow(str(tmp_path))
    (tmp_path / "stackoverflow.sqlite").unlink()
    sqlite3.connect(tmp_path / "stackoverflow.sqlite").close()
    (tmp_path / "stackoverflow.sqlite").touch()
    with pytest.raises(ValueError, match="`cache_dir`.*not in TFF's format"):
        stackoverflow.load_stackoverflow(str(tmp_path))


def test_a_split_without_users_is_refused(tmp_path):
    write(tmp_path, [post for post in POSTS if post[0] != "heldout"])
    with pytest.raises(ValueError, match="a split has no users"):
        stackoverflow.load_stackoverflow(str(tmp_path))


COUNTS = UserCounts({"a": 1}, {"b": 1}, "", None)


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: stackoverflow.bags_of_words(KNOWN, IN_ORDER, labels="all"), ValueError, "'all'"),
        (lambda: stackoverflow.bags_of_words(COUNTS, IN_ORDER), TypeError, r"`counts.vocabulary\("),
        (lambda: Vocabulary((), ("a",)), ValueError, "`words`"),
        (lambda: Vocabulary(("a",), ("b", "b")), ValueError, "`tags`.*'b'"),
        (lambda: COUNTS.vocabulary(0), ValueError, "num_words=0"),
    ],
)
def test_wrong_arguments_are_named(call, error, text):
    with pytest.raises(error, match=text):
        call()


@needs_posts
def test_the_real_posts():
    train, heldout, test = stackoverflow.load_stackoverflow()
    assert not set(train.client_ids) & set(heldout.client_ids)
    public = random_clients(heldout.client_ids, min(20, len(heldout.client_ids)), seed=0)
    counts = count_users(heldout, public).require_other_users(train.client_ids)
    assert max(counts.words.values()) <= len(public)
    known = load_counts().vocabulary(num_words=1000, num_tags=50)
    for labels in stackoverflow.LABELS:
        preprocess = stackoverflow.bags_of_words(known, ClientBatches(4), labels=labels)
        data = train.preprocess(preprocess)
        pairs = [
            pair
            for name in train.client_ids[:5]
            for pair in data.create_tf_dataset_for_client(name)
        ]
        bags = np.concatenate([x for x, _ in pairs])
        np.testing.assert_allclose(bags.sum(1), 1, rtol=1e-4)
    assert len(test.client_ids)


def test_clients_in_memory_are_read_once_and_have_the_same_examples(splits):
    data = splits[0].preprocess(
        stackoverflow.bags_of_words(KNOWN, IN_ORDER, labels="most_frequent")
    )
    asked = []

    class Counted:
        element_type_structure = data.element_type_structure
        client_ids = data.client_ids

        def serializable_dataset_fn(self, client):  # traced once, run for each client
            tf.py_function(lambda c: asked.append(c.numpy().decode()), [client], [])
            return data.serializable_dataset_fn(client)

    kept = in_memory(Counted(), ClientBatches(batch_size=1, shuffle_buffer=1))
    for client in ("a", "b", "a"):
        found, expected = kept(client), read(data.create_tf_dataset_for_client(client))
        assert all(len(x) == 1 for x, _ in found)
        for ours, theirs in zip(read(found), expected):
            np.testing.assert_array_equal(ours, theirs)
    assert asked == ["a", "b"]
    with pytest.raises(ValueError, match="`max_clients` must be"):
        in_memory(data, IN_ORDER, max_clients=0)
    with pytest.raises(ValueError, match="Received: 'nobody', which is none of its"):
        kept("nobody")
    for other in (splits[0], read):
        with pytest.raises(TypeError, match="`client_data` must be a .*ClientData` of batches"):
            in_memory(other, IN_ORDER)
