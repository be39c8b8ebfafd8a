"""Looks for inputs that a parser does not refuse properly: `make fuzz`, or `python tests/fuzz/fuzz.py frames` for one
parser. It changes known inputs at random: bytes and, where they are JSON, values. An input that is refused in a new way
is changed further; `--keep` adds it to the corpus. With `--coverage` it uses atheris instead, which follows the code
that an input reaches; atheris must be installed. A defect is printed with its input, as a line for the corpus.
Next: targets.py, what is fuzzed."""

from __future__ import annotations

import argparse
import base64
import copy
import json
import pickle
import random
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "src"), str(Path(__file__).parent)]
CORPUS = Path(__file__).parent / "corpus"
LONGEST_S = 2  # for one input
MAX_BYTES = 4096
MAX_KINDS = 60
MOST_DOCUMENTS = 50  # in one input
DEEPER = 0.7  # share of objects and lists of which one value is changed, and not the whole
NUMBERS = [0, -1, 1, 64, 65, 255, 256, 2**31, 2**63, 2**64, -(2**63), 10**30, 10**400, 1e308, 1e-320, 0.5]
VALUES: list[Any] = [
    *NUMBERS,
    None,
    True,
    "",
    "x",
    "\ud800",
    "\x00\x1b[2J",
    "a" * 300,
    [],
    {},
    [[]],
    [0] * 70,
    {"": {}},
]
PIECES = [
    b"\x00",
    b"\xff" * 8,
    b"\r\n",
    b"\r\n\r\n",
    b'"',
    b"{",
    b"[" * 50,
    b"9" * 40,
    b"NaN",
    b"-",
    b"#",
    b":",
    b"@",
    b"[",
]


class TooSlow(BaseException):
    pass


def corpus_of(name: str) -> list[bytes]:
    path = CORPUS / f"{name}.txt"
    return [base64.b64decode(line) for line in path.read_text().split()] if path.exists() else []


def mutated(rng: random.Random, known: Sequence[bytes]) -> bytes:
    data = rng.choice(known)
    if rng.random() < 0.5 and (changed := _json_mutated(rng, data)) is not None:
        return changed
    for _ in range(1 << rng.randrange(4)):
        data = _bytes_mutated(rng, data, known)
    return data[:MAX_BYTES]


def _bytes_mutated(rng: random.Random, data: bytes, known: Sequence[bytes]) -> bytes:
    at, length = rng.randrange(len(data) + 1), rng.randrange(1, 9)
    match rng.randrange(6):
        case 0:
            return data[:at] + rng.randbytes(length) + data[at + length :]
        case 1:
            return data[:at] + data[at + length :]
        case 2:
            return data[:at] + rng.choice(PIECES) + data[at:]
        case 3:
            return data[:at] + rng.choice(known)[rng.randrange(len(data) + 1) :]
        case 4:
            return data[:at] + data[max(0, at - 4 * length) :]
    return data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :] if at < len(data) else data


def _json_mutated(rng: random.Random, data: bytes) -> bytes | None:
    """A JSON object in the data with some values changed. What stands before and behind it stays, except that the
    length of a safetensors header is corrected."""
    documents = _documents(data)
    if not documents:
        return None
    begin, end, kept = rng.choice([documents[0], rng.choice(documents)])
    document = pickle.loads(kept)
    for _ in range(rng.randrange(1, 4)):
        _change(rng, document)
    text = json.dumps(document).encode()
    before = data[:begin]
    if before[-8:] == (end - begin).to_bytes(8, "little") and rng.random() < 0.9:
        text += b" " * (-len(text) % 8)
        before = before[:-8] + len(text).to_bytes(8, "little")
    return (before + text + data[end:])[: 4 * MAX_BYTES]


@lru_cache(4 * MAX_KINDS)
def _documents(data: bytes) -> list[tuple[int, int, bytes]]:
    """Where JSON objects begin and end in the data, and each one pickled: that is the fastest way to copy it."""
    text, found = data.decode("latin-1"), []
    for begin in [at for at, byte in enumerate(data) if byte == ord("{")][:MOST_DOCUMENTS]:
        with suppress(ValueError, RecursionError):
            document, end = json.JSONDecoder().raw_decode(text, begin)
            found.append((begin, end, pickle.dumps(document)))
    return found


