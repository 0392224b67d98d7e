"""Kernels of repacking and of the codecs: the native module if it is built, otherwise its twin, with the same results.

The native module (`kernels.c`) is several times faster and never needed. `kvstore.native.kernels_twin` documents the
functions.
"""

try:
    from kvstore.native._kernels import copy, dequantise, join, narrow, quantise, split, widen

    BUILT = True
    """True if the native kernels run."""
except ImportError:  # not built
    from kvstore.native.kernels_twin import copy, dequantise, join, narrow, quantise, split, widen

    BUILT = False

__all__ = ["BUILT", "copy", "dequantise", "join", "narrow", "quantise", "split", "widen"]
