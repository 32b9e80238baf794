"""From a model's nodes to the `Chain` of stages that strategies plan on."""

import dataclasses
import warnings

import keras
import numpy as np

from tf_ckpt import graph as keras_graph
from tf_ckpt.costs import by_size, node_cost, node_cost_between, tensor_bytes
from tf_ckpt.errors import CheckpointWarning
from tf_ckpt.layers.recompute import Recompute
from tf_ckpt.strategies.chain import Chain, Tensor
from tf_ckpt.strategies.tree import tree_of, walk

RECOMPUTES = "it is or holds a `Recompute` layer, which looks after itself"


class Stages:
    """The calls of a model, nested models opened, in the order in which they run.

    Attributes:
        nodes: List of `graph.Node`.
        names: List of their names, `outer/inner` inside nested models.
        ranges: List of pairs (start, stop): the stages of each nested model.
        inside: Dict from the name of a nested model's call to its `(start, stop)`.
        models: Dict from that name to the model.
        unfit: Dict from the name of each call that no plan may recompute to the reason. Known once there is a `chain`.
    """

    def __init__(self, level):
        self.nodes, self.names, self.ranges, self.inside, self.models, self.unfit = [], [], [], {}, {}, {}
        self._tensors = {}  # number -> [spec, producer, {stage: positions in the node's inputs}]
        numbers = {x: self._tensor(None, -1) for x in level.inputs}
        self._walk(level, numbers, "")
        self.outputs = [numbers[x] for x in level.outputs]

    def _tensor(self, spec, producer):
        self._tensors[len(self._tensors)] = [spec, producer, {}]
        return len(self._tensors) - 1

    def _walk(self, level, numbers, prefix):
        for node in level.nodes:
            name = prefix + node.name
            if node.inner is not None:
                start = len(self.nodes)
                inner = dict(zip(node.inner.inputs, (numbers[x] for x in node.inputs), strict=True))
                self._walk(node.inner, inner, name + "/")
                numbers.update(zip(node.outputs, (inner[x] for x in node.inner.outputs), strict=True))
                self.inside[name], self.models[name] = (start, len(self.nodes)), node.operation
                if len(self.nodes) - start > 1:
                    self.ranges.append(self.inside[name])
                continue
            stage = len(self.nodes)
            self.nodes.append(node)
            self.names.append(name)
            for position, x in enumerate(node.inputs):
                self._tensors[numbers[x]][2].setdefault(stage, []).append(position)
            for x in node.outputs:
                numbers[x] = self._tensor(node.specs[x], stage)

    def _reach(self):
        """Returns for each stage the set of the model's outputs that it has a part in."""
        reach = [frozenset()] * len(self.nodes)
        by_producer = {}
        for number, (_, producer, uses) in self._tensors.items():
            by_producer.setdefault(producer, []).append((number, uses))
        for stage in reversed(range(len(self.nodes))):
            for number, uses in by_producer.get(stage, []):
                own = {i for i, x in enumerate(self.outputs) if x == number}
                reach[stage] = reach[stage].union(own, *(reach[s] for s in uses))
        return reach

    def chain(self, batch_size, device=None, gradients_wait=True, between=None):
        """Returns the `Chain` for a batch size, from a trace of each kind of call.

        Args:
            batch_size: Integer.
            device: A `Calibration` that turns FLOPs into time, or None.
            between: Optional pair (least, largest) of batch sizes. Calls are then traced for these two and serve all batch
                sizes from the one to the other: see `costs.node_cost_between`.
        """
        cache = {}

        def cost_of(node, wanted):
            if between is None:
                return node_cost(node, batch_size, cache, wanted)
            return node_cost_between(node, batch_size, *between, cache, wanted)

        # A `tf.function` would keep the trace that is made here, side effects left out and all.
        hidden = [keras_graph.compiled_call(node.operation) for node in self.nodes]
        idle = self.idle()
        costs = [
            by_size(node, batch_size) if compiled else cost_of(node, wanted)
            for node, compiled, wanted in zip(self.nodes, hidden, self._differentiated(), strict=True)
        ]
        costs = [_kept_by_none(c) if none and not c.traced else c for c, none in zip(costs, idle, strict=True)]
        n, tensors = len(self.nodes), []
        for number, (spec, producer, uses) in self._tensors.items():
            spec = spec if spec is not None else next((self._input_spec(number, s) for s in uses), None)
            if spec is None:
                continue
            counts = {s: max(costs[s].input_uses[p] for p in places) for s, places in uses.items()}
            inner = [s for s, places in uses.items() if any(costs[s].reads_inputs[p] for p in places)]
            if producer >= 0:
                position = self.nodes[producer].outputs.index(id(spec))
                if costs[producer].reads_outputs[position]:
                    inner.append(producer)
            needed = bool(inner)
            if number in self.outputs:
                counts[n] = 1
                inner.append(n)  # the loss reads it
            floating = keras.backend.is_float_dtype(spec.dtype)
            size = tensor_bytes(spec, batch_size)
            traced = [(s, places) for s, places in uses.items() if costs[s].traced]
            handed = {
                "passed": tuple(s for s, places in traced if any(costs[s].passes[p] for p in places)),
                "spared": tuple(s for s, places in traced if not any(costs[s].reruns_inputs[p] for p in places)),
            }
            tensors.append(Tensor(size, producer, tuple(sorted(counts.items())), needed, tuple(inner), floating, **handed))
        reach = self._reach()
        kinds = {}
        seen, weights = set(), np.zeros(n)
        for stage in reversed(range(n)):  # a shared layer's gradient exists from its last call on
            if id(self.nodes[stage].operation) not in seen:
                weights[stage] = costs[stage].weight_bytes
                seen.add(id(self.nodes[stage].operation))
        chain = Chain(
            names=tuple(self.names),
            internal=np.array([c.internal_bytes for c in costs], float),
            flops=np.array([c.flops for c in costs], float),
            pruned_flops=np.array([c.pruned_flops for c in costs], float),
            backward_flops=np.array([c.backward_flops for c in costs], float),
            weights=weights,
            forward_extra=np.array([c.forward_extra for c in costs], float),
            taped_extra=np.array([c.taped_extra for c in costs], float),
            backward_extra=np.array([c.backward_extra for c in costs], float),
            backward_last=np.array([c.backward_last if c.traced else c.backward_extra for c in costs], float),
            backward_again=np.array([c.backward_again if c.traced else c.backward_extra for c in costs], float),
            early=np.array([c.early for c in costs], float),
            shared=self._shared(),
            unknown=tuple(sorted({kind for c in costs for kind in c.unknown})),
            untraced=tuple(name for name, c in zip(self.names, costs, strict=True) if not c.traced),
            open_sized=tuple(
                name
                for name, node in zip(self.names, self.nodes, strict=True)
                if any(None in node.specs[x].shape[1:] for x in node.outputs)
            ),
            **_parts(costs),
            fixed=self._fixed(costs, reach),
            joins_before=np.array([c.elementwise_start for c in costs], bool),
            joins_after=np.array([c.elementwise_end or c.expensive_end for c in costs], bool),
            expensive_end=np.array([c.expensive_end for c in costs], bool),
            groups=np.array([kinds.setdefault(r, len(kinds)) for r in reach], int),
            ranges=tuple(self.ranges),
            tensors=tuple(tensors),
            batch_size=batch_size,
            gradients_wait=gradients_wait,
            graph_mode=True,
            idle=np.array(idle, bool),
            largest=max((c.largest for c in costs), default=0),
        )
        return chain if device is None else _timed(chain, costs, device)

    def _differentiated(self):
        """Returns for each stage which of its inputs a gradient is asked for: those after the first trainable weight.

        A model without any, such as a network whose features make up another one's loss, has gradients of its inputs at most.
        """
        trained = [bool(keras_graph.trained_weights(node.operation)) for node in self.nodes]
        wanted = [[False] * len(node.inputs) for node in self.nodes]
        for _, producer, uses in self._tensors.values():  # in the order in which they are made
            if (trained[producer] or any(wanted[producer])) if producer >= 0 else not any(trained):
                for stage, places in uses.items():
                    for position in places:
                        wanted[stage][position] = True
        return [tuple(x) for x in wanted]

    def idle(self):
        """Returns for each stage whether no gradient reaches it: no trainable weight comes before it or is in it."""
        asked = zip(self._differentiated(), self.nodes, strict=True)
        return [not any(wanted) and not keras_graph.trained_weights(node.operation) for wanted, node in asked]

    def _shared(self):
        """Returns the stages of each layer with trainable weights that is called more than twice."""
        calls = {}
        for stage, node in enumerate(self.nodes):
            if keras_graph.trained_weights(node.operation):
                calls.setdefault(id(node.operation), []).append(stage)
        return tuple(tuple(stages) for stages in calls.values() if len(stages) > 2)

    def _fixed(self, costs, reach):
        for stage, (node, cost) in enumerate(zip(self.nodes, costs, strict=True)):
            reason = f"it {cost.unrepeatable}" if cost.unrepeatable else reason_to_stay_plain(node.operation)
            if not reach[stage]:
                reason = reason or "nothing that it makes reaches an output of the model"
            if reason:
                self.unfit[self.names[stage]] = reason
            if cost.unrepeatable:
                warnings.warn(
                    f"'{self.names[stage]}' runs plain in every plan: it {cost.unrepeatable}.",
                    CheckpointWarning,
                    stacklevel=6,
                )
        return np.array([name in self.unfit for name in self.names], bool)

    def _input_spec(self, number, stage):
        node = self.nodes[stage]
        return node.specs[node.inputs[self._tensors[number][2][stage][0]]]


