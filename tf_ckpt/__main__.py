"""`python -m tf_ckpt`: see `tf_ckpt.cli`."""

import sys

from tf_ckpt.cli import main

if __name__ == "__main__":
    sys.exit(main())
