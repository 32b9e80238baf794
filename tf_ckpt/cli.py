"""The command line: `python -m tf_ckpt` and `tf-ckpt`."""

import argparse
import contextlib
import ctypes
import json
import os
import re
import sys
import warnings

from tf_ckpt.budgets import device_bytes
from tf_ckpt.cli_model import load_data, load_model, load_strategy
from tf_ckpt.errors import CheckpointError
from tf_ckpt.json_file import check_writable
from tf_ckpt.planning import STRATEGIES

_MOST = 2**31 - 1  # of what sizes of tensors count in
_EPILOG = """\
MODEL is a saved model, `model.keras`, or `module:function`, where the function takes no arguments and returns a Keras model;
the module is looked for in this folder, too. Sizes are bytes, or text such as 6GiB or 800MB.

Results go to stdout, progress and errors to stderr. The exit status is 2 after an error.
"""
_EXAMPLES = {
    "plan": """\
examples:
  tf-ckpt plan model.keras --batch-size 64 --memory 6GiB --plot plan.png --save plan.json
  tf-ckpt plan my_models:resnet --strategy selective --target 0.3
""",
    "compare": """\
examples:
  tf-ckpt compare model.keras --batch-size 16 --strategies sqrt selective --plot compare.png
  tf-ckpt compare my_models:resnet --data my_data:batches --memory 2GiB --strategies sqrt plan.json

Without --data the model trains on random numbers, zeros for integers.
""",
    "max-batch": """\
examples:
  tf-ckpt max-batch model.keras --memory 6GiB --save plan.json
  tf-ckpt max-batch my_models:resnet --memory 2GiB --strategy recursive --json
""",
}


class _Parser(argparse.ArgumentParser):
    def error(self, message):
        self.exit(2, f"{self.prog}: error: {' '.join(message.split())} ({self.prog} --help explains)\n")


