"""Reader of the matrix product tables in an `aiconfigurator-core` wheel; a script for an environment with pyarrow.

    python gemm_tables.py WHEEL FOLDER

It writes SYSTEM-DTYPE.npz for each system and data type, with the columns m, n, k and ms. For each framework, only the tables of its newest
version are read.
"""

import io
import re
import sys
import zipfile
from pathlib import Path

import numpy as np
import pyarrow.parquet

TABLE = re.compile(r"aiconfigurator_core/systems/data/([^/]+)/gemm/([^/]+)/([^/]+)/gemm_perf\.parquet")


def main() -> None:
    wheel, folder = Path(sys.argv[1]), Path(sys.argv[2])
    columns: dict[tuple[str, str], list[np.ndarray]] = {}
    with zipfile.ZipFile(wheel) as archive:
        newest = {}
        for name in sorted(archive.namelist()):
            if found := TABLE.fullmatch(name):
                newest[found[1], found[2]] = name
        for (system, _), name in newest.items():
            table = pyarrow.parquet.read_table(io.BytesIO(archive.read(name)))
            kinds = np.array(table["gemm_dtype"].to_pylist())
            numbers = np.stack([table[each].to_numpy().astype(float) for each in ("m", "n", "k", "latency")])
            for kind in sorted(set(kinds)):
                columns.setdefault((system, kind), []).append(numbers[:, kinds == kind])
    for (system, kind), parts in columns.items():
        m, n, k, ms = np.concatenate(parts, axis=1)
        shape = {"m": m.astype(np.int64), "n": n.astype(np.int64), "k": k.astype(np.int64)}
        np.savez(folder / f"{system}-{kind}.npz", **shape, ms=ms)


main()
