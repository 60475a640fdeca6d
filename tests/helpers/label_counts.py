"""A metric with several numbers, as Keras's F1Score without an average is."""

import tensorflow as tf


class LabelCounts(tf.keras.metrics.Metric):
    """How many examples have each of the first two labels, by their weights."""

    def __init__(self):
        super().__init__(name="label_counts")
        self.counts = self.add_weight(shape=[2], initializer="zeros", name="counts")

    def update_state(self, y_true, y_pred, sample_weight=None):
        y = tf.one_hot(tf.reshape(tf.cast(y_true, tf.int32), [-1]), 2)
        if sample_weight is not None:
            y *= tf.reshape(tf.cast(sample_weight, tf.float32), [-1, 1])
        self.counts.assign_add(tf.reduce_sum(y, 0))

    def result(self):
        return tf.convert_to_tensor(self.counts)

    def reset_state(self):
        self.counts.assign(tf.zeros([2]))
