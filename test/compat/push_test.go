//go:build !all

package compat_test

// everything is whether every program and every document is run on every runtime.
const everything = false