def parser():
    """Returns the `argparse.ArgumentParser` of the command line."""
    made = _Parser(
        prog="tf-ckpt",
        description="Gradient checkpointing for Keras models: plan it, compare strategies, find the largest batch.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    commands = made.add_subparsers(dest="command", metavar="COMMAND", required=True)

    def add(name, summary, run):
        sub = commands.add_parser(
            name,
            help=summary,
            description=summary[0].upper() + summary[1:] + ".",
            epilog=f"{_EXAMPLES[name]}\n{_EPILOG}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        sub.add_argument("model", type=_text, metavar="MODEL", help="model.keras or module:function")
        sub.add_argument(
            "--import",
            dest="imports",
            type=_text,
            action="append",
            default=[],
            metavar="MODULE",
            help="import this first: it registers the model's own layers (may be repeated)",
        )
        sub.add_argument("--optimizer", type=_text, metavar="NAME", help="default: what the model is compiled with, or adam")
        sub.add_argument("--json", action="store_true", help="print the result as JSON")
        sub.set_defaults(run=run)
        return sub

    sub = add("plan", "show what a strategy recomputes, and the memory and FLOPs that are predicted; nothing is trained", _plan)
    sub.add_argument("--batch-size", type=_count, metavar="N", help="samples in a step (default: what the model states, or 32)")
    sub.add_argument(
        "--memory",
        type=_share_or_text,
        metavar="SIZE",
        help="memory of the device, or a share of the plain model's peak such as 0.5: plans with the strategy budget",
    )
    _add_strategy(sub, "default: sqrt, or budget with --memory")
    sub.add_argument("--plot", type=_text, metavar="FILE", help="draw memory over a step, and the trade-off")
    sub.add_argument("--save", type=_text, metavar="FILE", help="write the plan, for tf_ckpt.Plan.load")

    sub = add("compare", "train the plain model and strategies in turns, and show memory, time and loss of each", _compare)
    sub.add_argument(
        "--strategies", type=_text, nargs="+", default=["sqrt", "selective"], metavar="S", help="names, or plans (.json)"
    )
    sub.add_argument("--data", type=_text, metavar="MODULE:FUNCTION", help="returns (x, y), or a dataset of batches")
    sub.add_argument("--batch-size", type=_count, metavar="N", help="samples in a step (default: 32)")
    sub.add_argument("--steps", type=_count, default=5, metavar="N", help="measured steps (default: 5)")
    sub.add_argument("--memory", type=_text, metavar="SIZE", help="simulate a device of this size")
    _add_training(sub)
    sub.add_argument("--plot", type=_text, metavar="FILE", help="draw peak memory against step time")

    sub = add("max-batch", "find the largest batch that fits, plain and checkpointed", _max_batch)
    sub.add_argument("--memory", type=_text, metavar="SIZE", help="memory of the device (default: what it reports)")
    _add_strategy(sub, "default: sqrt")
    sub.add_argument("--data", type=_text, metavar="MODULE:FUNCTION", help="returns (x, y) of one sample or more")
    sub.add_argument("--most", type=_count, default=4096, metavar="N", help="largest batch to try (default: 4096)")
    sub.add_argument("--no-verify", action="store_true", help="predict only; train nothing")
    _add_training(sub)
    sub.add_argument("--save", type=_text, metavar="FILE", help="write the plan for that batch, for tf_ckpt.Plan.load")
    return made


def main(arguments=None):
    """Runs a command and returns its exit status: 0, or 2 after an error, which takes one line on stderr."""
    arguments = parser().parse_args(arguments)
    warnings.showwarning = lambda message, *_, **__: print(f"tf-ckpt: warning: {_line(message)}", file=sys.stderr)
    stdout = sys.stdout
    try:
        # What models and Keras print does not belong to the result.
        with _descriptor_redirected(), contextlib.redirect_stdout(sys.stderr):
            _check_files(arguments)
            text, data, files = arguments.run(arguments)
    except KeyboardInterrupt:
        print("tf-ckpt: interrupted", file=sys.stderr)
        return 130
    except SystemExit as error:
        return _failed(arguments, CheckpointError(f"The model's code ended the program: SystemExit({error.code!r})"))
    except Exception as error:  # models, losses and data have code of their own
        return _failed(arguments, error)
    try:
        print(json.dumps(data, indent=2) if arguments.json else text, file=stdout, flush=True)
    except BrokenPipeError:  # the reader, such as `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), stdout.fileno())
    try:
        for write, path in files:  # last, so that a disk that is full loses nothing else
            if path is not None:
                write(path)
    except Exception as error:
        return _failed(arguments, error)
    except KeyboardInterrupt:
        print("tf-ckpt: interrupted", file=sys.stderr)
        return 130
    return 0


def _failed(arguments, error):
    ours = type(error).__module__.startswith("tf_ckpt") or isinstance(error, (OSError, TypeError, ImportError))
    kind = "" if ours else f"{type(error).__name__}: "
    print(f"tf-ckpt {arguments.command}: error: {kind}{_line(error)}", file=sys.stderr)
    return 2


@contextlib.contextmanager
def _descriptor_redirected():
    """A scope in which what goes to file descriptor 1 by itself, from C or `os.write`, goes to stderr."""
    sys.stdout.flush()
    try:
        kept = os.dup(1)
        os.dup2(2, 1)
    except OSError:  # one of them is closed
        yield
        return
    try:
        yield
    finally:
        with contextlib.suppress(OSError, AttributeError, TypeError):
            ctypes.CDLL(None).fflush(None)  # what C has not written yet
        os.dup2(kept, 1)
        os.close(kept)


def _check_files(arguments):
    """Refuses files that could not be written, before any work."""
    for path in (getattr(arguments, "save", None), getattr(arguments, "plot", None)):
        if path is not None:
            check_writable(path)
    if getattr(arguments, "plot", None) is not None:
        from tf_ckpt.plan_plot import picture_kind

        picture_kind(arguments.plot)


def _check_memory(arguments):
    if arguments.memory is None and device_bytes() is None:
        raise CheckpointError("No device reports how much memory it has: say it with --memory, such as --memory 6GiB")


def _plan(arguments):
    import tf_ckpt
    from tf_ckpt.trainee import checked_optimizer

    model = load_model(arguments.model, arguments.imports)
    strategy = arguments.strategy or ("budget" if arguments.memory else "sqrt")
    if strategy == "budget":
        _check_memory(arguments)
    if arguments.optimizer is not None:
        checked_optimizer(arguments.optimizer)
    made = tf_ckpt.plan(
        model,
        strategy,
        batch_size=arguments.batch_size,
        memory=arguments.memory,
        optimizer=arguments.optimizer,
        **_options(arguments),
    )
    texts = []
    made.summary(print_fn=texts.append)
    return texts[0].rstrip("\n"), _plan_data(made), [(made.save, arguments.save), (made.plot, arguments.plot)]


def _compare(arguments):
    import tf_ckpt
    from tf_ckpt.samples import made_up, repeated, stated_batch

    model = load_model(arguments.model, arguments.imports)
    strategies = [load_strategy(text) for text in arguments.strategies]
    loss = arguments.loss or (None if model.compiled else "mse")
    if arguments.data:
        x, y = load_data(arguments.data)
        batch_size = arguments.batch_size
    else:
        sample = made_up(model, loss or getattr(model, "loss", None))
        batch_size = arguments.batch_size or stated_batch(model) or 32
        x, y = (*repeated(sample, batch_size), None)[:2]
    found = tf_ckpt.compare(
        model,
        x,
        y,
        strategies,
        arguments.steps,
        batch_size=batch_size,
        memory=arguments.memory,
        optimizer=arguments.optimizer,
        loss=loss,
        jit_compile=arguments.jit_compile,
    )
    return str(found), found.to_dict(), [(found.plot, arguments.plot)]


def _max_batch(arguments):
    import tf_ckpt

    model = load_model(arguments.model, arguments.imports)
    _check_memory(arguments)
    x, y = load_data(arguments.data) if arguments.data else (None, None)
    found = tf_ckpt.max_batch_size(
        model,
        arguments.memory,
        arguments.strategy or "sqrt",
        x=x,
        y=y,
        optimizer=arguments.optimizer,
        loss=arguments.loss,
        jit_compile=arguments.jit_compile,
        most=arguments.most,
        verify=not arguments.no_verify,
        **_options(arguments),
    )
    if found.plan is None and arguments.save is not None:
        warnings.warn(f"not even one sample fits: no plan is saved to {arguments.save!r}", stacklevel=2)
    return str(found), found.to_dict(), [(found.plan.save, arguments.save)] if found.plan is not None else []


def _plan_data(plan):
    names = ("strategy", "batch_size", "peak_bytes", "plain_peak_bytes", "activation_bytes", "plain_activation_bytes")
    data = {name: getattr(plan, name) for name in (*names, "weight_bytes", "optimizer_bytes", "overhead")}

    def segment(s):
        own = {"layers": list(s.layers), "part": s.part, "keeps_bytes": s.keeps_bytes, "frees_bytes": s.frees_bytes}
        return {**own, "rerun_flops": s.rerun_flops, "inside": [segment(inner) for inner in s.inside]}

    return {**data, "segments": [segment(s) for s in plan.segments], "unknown": list(plan.unknown)}


def _options(arguments):
    return {"layers": arguments.layers, "target": arguments.target, "levels": arguments.levels}


def _add_strategy(sub, default):
    sub.add_argument("--strategy", type=_text, metavar="NAME", help=f"one of {', '.join(STRATEGIES)} ({default})")
    sub.add_argument("--layers", type=_text, nargs="+", metavar="NAME", help="with selective: layer names or patterns")
    sub.add_argument("--target", type=_share, metavar="SHARE", help="with selective: share of the activation bytes to come to")
    sub.add_argument("--levels", type=_count, metavar="N", help="with recursive: how deep segments lie in segments")


def _add_training(sub):
    sub.add_argument("--loss", type=_text, metavar="NAME", help="default: what the model is compiled with, or mse")
    sub.add_argument(
        "--jit-compile", action=argparse.BooleanOptionalAction, default=None, help="with XLA or without (default: as compiled)"
    )


def _text(text):
    if not text.strip():
        raise argparse.ArgumentTypeError(f"must not be empty. Received: {text!r}")
    return text


def _share_or_text(text):
    return float(text) if re.fullmatch(r"0?\.[0-9]+", text) and float(text) else _text(text)


def _count(text):
    if not (text.isdecimal() and len(text) <= 10 and 0 < int(text) <= _MOST):
        shown = text if len(text) <= 40 else text[:37] + "..."
        raise argparse.ArgumentTypeError(f"must be a positive whole number, {_MOST:,} at most. Received: {shown!r}")
    return int(text)


def _share(text):
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a number above 0 and below 1. Received: {text!r}") from None


def _line(message):
    return " ".join(str(message).split())