def _kept_by_none(cost):
    """Returns the costs, guessed by sizes, of a call that no gradient reaches."""
    nothing = {"internal_bytes": 0, "pruned_flops": 0, "backward_flops": 0, "pruned_work": (), "backward_work": ()}
    reads = {"reads_inputs": (False,) * len(cost.reads_inputs), "reads_outputs": (False,) * len(cost.reads_outputs)}
    return dataclasses.replace(cost, **nothing, **reads)


def reason_to_stay_plain(operation):
    """Returns why recompute would change a call or gain nothing from it, or ""."""
    layers = keras_graph.sublayers(operation)
    if any(isinstance(layer, keras.layers.Embedding) for layer in layers):
        return "the gradient of an embedding table is sparse, and recompute would make it as large as the table"
    if any(isinstance(layer, Recompute) for layer in layers):
        return RECOMPUTES
    hidden = keras_graph.compiled_call(operation)
    return "" if hidden is None else f"the `call` of {hidden} is a `tf.function`, which recompute cannot see into"


def refusal(stages, plan):
    """Returns why a plan that was made elsewhere does not fit a model, or "".

    Args:
        stages: The model's `Stages`, whose names are those of the plan.
        plan: A `Plan`.
    """
    for r in walk(tree_of(plan.ranges())):
        name = stages.names[r.start]
        if r.part:
            if not keras_graph.inner_part(stages.nodes[r.start].operation)[0]:
                return f"there is no part inside '{name}' that can be recomputed alone"
            continue
        for k in range(r.start, r.stop):
            if reason_to_stay_plain(stages.nodes[k].operation):
                return f"'{stages.names[k]}' cannot be recomputed: embeddings and `Recompute` layers never are"
        for start, stop in stages.ranges:
            overlap = (max(r.start, start), min(r.stop, stop))
            if overlap[0] < overlap[1] and overlap not in ((start, stop), (r.start, r.stop)):
                return f"its segment from '{name}' on cuts through the nested model of '{stages.names[start]}'"
    return ""


