"""What differs, and whose fault it is: the runs of `check` in each mode, compared."""

import keras
import numpy as np
import tensorflow as tf

from tf_ckpt import graph as keras_graph
from tf_ckpt.causes import ROUNDING, UNKNOWN, VARIES, gather
from tf_ckpt.check_report import FOLLOWS, Difference, gap
from tf_ckpt.check_runs import OURS, PLAIN, Run
from tf_ckpt.errors import CheckpointError, first_line
from tf_ckpt.observing import differs, pairs, path_of
from tf_ckpt.python_state import same, short

# Up to these shares of the largest value a difference is one of rounding; under XLA it is then none.
_ROUNDING = {"float16": 3e-3, "bfloat16": 2e-2}
_ROUNDING_FLOAT32 = 2e-5
_AGAIN = 3  # runs of the plain model, to see whether it repeats itself
_UNEXPLAINED = (
    "not found: forward run and re-run of each segment are alike, and the plain model repeats itself. Please report it, with "
    "the model"
)


class Findings:
    """What was found in the modes that were looked at.

    Args:
        subject: A `check_runs.Subject`.
        tolerance: See `tf_ckpt.check`.

    Attributes: as those of `CheckReport`.
    """

    def __init__(self, subject, tolerance):
        self.subject, self.tolerance = subject, tolerance
        self.differences, self.plain, self.notes = [], {}, []
        self.compared, self.largest_share = 0, 0.0
        self._forwards, self._reruns, self._evidence, self._inside = {}, set(), {}, {}

    @property
    def segments(self):
        """The names of the segments that were run again, in order."""
        return [name for name in sorted(self._forwards, key=self._forwards.get) if name in self._reruns]

    def not_rerun(self):
        """Returns the names of segments that ran forward only."""
        if any(each.kind == "error" for each in self.differences):
            return []
        return [name for name in self._forwards if name not in self._reruns and name not in self.plain]

    def look(self, mode):
        """Runs the subject in a mode, plain and recomputed, and compares."""
        rounding = self._rounding()
        allowed = self.tolerance if self.tolerance is not None else rounding if mode == "xla" else 0.0
        plain = Run(self.subject, PLAIN, mode)
        try:
            want = plain()
        except tf.errors.ResourceExhaustedError:
            raise
        except (ValueError, TypeError, LookupError, AttributeError, RuntimeError, tf.errors.OpError) as error:
            raise CheckpointError(
                f"The plain model fails in {mode} mode: {first_line(error)}. Received: mode {mode!r} in `modes`"
            ) from error
        runs = [Run(self.subject, OURS, mode, values=True)]
        if mode != "eager":  # to note values keeps graph optimisers from what they do in training
            runs.append(Run(self.subject, OURS, mode))
        found = []
        for run in runs:
            have = self._run(run, mode, found)
            if have is None:
                break
            differing = run.differences(allowed) if run.values else []
            self._note_run(run)
            found += [self._of_pair(mode, pair, rounding) for pair in differing]
        else:
            if mode == "eager":
                self._compare_python(want, have)
            found += self._compare(mode, plain, want, have, allowed, rounding, bool(found))
        self.differences += found

    def _run(self, run, mode, found):
        """Returns the results of a run, or None if it fails, which is then among what was `found`."""
        try:
            return run()
        except (MemoryError, tf.errors.ResourceExhaustedError):
            raise
        except Exception as error:
            if run.observer is None:
                raise
            self._note_run(run)
            found += [self._of_pair(mode, pair, 0.0) for pair in run.observer.first_problems()]
            found.append(self._of_error(mode, error, run.observer))
            return None

    def _note_run(self, run):
        observer = run.observer
        for name in observer.forwards:
            self._forwards.setdefault(name, len(self._forwards))
        self._reruns |= observer.reruns
        self._inside |= observer.inside
        for name, reason in observer.plain.items():
            self.plain.setdefault(name, reason.rstrip("."))
        self.compared += observer.compared

    def _rounding(self):
        """Returns up to which share of the largest value a difference may be one of rounding."""
        layers = keras_graph.sublayers(self.subject.models[PLAIN])
        return max([_ROUNDING_FLOAT32, *(_ROUNDING.get(layer.compute_dtype, 0.0) for layer in layers)])

    def _of(self, mode):
        """Returns what layers were seen to do in a mode."""
        kind = "eager" if mode == "eager" else "graph"
        if kind not in self._evidence:
            self._evidence[kind] = gather(self.subject, OURS, kind)
        return self._evidence[kind]

    # Between forward run and re-run

    def _of_pair(self, mode, pair, rounding):
        trace, event = pair.trace, pair.event
        inside = event.owners[len(trace.around) :] if event.owners[: len(trace.around)] == trace.around else event.owners
        layer, owners = None, event.owners
        if event.kind == "exit":
            layer = event.layer
        elif event.kind == "write":
            layer, owners = _owner(trace, event.layer)
        elif event.kind == "loss":
            layer, owners = event.layer, _around(trace, event.layer)
        elif inside:
            layer, owners = inside[-1], event.owners[: event.owners.index(inside[-1])]
        kind, text, numbers = self._said(pair)
        candidates = [layer, *_inside(trace, layer)] if layer is not None else reversed(trace.around)
        cause = self._of(mode).of(candidates)
        if not cause:
            small = numbers.get("share", 1.0) <= rounding and pair.a is not None and pair.a.dtype.kind not in "biuOSU"
            cause = ROUNDING if small else UNKNOWN
        name = self._path((*owners, layer)) if layer is not None else ""
        return Difference(mode, kind, name, trace.name, text, cause, **numbers)

    def _said(self, pair):
        """Returns the kind of a difference, what differs, and by how much."""
        if pair.problem is not None:
            kind, text = pair.problem
            calls = pair.event.kind == "enter" and kind != "calls"
            return kind, f"what it passes to '{pair.event.layer.name}': {text}" if calls else text, {}
        name = pair.what
        if pair.event.kind == "enter":
            name = f"what it passes to '{pair.event.layer.name}' ({name})"
        elif pair.event.kind == "write":
            name = f"what it writes to '{pair.event.layer.path}'"
        found = gap(pair.a, pair.b)
        self.largest_share = max(self.largest_share, found.share)
        numbers = {"largest": found.largest, "share": found.share, "count": found.count, "size": found.size}
        kind = "write" if pair.event.kind == "write" else "value"
        return kind, f"{name} differs between forward run and re-run", numbers

    def _path(self, operations):
        models = [keras_graph.original(x) for x in self.subject.models.values()]
        return path_of(x for x in operations if not any(x is model for model in models))

    def _of_error(self, mode, error, observer):
        text = first_line(error)
        if isinstance(error, CheckpointError):  # what Keras puts before it is said anyway
            text = text.split(".call(): ", 1)[-1]
        names = [name for name in observer.forwards if f"'{name}'" in text]
        trace = observer.last
        segment = names[-1] if names else trace.name if trace is not None else ""
        layer, owners, cause = None, (), ""
        for event in trace.events if trace is not None and trace.name == segment else ():
            cause = self._of(mode).of([event.layer]) if event.kind == "exit" else ""
            if cause:
                layer, owners = event.layer, event.owners
                break
        around = () if trace is None else reversed(trace.around)
        cause = cause or self._of(mode).of(around) or f"see the error. {_ADVICE.get(type(error), '')}".rstrip()
        name = self._path((*owners, layer)) if layer is not None else ""
        return Difference(mode, "error", name, segment, f"{type(error).__name__}: {text}", cause)

    # Between plain and recomputed

    def _compare(self, mode, plain, want, have, allowed, rounding, explained):
        floor = _floor(want.values)
        found, small = [], []
        for key, a in want.values.items():
            self.compared += 1
            problem = _problem(a, have.values[key])
            if problem:
                found.append((key, problem, None))
                continue
            distance = _distance(a, have.values[key], floor if key[0] == "gradient" else 0.0)
            if distance is None:
                continue
            exactly = distance.share <= allowed and _is_float(a)
            self.largest_share = max(self.largest_share, distance.share)
            if not exactly:
                (small if distance.share <= rounding and _is_float(a) else found).append((key, "", distance))
        if not found and not small:
            return []
        varying = {} if explained else self._varying(mode, plain, want, floor)
        if varying and small and max(varying.values()) <= rounding:
            self.notes.append(
                f"[{mode}] the plain model itself rounds differently from run to run here: differences in the last places do "
                "not count."
            )
            small = []
        made = []
        where, cause = "", FOLLOWS if explained else _UNEXPLAINED
        if found and varying and max(varying.values()) > rounding:
            where, cause = self._first_varying(mode)
        elif found and not explained:
            where, cause = self._suspect(mode)
        order = {key: number for number, key in enumerate(want.values)}
        for key, problem, distance in sorted([*found, *small], key=lambda x: order[x[0]]):
            if problem == _NO_GRADIENT and not np.any(_values(have.values[key])):
                made.append(Difference(mode, key[0], "", "", f"{_named(key)} is zeros with recompute", _ZEROS))
                continue
            tiny = not explained and distance is not None and distance.share <= rounding and _is_float(want.values[key])
            why = ROUNDING if tiny else cause
            numbers = {} if distance is None else vars(distance)
            made.append(Difference(mode, key[0], where, "", f"{_named(key)} {problem or _FROM_PLAIN}", why, **numbers))
        return made

    def _varying(self, mode, plain, want, floor):
        """Returns by how much the plain model differs from itself, for what does."""
        found = {}
        fresh = [Run(self.subject, PLAIN, mode)] if mode != "eager" else []  # what is drawn while tracing is drawn anew
        for run in [plain] * _AGAIN + fresh:
            again = run()
            for key, a in want.values.items():
                b = again.values[key]
                distance = None if _problem(a, b) else _distance(a, b, floor if key[0] == "gradient" else 0.0)
                if distance is not None:
                    found[key] = max(found.get(key, 0.0), distance.share)
        return found

    def _suspect(self, mode):
        """Returns the first recomputed layer that does what cannot be repeated, and what, though its values are alike."""
        for layer, owners in self._inside.values():
            cause = self._of(mode).of([layer])
            if cause:
                return self._path((*owners, layer)), cause
        return "", _UNEXPLAINED

    def _first_varying(self, mode):
        """Returns the first layer that differs between two runs of the plain model, and why."""
        traces = []
        for _ in range(2):
            run = Run(self.subject, PLAIN, mode, values=True)
            run()
            traces.append(run.trace())
        pair = next((pair for pair in pairs(*traces, self.subject.known) if pair.problem is not None or differs(pair)), None)
        if pair is None:
            return "", f"{VARIES}: {UNKNOWN}"
        owners = pair.event.owners
        layer = pair.event.layer if pair.event.kind == "exit" else owners[-1] if owners else None
        cause = self._of(mode).of([layer, *_inside(traces[0], layer)]) or UNKNOWN
        owners = owners if pair.event.kind == "exit" else owners[:-1]
        return self._path((*owners, layer)) if layer is not None else "", f"{VARIES}: {cause}"

    def _compare_python(self, want, have):
        for label, once in want.python.items():
            if label in have.python and not same(once, have.python[label]):
                twice = short(have.python[label])
                told = short(once) != twice  # not so of random generators
                values = f" ({twice} after a step with recompute, {short(once)} after a plain one)" if told else ""
                self.notes.append(
                    f"Python data, {label}, is changed in the re-run as well{values}. If that matters, guard it by "
                    "`if not tf_ckpt.is_recomputing():`, or keep it in a Keras variable."
                )


