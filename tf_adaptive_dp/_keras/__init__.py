"""The one seam to the internals of Keras and TensorFlow."""
