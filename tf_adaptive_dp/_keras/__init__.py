"""The one seam to what Keras and TensorFlow do not document.

The rest of the library calls the functions of these modules, which say what they answer and not
how TensorFlow 2.14 with Keras 2 stores it. Another version needs another copy of this folder only.
"""
