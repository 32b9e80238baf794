"""The most bytes that small graphs hold at once, against figures worked out by hand."""

import contextlib

import pytest
import tensorflow as tf

from tf_ckpt.flops import operation_flops
from tf_ckpt.liveness import UNKNOWN, buffers, held, highest, root, tensor_size

ONE = 100 * 4  # bytes of a vector of the graphs below


@contextlib.contextmanager
def graph():
    """Yields a function that makes inputs of a new graph, and one that returns what was made since."""
    with tf.Graph().as_default() as made:

        def vector(n=100, dtype="float32"):
            return tf.compat.v1.placeholder(dtype, n if isinstance(n, tuple) else (n,))

        yield vector, made.get_operations


def peak(operations, results, before=(), inputs=()):
    return highest(operations(), list(before), list(results), {x.ref() for x in inputs})


# --- in place ---------------------------------------------------------------------------------------------------------


def test_elementwise_operations_write_into_their_input():
    with graph() as (vector, operations):
        x = vector()
        y = tf.tanh(tf.exp(tf.sin(x)))  # Sin is not known to write in place; the others reuse what it made
        assert peak(operations, [y], inputs=[x]) == ONE


def test_an_input_that_others_hold_is_not_written_into():
    with graph() as (vector, operations):
        x = vector()
        y = tf.exp(x)
        assert peak(operations, [y], inputs=[x]) == ONE
        assert peak(operations, [y], before=[x]) == ONE  # freed after its last reader, so reused
        assert peak(operations, [x, y], before=[x]) == 2 * ONE


def test_another_size_is_not_written_into():
    with graph() as (vector, operations):
        x = vector()
        y = tf.cast(tf.exp(x), "float64")
        assert peak(operations, [y], inputs=[x]) == 3 * ONE


@pytest.mark.parametrize(("scaled", "vectors"), [(False, 3), (True, 4)])
def test_a_constant_moves_inwards(scaled, vectors):
    # (a * b) * c becomes (a * c) * b: while another product waits for `a`, `a * c` is one vector more.
    with graph() as (vector, operations):
        a, b, other = before = [vector() for _ in range(3)]
        y = a * b
        y = y * 0.5 if scaled else tf.exp(y)
        z = a * other
        assert peak(operations, [y, z], before) == vectors * ONE


def test_a_constant_stays_where_others_read_the_product():
    with graph() as (vector, operations):
        a, b, other = before = [vector() for _ in range(3)]
        y = a * b
        w = a * other
        z = y * 0.5
        assert peak(operations, [y, w, z], before) == 3 * ONE
        assert peak(operations, [w, z], before) == 4 * ONE


def test_a_product_needs_its_inputs_beside_its_result():
    with graph() as (vector, operations):
        x, w = vector((10, 10)), vector((10, 10))
        y = tf.exp(x) @ w
        assert peak(operations, [y], inputs=[x, w]) == 2 * ONE


def test_one_of_two_inputs_is_reused():
    with graph() as (vector, operations):
        x = vector()
        y = tf.add(tf.exp(x), tf.sin(x))
        assert peak(operations, [y], inputs=[x]) == 2 * ONE


# --- readers ----------------------------------------------------------------------------------------------------------


def test_a_tensor_read_twice_stays_for_the_second():
    with graph() as (vector, operations):
        x = vector()
        a = tf.exp(x)
        b = tf.tanh(a)
        c = tf.tanh(b)
        assert peak(operations, [c], inputs=[x]) == ONE
        d = tf.multiply(a, c)
        assert peak(operations, [d], inputs=[x]) == 2 * ONE


def test_read_twice_by_one_operation_is_one():
    with graph() as (vector, operations):
        x = vector()
        a = tf.exp(x)
        y = tf.multiply(a, a)
        assert peak(operations, [y], inputs=[x]) == ONE


def test_results_stay():
    with graph() as (vector, operations):
        x = vector()
        a = tf.exp(x)
        b = tf.tanh(a)
        c = tf.tanh(b)
        assert peak(operations, [a, c], inputs=[x]) == 2 * ONE
        assert peak(operations, [a, b, c], inputs=[x]) == 3 * ONE


def test_what_nobody_reads_is_let_go_at_once():
    with graph() as (vector, operations):
        x = vector()
        tf.exp(x)
        tf.sin(x)
        y = tf.tanh(x)
        assert peak(operations, [y], inputs=[x]) == ONE


def test_what_was_there_before_counts_until_it_is_read():
    with graph() as (vector, operations):
        kept, x = vector(300), vector()
        y = tf.concat([tf.exp(x), tf.exp(tf.reduce_sum(kept, keepdims=True))], 0)
        assert peak(operations, [y], before=[kept], inputs=[x]) == 4 * ONE + 4
        assert peak(operations, [y], before=[kept, kept], inputs=[x]) == 4 * ONE + 4  # the same, named twice
        assert peak(operations, [], before=[], inputs=[x, kept]) == 2 * (ONE + 4)


def test_an_empty_list_holds_what_was_there():
    with graph() as (vector, _):
        assert highest([], [vector()], [], set()) == ONE
        assert highest([], [], [], set()) == 0


# --- aliases ----------------------------------------------------------------------------------------------------------


def test_aliases_hold_nothing_of_their_own():
    with graph() as (vector, operations):
        x = vector()
        a = tf.exp(x)
        y = tf.stop_gradient(tf.squeeze(tf.expand_dims(tf.identity(tf.reshape(a, (10, 10))), 0), 0))
        assert root(y, set()) is a
        assert peak(operations, [y], inputs=[x]) == ONE


