//go:build all

package e2e_test

// everything is whether every case is run on every runtime.
const everything = true
