"""Spoiling good input: bytes changed, cut, doubled, and put together with pieces that break parsers."""

import random

SPICE = [
    *(
        b"\x00",
        b"\xff",
        b"\xfe\xff",
        b"\xef\xbb\xbf",
        b"\r\n",
        b"\n",
        b"\t",
        b" ",
        b"",
        b"'",
        b'"',
        b"`",
        b"$(",
    ),
    *(b"{", b"}", b"[", b"]", b"{}", b"[]", b"null", b"~", b"true", b"-1", b"0", b"1e999", b"NaN", b".inf"),
    *(
        b"9223372036854775808",
        b"0x7fffffff",
        b"1" * 400,
        b"&a",
        b"*a",
        b"!!python/object:os.system",
        b"<<: *a",
    ),
    *(b"../", b"..%2f", b"%00", b"%2e%2e", b"%", b"//", b"\\", b"/", b"?", b"#", b"&", b"=", b";", b","),
    *(
        b"Upgrade: websocket\r\n",
        b"Upgrade: SPDY/3.1\r\n",
        b"Connection: Upgrade\r\n",
        b"Expect: 100-continue\r\n",
    ),
    *(
        b"Transfer-Encoding: chunked\r\n",
        b"Content-Length: 5\r\n",
        b"Range: bytes=-1\r\n",
        b"HTTP/2.0",
        b"ffffffff\r\n",
    ),
    *(
        b"\xc0\xaf",
        b"\xed\xa0\x80",
        "\u202e".encode(),
        "\u2028".encode(),
        b"a" * 5000,
        b"- " * 300,
        b"[" * 300,
    ),
    *(
        b"2026-02-30T25:61:61.999999999Z",
        b"stdout",
        b"stderr",
        b"P",
        b"F",
        b"---\n",
        b"...\n",
        b"%YAML 9.9\n",
    ),
]


def spoil(good: bytes, seeds: list[bytes], dice: random.Random) -> bytes:
    """Give a spoiled copy; the same dice give the same copy."""
    data = bytearray(good)
    for _ in range(dice.choice((1, 1, 2, 3, 5, 8))):
        at = dice.randint(0, len(data))
        upto = min(len(data), at + dice.choice((0, 1, 1, 2, 4, 16, 200)))
        match dice.randrange(7):
            case 0 if data:
                data[at % len(data)] = dice.randrange(256)
            case 1:
                del data[at:upto]
            case 2:
                data[at:at] = data[at:upto] * dice.choice((1, 2, 50))
            case 3:
                data[at:upto] = dice.choice(SPICE)
            case 4:
                other = dice.choice(seeds)
                start = dice.randint(0, len(other))
                data[at:upto] = other[start : start + dice.choice((3, 10, 100))]
            case 5 if data:
                del data[at:]
            case _:
                data[at:at] = dice.choice(SPICE)
    return bytes(data[:100_000])
