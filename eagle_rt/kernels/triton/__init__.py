"""Kernels for GPUs, in Triton."""

import os

# A product and a sum are one instruction unless a kernel says otherwise, as long as nobody does; Triton warns where it is not told,
# and will do without from 3.10 on.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
