"""The one seam to what Keras and TensorFlow do not document.

The rest of the library calls the functions of these modules, which say what they answer and not how
a version of TensorFlow or Keras stores it. They serve Keras 2 and Keras 3: `generation.py` finds
out which one is in use and sets `GENERATION`. Where the two differ in a few lines, a function
branches on it. Where they differ as a whole, each has a module of its own, `optimizers_keras2.py`
and `optimizers_keras3.py`, from which `optimizers.py` chooses.

A third generation needs a value of `GENERATION`, a module with the names that `optimizers.py`
imports, and an answer at each branch on `GENERATION`: those here and those of `callbacks/`, which
saves and loads models. The tests of `tests/_keras/` say what the answers must be.
"""
