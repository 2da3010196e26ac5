"""Reads Parquet files that may unpack to far more memory than they take on disk.

Equal values are stored once, so that a file of some kilobytes can hold billions of values. Their
number is known before they are read, and the size of texts before they are repeated.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Any, BinaryIO

from soulkit.parse import ParseError, parse_json

PACKED = b"soulkit.packed"
"""Metadata key of columns with mixed value types, which are stored as JSON text."""
UNPACKED, UNPACKED_RATIO = 256_000_000, 50
"""Memory for the rows of a Parquet file: so many bytes, plus so many times the size of the file."""
VALUE_BYTES = 40
"""Least memory of one value, even of a null."""
TOO_LARGE = "it unpacks to far more memory than the size of the file suggests"


def parquet_rows(stream: BinaryIO) -> Iterator[dict[str, Any] | ParseError]:
    """The rows of a Parquet file, and the reasons of rows that cannot be read. ParseError if the
    file is damaged or unpacks to too much memory."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        free, small = free_memory_for(stream)
        with pq.ParquetFile(stream) as file:
            packed = [f.name for f in file.schema_arrow if PACKED in (f.metadata or {})]
            for batch in file.iter_batches(1024 if small else 32):
                free -= 0 if small else batch.nbytes
                if free < 0:
                    raise ParseError(TOO_LARGE)
                yield from _parquet_batch(batch, packed)
    except ParseError:
        raise
    except (pa.ArrowException, OSError, ValueError) as error:
        raise ParseError(f"not a valid Parquet file: {error}") from error


def free_memory_for(stream: BinaryIO) -> tuple[int, bool]:
    """How many bytes the texts of a Parquet file may still take, and whether they were counted,
    which is slow for large row groups. ParseError if there are none left."""
    import pyarrow.parquet as pq

    free = UNPACKED + UNPACKED_RATIO * stream.seek(0, os.SEEK_END)
    with pq.ParquetFile(stream) as file:
        columns = [file.schema.column(n) for n in range(len(file.schema.names))]
        texts = [c.path for c in columns if c.logical_type.type in ("STRING", "NONE")]
        groups = [file.metadata.row_group(n) for n in range(file.metadata.num_row_groups)]
    values = sum(g.column(n).num_values for g in groups for n in range(g.num_columns))
    largest = max((g.total_byte_size for g in groups), default=0)
    free -= VALUE_BYTES * values + largest
    if (small := largest < UNPACKED // 8) and free > 0 and texts:
        # Equal texts are stored once: add up what they unpack to before doing it.
        with pq.ParquetFile(stream, read_dictionary=texts) as file:
            for number in range(len(groups)):  # nested texts cannot be read over several groups
                for batch in file.iter_batches(columns=texts, row_groups=[number]):
                    free -= sum(map(_text_bytes, batch.columns))
                if free < 0:
                    break
    if free < 0:
        raise ParseError(TOO_LARGE)
    return free, small


def _text_bytes(array: Any) -> int:
    import pyarrow.compute as pc

    if hasattr(array, "dictionary"):
        lengths = pc.take(pc.binary_length(array.dictionary), array.indices)
        return pc.sum(lengths).as_py() or 0
    if hasattr(array, "keys"):  # a map
        return _text_bytes(array.keys) + _text_bytes(array.items)
    parts = array.flatten() if array.type.num_fields else []
    return sum(map(_text_bytes, parts if isinstance(parts, list) else [parts]))


def _parquet_batch(batch: Any, packed: Sequence[str]) -> list[dict[str, Any] | ParseError]:
    try:  # a date may be out of Python's range, a text may not be UTF-8
        rows: list[Any] = batch.to_pylist()
        for row in rows if packed else ():
            texts = {name: row[name] for name in packed if row[name] is not None}
            row |= {name: parse_json(text, nan_is_null=True) for name, text in texts.items()}
    except (ValueError, ArithmeticError, TypeError) as error:
        if batch.num_rows == 1:
            return [ParseError(f"a value cannot be read: {error}")]
        single = (batch.slice(place, 1) for place in range(batch.num_rows))
        return [row for one in single for row in _parquet_batch(one, packed)]
    return rows
