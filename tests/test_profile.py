"""The share of re-runs that is read from a profile: names, nesting, threads, XLA programs."""

import keras
import pytest
import tensorflow as tf

import tf_ckpt
from tf_ckpt import profile_share, tf_internals
from tf_ckpt.profile_events import Event
from tf_ckpt.profile_names import BACKWARD, FORWARD, RECOMPUTE, UNKNOWN, part_of


@pytest.mark.parametrize(
    ("path", "part"),
    [
        ("", UNKNOWN),
        ("StatefulPartitionedCall/model/dense/MatMul", FORWARD),
        ("StatefulPartitionedCall/sgd/AssignSubVariableOp", FORWARD),
        ("StatefulPartitionedCall/gradient_tape/model/dense/MatMul/MatMul_1", BACKWARD),
        ("StatefulPartitionedCall/model/tf_ckpt_recompute/a..b/dense/MatMul", RECOMPUTE),
        ("StatefulPartitionedCall/gradient_tape/model/tf_ckpt_recompute/a..b/dense/MatMul/MatMul", BACKWARD),
        ("while/body/_1/while/StatefulPartitionedCall/model/tf_ckpt_recompute/a/tf_ckpt_recompute/b/Mul", RECOMPUTE),
        ("gradient_tape/model/tf_ckpt_recompute/a/tf_ckpt_recompute/b/Mul/Mul_1", BACKWARD),
        ("replica_1/model/tf_ckpt_recompute/a/Mul", RECOMPUTE),
        # A backward function that was inlined: its caller's name comes first.
        ("gradient_tape/model/PartitionedCall/PartitionedCall/layer/tf_ckpt_recompute/a/Mul", RECOMPUTE),
        ("gradient_tape/model/PartitionedCall/gradient_tape/PartitionedCall/layer/tf_ckpt_recompute/a/Mul/Mul", BACKWARD),
        ("gradient_tape/PartitionedCall/layer/tf_ckpt_recompute/a/Mul/Mul_1", BACKWARD),
    ],
)
def test_parts_by_name(path, part):
    assert part_of(path) == part


def test_names_agree_with_when_operations_are_made():
    # What a layer makes in its first call is the forward run, in later calls a re-run; the rest are gradients.
    calls, inside, made = {}, [], {}

    class Told(keras.layers.Dense):
        def call(self, x):
            calls[self.name] = calls.get(self.name, 0) + 1
            inside.append(RECOMPUTE if calls[self.name] > 1 else FORWARD)
            try:
                return super().call(x)
            finally:
                inside.pop()

    def note(op_type, inputs, outputs, graph):
        if op_type == "MatMul":
            made[outputs[0].op.name] = inside[-1] if inside else BACKWARD

    Range = tf_ckpt.strategies.Range
    inputs = x = keras.Input((16,))
    for _ in range(9):
        x = Told(16, "gelu")(x)
    model = tf_ckpt.apply(keras.Model(inputs, x), lambda chain: [Range(0, 8, (Range(2, 5),))])
    calls.clear()

    @tf.function(autograph=False)
    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(model(x, training=True) ** 2)
        return tape.gradient(loss, [v.value for v in model.trainable_variables])

    with tf_internals.watch_operations(note):
        step.get_concrete_function(tf.zeros((4, 16)))
    assert sorted(calls.values()) == [1] + 5 * [2] + 3 * [3]
    assert {name: part_of(name) for name in made} == made


def share_of(*events):
    times = list(profile_share._self_times([Event(line, start, end, part) for line, start, end, part in events]))
    return times


def test_self_times_leave_out_what_is_nested():
    times = share_of(("a", 0, 100, FORWARD), ("a", 10, 40, RECOMPUTE), ("a", 20, 30, FORWARD), ("b", 0, 5, BACKWARD))
    assert sorted(times) == sorted(
        [(0, 10, FORWARD), (10, 20, RECOMPUTE), (20, 30, FORWARD), (30, 40, RECOMPUTE), (40, 100, FORWARD), (0, 5, BACKWARD)]
    )


def space_of(*events, step_id=True):
    """An XSpace of (thread, start ns, duration ns, event name), written as the profiler writes it."""
    space = tf_internals.profile(b"")
    plane = space.planes.add(name="/host:CPU")
    plane.stat_metadata[1].name = "id"
    names, lines = {}, {}
    for thread, start, duration, name in events:
        if thread not in lines:
            lines[thread] = plane.lines.add(id=thread, timestamp_ns=1000)
        number = names.setdefault(name, len(names) + 1)
        plane.event_metadata[number].name = name.partition("#")[0]
        event = lines[thread].events.add(metadata_id=number, offset_ps=start * 1000, duration_ps=duration * 1000)
        if "#" in name:
            event.stats.add(metadata_id=1, int64_value=int(name.partition("#")[2]))
    return space


