"""Blocks by name, with the look-up of a whole chain in one call: native where it was built, a dict elsewhere.

Meaning of the methods: `kvstore.native.tables_twin`. The native table (`table.c`) finds 512 names, and says where their blocks
lie, in a quarter of the time that a dict of objects takes, which is most of what a node does for a look-up.
"""

try:
    from kvstore.native._table import Table as BlockTable

    BUILT = True
    """Whether the native table is used."""
except ImportError:  # not built, or not by a compiler that can
    from kvstore.native.tables_twin import BlockTable

    BUILT = False

__all__ = ["BUILT", "BlockTable"]
