"""Findings: what a file holds that is probably not plain UTF-8 text, and how to go on. Pure functions of some bytes and
a name. Nothing is refused here: a model of bytes can learn any bytes. Next: corpus.py, which reads them."""

from __future__ import annotations

import json
import re
import string
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

SAMPLE_BYTES = 2**16  # of the start of a file: enough to see what it is
PACKED, PREPARE = "unpack it first", "run blocktrain prepare"
SIGNATURES = {  # how files of a kind begin -> (what they are, how to go on)
    b"\x1f\x8b": ("compressed by gzip", f"{PACKED} (gunzip), or run blocktrain prepare on it"),
    b"PK\x03\x04": ("a zip archive or an Office document", f"{PACKED}, or save the document as plain text"),
    b"BZh": ("compressed by bzip2", f"{PACKED} (bunzip2)"),
    b"\xfd7zXZ\x00": ("compressed by xz", f"{PACKED} (unxz)"),
    b"\x28\xb5\x2f\xfd": ("compressed by zstd", f"{PACKED} (unzstd), or run blocktrain prepare on it"),
    b"%PDF": ("a PDF document", "extract its text first (pdftotext)"),
    b"PAR1": ("a Parquet table", f"{PREPARE} {{name}} --out corpus/, then give --corpus corpus/"),
    b"{\\rtf": ("a Rich Text document", "save it as plain text"),
    b"\x89PNG": ("a PNG image", "leave it out"),
    b"\xff\xd8\xff": ("a JPEG image", "leave it out"),
}
BYTE_ORDER_MARKS = {
    b"\xff\xfe\x00\x00": "UTF-32",
    b"\x00\x00\xfe\xff": "UTF-32",
    b"\xff\xfe": "UTF-16",
    b"\xfe\xff": "UTF-16",
}
TEXT_CONTROLS = frozenset(b"\t\n\r\f\v\x1b")
MOST_CONTROLS = 0.02  # share of control characters in a text
MOST_DAMAGED = 0.05  # share of the bytes beyond ASCII
MOST_NULS = 0.3  # every second byte of English UTF-16 is 0
JSON_LINES_ENDINGS = (".jsonl", ".ndjson")
CSV_ENDINGS = (".csv", ".tsv")


@dataclass(frozen=True)
class Finding:
    """`what` completes "the file …"; `remedy` is how to go on."""

    what: str
    remedy: str


def examine(data: bytes, name: str) -> Finding | None:
    """What a file that begins with these bytes probably is. None: plain UTF-8 text, or nothing."""
    return strange_bytes(data, name) or _json(data[:SAMPLE_BYTES], name) or _csv(data[:SAMPLE_BYTES], name)


def strange_bytes(data: bytes, name: str) -> Finding | None:
    """The same for what cannot be read as UTF-8 text at all."""
    data = data[:SAMPLE_BYTES]
    for start, (what, remedy) in SIGNATURES.items():
        if data.startswith(start):
            return Finding(f"is {what}", remedy.format(name=name))
    if encoding := _wide_encoding(data):
        return Finding(f"is {encoding} text", _convert(encoding, name))
    controls = sum(byte < 32 and byte not in TEXT_CONTROLS for byte in data)
    if b"\x00" in data or controls > MOST_CONTROLS * len(data):
        return Finding("is binary", "leave it out, unless the model is to learn exactly these bytes")
    if not _is_utf8(data):
        return Finding("is not UTF-8, perhaps Latin-1", _convert("LATIN1", name))
    return None


def remarks_on(files: Sequence[tuple[str, bytes]]) -> tuple[str, ...]:
    """One sentence per kind of finding, for files given by name and start: at most one example of each."""
    found: dict[str, list[tuple[str, Finding]]] = {}
    for name, data in files:
        if finding := examine(data, name):
            found.setdefault(finding.what, []).append((name, finding))
    return tuple(_sentence(each, len(files)) for each in found.values())


def _sentence(found: Sequence[tuple[str, Finding]], num_files: int) -> str:
    name, finding = found[0]
    if num_files == 1:
        return f"the text {name} {finding.what}: {finding.remedy}"
    others = f"like {len(found) - 1} more of the {num_files} files" if len(found) > 1 else f"one of {num_files} files"
    return f"{name}, {others}, {finding.what}: {finding.remedy}"


