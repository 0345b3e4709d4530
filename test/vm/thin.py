"""thin.py FROM TO: copy an image's archive without what no story needs.

Emulated machines hash and unpack each byte of an image ten times slower than others. A
story needs a shell, its tools and their libraries: a third of the bytes of "base", and
a sixth of its files.
"""

import copy
import hashlib
import io
import json
import sys
import tarfile

LIB = "usr/lib/x86_64-linux-gnu/"
DROP = (
    "usr/share/", "usr/lib/git-core/", "usr/lib/apt/", "var/lib/dpkg/", "var/lib/apt/", "var/cache/",
    "usr/bin/git", "usr/bin/scalar", "usr/bin/perl", "usr/bin/vim", "usr/bin/openssl", "usr/bin/curl", "usr/sbin/ldconfig",
    LIB + "perl", LIB + "libperl", LIB + "gconv/", LIB + "libdb-", LIB + "libapt", LIB + "libgnutls", LIB + "libstdc++",
)  # fmt: skip


def thin(layer: io.BufferedIOBase, to: io.BufferedIOBase) -> None:
    kept = set()
    with tarfile.open(fileobj=layer, mode="r|") as old, tarfile.open(fileobj=to, mode="w|", format=tarfile.PAX_FORMAT) as new:
        for member in old:
            name = member.name.removeprefix("./")
            if name.startswith(DROP) or member.islnk() and member.linkname.removeprefix("./") not in kept:
                continue
            kept.add(name)
            new.addfile(copy.copy(member), old.extractfile(member) if member.isreg() else None)


with tarfile.open(sys.argv[1]) as old, tarfile.open(sys.argv[2], "w") as new:

    def put(name: str, content: bytes) -> None:
        info = tarfile.TarInfo(name)
        info.size = len(content)
        new.addfile(info, io.BytesIO(content))

    (image,) = json.load(old.extractfile("manifest.json"))
    config = json.load(old.extractfile(image["Config"]))
    layers = []
    for layer in image["Layers"]:
        data = io.BytesIO()
        thin(old.extractfile(layer), data)
        layers.append(hashlib.sha256(data.getvalue()).hexdigest())
        put(layers[-1] + ".tar", data.getvalue())
    config["rootfs"]["diff_ids"] = ["sha256:" + digest for digest in layers]
    text = json.dumps(config).encode()
    image["Config"] = hashlib.sha256(text).hexdigest() + ".json"
    image["Layers"] = [digest + ".tar" for digest in layers]
    put(image["Config"], text)
    put("manifest.json", json.dumps([image]).encode())
