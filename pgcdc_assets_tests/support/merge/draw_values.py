"""Random values of base types, as texts that the types' input functions read."""

from __future__ import annotations

import json
import random
import struct
import uuid
from collections.abc import Callable

Draw = Callable[[random.Random], str]

# Characters that texts quote or escape: blanks, quotes, backslashes, delimiters of arrays,
# composites and ranges. Then characters of other planes of Unicode.
_CHARACTERS = " \t\n\r\v\f\\\"'{}()[],;:=>#%`|/ä€😀\u00a0\u2028\ufeffaZ09\x01\x7fNUL"


def draw_text(rng: random.Random) -> str:
    if rng.random() < 0.2:
        return chr(rng.choice((rng.randrange(1, 0xD800), rng.randrange(0xE000, 0x110000)))) * 3
    return "".join(rng.choices(_CHARACTERS, k=rng.randrange(1, 30)))


def draw_word(rng: random.Random) -> str:
    return "".join(rng.choices("abcxyz_019", k=rng.randrange(1, 9)))


def drawing_whole(bits: int, *, is_signed: bool = True) -> Draw:
    def draw(rng: random.Random) -> str:
        number = rng.getrandbits(rng.randrange(1, bits + 1))
        return str(number - (1 << (bits - 1)) if is_signed and number >> (bits - 1) else number)

    return draw


def draw_numeric(rng: random.Random) -> str:
    digits = "".join(rng.choices("0123456789", k=rng.randrange(1, 60)))
    scale = rng.randrange(0, 50)
    return rng.choice(("", "-")) + (f"{digits}.{digits[:scale]}" if scale else digits)


def draw_double(rng: random.Random) -> str:
    return repr(struct.unpack("d", rng.randbytes(8))[0])


def draw_single(rng: random.Random) -> str:
    return repr(struct.unpack("f", rng.randbytes(4))[0])


def draw_float(rng: random.Random) -> str:
    return repr(round(rng.uniform(-1e6, 1e6), rng.randrange(8)))


def draw_small(rng: random.Random) -> str:
    return repr(round(rng.uniform(-1000, 1000), rng.randrange(5)))


def draw_bits(rng: random.Random) -> str:
    return "".join(rng.choices("01", k=rng.randrange(1, 90)))


def draw_bytes(rng: random.Random) -> str:
    return "\\x" + rng.randbytes(rng.randrange(1, 40)).hex()


def draw_date(rng: random.Random) -> str:
    year = rng.choice((rng.randrange(1, 10_000), rng.randrange(10_000, 294_276)))
    era = rng.choice(("", "", " BC")) if year < 4713 else ""
    return f"{year:04}-{rng.randrange(1, 13):02}-{rng.randrange(1, 29):02}{era}"


def draw_clock(rng: random.Random) -> str:
    seconds = rng.choice(("00", "59.999999", f"{rng.randrange(60):02}.{rng.randrange(10**6):06}"))
    return f"{rng.randrange(24):02}:{rng.randrange(60):02}:{seconds}"


def draw_zone(rng: random.Random) -> str:
    return f"{rng.choice('+-')}{rng.randrange(15):02}:{rng.choice((0, 30, 45)):02}"


def drawing_moment(*parts: Draw) -> Draw:
    def draw(rng: random.Random) -> str:
        date, _, era = draw_date(rng).partition(" ")
        return f"{date} {''.join(part(rng) for part in parts)} {era}".strip()

    return draw


def draw_interval(rng: random.Random) -> str:
    units = ("years", "months", "days", "hours", "minutes", "seconds")
    return " ".join(f"{rng.randrange(-999, 999)} {unit}" for unit in units)


def draw_document(rng: random.Random, depth: int = 3) -> object:
    kind = rng.randrange(7 if depth else 5)
    if kind == 0:
        return rng.choice((None, True, False))
    if kind == 1:
        return rng.randrange(-(10**25), 10**25)
    if kind == 2:
        return rng.random()
    if kind < 5:
        return draw_text(rng)
    if kind == 5:
        return [draw_document(rng, depth - 1) for _ in range(rng.randrange(4))]
    return {draw_text(rng): draw_document(rng, depth - 1) for _ in range(rng.randrange(4))}


def draw_json(rng: random.Random) -> str:
    return json.dumps(draw_document(rng), ensure_ascii=rng.random() < 0.5)


def drawing_hex(size: int) -> Draw:
    return lambda rng: rng.randbytes(size).hex(":")


def drawing_list(left: str, item: Draw, right: str, size: int) -> Draw:
    return lambda rng: left + ",".join(item(rng) for _ in range(size)) + right


def draw_inet(rng: random.Random) -> str:
    if rng.random() < 0.5:
        return f"{'.'.join(str(rng.randrange(256)) for _ in range(4))}/{rng.randrange(33)}"
    return f"{uuid.UUID(bytes=rng.randbytes(16)).hex[:4]}:{rng.randrange(9)}::{rng.randrange(9)}"


def draw_hstore(rng: random.Random) -> str:
    def quoted(text: str) -> str:
        return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'

    pairs = [
        f"{quoted(draw_text(rng))}=>{rng.choice(('NULL', quoted(draw_text(rng))))}"
        for _ in range(rng.randrange(6))
    ]
    return ", ".join(pairs)


def draw_lsn(rng: random.Random) -> str:
    return f"{rng.getrandbits(32):X}/{rng.getrandbits(32):X}"


def draw_snapshot(rng: random.Random) -> str:
    least = rng.randrange(1, 10**9)
    return f"{least}:{least + 20}:{least + rng.randrange(1, 9)},{least + rng.randrange(10, 19)}"


draw_point = drawing_list("(", draw_float, ")", 2)
draw_box = drawing_list("", draw_point, "", 2)