def _is_float(value):
    value = value[1] if isinstance(value, tuple) else value
    return np.asarray(value).dtype.kind not in "biuOSU"


def _problem(a, b):
    """Returns how two results differ in kind, or ""."""
    if (a is None) != (b is None):
        return "is None with recompute, a value in the plain model" if b is None else _NO_GRADIENT
    if a is None:
        return ""
    if isinstance(a, tuple) != isinstance(b, tuple):
        return "is sparse in one of the two models, dense in the other"
    for x, y in zip(a, b, strict=True) if isinstance(a, tuple) else [(a, b)]:
        x, y = np.asarray(x), np.asarray(y)
        if x.dtype != y.dtype:
            return f"is {y.dtype} with recompute, {x.dtype} without"
        if x.shape != y.shape:
            return f"has shape {y.shape} with recompute, {x.shape} without"
    return ""


def _distance(a, b, floor):
    """Returns the `Gap` between two results of the same kind, or None."""
    if a is None:
        return None
    if isinstance(a, tuple):
        return gap(a[0], b[0]) or gap(a[1], b[1], floor)
    return gap(a, b, floor)


def _floor(values):
    """Returns what counts as the least size of a gradient: some are nothing but rounding, such as that of a key's bias."""
    gradients = [x[1] if isinstance(x, tuple) else x for (kind, _), x in values.items() if kind == "gradient"]
    tops = [float(np.max(np.abs(np.asarray(x).astype("float64")), initial=0.0)) for x in gradients if x is not None]
    return 0.05 * max([x for x in tops if np.isfinite(x)], default=0.0)