def test_what_an_alias_reads_stays():
    with graph() as (vector, operations):
        x = vector()
        a = tf.exp(x)
        flat = tf.reshape(a, (10, 10))
        b = tf.tanh(a)  # would write into `a`, were it not read as `flat` below
        y = tf.multiply(flat, tf.reshape(b, (10, 10)))
        assert peak(operations, [y], inputs=[x]) == 2 * ONE


def test_an_alias_of_an_input_is_the_input():
    with graph() as (vector, operations):
        x = vector()
        y = tf.reshape(x, (10, 10))
        assert root(y, {x.ref()}) is x
        assert peak(operations, [y], inputs=[x]) == 0
        assert peak(operations, [y], inputs=[y]) == 0


def test_many_tensors_through_one_identity_keep_their_places():
    with graph() as (vector, _):
        x, y = tf.exp(vector()), tf.exp(vector())
        first, second = tf.identity_n([x, y])
        assert root(first, set()) is x
        assert root(second, set()) is y


# --- sizes ------------------------------------------------------------------------------------------------------------


def test_sizes():
    with graph() as (vector, _):
        assert tensor_size(vector((2, 3))) == 24
        assert tensor_size(vector((2, 3), "bfloat16")) == 12
        assert tensor_size(vector((2, 3), "bool")) == 6
        assert tensor_size(vector((None, 3))) == UNKNOWN * 3 * 4
        assert tensor_size(tf.compat.v1.placeholder("float32")) == 0  # no rank
        assert tensor_size(tf.raw_ops.EmptyTensorList(element_shape=[2], max_num_elements=3, element_dtype="float32")) == 0
        assert tensor_size(tf.compat.v1.placeholder("string", (4,))) == 0


def test_lists_hold_their_rows():
    with graph() as (vector, operations):
        x = vector((10, 10))
        rows = tf.raw_ops.TensorListFromTensor(tensor=x, element_shape=[10])
        assert held([rows], {x.ref()}) == ONE  # copies
        row = tf.exp(vector(10))
        longer = tf.raw_ops.TensorListPushBack(input_handle=rows, tensor=row)
        assert held([rows, longer], {x.ref()}) == ONE + 40
        y = tf.raw_ops.TensorListStack(input_handle=longer, element_shape=[10], element_dtype="float32")
        assert peak(operations, [y], inputs=[x]) == 2 * (ONE + 40)


# --- functions --------------------------------------------------------------------------------------------------------


def test_a_call_holds_what_is_inside():
    @tf.function(autograph=False)
    def function(x, y):
        wide = tf.sin(tf.tile(x, [3]))
        return x, tf.reduce_sum(wide), tf.tanh(y)

    with graph() as (vector, operations):
        x, y = vector(), vector()
        passed, total, made = function(x, y)
        call = next(op for op in operations() if op.type == "PartitionedCall")
        same = next(z for z in call.outputs if z.shape.rank)
        assert root(same, set()) is x
        assert buffers(passed, {x.ref()}) == {}
        assert held([passed, total, made], {x.ref(), y.ref()}) == 4 + ONE
        # Tiled and its sine, when neither the sum nor `made` is there; both count with the call's results.
        assert peak(operations, [passed, total, made], inputs=[x, y]) == 6 * ONE


@pytest.mark.parametrize("turns", [1, 3, 10])
def test_a_loop_holds_the_rows_that_it_makes(turns):
    with graph() as (vector, operations):
        x = vector()
        rows = tf.TensorArray("float32", turns)

        def body(i, rows, x):
            x = tf.sin(x)
            return i + 1, rows.write(i, x), x

        _, rows, _ = tf.while_loop(lambda i, *_: i < turns, body, (0, rows, x))
        y = rows.stack()
        found = peak(operations, [y], inputs=[x])
        # The rows and the stack of them; the state is the last of the rows, counted once more.
        assert 2 * turns * ONE <= found <= (2 * turns + 2) * ONE + 16


def test_a_loop_of_unknown_length_is_no_error():
    with graph() as (_, operations):
        x = tf.compat.v1.placeholder("float32")  # not even a rank
        y = tf.while_loop(lambda x: tf.reduce_sum(x) < 1.0, lambda x: [tf.exp(x)], [x], shape_invariants=[tf.TensorShape(None)])
        assert highest(operations(), [], y, {x.ref()}) >= 0


def test_functions_of_an_imported_graph():
    with graph() as (vector, operations):
        x = vector()
        y = tf.while_loop(lambda i, x: i < 5, lambda i, x: (i + 1, tf.tanh(tf.sin(x))), (0, x))[1]
        expected = peak(operations, [y], inputs=[x])
        flops = sum(operation_flops(op) for op in operations())
        definition = tf.compat.v1.get_default_graph().as_graph_def()
    with graph() as (_, operations):
        tf.graph_util.import_graph_def(definition, name="")
        x, y = (tf.compat.v1.get_default_graph().get_tensor_by_name(t.name) for t in (x, y))
        assert peak(operations, [y], inputs=[x]) == expected
        assert sum(operation_flops(op) for op in operations()) == flops == 5 * (2 * 100 + 2)


def test_of_two_branches_the_larger_counts():
    with graph() as (vector, operations):
        x = vector()
        choice = tf.compat.v1.placeholder("bool", ())
        y = tf.cond(choice, lambda: tf.exp(x), lambda: tf.reduce_sum(tf.reshape(tf.sin(tf.tile(x, [5])), (5, 100)), 0))
        assert 5 * ONE <= peak(operations, [y], inputs=[x, choice]) <= 11 * ONE + 64
