"""The one seam to what Keras and TensorFlow do not document.

The rest of the library calls the functions of these modules, whose names say what they answer and
not how TensorFlow and Keras store it. To support another version, only this folder has to change.
"""
