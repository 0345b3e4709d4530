"""The filter to_toml writes a dict as TOML 1.0, because ansible-core 2.14 has no such filter."""

import datetime
import math
import re

try:
    from ansible.errors import AnsibleFilterError as Error
except ImportError:  # the tests need no Ansible

    class Error(Exception):
        pass


BARE = re.compile(r"[A-Za-z0-9_-]+")
SHORT = {"\b": r"\b", "\t": r"\t", "\n": r"\n", "\f": r"\f", "\r": r"\r", '"': r"\"", "\\": r"\\"}


def text(value, at):
    out = []
    for c in value:
        if 0xD800 <= ord(c) <= 0xDFFF:
            raise Error("%s: the text has half of a surrogate pair, which TOML cannot hold" % at)
        if c in SHORT:
            out.append(SHORT[c])
        elif ord(c) < 0x20 or ord(c) == 0x7F:
            out.append("\\u%04X" % ord(c))
        else:
            out.append(c)
    return '"' + "".join(out) + '"'


def key(name, at):
    # YAML 1.1 reads on, yes and 1 as keys of other types.
    if not is_text(name):
        raise Error("%s: the key %r is no text: put it in quotes" % (at or "the configuration", name))
    return name if BARE.fullmatch(name) else text(name, at)


def is_text(value):
    return isinstance(value, str) or type(value).__name__ == "AnsibleVaultEncryptedUnicode"


def number(value):
    if math.isnan(value):
        return "nan"
    if math.isinf(value):
        return "inf" if value > 0 else "-inf"
    return repr(float(value))


def inline(value, at):
    """The value in one line."""
    if is_text(value):
        return text(str(value), at)  # which also decrypts what ansible-vault has encrypted
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        if not -(2**63) <= value < 2**63:
            raise Error("%s: %d does not fit into 64 bits" % (at, value))
        return str(int(value))
    if isinstance(value, float):
        return number(value)
    if isinstance(value, (datetime.datetime, datetime.date, datetime.time)):
        return value.isoformat()
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(inline(v, "%s[%d]" % (at, i)) for i, v in enumerate(value)) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(key(k, at) + " = " + inline(v, join(at, k)) for k, v in value.items()) + "}"
    if value is None:
        raise Error("%s has no value, and TOML has no null: leave the key out to have the default" % at)
    raise Error("%s: TOML has no values of the type %s" % (at, type(value).__name__))


def join(at, name):
    return "%s.%s" % (at, name) if at else str(name)


def is_tables(value):
    return isinstance(value, (list, tuple)) and len(value) > 0 and all(isinstance(v, dict) for v in value)


def table(values, head, at):
    """The lines of a table, with its header unless it has nothing but tables. What is in one line comes
    first, because what follows the header of another table is that table's."""
    lines, below = [], []
    for name, value in values.items():
        quoted, here = key(name, at), join(at, name)
        path = head + "." + quoted if head else quoted
        if isinstance(value, dict):
            inner = table(value, path, here)
            below += inner if inner[:1] == [""] else ["", "[%s]" % path] + inner
        elif is_tables(value):
            for i, v in enumerate(value):
                below += ["", "[[%s]]" % path] + table(v, path, "%s[%d]" % (here, i))
        else:
            lines.append(quoted + " = " + inline(value, here))
    return lines + below


def to_toml(values):
    if not isinstance(values, dict):
        raise Error("to_toml: want a dict, got %s" % type(values).__name__)
    return "".join(line + "\n" for line in table(values, "", "")).lstrip("\n")


class FilterModule:
    def filters(self):
        return {"to_toml": to_toml}
