"""Ahead-of-time compilation for accelerators this machine does not have."""

import os

# Test workers compile at the same time, and no chip is there to be shared.
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