def _timed(chain, costs, device):
    """Returns a chain in nanoseconds on a device: what was traced knows no device, and is priced anew for each."""
    known = {}

    def nanoseconds(works):
        for work in works:  # calls alike share their costs, hence these tuples
            if id(work) not in known:
                known[id(work)] = 1e9 * sum(x.times * device.seconds(x.kind, x.flops, x.bytes) for x in work)
        return np.array([known[id(work)] for work in works], float)

    return dataclasses.replace(
        chain,
        flops=nanoseconds([c.work for c in costs]),
        pruned_flops=nanoseconds([c.pruned_work for c in costs]),
        backward_flops=nanoseconds([c.backward_work for c in costs]),
        part_flops=nanoseconds([() if c.part is None else c.part.work for c in costs]),
        unit="nanoseconds",
        counted=chain,
    )


def _parts(costs):
    """Returns the arrays of a `Chain` that say what recomputing a stage's inner part does."""
    parts = [c.part for c in costs]
    pairs = list(zip(parts, costs, strict=True))
    return {
        "part_internal": np.array([c.internal_bytes if p is None else p.internal_bytes for p, c in pairs], float),
        "part_flops": np.array([0.0 if p is None else p.flops for p in parts], float),
        "part_taped_extra": np.array([c.taped_extra if p is None else p.taped_extra for p, c in pairs], float),
        "part_backward_extra": np.array([c.backward_extra if p is None else p.backward_extra for p, c in pairs], float),
        "part_names": tuple("" if p is None else p.name for p in parts),
    }
