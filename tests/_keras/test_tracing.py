"""What the library learns about traces from TensorFlow's internals."""

import tensorflow as tf

from tf_adaptive_dp._keras import tracing

COMPLETE = []


def note(graph):
    COMPLETE.append(graph.name)


def named(name, function, **kwargs):
    function.__name__ = name
    return tf.function(function, autograph=False, **kwargs)


def test_a_function_is_complete_at_the_end_of_its_trace_and_so_are_those_around_it():
    COMPLETE.clear()

    def watched(x):
        tracing.call_when_complete(tf.compat.v1.get_default_graph(), note)
        assert not COMPLETE
        return x

    inner = named("inner", lambda x: tf.cond(x > 0, lambda: watched(x), lambda: x))
    outer = named("outer", lambda x: inner(x) + inner(x))
    assert outer(tf.constant(1.0)) == 2.0
    assert COMPLETE == ["inner", "outer"]  # branches belong to the function around them


def test_functions_that_call_a_watched_one_later_are_watched():
    COMPLETE.clear()

    def watch(x):
        tracing.call_when_complete(tf.compat.v1.get_default_graph(), note)
        return x

    inner = named("inner", watch, input_signature=[tf.TensorSpec([])])
    inner(1.0)
    named("later", lambda x: 2.0 * inner(x))(1.0)
    named("another", lambda x: 2.0 * x)(1.0)
    assert COMPLETE == ["inner", "later"]


def test_a_tape_tells_whether_it_is_open():
    with tf.GradientTape() as tape:
        assert tracing.is_recording(tape)
        with tape.stop_recording():
            assert not tracing.is_recording(tape)
    assert not tracing.is_recording(tape)


def test_in_xla_sees_compilation_from_any_depth():
    seen = {}

    def look(name):
        def function(x):
            seen[name] = tracing.in_xla()
            return x

        return function

    look("eager")(1)
    tf.function(look("graph"))(1)
    tf.function(look("xla"), jit_compile=True)(1)
    inner = tf.function(look("function in xla"))
    tf.function(lambda x: inner(x), jit_compile=True)(1)
    loop = look("loop in xla")
    tf.function(
        lambda x: tf.while_loop(lambda i: i < 2, lambda i: (loop(i) + 1,), [x]), jit_compile=True
    )(0)
    assert seen == {
        "eager": False,
        "graph": False,
        "xla": True,
        "function in xla": True,
        "loop in xla": True,
    }
