"""Kernels of repacking and of the codecs: functions of the native module, or of the twin if that module is not built.

The native module (`kernels.c`) is several times faster; the results are the same. `kvstore.native.kernels_twin`
documents the functions.
"""

try:
    from kvstore.native._kernels import copy, dequantise, join, narrow, quantise, split, widen

    BUILT = True
    """True if the functions of this module are those of the native module."""
except ImportError:  # the native module is not built
    from kvstore.native.kernels_twin import copy, dequantise, join, narrow, quantise, split, widen

    BUILT = False

__all__ = ["BUILT", "copy", "dequantise", "join", "narrow", "quantise", "split", "widen"]
