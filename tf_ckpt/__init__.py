import pathlib
_here = pathlib.Path(__file__).resolve().parent.parent
__path__.append(str(_here))
from tf_ckpt.replay import disabled, is_recomputing, recompute
from tf_ckpt.layers import Recompute
