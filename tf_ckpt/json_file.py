"""JSON files with a format and a version: written as a whole or not at all, and refused where they are something else."""

import json
import os

from tf_ckpt.errors import CheckpointError


def checked_path(path):
    """Returns a path as a string.

    Raises:
        TypeError: If it is not a string or path-like.
    """
    text = os.fspath(path) if isinstance(path, (str, os.PathLike)) else None
    if not isinstance(text, str):
        raise TypeError(f"`path` must be a string or path-like. Received: path={path!r} of type {type(path).__name__}")
    return text


def plain(content):
    """Returns what a file would give back for `content`: lists for tuples."""
    return json.loads(json.dumps(content, allow_nan=False))


def check_writable(path):
    """Refuses the path of a file that could not be written: before the work whose result it is to hold.

    Raises:
        CheckpointError: If its folder does not exist or cannot be written to, or it is a folder itself.
    """
    text = checked_path(path)
    folder = os.path.dirname(os.path.realpath(text))
    if not os.path.isdir(folder):
        why = "its folder does not exist"
    elif os.path.isdir(text) or not os.path.basename(text):
        why = "it is a folder"
    elif not os.access(folder, os.W_OK) or (os.path.exists(text) and not os.access(text, os.W_OK)):
        why = "there is no permission"
    else:
        return
    raise CheckpointError(f"A file cannot be written there: {why}. Received: path={text!r}")


def write(path, content):
    """Writes an object to a file, as a whole or not at all.

    Args:
        path: String or path-like.
        content: Dict of what JSON can say.
    """
    given = checked_path(path)
    path = os.path.realpath(given)  # a link stays one
    lines = (f"  {json.dumps(key)}: {json.dumps(value, allow_nan=False)}" for key, value in content.items())
    text = "{\n" + ",\n".join(lines) + "\n}\n"
    unfinished = f"{path}.{os.getpid()}.tmp"
    try:
        with open(unfinished, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(unfinished, path)
    except BaseException as error:
        if os.path.exists(unfinished):
            os.remove(unfinished)
        if isinstance(error, OSError):  # which names a file that the user has not heard of
            raise type(error)(error.errno, error.strerror, given) from None
        raise


def read(path, kind, version, again):
    """Reads the object in a file.

    Args:
        path: String or path-like.
        kind: `"Plan"` or `"Calibration"`: the class that wrote it, with `save`.
        version: The one version that can be read.
        again: What makes such a file anew, for the error.

    Returns:
        A dict.

    Raises:
        CheckpointError: If the file holds something else.
    """
    path, what = checked_path(path), kind.lower()
    with open(path, "rb") as file:
        data = file.read()
    try:
        content = json.loads(data.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(
            f"Not a {what}: `{kind}.load` reads the JSON that `{kind}.save` writes. Received: path={path!r}, which holds "
            f"{data[:40]!r}{'...' if len(data) > 40 else ''} ({error})"
        ) from error
    return checked(content, kind, version, again, f"path={path!r}")


def checked(content, kind, version, again, where):
    """Returns `content` if it is an object of a kind and version that can be read.

    Args:
        content: What was read.
        kind: See `read`.
        version: See `read`.
        again: See `read`.
        where: String that says where it was read, for errors: `name=value`.

    Raises:
        CheckpointError: If it is something else.
    """
    what = kind.lower()
    if not isinstance(content, dict) or content.get("format") != f"tf_ckpt.{kind}":
        held = f"format={content.get('format')!r}" if isinstance(content, dict) else f"a {type(content).__name__}"
        raise CheckpointError(
            f"Not a {what}: a file of `{kind}.save` has format='tf_ckpt.{kind}'. Received: {where}, which holds {held}"
        )
    found = content.get("version")
    if found != version or isinstance(found, bool):
        raise CheckpointError(
            f"This tf_ckpt reads {what}s of version {version}. Received: {where}, which holds version={found!r}. "
            f"Make the {what} again with `{again}`, or read it with the tf_ckpt that wrote it."
        )
    return content
