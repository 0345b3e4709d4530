"""Tests of the filter that writes config.toml. Python's tomllib is the second reader.

  to_toml_test.py          runs them
  to_toml_test.py convert  reads JSON, and prints it as TOML
"""

import datetime
import json
import math
import pathlib
import random
import sys
import tomllib
import unittest

sys.dont_write_bytecode = True
sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "deploy/ansible/roles/sandboxd/filter_plugins"))
import to_toml  # noqa: E402

write = to_toml.to_toml


class Values(unittest.TestCase):
    def whole(self, values):
        self.assertEqual(tomllib.loads(write(values)), values, write(values))

    def test_texts(self):
        for s in ("", "plain", 'a "quoted" word', "C:\\temp\\new", "two\nlines\r\n", "\ttab\b\f", "'''", '"""', "\\", "ends in \\", "a # b",
                  "[x]", "ümläut 日本 🦀", "\x00\x01\x1f\x7f\x85", "\u2028", "\ufeff", "{{ no }}", "$HOME", "%s"):  # fmt: skip
            self.whole({"key": s, "list": [s, s], "table": {s or "empty": s}, "tables": [{s: {s: [s]}}]})

    def test_numbers(self):
        for n in (0, 1, -1, 2**63 - 1, -(2**63), 0.0, -0.0, 0.1, 1e16, 1e-07, 1.5e300, 5e-324, float("inf"), -float("inf")):
            self.whole({"n": n, "l": [n]})
            self.assertIs(type(tomllib.loads(write({"n": n}))["n"]), type(n))
        self.assertTrue(math.isnan(tomllib.loads(write({"n": float("nan")}))["n"]))

    def test_bools_are_no_numbers(self):
        self.assertEqual(write({"a": True, "b": False, "c": 1}), "a = true\nb = false\nc = 1\n")

    def test_times(self):
        self.whole({"date": datetime.date(2026, 11, 21), "time": datetime.datetime(2026, 11, 21, 1, 2, 3, 4, datetime.timezone.utc)})

    def test_keys(self):
        self.whole({"ubuntu:*": "base", "a.b": 1, "": 2, "with space": {"a.b": {"c\"d": [{"e\\": 1}]}}, "é": 1, "-": 1, "1": 1})

    def test_order(self):
        """What stands behind a table in the dict must not become part of it."""
        self.whole({"t": {"a": 1}, "after": 2, "l": [{"x": {"y": 1}, "z": 2}, {}], "last": 3})
        self.assertEqual(write({"t": {"u": {"a": 1}, "b": 2}, "c": 3}), "c = 3\n\n[t]\nb = 2\n\n[t.u]\na = 1\n")

    def test_empty(self):
        self.assertEqual(write({}), "")
        self.assertEqual(write({"a": {"b": {"c": 1}, "d": {}}}), "[a.b]\nc = 1\n\n[a.d]\n")
        self.whole({"t": {}, "l": [], "ll": [[], [[]]], "x": [{}], "y": [{}, {}]})

    def test_mixed_lists(self):
        self.whole({"l": [1, "a", {"b": {"c": 1}}, [{"d": 2}], True]})

    def test_sub_tables_of_a_list(self):
        self.whole({"pool": [{"name": "a", "limits": {"memory": "1Gi"}}, {"name": "b", "limits": {"cpu": "1"}, "deep": [{"x": 1}]}]})

    def test_random(self):
        """Five thousand dicts of a fixed seed."""
        rnd = random.Random(1)
        alphabet = 'ab.-_"\'\\\n\t \x00\x7f#=[]{},é🦀'

        def word():
            return "".join(rnd.choice(alphabet) for _ in range(rnd.randrange(5)))

        def value(depth):
            kind = rnd.randrange(9 if depth else 5)
            if kind < 2:
                return word()
            if kind < 5:
                return (rnd.random() < 0.5, rnd.randrange(-(2**63), 2**63), rnd.uniform(-1e9, 1e9))[kind - 2]
            if kind < 7:
                return {word(): value(depth - 1) for _ in range(rnd.randrange(4))}
            if kind < 8:
                return [value(depth - 1) for _ in range(rnd.randrange(4))]
            return [{word(): value(depth - 1)} for _ in range(rnd.randrange(3))]

        for _ in range(5000):
            self.whole({word(): value(3) for _ in range(rnd.randrange(5))})

    def test_refused(self):
        for values, words in (
            ({"limits": {"max_creating": None}}, "limits.max_creating has no value"),
            ({"pool": [{"name": "a"}, {"name": None}]}, "pool[1].name has no value"),
            ({"limits": {True: 1}}, "limits: the key True is no text"),
            ({"a": {"b": [1, None]}}, "a.b[1] has no value"),
            ({"n": 2**63}, "does not fit"),
            ({"b": b"bytes"}, "no values of the type bytes"),
            ({"s": "\ud800"}, "surrogate"),
            ([], "want a dict, got list"),
            ("text", "want a dict, got str"),
        ):
            with self.assertRaises(to_toml.Error) as e:
                write(values)
            self.assertIn(words, str(e.exception))


if __name__ == "__main__":
    if sys.argv[1:] == ["convert"]:
        sys.stdout.write(write(json.load(sys.stdin)))
    else:
        unittest.main()