def _convert(encoding: str, name: str) -> str:
    return f"convert it with iconv -f {encoding} -t UTF-8 {name} > text.txt"


def _wide_encoding(data: bytes) -> str | None:
    for mark, encoding in BYTE_ORDER_MARKS.items():
        if data.startswith(mark):
            return encoding
    even, odd = data[0::2], data[1::2]
    for order, nuls, letters in (("LE", odd, even), ("BE", even, odd)):
        if len(data) >= 4 and nuls.count(0) > MOST_NULS * len(nuls) and letters.count(0) < 0.02 * len(letters):
            return f"UTF-16{order}"
    return None


def _is_utf8(data: bytes) -> bool:
    """The sample may end within a character, and a long text may hold a few damaged bytes."""
    damaged = data.decode("utf-8", "replace").count("�") - data.count("�".encode())
    return damaged <= 1 or damaged < MOST_DAMAGED * sum(byte > 127 for byte in data)


def _json(data: bytes, name: str) -> Finding | None:
    """JSON lines, or a JSON document that is a list of objects."""
    lines = data.decode("utf-8", "replace").splitlines()
    lines = [line for line in (lines[:-1] if len(data) == SAMPLE_BYTES else lines) if line.strip()][:20]
    records = [record for record in map(_object, lines) if record is not None]
    if len(lines) >= 2 and len(records) == len(lines):
        return _of_records("holds JSON lines", records, name, _prepare)
    objects = _first_objects(data.decode("utf-8", "replace").strip(), is_cut=len(data) == SAMPLE_BYTES)
    return _of_records("is a JSON document", objects, name, _data_set) if objects else None


def _first_objects(text: str, is_cut: bool) -> list[dict[str, Any]]:
    """Of a JSON list. If the text is cut, those before the cut."""
    values, decoder, at = list[Any](), json.JSONDecoder(), 1
    try:
        if not is_cut:
            whole = json.loads(text)
            values = whole if isinstance(whole, list) else []
        while is_cut and text.startswith("["):
            value, at = decoder.raw_decode(text, at)
            values.append(value)
            while text[at : at + 1] in {",", *string.whitespace}:
                at += 1
    except (ValueError, RecursionError):
        pass  # the cut, or no JSON
    return [each for each in values if isinstance(each, dict)]


def _csv(data: bytes, name: str) -> Finding | None:
    """By its ending: commas alone are no sign."""
    if PurePath(name).suffix.lower() not in CSV_ENDINGS:
        return None
    fields = re.split("[,;\t]", data.decode("utf-8", "replace").partition("\n")[0].strip())
    return Finding(
        f"is a table with the columns {', '.join(map(repr, fields[:5]))}, which the model would learn with the text",
        f'name the column with the text, as in "hf:{name}::{fields[-1]}" (it needs the extra hf)',
    )


def _prepare(name: str, field: str) -> str:
    column = "" if field == "text" else f"--column {field} "
    return f"{PREPARE} {name} {column}--out corpus/, then give --corpus corpus/"


def _data_set(name: str, field: str) -> str:
    return f'name one field, as in "hf:{name}::{field}" (it needs the extra hf)'


def _of_records(what: str, records: Sequence[dict[str, Any]], name: str, remedy: Callable[[str, str], str]) -> Finding:
    fields = list(dict.fromkeys(key for record in records for key, value in record.items() if isinstance(value, str)))
    if not fields:
        return Finding(f"{what} without text fields", "extract the text first")
    chosen = "text" if "text" in fields else max(fields, key=lambda field: _length(records, field))
    path = PurePath(name)
    is_named = path.suffix in JSON_LINES_ENDINGS or (path.suffix == ".json" and remedy is _data_set)
    renamed = name if is_named else str(path.with_suffix(".jsonl"))
    rename = "" if renamed == name else f"rename it to {renamed} and "
    return Finding(
        f"{what} with the fields {', '.join(map(repr, fields[:5]))}, which the model would learn with the text",
        rename + remedy(renamed, chosen),
    )


def _length(records: Iterable[dict[str, Any]], field: str) -> int:
    return sum(len(value) for record in records if isinstance(value := record.get(field), str))


def _object(line: str) -> dict[str, Any] | None:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None
