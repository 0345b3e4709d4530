//go:build all

package documents

// everything is whether blocks marked "run by test-all" run, too.
const everything = true
