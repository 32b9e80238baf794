"""`python -m tf_ckpt`: see `tf_ckpt.cli`."""

import sys

try:
    from tf_ckpt.cli import main
except KeyboardInterrupt:
    print("tf-ckpt: interrupted", file=sys.stderr)
    sys.exit(130)

if __name__ == "__main__":
    sys.exit(main())