def _named(key):
    kind, name = key
    if kind == "state":
        return f"the value of '{name.rsplit('#')[0]}' after the step"
    return {"loss": "the loss", "output": f"output {name}", "gradient": f"the gradient of '{name}'"}[kind]


def _inside(trace, layer):
    """Returns the layers that are called inside a layer."""
    found = {id(e.layer): e.layer for e in trace.events if e.kind == "exit" and any(x is layer for x in e.owners)}
    return list(found.values())


def _around(trace, layer):
    """Returns the layers around a layer."""
    return next((e.owners for e in trace.events if e.kind == "exit" and e.layer is layer), ())


def _owner(trace, variable):
    """Returns the layer that has a variable, innermost, and the layers around it; or None and nothing."""
    found = [
        (len(e.layer.variables), number, e)
        for number, e in enumerate(trace.events)
        if e.kind == "exit" and isinstance(e.layer, keras.Layer) and any(v is variable for v in e.layer.variables)
    ]
    event = min(found)[2] if found else None
    return (None, ()) if event is None else (event.layer, event.owners)


def _values(gradient):
    return gradient[1] if isinstance(gradient, tuple) else gradient


_NO_GRADIENT = "is None in the plain model, a value with recompute"
_ZEROS = (
    "a recomputed function has several outputs of which one is not used, so that weights which lead to that one alone get "
    "zeros, where the plain model gives None. Do not return what is not used"
)
_FROM_PLAIN = "differs from the plain model's"
_ADVICE = {NotImplementedError: "Use `with tf_ckpt.disabled():` there."}
