"""Table of blocks by hash, which looks up a whole chain in one call: the native module, or its twin if it is not built.

The native table (`table.c`) finds 512 blocks and their slots in a quarter of the time of a dict. Finding blocks and
slots takes most of the time of a look-up at a node. `kvstore.native.tables_twin` documents the methods.
"""

try:
    from kvstore.native._table import Table as BlockTable

    BUILT = True
    """True if `BlockTable` is the class of the native module."""
except ImportError:  # the native module is not built
    from kvstore.native.tables_twin import BlockTable

    BUILT = False

__all__ = ["BUILT", "BlockTable"]
