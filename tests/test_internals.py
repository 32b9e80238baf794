"""What Keras and TensorFlow do not document is used in one file each."""

import pathlib
import re

ROOT = pathlib.Path(__file__).resolve().parent.parent
SOURCES = [p for folder in ("tf_ckpt", "layers", "callbacks") for p in (ROOT / folder).rglob("*.py")]


def _using(pattern, but):
    return [str(p.relative_to(ROOT)) for p in SOURCES if p.name != but and re.search(pattern, p.read_text())]


def test_private_keras_names_are_in_graph_alone():
    assert len(SOURCES) > 15
    assert _using(r"keras\.src|keras\._|\._nodes_by_depth|\._inbound_nodes|_run_through_graph|_loss_ids", "graph.py") == []


def test_private_tensorflow_names_are_in_tf_internals_alone():
    assert _using(r"tensorflow\.(python|core|tsl|compiler)", "tf_internals.py") == []


def test_strategies_import_neither():
    for path in (ROOT / "tf_ckpt" / "strategies").glob("*.py"):
        assert not re.search(r"^\s*(import|from) (tensorflow|keras)", path.read_text(), re.M), path
