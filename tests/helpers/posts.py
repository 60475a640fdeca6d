"""Writes posts into a file in the format of TFF's Stack Overflow."""

import collections
import sqlite3

import tensorflow as tf


def serialized(tokens, title, tags):
    texts = {"tokens": tokens, "title": title, "tags": tags, "type": "question"}
    texts["creation_date"] = "2015-01-01 00:00:00 UTC"
    feature = {
        name: tf.train.Feature(bytes_list=tf.train.BytesList(value=[text.encode()]))
        for name, text in texts.items()
    }
    feature["score"] = tf.train.Feature(int64_list=tf.train.Int64List(value=[0]))
    return tf.train.Example(features=tf.train.Features(feature=feature)).SerializeToString()


def write(folder, posts):
    """Posts are (split, user, tokens, title, tags); returns the folder's name."""
    file = sqlite3.connect(folder / "stackoverflow.sqlite")
    with file:
        file.execute("CREATE TABLE examples (split_name, client_id, serialized_example_proto BLOB)")
        file.execute("CREATE TABLE client_metadata (client_id, split_name, num_examples INTEGER)")
        rows = [(split, user, serialized(*texts)) for split, user, *texts in posts]
        file.executemany("INSERT INTO examples VALUES (?, ?, ?)", rows)
        users = collections.Counter((user, split) for split, user, *_ in posts)
        rows = [(*key, number) for key, number in sorted(users.items())]
        file.executemany("INSERT INTO client_metadata VALUES (?, ?, ?)", rows)
    file.close()
    return str(folder)
