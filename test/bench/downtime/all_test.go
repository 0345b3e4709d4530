//go:build all

package downtime_test

const sandboxes = 50 // on each runtime
