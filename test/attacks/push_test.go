//go:build !all

package attacks_test

// everything is whether attacks that take long are run, too.
const everything = false
