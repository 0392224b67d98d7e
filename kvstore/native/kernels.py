"""The inner loops of repacking and of the codecs: native where they were built, numpy elsewhere, the same bytes.

Built with the package where a C compiler and Python's headers are at hand (`kernels.c`), and never needed. Meaning and
arguments of each are those of `kvstore.native.kernels_twin`.
"""

try:
    from kvstore.native._kernels import copy, dequantise, join, narrow, quantise, split, widen

    BUILT = True
    """Whether the native kernels run."""
except ImportError:  # not built
    from kvstore.native.kernels_twin import copy, dequantise, join, narrow, quantise, split, widen

    BUILT = False

__all__ = ["BUILT", "copy", "dequantise", "join", "narrow", "quantise", "split", "widen"]