def _change(rng: random.Random, document: Any) -> None:
    """One value somewhere in the document."""
    holder, key, each = None, None, document
    while isinstance(each, dict | list) and each and (holder is None or rng.random() < DEEPER):
        holder, key = each, rng.choice(list(each) if isinstance(each, dict) else range(len(each)))
        each = holder[key]
    if holder is None:
        return
    match rng.randrange(4):
        case 0 if isinstance(holder, dict):
            holder[rng.choice([str(key) + "x", "", "\ud800", "kind"])] = holder.pop(key)
        case 1:
            del holder[key]
        case _:
            holder[key] = copy.deepcopy(rng.choice(VALUES))


def fuzz(name: str, seconds: float, seed: int, keep: bool) -> int:
    """Returns the number of inputs. Prints defects and raises SystemExit after the first."""
    from targets import TARGETS, run

    target, rng = TARGETS[name], random.Random(f"{name}/{seed}")
    known, end_s, count = [*target.seeds, *corpus_of(name)], time.monotonic() + seconds, 0
    seen = {run(target, data) for data in known}
    signal.signal(signal.SIGALRM, _too_slow)
    while time.monotonic() < end_s:
        for _ in range(100):
            data = mutated(rng, known)
            signal.setitimer(signal.ITIMER_REAL, LONGEST_S)
            try:
                kind = run(target, data)
            except BaseException as error:
                signal.setitimer(signal.ITIMER_REAL, 0)
                if isinstance(error, KeyboardInterrupt):
                    raise
                print(f"{name}: {type(error).__name__}: {error}\n{base64.b64encode(data).decode()}", flush=True)
                raise SystemExit(1) from error
            count += 1
            if kind not in seen and len(seen) < MAX_KINDS:  # a new kind of refusal is worth changing further
                seen.add(kind)
                known.append(data)
                if keep:
                    with (CORPUS / f"{name}.txt").open("a") as kept:
                        kept.write(f"{base64.b64encode(data).decode()}\n")
    signal.setitimer(signal.ITIMER_REAL, 0)
    return count


def _too_slow(*_: object) -> None:
    raise TooSlow(f"took longer than {LONGEST_S} s")


def fuzz_by_coverage(name: str, seconds: float) -> None:
    """atheris ends the process when it is done."""
    import tempfile

    import atheris

    with atheris.instrument_imports(include=["blocktrain"]):
        from targets import TARGETS, run
    target = TARGETS[name]
    folder = Path(tempfile.mkdtemp(prefix=f"fuzz-{name}-"))
    for number, data in enumerate([*target.seeds, *corpus_of(name)]):
        (folder / str(number)).write_bytes(data)
    options = [f"-max_total_time={int(seconds)}", f"-max_len={MAX_BYTES}", f"-timeout={LONGEST_S}", "-verbosity=0"]
    atheris.Setup([sys.argv[0], *options, f"-artifact_prefix={folder}/", str(folder)], lambda data: run(target, data))
    print(f"{name}: inputs are kept in {folder}", flush=True)
    atheris.Fuzz()


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("targets", nargs="*", help="all by default")
    parser.add_argument("--seconds", type=float, default=60.0, help="for each target")
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--keep", action="store_true", help="add inputs of new kinds to the corpus")
    parser.add_argument("--coverage", action="store_true", help="one target, by atheris")
    given = parser.parse_args(argv)
    if given.coverage:
        (name,) = given.targets
        fuzz_by_coverage(name, given.seconds)
        return
    from targets import TARGETS

    for name in given.targets or TARGETS:
        print(
            f"{name}: {fuzz(name, given.seconds, given.seed, given.keep):,} inputs, no defect (seed {given.seed})",
            flush=True,
        )


if __name__ == "__main__":
    main()