RERUN, PLAIN = "m/tf_ckpt_recompute/a/MatMul:MatMul", "m/MatMul:MatMul"


def test_two_threads_share_an_instant():
    share = profile_share.read(space_of((1, 0, 100, PLAIN), (2, 50, 100, RERUN)))
    assert share.seconds == pytest.approx(150e-9)
    assert share.recompute == pytest.approx((25 + 50) * 1e-9)


def test_containers_and_other_events_do_not_count():
    share = profile_share.read(
        space_of(
            (1, 0, 400, "m/PartitionedCall:PartitionedCall"), (1, 0, 60, PLAIN), (1, 60, 40, RERUN), (1, 0, 900, "EagerExecute")
        )
    )
    assert (share.operations, share.seconds) == (2, pytest.approx(100e-9))
    assert share.recompute / share.seconds == pytest.approx(0.4)


def test_operations_of_other_executors_do_not_count():
    ours, others = "ExecutorState::Process#7", "ExecutorState::Process#8"
    share = profile_share.read(
        space_of(
            (1, 0, 100, ours), (1, 0, 60, PLAIN), (1, 60, 40, RERUN), (2, 0, 900, others), (2, 0, 900, "map/Decode:DecodeJpeg")
        )
    )
    assert share.seconds == pytest.approx(100e-9)


def test_an_xla_program_is_read_by_its_instructions():
    proto = tf_internals.hlo_pb2.HloProto()
    proto.hlo_module.name = "step"
    main = proto.hlo_module.computations.add(id=1, name="main")
    inner = proto.hlo_module.computations.add(id=2, name="fused")
    inner.instructions.add(id=20, name="mul", opcode="multiply").metadata.op_name = "m/tf_ckpt_recompute/a/Mul"
    main.instructions.add(id=10, name="dot", opcode="dot").metadata.op_name = "m/MatMul"
    main.instructions.add(id=11, name="fusion", opcode="fusion", called_computation_ids=[2], operand_ids=[10])
    main.instructions.add(id=12, name="copy", opcode="copy", operand_ids=[10])
    again = main.instructions.add(id=13, name="again", opcode="dot", operand_ids=[12])
    again.metadata.op_name = "m/tf_ckpt_recompute/a/MatMul"
    main.instructions.add(id=14, name="lonely", opcode="rng")
    space = tf_internals.profile(b"")
    metadata = space.planes.add(name="/host:metadata")
    metadata.stat_metadata[1].name = "Hlo Proto"
    metadata.event_metadata[5].id = 5
    metadata.event_metadata[5].stats.add(metadata_id=1, bytes_value=proto.SerializeToString())
    plane = space.planes.add(name="/host:CPU")
    for number, name in enumerate(("hlo_op", "program_id", "hlo_module"), 1):
        plane.stat_metadata[number].name = name
    line = plane.lines.add(id=1)
    for i, (name, duration) in enumerate({"dot": 10, "fusion": 20, "copy": 30, "again": 40, "lonely": 50}.items()):
        event = line.events.add(metadata_id=9, offset_ps=1000 * i, duration_ps=duration)
        event.stats.add(metadata_id=1, str_value=name)
        event.stats.add(metadata_id=2, uint64_value=5)
    plane.event_metadata[9].name = "whatever"
    share = profile_share.read(space)
    assert share.seconds == pytest.approx(150e-12)
    assert share.recompute == pytest.approx((20 + 30 + 40) * 1e-12)
    assert share.unknown == pytest.approx(50e-12)


def test_kernels_of_a_gpu_count_and_launches_do_not():
    # As the format is described; not compared with a GPU.
    space = space_of((1, 0, 900, PLAIN))
    plane = space.planes.add(name="/device:GPU:0")
    plane.stat_metadata[1].name = "tf_op"
    for number, (name, path) in enumerate({"Stream #1(compute)": RERUN, "Stream #2(compute)": PLAIN, "Steps": RERUN}.items()):
        line = plane.lines.add(id=number, name=name)
        line.events.add(metadata_id=1, offset_ps=1000 * number, duration_ps=1000).stats.add(metadata_id=1, str_value=path)
    share = profile_share.read(space, gpus=True)
    assert (share.operations, share.seconds, share.recompute) == (2, pytest.approx(2e-9), pytest.approx(1e-9))
    del space.planes[1]
    assert profile_share.read(space, gpus=True).operations == 0
