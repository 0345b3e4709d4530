//go:build all

package documents

// everything says whether blocks marked "run by test-all" run, too.
const everything = true
